"""Each cause of an error as each kind of RTL shows it, and a run that is right afterwards."""

from __future__ import annotations

import numpy as np
import pytest

import nearstep
from nearstep.axdimm.device import AxdimmDevice
from nearstep.backends.emulated import Injection
from nearstep_spec.updater.registers import ErrorCause

from .conftest import CARD_SHAPE, DIMM_SHAPE, SHAPE
from .job import accelerated
from .start import TOP, Start

PAIRED = "rules=adam&compression=fused&gradient_formats=fp32&scan=no&copy_out_formats="
DEVICES = {
    "kernel": f"sim:axdimm?{SHAPE}&{PAIRED}",
    "module": f"sim:axdimm?memory=ddr4-1600&{DIMM_SHAPE}&channels=1&fu=native&{PAIRED}",
    "card": f"sim:smartssd?{CARD_SHAPE}&{PAIRED}",
}
LONG = 20_000


def ended(start: Start) -> ErrorCause:
    """Cause of a run that may have moved beats before its end."""
    with accelerated(start.device):
        start.kernel.start.go = 1
        start.device.backend.wait([start.kernel.status.poll(busy=0)], 50_000)
    return ErrorCause(start.kernel.error.cause)


@pytest.mark.deep
@pytest.mark.parametrize("name", DEVICES)
def test_every_cause_is_shown_by_the_rtl(name: str) -> None:
    with nearstep.open(DEVICES[name]) as device:
        backend, start = device.backend, Start(device, LONG)
        p = start.at["p"]
        start.check_works()
        cases = {
            ErrorCause.NONE: {},
            ErrorCause.UNSUPPORTED: {"formats": {"gradient": 3}},
            ErrorCause.ALIGNMENT: {"p_address": p + 4},
            ErrorCause.ADDRESS_RANGE: {"p_address": TOP},
            ErrorCause.OVERLAP: {"m_address": p},
        }
        for cause, registers in cases.items():
            start.reset()
            start.set(**registers)
            assert start.outcome()[0] == cause
        shown = set(cases)
        start.reset()
        start.windows()
        assert start.outcome()[0] == ErrorCause.WINDOW

        start.reset()
        good = start.work.index
        for cause, index in (
            (ErrorCause.PAIR_RANGE, np.array([LONG], np.uint32)),
            (ErrorCause.PAIR_ORDER, good[[1, 0]]),
        ):
            backend.write_memory(start.at["index"], index.view(np.uint8))
            assert ended(start) == cause
            backend.write_memory(start.at["index"], good.view(np.uint8))
        shown |= {ErrorCause.WINDOW, ErrorCause.PAIR_RANGE, ErrorCause.PAIR_ORDER}

        with accelerated(device):
            start.kernel.start.go = 1
            start.kernel.control.abort = 1
            backend.wait([start.kernel.status.poll(busy=0)], 50_000)
        assert start.kernel.error.cause == ErrorCause.ABORTED
        shown.add(ErrorCause.ABORTED)

        if not isinstance(device, AxdimmDevice) or device.dimm is None:
            for cause, write in (
                (ErrorCause.READ_RESPONSE, False),
                (ErrorCause.WRITE_RESPONSE, True),
            ):
                backend.inject(Injection(kind="slverr", write=write, base=p, limit=p + 1))
                assert ended(start) == cause
                backend.heal()
                shown.add(cause)
            assert shown == set(ErrorCause)
        start.work.upload()
        start.check_works()
