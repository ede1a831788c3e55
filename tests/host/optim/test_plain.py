"""Tensors that no check refuses are the same one by one and all at once."""

from __future__ import annotations

import itertools

import torch

from nearstep.torch.checks import are_plain, is_plain


class Own(torch.Tensor):
    """A class of tensors."""


def test_tensors_are_plain_alone_if_they_are_plain_together() -> None:
    plain = torch.ones(4, 6)
    tensors = [
        plain,
        torch.nn.Parameter(plain),
        plain.double(),
        plain.t(),
        plain.to_sparse(),
        plain.to("meta"),
        plain.as_subclass(Own),
        plain[:0],
    ]
    alone = [is_plain(each) for each in tensors]
    assert alone == [True, True, False, False, False, False, False, True]
    checked = 0
    for some in itertools.product(range(len(tensors)), repeat=2):
        found = are_plain([tensors[i] for i in some], torch.float32)
        assert found == all(alone[i] for i in some)
        checked += 1
    assert checked == 64
    assert not are_plain([plain], torch.bfloat16)
