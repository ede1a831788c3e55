"""A pool of eight devices in RTL, the gradients of eight workers' GPT, and every fault there is.

After each of them the averages of all workers have golden's bits; where a job had to end, all
workers had their own gradients still.
"""

from __future__ import annotations

import contextlib
import errno
import io
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from nearstep.backends.emulated import Injection
from nearstep.coarse import CoarsePool
from nearstep.coarse.errors import (
    JobMismatchError,
    MemoryResponseError,
    QueueFullError,
    RingError,
    SilentLinkError,
    SnapshotSaveError,
    TensorMismatchError,
    TornSnapshotError,
)
from nearstep_sim.coarse.pool import PoolBackend
from nearstep_sim.coarse.pool_values import SMALL, SMALL_MEMORY, Floats, compare, reduced
from nearstep_sim.models.link.faults import LinkFault

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
WORKERS = 8
URL = f"sim:coarse?{SMALL.replace('devices=4', f'devices={WORKERS}')}&{SMALL_MEMORY}&link_latency=8"
SILENCE = 5000
"""Device cycles after which a link is silent."""

COUNTED = {"drop": "gaps", "duplicate": "duplicates", "reorder": "gaps", "corrupt": "bad_frames"}
"""By the receiver of a frame with this fault."""


@pytest.fixture(scope="module")
def gradients() -> list[Floats]:
    """Of a GPT with a layer, after a batch of its own in the thread of each worker."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLES)
        from gpt import Gpt, GptConfig

    def work(worker: int) -> Floats:
        generator = torch.Generator().manual_seed(worker)
        tokens = torch.randint(256, (4, 17), generator=generator)
        model = models[worker]
        logits = model(tokens[:, :-1])
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        flat = torch.cat([each.grad.reshape(-1) for each in model.parameters()])
        return flat.numpy()

    torch.manual_seed(1)
    models = [Gpt(GptConfig(layers=1, heads=2, width=32, context=16)) for _ in range(WORKERS)]
    for model in models:
        model.load_state_dict(models[0].state_dict())
    with ThreadPoolExecutor(WORKERS) as threads:
        found = list(threads.map(work, range(WORKERS)))
    assert len({each.tobytes() for each in found}) == WORKERS
    return found


@contextlib.contextmanager
def opened(**options: object) -> Iterator[CoarsePool]:
    """Eight devices with these options of their links; tries again soon."""
    text = "".join(f"&{name}={value}" for name, value in options.items())
    with CoarsePool.open(URL + text, silence_cycles=SILENCE) as pool:
        for node in pool.device.nodes:
            node.pool.retry.value, node.pool.keepalive.value = 512, 128
        yield pool


def backend(pool: CoarsePool) -> PoolBackend:
    assert isinstance(pool.device.backend, PoolBackend)
    return pool.device.backend


def average(pool: CoarsePool, gradients: list[Floats]) -> int:
    """A whole reduction with golden's bits on all; the number of elements compared."""
    tensor = pool.tensor(gradients)
    pool.all_reduce(tensor, "average")
    compared = compare(tensor, reduced(pool, gradients, "average"))
    tensor.free()
    return compared


def survives(
    pool: CoarsePool, gradients: list[Floats], tensor, error: type[RingError]
) -> RingError:
    """The job of the tensor ends with this error, of all devices, which keep their values; after a
    reset all is well."""
    with pytest.raises(error) as found:
        pool.all_reduce(tensor, "average")
    assert set(found.value.causes) == set(range(WORKERS))
    elements = WORKERS * gradients[0].size
    assert compare(tensor, gradients) == elements
    backend(pool).heal()
    for device in range(WORKERS):
        backend(pool).revive(device)
    pool.reset()
    pool.all_reduce(tensor, "average")
    assert compare(tensor, reduced(pool, gradients, "average")) == elements
    return found.value


@pytest.mark.deep  # the next test has all of them at once
@pytest.mark.parametrize("kind", COUNTED)
def test_frames_that_are_hit(gradients, kind) -> None:
    with opened(**{kind: 0.03, "seed": 11}) as pool:
        assert average(pool, gradients) == WORKERS * gradients[0].size
        links = [link for device in pool.counters().devices for link in device.links]
        assert sum(getattr(link, COUNTED[kind]) for link in links) > 10
        assert sum(backend(pool).link_statistics(0, d)[kind] for d in (0, 1)) > 0


def test_all_that_can_hit_frames_and_slow_memories(gradients) -> None:
    rates = {"drop": 0.01, "duplicate": 0.01, "reorder": 0.01, "corrupt": 0.01}
    with opened(**rates, memory="ideal", stall=0.2, seed=12) as pool:
        for wire in ("fp32", "bf16"):
            tensor = pool.tensor(gradients)
            pool.all_reduce(tensor, "average", wire)
            expected = reduced(pool, gradients, "average", wire)
            assert compare(tensor, expected) == WORKERS * gradients[0].size
            tensor.free()


@pytest.mark.parametrize(
    "link", [4, *(pytest.param(link, marks=pytest.mark.deep) for link in (0, 7))]
)
def test_a_peer_that_returns_in_time(gradients, link) -> None:
    with opened() as pool:
        tensor = pool.tensor(gradients)
        event = pool.submit(tensor, "average")
        fault = LinkFault(kind="stall", link=link, direction=link % 2, cycles=SILENCE - 500)
        backend(pool).inject_link(fault)
        event.wait()
        elements = WORKERS * gradients[0].size
        assert compare(tensor, reduced(pool, gradients, "average")) == elements


@pytest.mark.deep
def test_a_peer_that_returns_too_late(gradients) -> None:
    with opened() as pool:
        tensor = pool.tensor(gradients)
        fault = LinkFault(kind="stall", link=2, direction=1, cycles=3 * SILENCE)
        backend(pool).inject_link(fault)
        error = survives(pool, gradients, tensor, SilentLinkError)
        assert (error.device, error.peer) == (2, 3)


@pytest.mark.parametrize("dead", [5, pytest.param(0, marks=pytest.mark.deep)])
def test_a_peer_that_dies(gradients, dead) -> None:
    with opened(drop=0.01, seed=13) as pool:
        tensor = pool.tensor(gradients)
        backend(pool).kill(dead)
        error = survives(pool, gradients, tensor, SilentLinkError)
        assert dead in (error.device, error.peer)
        assert f"device {dead}" in str(error)


@pytest.mark.deep
@pytest.mark.parametrize("write", [False, True])
def test_a_memory_that_answers_with_an_error(gradients, write) -> None:
    with opened() as pool:
        tensor = pool.tensor(gradients)
        buffer = tensor.back(6) if write else tensor.front(6)
        limit = buffer.address + buffer.nbytes
        backend(pool).inject(
            Injection(kind="slverr", write=write, base=buffer.address, limit=limit, nth=3)
        )
        assert survives(pool, gradients, tensor, MemoryResponseError).device == 6


def test_lengths_that_differ(gradients) -> None:
    """Refused by the host; behind its back, by the devices."""
    with opened() as pool:
        short = [*gradients[:7], gradients[7][:-1]]
        with pytest.raises(TensorMismatchError, match="device 7"):
            pool.tensor(short)
        tensor, others = pool.tensor(gradients), pool.tensor(64)
        core, at = pool.device.nodes[4].sync0, pool.device.local_address
        core.source.value = at(others.front(4).address, 4)
        core.destination.value = at(others.back(4).address, 4)
        core.elements.value, core.scale.value = 64, 1.0
        core.job.set(operation=0, wire=0, tag=1)
        core.start.go = 1
        assert survives(pool, gradients, tensor, JobMismatchError).causes[4] == "MISMATCH"


@pytest.mark.deep
def test_a_full_queue(gradients) -> None:
    part = [each[:6000] for each in gradients]
    with opened() as pool:
        tensors = [pool.tensor(part) for _ in range(4)]

        def fill() -> None:
            for each in tensors:
                pool.submit(each, "average", group=0)

        with pytest.raises(QueueFullError):
            fill()
        started = [tensor for tensor in tensors if tensor.event is not None]
        assert len(started) in (2, 3)
        for tensor in started:
            tensor.event.wait()
            expected = reduced(pool, part, "average", group=0)
            assert compare(tensor, expected) == WORKERS * 6000
        assert compare(tensors[-1], part) == WORKERS * 6000


@pytest.mark.deep
def test_snapshots_under_load_a_full_disk_and_a_torn_file(gradients, tmp_path) -> None:
    with opened(drop=0.01, seed=14) as pool:
        tensor = pool.tensor(gradients)
        event = pool.submit(tensor, "average")
        with pool.freeze([tensor]) as frozen:
            event.wait()
            old = np.array_equal(frozen.read(0, 0), gradients[0])
            mean = reduced(pool, gradients, "average")
            version = gradients if old else [mean] * WORKERS
            for _ in range(2):
                for device, values in enumerate(version):
                    bits = frozen.read(0, device).view(np.uint32)
                    np.testing.assert_array_equal(bits, values.view(np.uint32))
                pool.all_reduce(tensor, "max")
        for device, values in enumerate(gradients):
            tensor.write(device, values)
        good = pool.snapshot(tmp_path / "state", [tensor])

        class FullDisk(io.BytesIO):
            def write(self, _data) -> int:
                raise OSError(errno.ENOSPC, "No space left on device")

        with pytest.raises(SnapshotSaveError, match="No space left"):
            pool.snapshot(tmp_path / "state", [tensor], opener=lambda _: FullDisk())
        pool.all_reduce(tensor, "average")
        elements = WORKERS * gradients[0].size
        assert compare(tensor, reduced(pool, gradients, "average")) == elements
        torn = pool.snapshot(tmp_path / "state", [tensor])
        torn.write_bytes(torn.read_bytes()[:-100])
        with pytest.raises(TornSnapshotError) as found:
            pool.restore(torn, [tensor])
        assert found.value.last_good == good
        pool.restore(good, [tensor])
        assert compare(tensor, gradients) == elements
