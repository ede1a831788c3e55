"""Every rule of the package with its states in every format, on a kernel with its units in RTL."""

from __future__ import annotations

import numpy as np
import pytest

import nearstep
from nearstep.updater.device import KernelDevice
from nearstep_spec.rule.rules import BY_RULE, OPTIMIZERS

from .test_conformance import Drawn

SHAPE = "lanes=1&block_bytes=1024&memory_bytes=1MiB"
COUNTS = (1, 257, 700)
SEED = 71


@pytest.mark.deep
@pytest.mark.parametrize(
    "formats",
    [
        *("parameter_format=fp32&state_format=fp32", "parameter_format=fp16&state_format=fp16"),
        *("parameter_format=bf16&state_format=bf16", "parameter_format=fp32&state_format=dynamic8"),
    ],
)
def test_a_step_is_that_of_the_rule(formats: str) -> None:
    print(f"seed {SEED}")
    rng = np.random.default_rng(SEED)
    compared = least = 0
    with nearstep.open(f"sim:axdimm?{SHAPE}&{formats}&rules={','.join(BY_RULE)}") as device:
        assert isinstance(device, KernelDevice)
        for optimizer in OPTIMIZERS.values():
            for rule, usual in optimizer.by_rule.items():
                for count in COUNTS:
                    compared += Drawn(device, rng, count).step(optimizer, usual, rule)
                    least += count * len(usual.rule.states)
    print(f"{compared} elements compared")
    assert compared >= least > 10_000
