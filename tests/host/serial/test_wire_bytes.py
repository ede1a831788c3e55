"""What a step takes on the wire is what the protocol says, and registers, which are so many."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import nearstep.optim
from nearstep.serial.link import FRAME_BYTES
from nearstep_spec.serial.framing import to_frame
from nearstep_spec.serial.protocol import ANSWER_BYTES, MOST_DATA, REQUEST_BYTES, Op, Request, Space

from .conftest import over_link

URL = "golden:smartssd?memory_bytes=4MiB"


def step(parameters: int, dtype: torch.dtype, share: float | None) -> tuple[int, int]:
    """Bytes down and up of a step's registers: what is no data, and none of its frames."""
    generator = torch.Generator().manual_seed(2)
    with over_link(URL) as device:
        parameter = torch.nn.Parameter(torch.randn(parameters, generator=generator).to(dtype))
        optimizer = nearstep.optim.SGD([parameter], lr=0.1, device=device, compression=share)
        for _ in range(2):
            parameter.grad = torch.randn(parameters, generator=generator).to(dtype)
            before = dataclasses.replace(optimizer.traffic)
            wire = dataclasses.replace(device.backend.link.traffic)
            optimizer.step()
        now, after = optimizer.traffic, device.backend.link.traffic
    down = now.gradients_down - before.gradients_down
    up = now.parameters_up - before.parameters_up
    assert down % MOST_DATA == up % MOST_DATA == 0
    frames = (down + up) // MOST_DATA
    sent = after.bodies_sent - wire.bodies_sent - down - frames * REQUEST_BYTES
    received = after.bodies_received - wire.bodies_received - up - frames * ANSWER_BYTES
    for whole, bodies, count in (
        ("bytes_sent", "bodies_sent", "frames_sent"),
        ("bytes_received", "bodies_received", "frames_received"),
    ):
        total, bare, many = (
            getattr(after, each) - getattr(wire, each) for each in (whole, bodies, count)
        )
        escaped = total - bare - FRAME_BYTES * many
        assert 0 < escaped < bare / 100  # one byte in 128, if all were random
    return sent, received


@pytest.mark.parametrize(
    ("dtype", "share"),
    [(torch.float32, None), (torch.bfloat16, None), (torch.bfloat16, 1 / 128)],
    ids=["fp32", "bf16", "bf16-sparse"],
)
def test_registers_take_the_same_whatever_the_size(dtype: torch.dtype, share: float | None) -> None:
    found = {size: step(size, dtype, share) for size in (1 << 15, 1 << 16)}
    print(found)
    first, second = found.values()
    assert first == second
    assert 500 < sum(first) < 3000


def test_a_byte_in_128_is_escaped_where_all_are_as_frequent() -> None:
    data = bytes(range(256)) * 4
    body = Request(op=Op.WRITE, space=Space.MEMORY, length=MOST_DATA, data=data).encode()
    escapes = len(to_frame(body)) - len(body) - FRAME_BYTES
    assert escapes == MOST_DATA // 128
