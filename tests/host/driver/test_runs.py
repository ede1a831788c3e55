"""A run from its start to its end: what it says, what it holds, what it refuses, and who has ended
it, on every emulated device."""

from __future__ import annotations

import numpy as np
import pytest

import nearstep
from nearstep.device import drive
from nearstep.errors import (
    AbortedError,
    ArgumentError,
    BusError,
    BusyError,
    ClosedDeviceError,
    MismatchError,
    PairRangeError,
)
from nearstep.registers import RefusedWriteError
from nearstep_sim.backends.golden import open_device
from nearstep_spec.smartssd.config import UPDATER, SmartssdConfig

from .conftest import CARD_SHAPE, everywhere
from .job import Job, accelerated, host_reaches

ROWS = [("adam", name) for name in "pgmv"]
ROWS += [("copy", "copy_out"), ("pairs", "index"), ("pairs", "g"), ("scan", "g")]


@everywhere
def test_busy_is_seen_and_then_done_and_cycles_are_counted_or_unknown(device, job):
    work = job(4000)
    kernel = device.channels[0].kernel
    run = work.start()
    assert kernel.status.busy
    assert not run.done
    run.wait()
    assert run.done
    assert not kernel.status.busy
    if device.backend.cycles is None:
        assert run.cycles is None
        assert "cycles" not in run.counters
    else:
        assert run.cycles > 4 * 4000 / device.config.lanes / len(device.channels)
    assert run.counters["committed"] == 4000
    assert work.check() == 12_000


@everywhere
def test_a_run_while_another_is_busy_is_refused(device, job):
    first, second = job(4000, seed=1), job(100, seed=2)
    run = first.start()
    with pytest.raises(BusyError, match="adam of 4000 elements has not ended"):
        second.start()
    run.wait()
    assert first.check() == 12000
    assert second.check_untouched() == 300
    second.start().wait()
    assert second.check() == 300


def test_start_and_configuration_while_busy_are_refused_and_flagged(device, job):
    work = job(4000)
    run = work.start()
    kernel = device.channels[0].kernel
    assert not kernel.status.refused
    for register in (kernel.start, kernel.p_address, kernel.window0_permissions):
        with pytest.raises(BusError):
            device.backend.write_register(register.address, 1)
        assert kernel.status.refused
        assert kernel.status.refused, "reading it cleared it"
        kernel.control.clear = 1
        assert not kernel.status.refused
    for write in (
        lambda: setattr(kernel.start, "go", 1),
        lambda: setattr(kernel.p_address, "value", 0),
        lambda: setattr(kernel.window0_permissions, "bits", 0),
    ):
        with pytest.raises(RefusedWriteError):
            write()
    assert not kernel.status.refused, "the driver did not clear it"
    assert kernel.status.busy
    run.wait()
    assert work.check() == 12000


def test_what_a_run_uses_cannot_be_freed_or_changed(full):
    """Of what it only reads, the host may read where it reaches the memory."""
    free = full.free_bytes
    for kind, name in ROWS:
        print(kind, name)
        work = Job(full, 40_000 if kind == "scan" else 4000)
        given, what = {}, f"adam of {work.count} elements"
        if kind == "copy":
            given["copy_out"] = work.copy("fp16")
        if kind == "pairs":
            given["g"] = work.pairs(np.zeros(3, np.uint32), np.ones(3, np.float32), "fused")
        used = given.get("copy_out", work.buffers[name if name in "pgmv" else "p"])
        if kind == "pairs":
            used = given["g"].index if name == "index" else given["g"].value
        before = None if name == "copy_out" else used.read()
        allocated = full.free_bytes
        with accelerated(full):
            if kind == "scan":
                what = f"scan of {work.count} elements"
                run = full.scan(used)
            else:
                run = work.start(**given)
            uses = [used.free]
            if host_reaches(full):
                uses += [lambda: used.fill(0), lambda: used[1:].fill(0)]  # noqa: B023
            for use in uses:
                text = f"{what}, which uses it as {name}, has not ended"
                with pytest.raises(BusyError, match=text) as caught:
                    use()
                assert caught.value.registers[f"{full.channels[0].kernel.name}.status.busy"] == 1
            if host_reaches(full) and (kind in ("pairs", "scan") or name == "g"):
                assert used.read().tobytes() == before.tobytes()
            elif host_reaches(full):
                with pytest.raises(BusyError, match="cannot read"):
                    used.read()
            assert run.sharing(used[1:2]) == [name]
            assert full.free_bytes == allocated
            run.wait()
        if kind != "scan":
            assert work.check() >= 12_000
        used.free()
        work.free()
        assert full.free_bytes == free


def test_what_a_run_does_not_use_stays_usable_beside_it(device, job):
    work, other = job(4000, seed=1), job(100, seed=2)
    whole = device.alloc(5000)
    whole[:4000].write(work.before["p"])
    work.buffers["p"] = whole[:4000]
    run = work.start()
    whole[4000:].fill(7.0)
    assert other.check_untouched() == 300
    other.buffers["p"].free()
    for use in (whole.read, whole.free):
        with pytest.raises(BusyError):
            use()
    run.wait()
    assert work.check() == 12000
    assert np.all(whole[4000:].read() == 7.0)


def test_windows_grant_what_a_run_does_and_are_closed_after_it(full):
    work = Job(full, 300)
    kernel, base = full.channels[0].kernel, full.channels[0].base
    pairs = work.pairs(np.zeros(3, np.uint32), np.ones(3, np.float32), "fused")
    copy = work.copy("fp16")
    with accelerated(full):
        run = work.start(g=pairs, copy_out=copy)
        granted = {
            kernel[f"window{i}_base"].value: kernel[f"window{i}_permissions"].bits
            for i in range(full.config.windows)
        }
        run.wait()
    wanted = {work.buffers[name]: 0b111 for name in "pmv"} | {copy: 0b110}
    wanted |= {pairs.index: 0b101, pairs.value: 0b101}
    for buffer, bits in wanted.items():
        assert granted[buffer.address - base] == bits
    closed = [kernel[f"window{i}_permissions"].bits for i in range(full.config.windows)]
    assert closed == [0] * full.config.windows


def test_what_a_run_finds_is_known_at_its_end_only(full):
    count = 40_000  # more than the host's accesses take, through PCIe too
    work = Job(full, count, 11)
    pairs = work.pairs(np.zeros(3, np.uint32), np.ones(3, np.float32), "fused")
    work.buffers["g"].fill(1.0)
    with accelerated(full):
        run = work.start(g=pairs)
        with pytest.raises(BusyError, match=f"adam of {count} elements has not ended"):
            _ = run.duplicates
        run.wait()
        assert run.duplicates == 2
        scan = full.scan(work.buffers["g"])
        for use in (lambda: scan.found_inf, lambda: scan.sum_of_squares):
            with pytest.raises(BusyError, match=f"scan of {count} elements has not ended"):
                use()
        with pytest.raises(BusyError, match=f"cannot run scan: scan of {count} elements has not"):
            full.scan(work.buffers["g"])
        scan.wait()
        assert (scan.found_inf, scan.sum_of_squares) == (False, float(count))
    pairs.index.fill(count)
    with accelerated(full):
        run = work.start(g=pairs)
        for _ in range(2):
            with pytest.raises(PairRangeError):
                run.wait()
    with pytest.raises(PairRangeError):
        _ = run.duplicates


def test_buffers_are_free_again_after_an_abort_or_a_reset(device, job):
    first, second = job(4000, seed=1), job(4000, seed=2)
    first.start().abort()
    run = second.start()
    device.reset()
    with pytest.raises(AbortedError, match="the device was reset"):
        run.wait()
    for work in (first, second):
        for buffer in work.buffers.values():
            buffer.free()
    assert job(300).start().wait().done


def test_a_closed_device_says_so(device, job):
    work = job(4000)
    run = work.start()
    device.close()
    device.close()
    for use in (
        run.wait,
        run.abort,
        lambda: run.done,
        lambda: run.committed,
        lambda: device.channels[0].kernel.status.busy,
        lambda: setattr(device.channels[0].kernel.count, "value", 1),
        work.start,
        lambda: device.alloc(4),
        lambda: work.buffers["p"].read(),
        lambda: work.buffers["p"].write(work.before["p"]),
        lambda: work.buffers["p"].free(),
        device.reset,
        lambda: device.cycles,
    ):
        with pytest.raises(ClosedDeviceError, match="is closed"):
            use()


@pytest.fixture
def card():
    with nearstep.open(f"golden:smartssd?{CARD_SHAPE}") as opened:
        yield opened


def test_a_card_is_what_its_name_says(card):
    assert card.card.kernel is card.config
    assert (card.config.lanes, card.config.block_bytes) == (4, 512)
    assert card.config.rules == UPDATER.rules
    assert card.capacity_bytes == card.card.memory_bytes == 1 << 20
    assert card.channel_count == 1
    assert [block.name for block in card.regs] == ["updater0"]
    config = SmartssdConfig(kernel=card.config, memory_bytes=1 << 20)
    assert card.card.subgroup_elements == config.subgroup_elements


def test_a_block_of_runs_waits_for_them_or_aborts_them(card):
    work, runs = Job(card, 4000, 3), []
    with card.acceleration():
        runs.append(work.start("adam", step=1))
        card.alloc(4).fill(1.0)  # there are no modes
    assert runs[0].done
    assert work.check() == 12_000
    for wrong in ((1,), (0, 0)):
        with pytest.raises(ArgumentError), card.acceleration(*wrong):
            pass

    def interrupted():
        with card.acceleration():
            runs.append(work.start("adam", step=1))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert isinstance(runs[1].error, AbortedError)
    assert not card.regs.updater0.status.busy


def test_the_configuration_must_be_of_the_family():
    backend = open_device("axdimm", {"memory_bytes": "64KiB", "engine": "numpy"})
    backend.family = "smartssd"
    with pytest.raises(MismatchError, match="must be of a card, not a UpdateKernelConfig"):
        drive(backend, "golden:smartssd")
