"""A step calls the functions that docs/architecture.md lists."""

from __future__ import annotations

import re
import traceback
from pathlib import Path

import torch

import nearstep

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "architecture.md"
MOST = 10


def test_the_way_of_a_gradient_is_that_of_the_page(monkeypatch) -> None:
    told = re.findall(r"^\d+\. `([\w/]+\.py)` `(\w+)`$", PAGE.read_text(), re.MULTILINE)
    walked = []
    with nearstep.open("sim:axdimm?lanes=4&block_bytes=512&memory_bytes=1MiB") as device:
        p = torch.randn(64).requires_grad_()
        optimizer = nearstep.optim.AdamW([p], device=device)
        command = device._update

        def spy(*arguments):
            stack = traceback.extract_stack()[:-1]
            ours = [each for each in stack if "/host/nearstep/" in each.filename]
            walked.append([(e.filename.partition("/host/nearstep/")[2], e.name) for e in ours])
            return command(*arguments)

        monkeypatch.setattr(device, "_update", spy)
        p.grad = torch.randn(64)
        optimizer.step()
    assert walked == [told]
    assert len(told) == MOST


def test_the_page_names_files_that_there_are_and_counts_their_lines() -> None:
    text, checked = PAGE.read_text(), 0
    for name in re.findall(r"`((?:host|tests|examples|docs)/[\w/]+(?:\.py|\.md|/))`", text):
        assert (ROOT / name).exists(), name
        checked += 1
    assert checked >= 8
    lines = len((ROOT / "examples" / "shm_home.py").read_text().splitlines())
    assert f"in {lines} lines" in text
    assert lines < 150
