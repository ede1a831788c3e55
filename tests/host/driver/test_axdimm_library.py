"""libaxdimm.so: programs in C that use the runtime."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from nearstep import cli
from nearstep.axdimm.c_interface import HEADER, NUMBERS, PLACES, STATUSES, _Session
from nearstep.axdimm.runtime import Axdimm, Place
from nearstep.cli.doctor import compiler

ROOT = Path(__file__).resolve().parents[3]
STATUS_PROGRAM = Path(__file__).with_name("axdimm_statuses.c")
WEIGHTS, SAMPLES, STEPS = 96, 64, 30  # weights in whole vectors of torch
HYPER = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
SUPPRESSED = """{
   glibc compares whole words of a path, behind its end
   Memcheck:Addr8
   fun:strncmp
   fun:is_dst
}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("axdimm")
    done = CliRunner().invoke(cli._app(), ["axdimm", "library", "-o", str(folder)])
    assert done.exit_code == 0, done.output
    return folder


def built(library: Path, source: Path, to: Path, *flags: str) -> Path:
    """Compile a program; a product rounds before it is added, on every processor."""
    program = to / source.stem
    words = [*compiler(), "-x", "c", "-std=c11", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror"]
    words += ["-ffp-contract=off", "-pthread", *flags, f"-I{library}", str(source), "-x", "none"]
    words += [f"-L{library}", "-laxdimm", f"-Wl,-rpath,{library}", "-o", str(program)]
    subprocess.run(words, check=True)
    return program


def ran(*words: object) -> str:
    done = subprocess.run(
        [str(word) for word in words], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    return done.stdout


def model() -> tuple[np.ndarray, np.ndarray]:
    """Return inputs and targets of examples/linear.c."""
    state, values = 1, []
    for _ in range(SAMPLES * (WEIGHTS + 1)):
        state = (state * 1664525 + 1013904223) % 2**32
        values.append(np.float32(state >> 16) / np.float32(65536) - np.float32(0.5))
    rows = np.array(values, np.float32).reshape(SAMPLES, WEIGHTS + 1)
    return rows[:, :-1], rows[:, -1]


def gradient(weights: np.ndarray, inputs: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Add in the order of examples/linear.c."""
    total = np.zeros(WEIGHTS, np.float32)
    for row, target in zip(inputs, targets, strict=True):
        terms = np.concatenate([[-target], weights * row]).astype(np.float32)
        total += np.add.accumulate(terms, dtype=np.float32)[-1] * row
    return total * np.float32(2 / SAMPLES)


def trained_by_python(device: str) -> np.ndarray:
    inputs, targets = model()
    weights, nbytes = np.zeros(WEIGHTS, np.float32), 4 * WEIGHTS
    with Axdimm(device) as runtime:
        p, m, v, g = (runtime.MallocX(nbytes) for _ in "pmvg")
        for pointer in (p, m, v):
            runtime.MemcpyX2Y(pointer, np.zeros(WEIGHTS, np.float32), nbytes)
        for t in range(1, STEPS + 1):
            runtime.MemcpyX2Y(g, gradient(weights, inputs, targets), nbytes)
            with runtime.SetArbiterAcc(0):
                runtime.RunAdamOnAxdimmAsync(p, m, v, g, WEIGHTS, t=t, **HYPER).wait()
            runtime.MemcpyX2Y(weights, p, nbytes)
    return weights


def trained_by_torch() -> np.ndarray:
    inputs, targets = model()
    weights = torch.nn.Parameter(torch.zeros(WEIGHTS))
    optimizer = torch.optim.Adam([weights], fused=True, **HYPER)
    for _ in range(STEPS):
        weights.grad = torch.from_numpy(gradient(weights.detach().numpy(), inputs, targets))
        optimizer.step()
    return weights.detach().numpy()


def trained_by_c(program: Path, device: str, folder: Path) -> np.ndarray:
    said = ran(program, device, folder / "ssd", folder / "weights")
    assert "weights by way of the SSD: equal" in said
    lines = (folder / "weights").read_text().split()
    return np.array([float.fromhex(line) for line in lines], np.float32)


def check_bits(library: Path, folder: Path, device: str) -> None:
    program = built(library, ROOT / "examples" / "linear.c", folder)
    found = trained_by_c(program, device, folder).view(np.uint32)
    assert found.size == WEIGHTS
    assert np.unique(found).size > WEIGHTS // 2
    assert (found == trained_by_python(device).view(np.uint32)).all()
    assert (found == trained_by_torch().view(np.uint32)).all()


def test_a_linear_model_trained_in_c_has_the_bits_of_python_and_torch(
    library: Path, tmp_path: Path
) -> None:
    check_bits(library, tmp_path, "golden:axdimm")


@pytest.mark.deep
def test_a_linear_model_trained_in_c_on_rtl_has_the_same_bits(
    library: Path, tmp_path: Path
) -> None:
    check_bits(library, tmp_path, "sim:axdimm")


def statuses(library: Path, folder: Path, device: str, *flags: str) -> list[object]:
    (folder / "text").write_text("no drive" * 1000)
    return [built(library, STATUS_PROGRAM, folder, *flags), device, folder]


DEVICE = "golden:axdimm?channels=2&engine=numpy&memory_bytes=8MiB"


def test_every_wrong_call_has_its_status_and_says_why(library: Path, tmp_path: Path) -> None:
    said = ran(*statuses(library, tmp_path, DEVICE))
    print(said)
    assert re.fullmatch(r"(8|9)\d checks, 0 wrong\n", said)


@pytest.mark.deep
def test_wrong_calls_on_rtl(library: Path, tmp_path: Path) -> None:
    said = ran(*statuses(library, tmp_path, "sim:axdimm?memory=ddr4-1600&channels=2"))
    assert said.endswith(" 0 wrong\n")


@pytest.mark.deep
def test_valgrind_finds_nothing(library: Path, tmp_path: Path) -> None:
    """No invalid access, no use of uninitialised bytes, no lost block of malloc."""
    if shutil.which("valgrind") is None:
        pytest.skip("there is no valgrind")
    (tmp_path / "suppressed").write_text(SUPPRESSED)
    options = ["-q", "--child-silent-after-fork=yes", "--leak-check=full"]
    options += ["--show-leak-kinds=definite", f"--suppressions={tmp_path}/suppressed"]
    said = ran("valgrind", *options, *statuses(library, tmp_path, DEVICE, "-g"))
    assert said.endswith(" 0 wrong\n")


def test_python_has_the_functions_and_numbers_of_the_header() -> None:
    text = HEADER.read_text()
    declared = set(re.findall(r"AXDIMM_API int (\w+)\(", text))
    assert declared == {"Axdimm", *(name for name in vars(_Session) if name[0].isupper())}
    assert len(declared) == 12
    assert [*PLACES] == [0, 1, 2, 3]
    assert [*PLACES.values()] == [*Place]
    used = [NUMBERS["AXDIMM_OK"], *sorted(NUMBERS[name] for name, _ in STATUSES)]
    assert used == [*range(9)]


def test_a_library_that_cannot_be_built_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "false")
    done = CliRunner().invoke(cli._app(), ["axdimm", "library", "-o", str(tmp_path)])
    assert done.exit_code == 1
    assert "false cannot build libaxdimm.so" in done.output
    assert [*tmp_path.iterdir()] == []
