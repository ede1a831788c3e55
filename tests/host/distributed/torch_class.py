"""torch's own tests of a backend, `DistributedTest._DistTestBase`, with `coarse` as the backend.

    python -m tests.host.distributed.torch_class PROCESSES [PART_OF_A_NAME ...]

Each test has its own process group, in processes that carry out one test after the other; a test
that fails or lasts too long ends them. The class is made as for gloo, whose collectives those are,
and `BACKEND` is `coarse` when tests run. Prints a line of JSON for each test.

Tests that want GPUs run on the CPU: whatever they move to a device stays (`on_the_cpu`).
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
import unittest
import warnings
from collections.abc import Iterator
from datetime import timedelta
from fnmatch import fnmatchcase
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

os.environ |= {"BACKEND": "gloo", "WORLD_SIZE": sys.argv[1], "TEMP_DIR": tempfile.gettempdir()}
os.environ |= {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}

import torch.distributed as dist
from torch.testing._internal import common_distributed, common_utils

from nearstep.coarse.service.spawn import Spawned
from nearstep.torch.distributed.rendezvous import ADDRESS, TOKEN_FILE

from . import on_the_cpu

on_the_cpu.allow(common_distributed)

distributed_test: Any = importlib.import_module(
    "torch.testing._internal.distributed.distributed_test"
)

LIMIT_S = 40.0
"""Of a test, start of its group included."""

LONGER_S = {"test_ddp_uneven_inputs": 900.0, "test_ddp_compile_static_graph": 300.0}
"""Of those that do the same several hundred times, or compile."""

LARGE_MODEL, LARGE_PIXELS = "large_conv_model", 64
"""A case of `test_ddp_uneven_inputs`, and the side of the images that it gets here: with torch's
1000 a step took 18 s of a core (0.06 s with this), and two processes make more than a hundred."""

AFTER_FAILURE_S = 3.0
"""For the other processes of a test to say something, too."""

DEVICE = "golden:coarse?devices=4&groups=2&memory_bytes=256MiB"

AS_GLOO = "test_accumulate_gradients_no_sync"
"""Tests that make no model for a backend that they do not know by name."""

LEFT_OUT = {
    "*cuda*": "the test without this part of its name, on a GPU",
    "*nccl*": "of NCCL",
    "*SyncBatchNorm*": "torch has it on GPUs alone",
    "*sync_bn*": "SyncBatchNorm: torch has it on GPUs alone",
    "test_ddp_inference": "SyncBatchNorm: torch has it on GPUs alone",
    "*monitored_barrier*": "torch has it for gloo alone, and refuses it to other backends",
    "test_barrier_timeout*": "looks for the text of an error of gloo's",
    "*mixed_backend_err*": "makes a group of NCCL",
    "test_average_parameters": "makes a group of NCCL",
    "test_ddp_profiling*": "looks for events that backends written in C++ record",
    "test_ddp_device": "looks at numbers of GPUs",
    "test_ddp_apply_optim_in_backward*": "waits for streams of an accelerator",
    "test_ddp_native_mixed_precision*": "waits for events of a device; `bf16` in test_training.py",
    "test_ddp_logging_data_gpu": "looks at numbers of GPUs",
    "test_ddp_hook_pickling*": "loads what torch.load does not take any more",
}
"""Names of tests that are not run, as patterns, and why."""

SEED = 1234
"""Of each test in each process: some take for granted that they draw the same."""

SKIPS = {each.exit_code: each.message for each in common_distributed.TEST_SKIPS.values()}


class Case(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
    """torch's tests."""

    def __init__(self, name: str, rank: int, store: str) -> None:
        super().__init__(name)
        self.rank = rank
        self.file_name = store

    def _run_uneven_inputs_test(
        self, test_case: Any, iteration_mapping: Any, find_unused_params: bool
    ) -> None:
        if test_case.name == LARGE_MODEL:
            given = test_case.inp[..., :LARGE_PIXELS, :LARGE_PIXELS].clone()
            test_case = test_case._replace(inp=given)
        super()._run_uneven_inputs_test(test_case, iteration_mapping, find_unused_params)


distributed_test.instantiate_parametrized_tests(Case)


def names() -> list[str]:
    return [each for each in dir(Case) if each.startswith("test_")]


def carry_out(name: str, rank: int, count: int, folder: str) -> tuple[str, str]:
    """`passed`, `skipped` or `failed`, and why."""
    os.environ["TEMP_DIR"] = folder
    os.environ.pop("TORCH_DISTRIBUTED_DEBUG", None)  # as others left it
    dist.set_debug_level_from_env()
    common_utils.set_rng_seed(SEED)
    distributed_test.Barrier.barrier_id = 0
    distributed_test.BACKEND = "gloo" if AS_GLOO in name else "coarse"
    case = Case(name, rank, f"{folder}/store")
    limit = LONGER_S.get(name, LIMIT_S)
    timeout = distributed_test.CUSTOM_PG_TIMEOUT.get(name, limit / 2)
    try:
        dist.init_process_group(
            "coarse",
            init_method=case.init_method,
            rank=rank,
            world_size=count,
            timeout=timedelta(seconds=min(timeout, limit / 2)),
        )
        case._barrier(timeout=limit / 2)
        getattr(case, name)()
        case._barrier(timeout=limit / 2)
        dist.destroy_process_group()
    except unittest.SkipTest as skip:
        dist.destroy_process_group()
        return "skipped", str(skip)
    except SystemExit as skip:
        dist.destroy_process_group()
        return "skipped", SKIPS.get(skip.code, f"exit {skip.code}")
    except BaseException:
        return "failed", traceback.format_exc()
    return "passed", ""


def work(rank: int, count: int, connection: Connection) -> None:
    os.dup2(2, 1)  # profilers write there
    warnings.simplefilter("ignore")
    with on_the_cpu.OnTheCpu():
        while True:
            name, folder = connection.recv()
            connection.send(carry_out(name, rank, count, folder))


class Workers:
    """Processes of one size."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.connections: list[Connection] = []
        self.processes: list[Any] = []

    def start(self) -> None:
        context = multiprocessing.get_context("fork")
        for rank in range(self.count):
            ours, theirs = context.Pipe()
            process = context.Process(target=work, args=(rank, self.count, theirs), daemon=True)
            process.start()
            theirs.close()
            self.connections.append(ours)
            self.processes.append(process)

    def run(self, name: str) -> tuple[str, str]:
        """What all of them say of a test."""
        if not self.processes:
            self.start()
        end = time.monotonic() + LONGER_S.get(name, LIMIT_S)
        with tempfile.TemporaryDirectory() as folder:
            for each in ("barrier", "test_dir", "init_dir"):
                Path(folder, each).mkdir()
            for connection in self.connections:
                connection.send((name, folder))
            said = []
            for connection in self.connections:
                said.append(self._hear(connection, end))
                if said[-1][0] == "failed":
                    end = min(end, time.monotonic() + AFTER_FAILURE_S)
        kinds = {kind for kind, _ in said}
        if kinds == {"passed"} or kinds == {"skipped"}:
            return said[0]
        if kinds == {"passed", "skipped"}:
            self.stop()
            return "passed", ""
        self.stop()
        texts = [f"rank {rank}: {kind} {text}" for rank, (kind, text) in enumerate(said)]
        return "failed", "\n".join(texts)

    def _hear(self, connection: Connection, end: float) -> tuple[str, str]:
        try:
            if connection.poll(max(0.0, end - time.monotonic())):
                found: tuple[str, str] = connection.recv()
                return found
        except (EOFError, OSError):
            return "failed", "the process ended"
        return "failed", "did not end in time"

    def stop(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        self.connections.clear()
        self.processes.clear()


def run(count: int, parts: list[str]) -> Iterator[dict[str, Any]]:
    """What became of each test with some part in its name, or of all."""
    service = Spawned(DEVICE)
    with tempfile.NamedTemporaryFile("w") as token:
        token.write(service.token)
        token.flush()
        os.environ |= {ADDRESS: service.address, TOKEN_FILE: token.name}
        workers = Workers(count)
        for name in names():
            if parts and not any(part in name for part in parts):
                continue
            reason = next((why for some, why in LEFT_OUT.items() if fnmatchcase(name, some)), None)
            if reason is not None:
                yield {"test": name, "result": "left out", "why": reason, "seconds": 0.0}
                continue
            if getattr(getattr(Case, name), "__unittest_skip__", False):
                reason = getattr(Case, name).__unittest_skip_why__
                yield {"test": name, "result": "skipped", "why": reason, "seconds": 0.0}
                continue
            start = time.monotonic()
            kind, text = workers.run(name)
            seconds = round(time.monotonic() - start, 2)
            yield {"test": name, "result": kind, "why": text, "seconds": seconds}
        workers.stop()
    service.close()


if __name__ == "__main__":
    for result in run(int(sys.argv[1]), sys.argv[2:]):
        print(json.dumps(result), flush=True)
