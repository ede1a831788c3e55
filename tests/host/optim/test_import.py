"""`nearstep` without torch."""

from __future__ import annotations

import subprocess
import sys

WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None  # any import of it raises ModuleNotFoundError
import nearstep
with nearstep.open("golden:axdimm?memory_bytes=1MiB&engine=numpy") as device:
    print(device.capacity_bytes)
for name in ("optim", "offload"):
    try:
        getattr(nearstep, name)
    except ImportError as error:
        print(error)
"""


def test_nearstep_works_without_torch_and_optim_says_what_is_missing():
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH], capture_output=True, text=True, check=True
    )
    capacity, *messages = done.stdout.splitlines()
    assert capacity == str(1 << 20)
    assert len(messages) == 2
    for name, message in zip(("optim", "offload"), messages, strict=True):
        assert f"nearstep.{name} needs torch: pip install 'nearstep[torch]'" in message


def test_import_nearstep_does_not_import_torch():
    code = "import nearstep, sys; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_an_unknown_attribute_is_an_attribute_error():
    code = "import nearstep\ntry: nearstep.optimiser\nexcept AttributeError as e: print(e)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "'optimiser'" in done.stdout
