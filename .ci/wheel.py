"""Compile the rules of the package into a wheel: a hook of Hatchling, which `make wheel` enables.

The wheel is for the processors of `nearstep_sim.verilate.prebuilt.TARGETS` that are of one machine:
this one, or `$WHEEL_FOR`.
"""

import hashlib
import itertools
import json
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / tree) for tree in ("hw", "sim", "host")]
os.environ.pop("NEARSTEP_OPTIMISE", None)  # the libraries are for a process without it

from nearstep_sim.backends.host import on_blocks
from nearstep_sim.golden import rule_cpp
from nearstep_sim.verilate.build import GLIBC, INCLUDES, Library
from nearstep_sim.verilate.prebuilt import INDEX, TARGETS
from nearstep_spec.blockwise import DYNAMIC8
from nearstep_spec.rule.columns import Columns
from nearstep_spec.rule.rules import NEVER_NEGATIVE, OPTIMIZERS
from nearstep_spec.rule.scale import scaled

FUNCTIONS = ("golden/blockwise", "golden/formats", "golden/rounding", "golden/topk", "models/bulk")
FLOATS = ("fp32", "fp16", "bf16")


def libraries() -> Iterator[Library]:
    """Every library that `host:` and `golden:` load for optimizers of the package: of a rule alone,
    and on blocks for each dtype of parameters, dtype of their state, and rounding."""
    for name in FUNCTIONS:
        yield Library(Path(name).name, [INCLUDES / f"{name}.cpp"])
    yield Library("ring", [INCLUDES / "golden" / "ring.cpp"], ["-pthread"])
    for optimizer, form in ((o, form) for o in OPTIMIZERS.values() for form in o.all_forms):
        rule = form.rule
        yield from (rule_cpp.library(each) for each in (rule, scaled(rule)))
        for own, kept, stochastic in itertools.product(FLOATS, (*FLOATS, DYNAMIC8), (False, True)):
            states = dict.fromkeys(rule.states, kept)
            if kept == DYNAMIC8:
                states |= {each: "dynamic8u" for each in rule.states if each in NEVER_NEGATIVE}
            # Gradients that were divided by a scale are in fp32; those of the second run of a step
            # may be of another dtype than the parameters, too.
            for gradient in {own, "fp32", *(FLOATS if optimizer.between is not None else ())}:
                formats = {**states, "p": own, "g": gradient}
                columns = Columns.of(rule, formats, stochastic=stochastic)
                yield rule_cpp.library_of_blocks(*on_blocks(rule, form.remainder, columns))


class CustomBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    """Adds a folder of libraries and an index of them to a wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version != "standard":  # an editable installation has none
            return
        machine = os.environ.get("WHEEL_FOR") or platform.machine()
        targets = [target for target in TARGETS if target.machine == machine]
        if not targets:
            known = sorted({target.machine for target in TARGETS})
            raise SystemExit(f"WHEEL_FOR must be one of {', '.join(known)}, not {machine!r}")
        made = {each.key: each for each in libraries()}
        pairs = [(each, target) for each in made.values() for target in targets]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            found = list(pool.map(lambda pair: pair[0].compiled(pair[1]), pairs))
        self.folder = Path(tempfile.mkdtemp())
        index: dict[str, dict[str, tuple[str, str]]] = {key: {} for key in made}
        for (library, target), path in zip(pairs, found, strict=True):
            shutil.copyfile(path, self.folder / path.name)
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
            index[library.key][target.name] = (path.name, digest)
        (self.folder / INDEX).write_text(json.dumps(index, indent=0, sort_keys=True))
        build_data["force_include"][str(self.folder)] = "nearstep_sim/prebuilt"
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-manylinux_{GLIBC.replace('.', '_')}_{machine}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if version == "standard":
            shutil.rmtree(self.folder)
