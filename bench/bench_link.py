"""Bytes on a serial line for each parameter of a step, framing and registers included.

The board is the functional model of a card behind the protocol in software. The bytes are compared
with what the protocol says a step takes: the data, and with each 1,024 bytes of it 28 of two
frames' headers, CRC and flags. Not all bytes of numbers are random.
"""

import dataclasses
from typing import Annotated

import torch
from harness import Results, option, report, script

import nearstep
from nearstep.device import drive, open_backend
from nearstep.serial.backend import LinkBackend
from nearstep.serial.link import FRAME_BYTES, Link, LinkTraffic
from nearstep.serial.transport import BITS_A_BYTE
from nearstep_sim.serial.endpoint import Endpoint
from nearstep_sim.serial.line import Loopback
from nearstep_spec.boards.board import BOARDS
from nearstep_spec.serial.protocol import ANSWER_BYTES, MOST_DATA, REQUEST_BYTES

DEVICE = "golden:smartssd?memory_bytes=64MiB"
BAUD = BOARDS["ulx3s_85f"].baud
ESCAPED = 1 / 128  # of random bytes: two of 256
CASES: dict[str, tuple[torch.dtype, float | None]] = {"fp32": (torch.float32, None),
    "bf16 and back": (torch.bfloat16, None), "Top-K 1 %, fp32": (torch.float32, 0.01),
    "Top-K 1 %, bf16": (torch.bfloat16, 0.01)}  # fmt: skip
"""Format of the parameters, and share of the gradients that is sent."""


def opened(url: str) -> nearstep.Device:
    backend = LinkBackend(Link(Loopback(Endpoint(open_backend(url), url))))
    return drive(backend, f"serial:{url}")


def closed_form(down: float, up: float) -> dict[str, float]:
    request = (REQUEST_BYTES + FRAME_BYTES) / MOST_DATA
    answer = (ANSWER_BYTES + FRAME_BYTES) / MOST_DATA
    return {"down": down * (1 + request) + up * request, "up": up * (1 + answer) + down * answer}


def measure(name: str, parameters: int) -> Results:
    dtype, share = CASES[name]
    generator = torch.Generator().manual_seed(1)
    with opened(DEVICE) as device:
        assert isinstance(device.backend, LinkBackend)
        first = torch.randn(parameters, generator=generator)
        parameter = torch.nn.Parameter(first.to(dtype))
        optimizer = nearstep.optim.AdamW([parameter], lr=1e-3, device=device, compression=share)
        for _ in range(3):
            parameter.grad = torch.randn(parameters, generator=generator).to(dtype)
            before = dataclasses.replace(optimizer.traffic)
            crossed = dataclasses.asdict(device.backend.link.traffic)
            optimizer.step()
        now = dataclasses.asdict(device.backend.link.traffic)
        moved = LinkTraffic(**{key: now[key] - crossed[key] for key in now})
        after = optimizer.traffic
    data = {
        "down": (after.gradients_down - before.gradients_down) / parameters,
        "up": (after.parameters_up - before.parameters_up) / parameters,
    }
    found = {}
    for way, expected in closed_form(**data).items():
        past = "sent" if way == "down" else "received"
        wire, bodies, frames = (
            getattr(moved, f"{what}_{past}") for what in ("bytes", "bodies", "frames")
        )
        bare = bodies + FRAME_BYTES * frames
        found[way] = {"data": data[way], "closed_form": expected,
            "closed_form_random": expected * (1 + ESCAPED), "wire": wire / parameters,
            "escaped": (wire - bare) / bare,
            "registers": (bare - expected * parameters) / parameters}  # fmt: skip
    return {
        "case": name, "parameters": parameters, **found, "requests": moved.frames_sent,
        "seconds_at_baud": (moved.bytes_sent + moved.bytes_received) * BITS_A_BYTE / BAUD,
    }  # fmt: skip


@script
def main(parameters: Annotated[int, option("Of one tensor.", min=1024)] = 1 << 18) -> None:
    """Measure, print, and write build/bench/link.json."""
    rows = [measure(case, parameters) for case in CASES]
    report(
        "link",
        lambda results: {
            "count": results["rows"][0]["parameters"],
            "ways": [
                {"case": row["case"] if way == "down" else "", "way": way, **row[way]}
                for row in results["rows"]
                for way in ("down", "up")
            ],
        },
        device=DEVICE, optimizer="AdamW", baud=BAUD, rows=rows)  # fmt: skip
