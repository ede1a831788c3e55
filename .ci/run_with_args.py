"""Run a Python script with the arguments in $RUN_ARGS, split as a shell would, by no shell."""

import os
import shlex
import sys

try:
    given = shlex.split(os.environ.get("RUN_ARGS", ""))
except ValueError as error:
    raise SystemExit(f"RUN_ARGS={os.environ['RUN_ARGS']}: {error}") from None
os.execv(sys.executable, [sys.executable, *sys.argv[1:], *given])
