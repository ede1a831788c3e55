"""Bytes on a serial line for each parameter of a step, framing and registers included.

The board is the functional model of a card behind the protocol in software, over a line in this
process: the bytes are those of a board's line, whatever its speed. They are compared with what the
protocol says a step takes: the data, and with each 1,024 bytes of it 28 of two frames' headers,
CRC and flags. Of random bytes one in 128 is escaped; not all bytes of numbers are random. What
remains are registers, a fixed number of accesses.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import report
import torch
import typer
from rich.console import Console
from rich.table import Table

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

console = Console()


@dataclass(frozen=True)
class Case:
    """How parameters are trained: their format, and the share of gradients that is sent."""

    name: str
    dtype: torch.dtype
    share: float | None = None


CASES = (
    Case("fp32", torch.float32),
    Case("bf16 and back", torch.bfloat16),
    Case("Top-K 1 %, fp32", torch.float32, 0.01),
    Case("Top-K 1 %, bf16", torch.bfloat16, 0.01),
)


def opened(url: str) -> nearstep.Device:
    """The device behind a link in this process."""
    backend = LinkBackend(Link(Loopback(Endpoint(open_backend(url), url))))
    return drive(backend, f"serial:{url}")


def counted(traffic: LinkTraffic, action: Callable[[], object]) -> LinkTraffic:
    """What crosses the link meanwhile."""
    before = dataclasses.replace(traffic)
    action()
    return LinkTraffic(
        **{
            each.name: getattr(traffic, each.name) - getattr(before, each.name)
            for each in dataclasses.fields(LinkTraffic)
        }
    )


def closed_form(data_down: float, data_up: float) -> tuple[float, float]:
    """Bytes down and up for so many bytes of data, without escapes and registers."""
    request = (REQUEST_BYTES + FRAME_BYTES) / MOST_DATA
    answer = (ANSWER_BYTES + FRAME_BYTES) / MOST_DATA
    down = data_down * (1 + request) + data_up * request
    up = data_up * (1 + answer) + data_down * answer
    return down, up


def measure(case: Case, parameters: int) -> dict[str, Any]:
    """The bytes of the third step."""
    generator = torch.Generator().manual_seed(1)
    with opened(DEVICE) as device:
        assert isinstance(device.backend, LinkBackend)
        first = torch.randn(parameters, generator=generator)
        parameter = torch.nn.Parameter(first.to(case.dtype))
        optimizer = nearstep.optim.AdamW(
            [parameter], lr=1e-3, device=device, compression=case.share
        )
        for _ in range(3):
            gradient = torch.randn(parameters, generator=generator)
            parameter.grad = gradient.to(case.dtype)
            before = dataclasses.replace(optimizer.traffic)
            moved = counted(device.backend.link.traffic, optimizer.step)
        now = optimizer.traffic
    data = {
        "down": (now.gradients_down - before.gradients_down) / parameters,
        "up": (now.parameters_up - before.parameters_up) / parameters,
    }
    most_down, most_up = closed_form(data["down"], data["up"])
    found = {}
    for way, wire, bodies, frames, expected in (
        ("down", moved.bytes_sent, moved.bodies_sent, moved.frames_sent, most_down),
        (
            "up",
            moved.bytes_received,
            moved.bodies_received,
            moved.frames_received,
            most_up,
        ),
    ):
        bare = bodies + FRAME_BYTES * frames
        found[way] = {
            "data": data[way],
            "closed_form": expected,
            "closed_form_random": expected * (1 + ESCAPED),
            "wire": wire / parameters,
            "escaped": (wire - bare) / bare,
            "registers": (bare - expected * parameters) / parameters,
        }
    return {
        "case": case.name,
        "label": "measured (bytes), modelled (seconds)",
        "parameters": parameters,
        **found,
        "requests": moved.frames_sent,
        "seconds_at_baud": (moved.bytes_sent + moved.bytes_received) * BITS_A_BYTE / BAUD,
    }


def main(
    parameters: Annotated[int, typer.Option(min=1024, help="Of one tensor.")] = 1 << 18,
) -> None:
    """Measure, print, and write build/bench/link.json."""
    rows = [measure(case, parameters) for case in CASES]
    results = {"device": DEVICE, "optimizer": "AdamW", "baud": BAUD, "rows": rows}
    path = report.write("link", results)
    table = Table(
        "a step of AdamW", "way", "data", "closed form", "on the wire", "escaped", "registers",
        title=f"bytes for each of {parameters:,} parameters; {path}",
    )  # fmt: skip
    for row in rows:
        for way in ("down", "up"):
            each = row[way]
            table.add_row(
                row["case"] if way == "down" else "",
                way,
                f"{each['data']:.4g}",
                f"{each['closed_form']:.4f}",
                f"{each['wire']:.4f}",
                f"{100 * each['escaped']:.2f} %",
                f"{each['registers']:.4f}",
            )
    console.print(table)
    for row in rows:
        seconds = row["seconds_at_baud"]
        console.print(f"{row['case']}: {seconds:.2f} s at {BAUD / 1e6:g} Mbaud")


if __name__ == "__main__":
    typer.run(main)
