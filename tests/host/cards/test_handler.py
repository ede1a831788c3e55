"""What the transfer handler does at once, in cycles of the RTL."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import nearstep
from nearstep.torch.errors import HyperparameterError, UnsupportedOptionError
from nearstep.work.timeline import Timeline

from ...sim.smartssd.test_card import URLS

SUBGROUP = 512
COUNT = 8 * SUBGROUP
HERTZ = 200_000_000
READ, WRITE = 3, 2
"""Bytes a cycle of the drive, of the 16 that the port of this small card moves."""
RATES = f"&drive_read_bytes_per_s={READ * HERTZ}&drive_write_bytes_per_s={WRITE * HERTZ}"


def trained(
    folder: Path, more: str = "", count: int = COUNT, **options: Any
) -> tuple[torch.Tensor, Timeline]:
    """Parameters after two steps, and what the second one did."""
    url = f"{URLS['sim']}{RATES}&subgroup_elements={SUBGROUP}&drive={folder}{more}"
    folder.mkdir()
    torch.manual_seed(3)
    parameter = torch.nn.Parameter(torch.randn(count))
    optimizer = nearstep.optim.AdamW([parameter], lr=1e-2, device=url, **options)
    for _ in range(2):
        parameter.grad = torch.randn(count)
        optimizer.step()
    assert optimizer.timeline is not None
    return parameter.detach(), optimizer.timeline


def at_once(timeline: Timeline, first: str, second: str) -> int:
    """Pairs of operations of two kinds that were under way together."""
    kinds = [
        [e for e in timeline.entries if e.operation.name.startswith(n)] for n in (first, second)
    ]
    return sum(max(a.start, b.start) < min(a.end, b.end) for a in kinds[0] for b in kinds[1])


@pytest.mark.deep
@pytest.mark.parametrize(
    ("duplex", "drive_cycles", "gain"),
    [
        ("full", 3 * 4 * COUNT // WRITE, 1.6),
        ("half", 3 * 4 * COUNT // WRITE + 3 * 4 * COUNT // READ, 1.3),
    ],
)
def test_the_handler_beats_the_naive_order_with_the_same_bits(
    tmp_path: Path, duplex: str, drive_cycles: int, gain: float
) -> None:
    more = f"&drive_duplex={duplex}"
    own, overlapped = trained(tmp_path / "overlapped", more)
    naive, one_by_one = trained(tmp_path / "naive", more, transfer_handler="naive")
    print(duplex, drive_cycles, overlapped.makespan, one_by_one.makespan)
    assert own.view(torch.int32).tolist() == naive.view(torch.int32).tolist()
    assert drive_cycles <= overlapped.makespan <= 1.2 * drive_cycles
    assert one_by_one.makespan >= gain * overlapped.makespan
    for other in ("read", "write", "run"):
        for kind in ("read", "write", "run"):
            if kind != other:
                assert at_once(overlapped, kind, other) > 4
                assert at_once(one_by_one, kind, other) == 0


@pytest.mark.deep
def test_cards_share_the_uplink_and_nothing_else(tmp_path: Path) -> None:
    alone, one = trained(tmp_path / "one")
    assert alone.numel() == COUNT
    both, two = trained(tmp_path / "two", "&cards=2", 2 * COUNT)
    assert two.makespan <= 1.03 * one.makespan
    nbytes = 4 * 2 * COUNT  # of gradients down, and of parameters up
    slow = 1  # byte a cycle
    options = f"&cards=2&uplink_bytes_per_s={slow * HERTZ}&link_bytes_per_s={WRITE * HERTZ}"
    bound, shared = trained(tmp_path / "shared", options, 2 * COUNT)
    assert bound.view(torch.int32).tolist() == both.view(torch.int32).tolist()
    assert shared.traffic["uplink", 0] == shared.traffic["uplink", 1] == nbytes
    assert shared.traffic["link 0", 0] == shared.traffic["link 1", 1] == nbytes // 2
    assert nbytes // slow <= shared.makespan <= 1.3 * nbytes // slow
    assert at_once(shared, "send", "send") > len(shared.links["uplink down"])  # not only itself


def test_what_the_handler_is_asked_for_is_checked() -> None:
    parameter = torch.nn.Parameter(torch.zeros(8))
    with pytest.raises(HyperparameterError, match=r"'overlapped', 'naive'.*'lazy'"):
        nearstep.optim.AdamW([parameter], device="golden:smartssd", transfer_handler="lazy")
    with pytest.raises(UnsupportedOptionError, match="only cards with drives"):
        nearstep.optim.AdamW([parameter], device="golden:smartssd", transfer_handler="naive")
