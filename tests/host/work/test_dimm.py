"""Graphs on a DIMM of two channels: transfers to one channel while the kernel of the other runs."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
from numpy.typing import NDArray

import nearstep
from nearstep.axdimm.device import AxdimmDevice
from nearstep.backends.emulated import Injection
from nearstep.buffer import Buffer
from nearstep.errors import (
    BusyError,
    DeviceError,
    ModeError,
    OutOfBoundsError,
    UninitialisedError,
    WaitTimeoutError,
)
from nearstep.work.clock import Clock
from nearstep.work.errors import WorkError
from nearstep.work.executor import execute
from nearstep.work.graph import Graph
from nearstep.work.operation import Range
from nearstep.work.trace import trace

from ..driver.conftest import DIMMS

ARRAYS = ("p", "g", "m", "v")
SIZE = 8192
SEED = 5


@pytest.fixture(params=["golden-dimm", "sim-dimm"])
def dimm(request: pytest.FixtureRequest) -> Iterator[AxdimmDevice]:
    with nearstep.open(DIMMS[request.param]) as opened:
        assert isinstance(opened, AxdimmDevice)
        yield opened


@pytest.fixture
def simulated() -> Iterator[AxdimmDevice]:
    with nearstep.open(DIMMS["sim-dimm"]) as opened:
        assert isinstance(opened, AxdimmDevice)
        yield opened


@dataclass
class Chunk:
    """A piece of a step: its arrays on a channel, its gradients, and room for what comes back."""

    dimm: AxdimmDevice
    channel: int
    buffers: dict[str, Buffer]
    gradients: NDArray[np.float32]
    updated: NDArray[np.float32]

    def start(self):
        return self.dimm.update("adam", self.buffers, step=1, lr=1e-2)

    def accelerate(self):
        return self.dimm.accelerated(self.channel, self.start)

    def send(self):
        return self.buffers["g"].submit_write(self.gradients)

    def fetch(self):
        return self.buffers["p"].submit_read(self.updated)

    def bits(self):
        arrays = [self.updated, *(self.buffers[name].read() for name in ARRAYS)]
        return np.concatenate(arrays).view(np.uint32)


def chunks(dimm, count, size=SIZE):
    """By chunk and channel; state is on the device, gradients are not."""
    print(f"seed {SEED}")
    rng = np.random.default_rng(SEED)
    made = []
    for _ in range(count):
        for channel in range(2):
            buffers = {
                name: dimm.alloc(size, channel=channel, align=dimm.stripe_align) for name in ARRAYS
            }
            for name in ("p", "m", "v"):
                buffers[name].write(np.square(rng.standard_normal(size, dtype=np.float32)))
            gradients = rng.standard_normal(size, dtype=np.float32)
            made.append(Chunk(dimm, channel, buffers, gradients, np.zeros(size, np.float32)))
    return made


def in_sequence(dimm, work):
    """Everything to the device, both channels at once, everything back; the cycles."""
    begun = dimm.cycles
    for each in work:
        each.buffers["g"].write(each.gradients)
    with dimm.acceleration():
        for pair in zip(work[::2], work[1::2], strict=True):
            for run in [each.start() for each in pair]:
                run.wait()
    for each in work:
        each.buffers["p"].read(each.updated)
    return None if begun is None else dimm.cycles - begun


def plan(work):
    """The same as a graph: each channel gets its next gradients when it has given its parameters
    back, while the other one's kernel runs."""
    graph = Graph()
    before: dict[int, tuple[int, Chunk]] = {}

    def fetch(number, each):
        where, lane = [Range.of(each.buffers["p"])], f"channel {each.channel}"
        graph.add(f"read {number}", "bus", lane, reads=where, action=each.fetch)

    for number, each in enumerate(work):
        if each.channel in before:
            fetch(*before[each.channel])
        before[each.channel] = (number, each)
        where = {name: Range.of(buffer) for name, buffer in each.buffers.items()}
        lane = f"channel {each.channel}"
        graph.add(f"write {number}", "bus", lane, writes=[where["g"]], action=each.send)
        state = [where[name] for name in ("p", "m", "v")]
        graph.add(f"run {number}", lane, reads=[where["g"]], writes=state, action=each.accelerate)
    for last in before.values():
        fetch(*last)
    return graph


def test_transfers_to_one_channel_overlap_the_run_of_the_other(dimm):
    url = dimm.url
    work = chunks(dimm, 4)
    timeline = execute(plan(work), Clock([dimm.backend]))
    found = [each.bits() for each in work]
    with nearstep.open(url) as other:
        assert isinstance(other, AxdimmDevice)
        compared = chunks(other, 4)
        cycles = in_sequence(other, compared)
        for one, each in zip(found, compared, strict=True):
            np.testing.assert_array_equal(one, each.bits())
    assert sum(each.size for each in found) == 8 * 5 * SIZE
    if cycles is None:
        assert timeline.unit == "steps"
        return
    limit = max(map(timeline.busy, timeline.lanes))
    print("graph", timeline.makespan, "in sequence", cycles, "busiest resource", limit)
    assert timeline.makespan <= 1.1 * limit
    assert timeline.makespan < 0.9 * cycles
    at = {e.operation.name: e for e in timeline.entries}
    overlaps = sum(
        max(0, min(one.end, other.end) - max(one.start, other.start))
        for name, one in at.items()
        for rest, other in at.items()
        if name.startswith("run") and not rest.startswith("run")
    )
    print("transfers beside a run:", overlaps, "of", timeline.busy("bus"))
    assert overlaps >= 0.7 * timeline.busy("bus")


def test_the_same_graph_takes_the_same_cycles(dimm):
    def once():
        with nearstep.open(dimm.url) as fresh:
            assert isinstance(fresh, AxdimmDevice)
            return trace(execute(plan(chunks(fresh, 1, 1024)), Clock([fresh.backend])))

    assert once() == once()


def test_submitted_transfers_go_on_while_registers_are_read(simulated):
    rng = np.random.default_rng(SEED)
    data = [rng.standard_normal(2048, dtype=np.float32) for _ in range(4)]
    buffers = [simulated.alloc(2048, channel=n % 2) for n in range(4)]
    writes = [b.submit_write(d) for b, d in zip(buffers, data, strict=True)]
    assert not any(each.ended for each in writes)
    looked = 0
    while not writes[-1].ended:
        assert simulated.regs.adam0.status.busy == 0
        looked += 1
    assert looked > 5
    assert [each.done for each in writes] == [True] * 4
    out = [np.zeros(2048, np.float32) for _ in range(4)]
    reads = [b.submit_read(o) for b, o in zip(buffers, out, strict=True)]
    reads[-1].wait()
    assert all(each.done and each.cycles > 0 for each in reads)
    np.testing.assert_array_equal(np.stack(out).view(np.uint32), np.stack(data).view(np.uint32))


def test_a_submitted_copy_takes_the_time_of_a_call(simulated):
    data = np.arange(4096, dtype=np.float32)
    one, other = simulated.alloc(4096), simulated.alloc(4096)
    begun = simulated.cycles
    one.write(data)
    middle = simulated.cycles
    cycles = other.submit_write(data).wait().cycles
    print("call", middle - begun, "submitted", cycles)
    assert abs(cycles - (middle - begun)) <= 0.05 * cycles


def test_parts_of_a_line_are_written_in_order(dimm):
    whole = dimm.alloc(64)
    whole.write(np.zeros(64, np.float32))
    for start in range(0, 64, 5):
        stop = min(64, start + 5)
        whole[start:stop].submit_write(np.arange(start, stop, dtype=np.float32)).wait()
    large = dimm.alloc(4096)
    first = large[:4091].submit_write(np.arange(4091, dtype=np.float32))
    second = large[4091:].submit_write(np.arange(4091, 4096, dtype=np.float32))
    first.wait()
    second.wait()
    np.testing.assert_array_equal(whole.read(), np.arange(64, dtype=np.float32))
    np.testing.assert_array_equal(large.read(), np.arange(4096, dtype=np.float32))


def test_a_buffer_is_not_used_while_a_transfer_uses_it(simulated):
    data = np.zeros(2048, np.float32)
    buffer, other = simulated.alloc(2048), simulated.alloc(16, channel=1)
    transfer = buffer.submit_write(data)
    for forbidden in (
        lambda: buffer.write(data),
        buffer.read,
        lambda: buffer[5:9].read(),
        buffer.free,
        lambda: buffer.submit_read(np.empty_like(data)),
        simulated.acceleration(0).__enter__,
    ):
        with pytest.raises(BusyError, match="has not ended"):
            forbidden()
    other.write(data[:16])
    with simulated.acceleration(1):
        assert not transfer.ended or transfer.done
        with pytest.raises(ModeError):
            other.submit_write(data[:16])
    transfer.wait()
    reading = buffer.submit_read(np.empty_like(data))
    buffer[:16].read()
    with pytest.raises(BusyError):
        buffer.write(data)
    reading.wait()
    buffer.write(data)


def test_a_wait_for_a_transfer_is_bounded(simulated):
    buffer = simulated.alloc(2048)
    transfer = buffer.submit_write(np.zeros(2048, np.float32))
    with pytest.raises(WaitTimeoutError, match=r"waited 10 device cycles for write of 8192 bytes"):
        transfer.wait(10)
    assert transfer.wait().done


def test_a_transfer_that_is_given_up_says_so_and_the_device_goes_on(simulated):
    buffer = simulated.alloc(2048)
    transfers = [buffer[:1024].submit_write(np.zeros(1024, np.float32)) for _ in range(1)]
    transfers.append(buffer[1024:].submit_write(np.zeros(1024, np.float32)))
    simulated.backend.advance(30)
    transfers[0].abort()
    assert all(each.ended and not each.done for each in transfers)
    with pytest.raises(DeviceError, match="was given up"):
        transfers[1].wait()
    buffer.write(np.ones(2048, np.float32))
    assert (buffer.read() == 1).all()


def test_a_transfer_lies_in_one_channel(simulated):
    base, size = simulated.backend.regions[0]
    with pytest.raises(OutOfBoundsError):
        simulated.backend.submit_write(base + size - 64, np.zeros(128, np.uint8))


def check_usable(dimm):
    again = chunks(dimm, 1, 1024)
    execute(plan(again), Clock([dimm.backend]))
    assert all(np.isfinite(each.updated).all() and each.updated.any() for each in again)


def test_a_run_that_fails_ends_the_graph_and_the_device_can_be_used(dimm):
    work = chunks(dimm, 2, 2048)
    where = work[1].buffers["m"].address
    dimm.backend.inject(Injection(kind="never", write=False, base=where, limit=where + 4096))
    with pytest.raises(WorkError, match=r"\d: run 1 failed: waited") as caught:
        execute(plan(work), Clock([dimm.backend]))
    assert isinstance(caught.value.__cause__, WaitTimeoutError)
    assert "1: run 0" in caught.value.done
    assert [name for name in caught.value.not_run if "run" in name]
    dimm.backend.heal()
    dimm.reset()
    check_usable(dimm)


def test_a_fault_of_a_kernel_ends_the_transfers_beside_it(dimm):
    """An emulated device stops at a fault: nothing on it goes on."""
    work = chunks(dimm, 2, 4096)
    work[0].buffers["v"] = dimm.alloc(4096, channel=0)  # nobody has written it
    with pytest.raises(WorkError, match="1: run 0 failed") as caught:
        execute(plan(work), Clock([dimm.backend]))
    assert isinstance(caught.value.failed["1: run 0"], UninitialisedError)
    assert len(caught.value.not_run) >= 6
    dimm.reset()
    check_usable(dimm)


def test_ctrl_c_ends_what_is_under_way(simulated):
    work = chunks(simulated, 1)
    graph = plan(work)
    graph.add(
        "press", "finger", after=[graph[0]], action=lambda: signal.raise_signal(signal.SIGINT)
    )
    with pytest.raises(KeyboardInterrupt) as caught:
        execute(graph, Clock([simulated.backend]))
    assert caught.value.__notes__ == [
        "under way: 1: run 0, 2: write 1; not run: 3: run 1, 4: read 0, 5: read 1"
    ]
    assert not any(channel.accelerated for channel in simulated.channels)
    check_usable(simulated)
