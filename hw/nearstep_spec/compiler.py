"""Which C++ compiler this machine has."""

import importlib.util
import os
import shlex
import shutil
import sys

__all__ = ["COMPILERS", "NOT_FOUND", "compiler"]

COMPILERS = ("g++", "clang++", "ziglang")
"""Compilers in the order in which they are looked for: two programs, and a package of PyPI."""

NOT_FOUND = "no C++ compiler was found: neither g++, nor clang++, nor ziglang (pip install ziglang)"


def compiler() -> list[str]:
    """The C++ compiler as a command: `$CXX`, such as `ccache g++`, or the first of `COMPILERS` that
    is there; `g++` if none is.

    Raises
    ------
    ValueError : the variable is no command.
    """
    if given := shlex.split(os.environ.get("CXX", "")):
        return given
    *programs, package = COMPILERS
    if found := next(filter(shutil.which, programs), None):
        return [found]
    if importlib.util.find_spec(package) is not None:
        return [sys.executable, "-m", package, "c++"]
    return [programs[0]]
