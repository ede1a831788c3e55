"""What is read ahead of a step counts only if nothing was written since."""

from __future__ import annotations

from pathlib import Path

import torch

import nearstep

SUBGROUP = 4096
COUNT = 5 * SUBGROUP
ROOMS = 3 * SUBGROUP


def test_a_parameter_that_was_changed_is_read_again(tmp_path: Path) -> None:
    url = f"golden:smartssd?subgroup_elements={SUBGROUP}&drive={tmp_path}"
    torch.manual_seed(7)
    own = torch.nn.Parameter(torch.randn(COUNT))
    twin = torch.nn.Parameter(own.detach().clone())
    optimizer = nearstep.optim.AdamW([own], lr=1e-2, device=url)
    expected = torch.optim.AdamW([twin], lr=1e-2, fused=True)
    read, compared = [], 0
    for step in range(6):
        own.grad = torch.randn(COUNT)
        twin.grad = own.grad.clone()
        if step in (2, 4):  # behind autograd's back, in the first and in the last subgroup
            for each in (own, twin):
                each.data[0 if step == 2 else -1] = 3.0
        before = optimizer.traffic.drives_to_cards
        optimizer.step()
        expected.step()
        read.append(optimizer.traffic.drives_to_cards - before)
        assert torch.equal(own.view(torch.int32), twin.view(torch.int32))
        compared += 1
    assert compared == 6
    once, again = 12 * COUNT, 12 * (COUNT + ROOMS)  # the rooms were filled in vain
    assert read[1:] == [once, again, once, again, once]
