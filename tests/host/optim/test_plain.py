"""Tensors that no check refuses are the same one by one and all at once."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch

from nearstep.torch.checks import KnownTensors, are_plain, is_plain


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
        torch.nested.nested_tensor([*plain]),
        plain.to("meta"),
        plain.as_subclass(Own),
        plain[:0],
    ]
    alone = [is_plain(each) for each in tensors]
    assert alone == [True, True, False, False, False, False, False, False, True]
    checked = 0
    for some in itertools.product(range(len(tensors)), repeat=2):
        found = are_plain([tensors[i] for i in some], torch.float32)
        assert found == all(alone[i] for i in some)
        checked += 1
    assert checked == 81
    assert not are_plain([plain], torch.bfloat16)


def test_tensors_that_changed_are_checked_again() -> None:
    known, checks = KnownTensors(), list[int]()

    def passed(tensors: list[object], result: bool = True) -> bool:
        checks.append(0)

        def check() -> bool:
            checks[-1] += 1
            return result

        return known.passed("key", tensors, check)

    def first() -> list[object]:
        return [torch.ones(4, 6), torch.nn.Parameter(torch.ones(4, 6)), torch.ones(6)]

    plain = torch.ones(4, 6)
    others = {
        "refused": plain.double(),
        "bf16": plain.bfloat16(),
        "transposed": torch.ones(6, 4).t(),
        "every second": torch.ones(4, 12)[:, ::2],
        "smaller": torch.ones(4, 5),
        "flat": torch.ones(24),
        "negated": torch._neg_view(plain),
        "sparse": plain.to_sparse(),
        "meta": plain.to("meta"),
        "subclass": plain.as_subclass(Own),
        "parameter": torch.nn.Parameter(plain),
        "zeros without memory": torch._efficientzerotensor((4, 6)),
        "expanded": torch.ones(1).expand(4, 6),
        "nothing": None,
        "number": 1.0,
    }
    assert not passed(first(), False)
    assert passed(first())  # what was refused is not known
    assert checks == [1, 1]
    for name, other in others.items():
        checks.clear()
        assert passed(first()), name
        assert not passed([other, *first()[1:]], False), name
        assert passed(first()), name
        assert checks == [0, 1, 0], name
    checks.clear()
    assert not passed(first()[:2], False)
    assert not passed([*first(), plain], False)
    assert passed([plain, *first()[1:]])
    assert checks == [1, 1, 0]
    assert not copy.deepcopy(known).passed("key", first(), bool)


def test_few_tensors_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KnownTensors, "MOST", 32)
    known, plain = KnownTensors(), torch.ones(4, 6)
    for number in range(64):  # so many experts, say, that have gradients by turns
        tensors = [plain.clone() for _ in range(number % 20)]
        assert known.passed(number, tensors, bool) is False
        assert known.passed(number, tensors, lambda: True)
        assert known.passed(number, tensors, bool)
        assert sum(count for _, count in known._guards) <= 32
    large = [plain.clone() for _ in range(33)]
    for _ in range(2):
        assert known.passed("large", large, lambda: True)
    assert known.passed("large", large, bool)
    assert len(known._guards) == 1
