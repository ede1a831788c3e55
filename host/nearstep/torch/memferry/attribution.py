"""Attribution of torch's operations in forward and backward passes to layers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from nearstep.memferry.access import Access
from nearstep.torch.computation import ATEN, FLOPS, FREE, LOOKUPS, is_in_backward, tensors
from nearstep.torch.memferry.layers import ModuleLayer

Timed = Callable[[Any, Sequence[Any], Mapping[str, Any]], tuple[Any, float]]
"""Calls a function of torch; returns its result and seconds."""

UNREAD = {ATEN.native_layer_norm_backward: (6,)}
"""Arguments that are passed but not read: the bias."""

CONVOLUTIONS = {ATEN.convolution, ATEN.convolution_backward, ATEN.mkldnn_convolution}

Key = Callable[[Tensor], int]
"""Maps a tensor to a number of the parameter whose memory it uses; 0 if none."""

sequence_number: Callable[[], int] = torch.autograd._get_sequence_nr  # type: ignore[attr-defined]
"""Sequence number of the next node of autograd in this thread."""

Label = int
"""A layer by its number from 0, or -1 - n: between layers, when n of them have been used in this
pass."""


class Attribution(TorchDispatchMode):
    """Adds up the times of operations while it is entered, by layer and pass.

    An operation with a parameter as an operand belongs to the parameter's layer; if several layers
    have the parameter, to the innermost running one. Other operations belong to the running module
    if that is a layer without submodules, or else are between layers. An operation of backward
    belongs to the layer of its operation of forward, unless a parameter is an operand or a module
    runs again (checkpointing).

    Parameters
    ----------
    access : model of direct host access, for the bytes read of parameters.
    key : returns the number of the parameter whose memory a tensor uses. None: by storage, if
        parameters are not moved.

    Attributes
    ----------
    running : layers whose modules are running, the innermost last.
    order : layers in the order of first use.
    forward, backward : seconds by label.
    reads_forward, reads_backward : bytes of parameters that operations would read by direct host
        access, by layer.
    """

    def __init__(
        self,
        layers: Sequence[ModuleLayer],
        timed: Timed,
        access: Access,
        key: Key | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._key: Key = memory_of if key is None else key
        self._layers = layers
        self._timed = timed
        self._access = access
        self.order: list[int] = []
        self.forward: defaultdict[Label, float] = defaultdict(float)
        self.backward: defaultdict[Label, float] = defaultdict(float)
        self.reads_forward: defaultdict[int, float] = defaultdict(float)
        self.reads_backward: defaultdict[int, float] = defaultdict(float)
        self.running: list[int] = []
        self._nodes: dict[int, Label] = {}
        self._reached = 0  # number of layers of `order` used in this pass
        self._turned = False  # the pass is in backward
        self._owners: defaultdict[int, list[int]] = defaultdict(list)
        for number, layer in enumerate(layers):
            for parameter in layer.parameters:
                owners = self._owners[self._key(parameter)]
                if number not in owners:
                    owners.append(number)

    @contextmanager
    def following(self) -> Iterator[None]:
        """Track the running layers and enter the mode."""
        handles: list[Any] = []
        try:
            for number, layer in enumerate(self._layers):
                any_module: Any = layer.module
                handles.append(any_module.register_forward_pre_hook(partial(self._enter, number)))
                handles.append(any_module.register_forward_hook(self._leave, always_call=True))
            with self:
                yield
        finally:
            for each in handles:
                each.remove()

    def owns(self, tensor: Tensor) -> bool:
        """Return whether a tensor uses a parameter's memory."""
        return self._key(tensor) in self._owners

    def _enter(self, number: int, _: nn.Module, __: Any) -> None:
        self.running.append(number)

    def _leave(self, *_: Any) -> None:
        self.running.pop()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        before = sequence_number() - 1  # the node of this operation, if it has one
        in_backward = is_in_backward()
        unread = UNREAD.get(func._overloadpacket, ())
        operands = [value for place, value in enumerate(args) if place not in unread]
        touched = [each for each in tensors([operands, [*kwargs.values()]]) if self.owns(each)]
        label = self._label(touched, in_backward)
        if label >= 0:
            self._use(label, in_backward)
        if torch.is_grad_enabled():
            self._nodes.setdefault(before, label)
        elif touched and not in_backward:  # in a user's autograd function: the last node
            self._nodes[before] = label
        result, seconds = self._timed(func, args, kwargs)
        if not func.is_view and func._overloadpacket not in FREE:
            times = self.backward if in_backward else self.forward
            times[label] += seconds
            reads = self.reads_backward if in_backward else self.reads_forward
            for each in touched:
                reads[label] += self._read(func, each, result)
        return result

    def _use(self, layer: int, in_backward: bool) -> None:
        if layer not in self.order:
            self.order.append(layer)
        if self._turned and not in_backward:  # another pass begins
            self._reached = 0
        self._turned = in_backward
        self._reached = max(self._reached, self.order.index(layer) + 1)

    def _label(self, touched: Sequence[Tensor], in_backward: bool) -> Label:
        node = torch._C._current_autograd_node() if in_backward else None
        known = None if node is None else self._nodes.get(node._sequence_nr())
        if touched:
            return self._owner(self._key(touched[0]), known)
        if self.running and self._layers[self.running[-1]].is_leaf:
            return self.running[-1]
        variable: Any = getattr(node, "variable", None)
        if isinstance(variable, Tensor) and self.owns(variable):  # its gradient is added
            return self._owner(self._key(variable), None)
        return -1 - self._reached if known is None else known

    def _owner(self, memory: int, known: Label | None) -> int:
        owners = self._owners[memory]
        inner = next((each for each in reversed(self.running) if each in owners), None)
        if inner is not None:
            return inner
        if known is not None and known in owners:
            return known
        return next((each for each in self.order if each in owners), owners[0])

    def _read(self, func: Any, tensor: Tensor, result: Any) -> float:
        """Return the bytes of a parameter that an operation reads by direct host access."""
        kind = func._overloadpacket
        whole = tensor.untyped_storage().nbytes()
        nbytes = min(tensor.numel() * tensor.element_size(), whole)
        out = next(tensors(result), None)
        if out is None:
            return nbytes
        if kind in LOOKUPS:
            return min(out.numel() * out.element_size(), nbytes)
        if kind in FLOPS and out.dim() > 1:
            columns = max(out.shape[1] if kind in CONVOLUTIONS else out.shape[-1], 1)
            return nbytes * self._access.matrix_reads(out.numel() // columns, columns)
        return nbytes


def memory_of(tensor: Tensor) -> int:
    """Return the address of a tensor's storage object; 0 without a storage."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return 0
