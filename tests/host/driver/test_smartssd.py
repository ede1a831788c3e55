"""A card: one kernel, and memory that the host reaches at any time."""

from __future__ import annotations

import numpy as np
import pytest

import nearstep
from nearstep.device import drive
from nearstep.errors import (
    AbortedError,
    ArgumentError,
    BusyError,
    MismatchError,
    OptionError,
)
from nearstep.smartssd.device import SmartssdDevice
from nearstep_sim.backends.golden import open_device
from nearstep_spec.smartssd.config import UPDATER, SmartssdConfig
from nearstep_spec.updater.registers import ErrorCause, Stream

from .conftest import CARD_SHAPE
from .job import Job

URLS = {"golden": f"golden:smartssd?{CARD_SHAPE}"}


@pytest.fixture(params=URLS)
def card(request):
    with nearstep.open(URLS[request.param]) as opened:
        assert isinstance(opened, SmartssdDevice)
        yield opened


def test_a_card_is_what_its_name_says(card):
    assert card.card.kernel is card.config
    assert (card.config.lanes, card.config.block_bytes) == (4, 512)
    assert card.config.rules == UPDATER.rules
    assert card.capacity_bytes == card.card.memory_bytes == 1 << 20
    assert card.channel_count == 1
    assert [block.name for block in card.regs] == ["updater0"]
    assert (
        card.card.subgroup_elements
        == SmartssdConfig(kernel=card.config, memory_bytes=1 << 20).subgroup_elements
    )


def test_the_host_uses_the_memory_while_the_kernel_runs(card):
    work, other = Job(card, 4000, 1), Job(card, 500, 2)
    g = work.buffers["g"]
    run = work.start("adam", step=1)
    assert not run.done
    other.buffers["p"].fill(3.0)
    assert np.all(other.buffers["p"].read() == 3.0)
    np.testing.assert_array_equal(g.read(), work.before["g"])
    for use in (work.buffers["p"].read, work.buffers["m"].free, lambda: g.fill(0.0)):
        with pytest.raises(BusyError, match="adam of 4000 elements"):
            use()
    run.wait()
    assert work.check() == 12_000


def test_a_block_of_runs_waits_for_them_at_its_end(card):
    work = Job(card, 4000, 3)
    with card.acceleration():
        run = work.start("adam", step=1)
        card.alloc(4).fill(1.0)  # there are no modes
    assert run.done
    assert work.check() == 12_000
    for wrong in ((1,), (0, 0)):
        with pytest.raises(ArgumentError), card.acceleration(*wrong):
            pass


def test_a_block_of_runs_that_fails_aborts_them(card):
    work = Job(card, 4000, 3)

    def interrupted():
        with card.acceleration():
            runs.append(work.start("adam", step=1))
            raise KeyboardInterrupt

    runs = []
    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert isinstance(runs[0].error, AbortedError)
    assert not card.regs.updater0.status.busy


def test_a_reset_forgets_the_run(card):
    work = Job(card, 4000, 4)
    run = work.start("adam", step=1)
    card.reset()
    with pytest.raises(AbortedError, match="the device was reset"):
        run.wait()
    work.upload()
    work.start("adam", step=1).wait()
    assert work.check() == 12_000


def test_arrays_must_end_with_the_memory(card):
    kernel = card.regs.updater0
    kernel.window0_limit.value = 1 << 34
    kernel.window0_permissions.bits = 0b111
    kernel.rule.value = UPDATER.rules.index("sgd")
    kernel.gradient_scale.value = 1.0
    kernel.count.value = 4
    kernel.g_address.value = 4096
    kernel.p_address.value = bad = card.capacity_bytes
    kernel.start.go = 1
    card.backend.wait([kernel.status.poll(busy=0)], 20_000)
    assert (kernel.error.cause, kernel.error.stream) == (ErrorCause.ADDRESS_RANGE, Stream.P_READ)
    assert kernel.error_address.value == bad


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("channels=2", "no such option; valid: lanes"),
        ("memory_bytes=3MiB", "power of two"),
        ("memory_bytes=128GiB", "power of two"),
        ("subgroup_elements=1", "multiple of a chunk"),
        ("subgroup_elements=1Gi", "whole number"),
        ("compression=sorted", "compression must be some of"),
        ("scan=maybe", "must be a boolean"),
    ],
)
def test_a_wrong_option_says_what_is_valid(option, message):
    with pytest.raises(OptionError, match=message):
        nearstep.open(f"golden:smartssd?{option}")


def test_the_configuration_must_be_of_the_family():
    backend = open_device("axdimm", {"memory_bytes": "64KiB", "engine": "numpy"})
    backend.family = "smartssd"
    with pytest.raises(MismatchError, match="must be of a card, not a UpdateKernelConfig"):
        drive(backend, "golden:smartssd")
