"""Memory of arrays that is used again once nobody refers to it."""

from __future__ import annotations

import numpy as np
import torch

from nearstep.torch.compression import ScratchPool


def place(array):
    return array.ctypes.data


def test_memory_is_used_again_by_an_array_of_the_same_size():
    memory = ScratchPool()
    array = memory.empty(100)
    assert (array.shape, array.dtype, array.flags.writeable) == ((100,), np.float32, True)
    before = place(array)
    del array
    other = memory.empty(99)
    assert place(other) != before
    assert place(memory.empty(100)) == before
    assert memory.empty(0).size == 0


def test_memory_that_is_in_use_is_not_given_away():
    """Not while there is a view of numpy's or of torch's, of any depth."""
    memory = ScratchPool()
    keep = [
        lambda array: array,
        lambda array: array[3:9],
        lambda array: array[3:9][::2].reshape(3, 1).view(np.uint32),
        torch.from_numpy,
        lambda array: torch.from_numpy(array[2:]).view(2, 49)[1].detach(),
        lambda array: torch.from_numpy(array).view(10, 10)[5].numpy(),
        lambda array: memoryview(array[5:]),
    ]
    for make in keep:
        array = memory.empty(100)
        before = place(array)
        kept = make(array)
        del array
        assert place(memory.empty(100)) != before
        del kept
        again = [memory.empty(100) for _ in range(8)]
        assert before in map(place, again)
