"""Sweeps: a function at every point of a grid, each result in a file named by its inputs.

`SHA-256` of the function's name, its arguments and the version of nearstep names the file of a
result, so that an interrupted sweep goes on where it ended, and one with more points computes these
alone. Points run through joblib, on any of its backends, or through submitit on Slurm. Each worker
writes its result itself; all need the folder.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import inspect
import itertools
import json
import os
import sys
import threading
import tomllib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nearstep.errors import ArgumentError, NearstepError

if TYPE_CHECKING:
    from collections.abc import Iterator

BACKENDS = ("loky", "threading", "dask", "ray", "submitit")
FUNCTIONS = {"train": "nearstep.sweep:train", "plan": "nearstep.sweep:plan"}
"""Functions that a file may name without their module."""

POLL_S = 0.2
Arguments = Mapping[str, Any]


class SweepError(NearstepError):
    """Some points of a sweep failed; the results of the others are kept.

    Attributes
    ----------
    failed : arguments and reason of each such point.
    """

    def __init__(self, failed: Sequence[tuple[Arguments, str]]) -> None:
        self.failed = failed
        first, reason = failed[0]
        super().__init__(f"{len(failed)} points failed; the first, {dict(first)}: {reason}")


@dataclass(frozen=True)
class Sweep:
    """A function and the grid of its arguments.

    Attributes
    ----------
    function : `module:name`; takes a point's arguments by keyword, and returns what JSON can hold.
    points : arguments of each call, no two equal.
    axes : names of the arguments that differ, in the order of the file.
    submitit : parameters of `submitit.AutoExecutor`.
    """

    function: str
    points: Sequence[Arguments]
    axes: Sequence[str]
    submitit: Arguments

    @classmethod
    def read(cls, path: Path) -> Sweep:
        """Read a file in TOML.

        Keys: `run`, the function; `fixed`, a table of arguments; `axes`, a table of lists, whose
        product is the grid; `without`, tables of arguments whose points are left out; `submitit`.

        Raises
        ------
        ArgumentError : the file is not TOML, or has missing, unknown or invalid keys.
        OSError : the file cannot be read.
        """
        try:
            found = tomllib.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:  # of TOML, UTF-8, or a number of too many digits
            raise ArgumentError(f"{path}: {error}") from None
        kinds = {"run": str, "fixed": dict, "axes": dict, "without": list, "submitit": dict}
        for entry, value in found.items():
            if entry not in kinds:
                raise ArgumentError(f"{path}: {entry} must be of {', '.join(kinds)}")
            if not isinstance(value, kinds[entry]):
                kind = kinds[entry].__name__
                raise ArgumentError(f"{path}: {entry} must be a {kind}, not {value!r}")
        if "run" not in found:
            raise ArgumentError(f"{path}: run must be given")
        fixed, axes = found.get("fixed", {}), found.get("axes", {})
        for name, values in axes.items():
            if not isinstance(values, list) or not values:
                raise ArgumentError(f"{path}: axes.{name} must be a list of values, not {values!r}")
            if name in fixed:
                raise ArgumentError(f"{path}: {name} is in fixed and in axes")
        without = found.get("without", [])
        for each in without:
            unknown = [*each] if not isinstance(each, dict) else [n for n in each if n not in axes]
            if unknown:
                raise ArgumentError(f"{path}: without must be of axes, not {unknown[0]!r}")
        grid = [
            dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())
        ]
        kept = [each for each in grid if not any(w.items() <= each.items() for w in without)]
        points = [{**fixed, **each} for each in kept]
        if not points:
            raise ArgumentError(f"{path}: there is no point")
        function = FUNCTIONS.get(found["run"], found["run"])
        signature = inspect.signature(_load(function))
        seen: dict[str, Arguments] = {}
        for point in points:
            try:
                signature.bind(**point)
                name = key(function, point)
            except TypeError as error:  # also of a date, which JSON has not
                raise ArgumentError(f"{path}: {function}: {error}") from None
            if name in seen:
                raise ArgumentError(f"{path}: {point} is in the grid twice")
            seen[name] = point
        return cls(function, points, [*axes], found.get("submitit", {}))

    def file(self, folder: Path, point: Arguments) -> Path:
        """The result of a point, there or not."""
        return folder / f"{key(self.function, point)}.json"

    def missing(self, folder: Path) -> list[Arguments]:
        """Points without a result."""
        return [point for point in self.points if not self.file(folder, point).exists()]

    def results(self, folder: Path) -> list[tuple[Arguments, Arguments]]:
        """Arguments and result of each point that has one.

        Raises
        ------
        ArgumentError : a file has the name of other inputs than its own.
        """
        found = []
        for point in self.points:
            path = self.file(folder, point)
            if path.exists():
                kept = json.loads(path.read_text(encoding="utf-8"))
                if kept["inputs"] != inputs(self.function, point):
                    raise ArgumentError(f"{path} has the inputs {kept['inputs']}")
                found.append((point, kept["result"]))
        return found

    def run(
        self,
        folder: Path,
        *,
        backend: str = "loky",
        jobs: int = 1,
        report: Callable[[int], object] = lambda done: None,
    ) -> None:
        """Compute the points without a result.

        Parameters
        ----------
        backend : of `BACKENDS`. dask, ray: their cluster is the one that this process is connected
            to, or a local one; submitit: Slurm, or local processes where there is no Slurm.
        jobs : points at once; of submitit at most.
        report : called with the number of results, now and then.

        Raises
        ------
        ArgumentError : there is no such backend, or jobs is below 1.
        SweepError : points failed, or a process of loky was killed; then all points without a
            result count as failed.
        """
        if backend not in BACKENDS:
            raise ArgumentError(f"backend must be of {', '.join(BACKENDS)}, not {backend!r}")
        if jobs < 1:
            raise ArgumentError(f"jobs must be above 0, not {jobs}")
        folder.mkdir(parents=True, exist_ok=True)
        points = self.missing(folder)
        calls = [(self.function, point, str(folder.resolve())) for point in points]
        with _reporting(lambda: len(self.points) - len(self.missing(folder)), report):
            if backend == "submitit":
                reasons = self._submit(folder, calls, jobs)
            else:
                import joblib  # in the extra `sweep`

                if backend == "ray":
                    from ray.util.joblib import register_ray

                    register_ray()
                cluster = _dask(jobs) if backend == "dask" else nullcontext()
                options: dict[str, Any] = {}
                if backend == "loky":  # it has processes of an earlier call, if initargs are equal
                    options = {"initializer": _import_from, "initargs": (list(sys.path),)}
                with cluster, joblib.parallel_config(backend, n_jobs=jobs, **options):
                    try:
                        reasons = joblib.Parallel()(joblib.delayed(compute)(*c) for c in calls)
                    except BrokenProcessPool as error:  # a killed process ends those of the others
                        reason = " ".join(str(error).split())
                        missing = self.missing(folder)
                        reasons = [reason if point in missing else "" for point in points]
        failed = [(p, reason) for p, reason in zip(points, reasons, strict=True) if reason]
        if failed:
            raise SweepError(failed)

    def _submit(self, folder: Path, calls: Sequence[Any], jobs: int) -> list[str]:
        import submitit

        executor = submitit.AutoExecutor(folder / "jobs")
        executor.update_parameters(**{"slurm_array_parallelism": jobs, **self.submitit})
        reasons = []
        for job in executor.map_array(compute, *zip(*calls, strict=True)) if calls else []:
            try:
                reasons.append(job.result())
            except submitit.core.utils.UncompletedJobError as error:
                reasons.append(str(error).splitlines()[0])
        return reasons


def _dask(jobs: int) -> AbstractContextManager[Any]:
    """Connect to the scheduler of `DASK_SCHEDULER_ADDRESS`, or start processes here."""
    import dask
    import distributed

    if dask.config.get("scheduler-address", None):
        client: AbstractContextManager[Any] = distributed.Client()
    else:
        client = distributed.Client(n_workers=jobs, threads_per_worker=1, dashboard_address=None)
    return client


def _import_from(path: list[str]) -> None:
    sys.path[:] = path


def inputs(function: str, point: Arguments) -> dict[str, Any]:
    """All that the result of a point depends on."""
    return {"function": function, "arguments": dict(point), "nearstep": _version()}


@cache
def _version() -> str:
    return importlib.metadata.version("nearstep")


def key(function: str, point: Arguments) -> str:
    """First 16 digits of SHA-256 of the inputs."""
    text = json.dumps(inputs(function, point), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def compute(function: str, point: Arguments, folder: str) -> str:
    """Compute a point and write its result, whole or not at all.

    Returns
    -------
    str : why it failed; empty if it did not.
    """
    try:
        result = _load(function)(**point)
        kept = {"inputs": inputs(function, point), "result": result}
        text = json.dumps(kept, indent=1) + "\n"
    except Exception as error:  # one point's; the others go on
        return f"{type(error).__name__}: {error}"
    path = Path(folder, f"{key(function, point)}.json")
    part = path.with_suffix(f".{os.getpid()}-{threading.get_ident()}")
    part.write_text(text, encoding="utf-8")
    part.replace(path)
    return ""


def _load(function: str) -> Callable[..., Any]:
    module, _, name = function.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except Exception as error:  # of the module, whose text is executed
        known, kind = ", ".join(FUNCTIONS), type(error).__name__
        reason = f"run must be {known} or module:name, not {function!r}: {kind}: {error}"
        raise ArgumentError(reason) from None
    if not callable(found):
        raise ArgumentError(f"run must be a function, not {function!r}")
    return found  # type: ignore[no-any-return]


@contextmanager
def _reporting(count: Callable[[], int], report: Callable[[int], object]) -> Iterator[None]:
    done = threading.Event()

    def watch() -> None:
        while not done.wait(POLL_S):
            report(count())

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        report(count())


def train(
    *,
    device: str = "host:",
    optimizer: str = "AdamW",
    dtype: str = "fp32",
    parameters: int = 4096,
    steps: int = 3,
    seed: int = 0,
    **options: Any,
) -> dict[str, Any]:
    """Make steps on a device with seeded gradients.

    Parameters
    ----------
    device : a name for `nearstep.open`, or `host:`.
    optimizer : of `nearstep.optim`.
    dtype : fp32, fp16 or bf16, of parameters and gradients.
    options : of the optimizer, such as `compression`.

    Returns
    -------
    dict : SHA-256 of parameters and state; bytes moved, and cycles of the device if it has a clock.
    """
    import numpy as np
    import torch

    import nearstep.optim
    from nearstep.measure.arithmetic import DTYPES

    rng = np.random.default_rng(seed)

    def numbers() -> torch.Tensor:
        whole = rng.integers(-(1 << 20), 1 << 20, parameters).astype(np.float32)
        return torch.from_numpy(np.ldexp(whole, -20)).to(DTYPES[dtype])

    parameter = torch.nn.Parameter(numbers())
    made = getattr(nearstep.optim, optimizer)([parameter], device=device, **options)
    for _ in range(steps):
        parameter.grad = numbers()
        made.step()
    found = hashlib.sha256()
    kept = made.state_dict()["state"].get(0, {})
    for tensor in [parameter.detach(), *(kept[name] for name in sorted(kept))]:
        if isinstance(tensor, torch.Tensor):
            found.update(tensor.reshape(-1).contiguous().view(torch.uint8).numpy().tobytes())
    counted = made.traffic.as_dict()
    del counted["run_seconds"]  # another one each time
    return {"sha256": found.hexdigest(), **counted}


def plan(
    *,
    model: str,
    platform: str,
    ranks: int,
    gpu: str = "gpu0",
    batch: int = 8,
    sequence: int = 512,
    dtype: str = "fp16",
    state: str = "memory",
    network: float | None = None,
    host_rate: float = 7e9,
) -> dict[str, Any]:
    """Model an iteration on ranks, as `nearstep plan --ranks` does.

    Returns
    -------
    dict : as `nearstep.plan.ranks.report`.
    """
    from nearstep.memferry.modelled import Setup
    from nearstep.plan.ranks import iteration_of, report, shape, with_network
    from nearstep_spec.platform.load import load

    machine = load(platform)
    if network is not None:
        machine = with_network(machine, network)
    rate = {"gpu": gpu, "host_params_per_s": host_rate}
    setup = Setup(batch=batch, sequence=sequence, dtype=dtype, **rate)  # type: ignore[arg-type]
    iteration = iteration_of(machine, shape(model), setup, ranks, state)
    return report(iteration, iteration.timeline(), batch)
