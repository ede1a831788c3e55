"""How long what torch computes takes on another processor: a roofline of each operation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop, sdpa_flop

from nearstep.torch import convert
from nearstep_spec.platform.machine import Processor

ATEN = torch.ops.aten
FLOPS: Mapping[Any, Callable[..., int]] = {
    **flop_registry,
    ATEN._scaled_dot_product_flash_attention_for_cpu: sdpa_flop,
    ATEN._scaled_dot_product_flash_attention_for_cpu_backward: sdpa_backward_flop,
}
"""Of matrix products, convolutions and attention, by torch's count. Others: one for each element of
the result."""

FREE = frozenset(
    {
        ATEN._unsafe_view,
        ATEN.empty,
        ATEN.empty_like,
        ATEN.empty_strided,
        ATEN.new_empty,
        ATEN.new_empty_strided,
        ATEN.set_,
    }
)
"""Operations beside views that touch no element."""

LOOKUPS = {ATEN.embedding, ATEN.index_select, ATEN.index, ATEN.gather, ATEN._embedding_bag}
"""Read of their first operand what they return."""


class Computation(TorchDispatchMode):
    """Counts the time of all operations of torch while it is entered.

    An operation takes as long as its floating-point operations at the processor's rate, or, if that
    is longer, as its operands and results at the rate of its memory. A dtype for which the
    processor has no rate computes at that of fp32. What touches no element, such as a view, takes
    no time, and a lookup reads what it returns.

    Parameters
    ----------
    processor : with a rate of fp32.
    """

    def __init__(self, processor: Processor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._rates = {name: float(figure) for name, figure in processor.flops.items()}
        memory = processor.memory_bytes_per_s
        self._bytes_per_s = float("inf") if memory is None else float(memory)
        self._parts: list[tuple[bool, float]] = []

    def take(self) -> Sequence[tuple[bool, float]]:
        """Seconds since the last call in turn, each with whether autograd's backward took them."""
        parts, self._parts = self._parts, []
        return parts

    def _add(self, seconds: float) -> None:
        in_backward, before = is_in_backward(), 0.0
        if self._parts and self._parts[-1][0] == in_backward:
            before = self._parts.pop()[1]
        self._parts.append((in_backward, before + seconds))

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if torch.is_inference_mode_enabled() and func._overloadpacket not in FLOPS:
            with self:  # there composite operations come here as they are
                parts = func.decompose(*args, **(kwargs or {}))
            if parts is not NotImplemented:
                return parts
        result = func(*args, **(kwargs or {}))
        if not func.is_view and func._overloadpacket not in FREE:
            self._add(self.seconds_of(func, args, kwargs or {}, result))
        return result

    def seconds_of(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
    ) -> float:
        """Of one operation, with its result."""
        results = list(tensors(result))
        operands = [*tensors(args), *tensors(list(kwargs.values()))]
        if not results:
            return 0.0
        count = FLOPS.get(func._overloadpacket)
        if count is None:
            flops = sum(each.numel() for each in results)
        else:
            flops = count(*args, **kwargs, out_val=result)
        dtype = convert.NAMES.get(results[0].dtype, "fp32")
        rate = self._rates.get(dtype, self._rates["fp32"])
        if func._overloadpacket in LOOKUPS and operands:
            operands[0] = min(operands[0], results[0], key=_nbytes)
        nbytes = sum(map(_nbytes, (*operands, *results)))
        return max(flops / rate, nbytes / self._bytes_per_s)


def is_in_backward() -> bool:
    """Whether autograd's backward goes on in this thread."""
    return torch._C._current_graph_task_id() >= 0


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def tensors(values: Any) -> Iterator[Tensor]:
    """Tensors among arguments or results, in lists and tuples of any depth."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, list | tuple):
        for each in values:
            yield from tensors(each)
