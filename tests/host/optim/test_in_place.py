"""Large parameters and gradients, which a device may work on where they are, and small ones, which
are copied together: bits, what is seen, and what is left."""

from __future__ import annotations

import sys
import weakref

import numpy as np
import pytest
import torch

import nearstep
from nearstep.backends.emulated import Injection
from nearstep.errors import BusResponseError
from nearstep.torch.exchange import SMALL_ELEMENTS

from .beside import Beside, clone, equal_bits, made, parameters, tensors
from .conftest import like_torch
from .test_residency import CHANGES

URLS = {
    "in place": "golden:axdimm?memory_bytes=64MiB",
    "copied": "golden:axdimm?memory_bytes=64MiB&in_place=no",
    "dimm in place": "golden:axdimm?channels=1&memory_bytes=64MiB",
    "stripes": "golden:axdimm?channels=2&block_bytes=512&memory_bytes=64MiB",
    "card": "golden:smartssd?memory_bytes=64MiB",
}
SHAPES = ((16,), (SMALL_ELEMENTS + 16,), (3, 16), (160,), (160, 112), (SMALL_ELEMENTS,), (32,))
"""Neighbours of either kind, whose bits are those of torch's fused steps."""

ODD = ((7,), (SMALL_ELEMENTS + 5,), (3, 5), (1,), (161, 113), (SMALL_ELEMENTS,), (33,))
"""Neighbours of either kind that end within a line."""


@pytest.fixture(params=URLS)
def device(request):
    with nearstep.open(URLS[request.param]) as opened:
        yield opened


def another_optimizer(p):
    grad, p.grad = p.grad, torch.full_like(p, 0.5)
    torch.optim.SGD([p], lr=0.1).step()
    p.grad = grad


@like_torch
def test_every_change_on_the_host_is_found_whatever_the_size(device):
    beside = Beside("AdamW", device, tensors(SHAPES))
    for name, change in {**CHANGES, "another optimizer": another_optimizer}.items():
        print(name)
        beside.step()
        beside.check(state=False)
        for side in beside:
            for index in (1, 2, 4):
                change(side.parameters[index])
    beside.step()
    beside.check()


def test_neighbours_that_end_within_a_line_have_the_bits_of_each_alone(device):
    beside = Beside("AdamW", device, tensors(ODD))
    alone = "golden:axdimm?memory_bytes=1MiB&engine=numpy&in_place=no"
    references = [made("AdamW", [p], alone) for p in beside.torchs.parameters]
    for step in range(3):
        beside.give((1, 3) if step == 1 else ())  # their neighbours are no longer that
        for optimizer in (beside.mine.optimizer, *references):
            optimizer.step()
        for side in beside:
            side.parameters[4].data.add_(1.0)
    equal_bits(*(side.parameters for side in beside))


@like_torch
def test_an_array_that_a_parameter_was_made_of_stays_its_memory(device):
    beside = Beside("AdamW", device, tensors([(SMALL_ELEMENTS + 32,)]))
    arrays = [side.parameters[0].detach().numpy() for side in beside]
    for _ in range(3):
        beside.step()
        assert np.array_equal(arrays[0].view(np.uint32), arrays[1].view(np.uint32))
        for array in arrays:
            array[1::3] *= 1.5


def counted(device):
    """Bytes that are copied, of each copy."""
    backend, written, read = device.backend, [], []
    write_memory, read_memory = backend.write_memory, backend.read_memory
    backend.write_memory = lambda at, data: (written.append(data.size), write_memory(at, data))
    backend.read_memory = lambda at, out: (read.append(out.size), read_memory(at, out))
    return written, read


def test_what_stays_on_the_host_is_not_copied():
    with nearstep.open(URLS["in place"]) as device:
        written, read = counted(device)
        beside = Beside("AdamW", device, tensors(((SMALL_ELEMENTS,), (2 * SMALL_ELEMENTS,))))
        ours, traffic = beside.mine.parameters, beside.mine.optimizer.traffic
        before = [(p.data_ptr(), p._version) for p in ours]
        beside.step(2)
        assert (written, read) == ([], [])
        for p, (place, version) in zip(ours, before, strict=True):
            assert p.data_ptr() == place
            assert p._version > version
        assert traffic.gradients_down == traffic.parameters_up == 2 * 4 * 3 * SMALL_ELEMENTS
        assert traffic.masters_down == 4 * 3 * SMALL_ELEMENTS  # as of a memory of its own


@pytest.mark.parametrize(("url", "most"), [("in place", 270), ("card", 340)])
def test_a_step_makes_few_calls_for_each_tensor(url, most):
    """As Python takes longer than the update of many a tensor: calls, so that no clock counts."""

    def calls(pairs):
        beside = Beside("AdamW", device, tensors([(SMALL_ELEMENTS,), (16,)] * pairs))
        beside.step(2)
        beside.give()
        made = 0

        def count(frame, event, argument):
            nonlocal made
            made += event == "call"

        sys.setprofile(count)
        try:
            beside.mine.optimizer.step()
        finally:
            sys.setprofile(None)
        return made

    with nearstep.open(URLS[url]) as device:
        more = calls(12) - calls(4)
    print(more / 16)
    assert 0 < more <= 16 * most


@pytest.mark.parametrize("url", ["copied", "card"])
def test_small_neighbours_are_copied_together(url):
    with nearstep.open(URLS[url]) as device:
        beside = Beside("AdamW", device, tensors([(64,), (5,), (3, 7)] * 20))
        beside.step()
        written, read = counted(device)
        beside.step()
        assert (len(written), len(read)) == (1, 1)


def test_the_device_lets_go_of_gradients(device):
    beside = Beside("AdamW", device, tensors(SHAPES))
    beside.step()
    gradients = [weakref.ref(p.grad) for p in beside.mine.parameters]
    for p in beside.mine.parameters:
        p.grad = None
    assert [each() for each in gradients] == [None] * len(SHAPES)


@like_torch
def test_nothing_is_lost_when_the_device_is_closed():
    beside = Beside("AdamW", URLS["in place"], tensors(SHAPES))
    views = [p.detach().numpy() for p in beside.mine.parameters]
    beside.step()
    beside.mine.optimizer.device.close()
    equal_bits(*(side.parameters for side in beside))
    del beside.mine.optimizer
    for p, view in zip(beside.mine.parameters, views, strict=True):
        view[...] = 2.0
        assert torch.all(p == 2.0)


def test_a_failed_step_leaves_parameters_as_they_were(device):
    beside = Beside("AdamW", device, tensors(SHAPES))
    beside.step()
    before = clone(beside.mine.parameters)
    device.backend.inject(Injection(kind="slverr", write=True, nth=9))
    with pytest.raises(BusResponseError):
        beside.mine.optimizer.step()
    equal_bits(beside.mine.parameters, before)


@like_torch
def test_memory_that_is_shared_has_the_bits_of_copies():
    results = []
    for url in (URLS["in place"], URLS["copied"]):
        p, twin, own = parameters(((SMALL_ELEMENTS + 16,),) * 2 + ((SMALL_ELEMENTS,),))
        p.grad = twin.grad = torch.linspace(-1, 1, p.numel())  # one gradient for two
        own.grad = own.detach()  # its own gradient
        optimizer = nearstep.optim.AdamW([p, twin, own], device=url)
        for _ in range(2):
            optimizer.step()
        results.append([p, twin, own])
    equal_bits(*results)


def test_a_parameter_that_is_narrowed_keeps_the_bits_of_its_master():
    results = []
    for url in (URLS["in place"], URLS["copied"]):
        (p,) = parameters(((SMALL_ELEMENTS + 1,),))
        optimizer = nearstep.optim.AdamW([p], lr=1e-4, device=url)
        for _ in range(2):
            p.grad = torch.ones_like(p)
            optimizer.step()
            p.grad = None
            p.data = p.data.bfloat16()
        results.append([p, optimizer.state_dict()["state"][0]["master_param"]])
    equal_bits(*results)
    assert not torch.equal(results[0][1], results[0][0].float())
