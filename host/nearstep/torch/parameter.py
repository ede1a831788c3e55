"""A parameter whose fp32 master and moments are kept on a device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from nearstep.placement import Extent
from nearstep.torch import convert
from nearstep.torch.checks import is_plain
from nearstep.torch.compression import Compressed, Compression
from nearstep.torch.device_gradient import DeviceGradient, SparseGradient, SpentGradient
from nearstep.torch.dtensor import local
from nearstep.torch.errors import InterruptedStepError, ParameterError
from nearstep.torch.exchange import SMALL_ELEMENTS, Results, Sending, Sends, Target, send_now
from nearstep.torch.formats import (
    Formats,
    Quantized,
    copy_array,
    dequantize,
    flat_arrays,
    gradient_array,
    tensors,
)
from nearstep.torch.homes.host_changes import CheckedParameter
from nearstep.torch.layout import Layout
from nearstep.torch.select import flat, select_largest
from nearstep.torch.topk import take_largest
from nearstep.torch.traffic import Traffic


class DeviceParameter:
    """A parameter on the host and its extent on the device; copies data between the two.

    The user may change the host's copy at any time. Before each step the copy is therefore compared
    with its contents after the last step; a changed copy becomes the master. A device that can
    compare (`nearstep.buffer.Buffer.holds`) compares with its own array; for other devices
    `convert.fingerprint` is kept, and for small parameters the fetched array.

    Parameters
    ----------
    narrow : the segment has 16-bit arrays.
    alone : the neighbours in the segment are not small, so that nothing is copied together.
    moves : arrays on the device are evicted, so the device cannot compare them with the host's.
    durable : the master outlasts the device's memory, and changes by the host are sent
        (`push_changes`) or checked for (`change_check`) before a step is prepared.

    Attributes
    ----------
    label : name of the parameter in errors.
    is_small : whether the parameter is copied together with its neighbours.
    is_new : the arrays have their initial values.
    interrupted : name of the error that interrupted a step of this parameter; cleared by
        `load_master`.
    last_seen : contents of the host's parameter after the last step: the name of an array on the
        device with the same contents; a fingerprint; or, of a small parameter, the fetched array.
        None if unknown.
    offloaded : the device alone has the parameter (`push`): steps neither send nor fetch it.
    held : the gradient, if the device keeps it until a step, or if it is compressed for one.
    """

    def __init__(
        self,
        parameter: Tensor,
        label: str,
        extent: Extent,
        layout: Layout,
        traffic: Traffic,
        formats: Formats,
        *,
        narrow: bool,
        alone: bool = False,
        moves: bool = False,
        durable: bool = False,
    ) -> None:
        self.parameter = parameter
        self.label = label
        self.extent = extent
        self.layout = layout
        self.interrupted: str | None = None
        self.offloaded = False
        self.held: DeviceGradient | SparseGradient | None = None
        self._current = "p"  # array with the contents of an offloaded parameter
        self._traffic = traffic
        self._formats = formats
        self.last_seen: str | int | NDArray[Any] | None = None
        self._lent: list[str] = []
        self.reader: torch.Event | None = None  # after the last copy from the device's own memory
        self._landing: NDArray[np.float32] | None = None  # set by the comparison before a step
        self._home: NDArray[np.float32] | None = None  # the master, if updated in host memory
        self._loaded_master: NDArray[np.float32] | None = None
        self.is_new = True
        self._seen: tuple[int, NDArray[np.float32]] | None = None
        self._narrow = narrow
        self._moves = moves
        self._durable = durable
        self._checked = False  # the next step need not look for changes by the host
        self._p = formats.state_of("p")
        self.is_small = extent.count < SMALL_ELEMENTS
        self._lends = alone or not self.is_small

    @property
    def elements(self) -> int:
        """Number of elements of the parameter."""
        return self.extent.count

    @property
    def keeps_master(self) -> bool:
        return convert.NAMES[self.parameter.dtype] != self._p

    @property
    def is_on_host(self) -> bool:
        """Whether the host has all bits of the master."""
        return not (self.offloaded or self.keeps_master)

    def host_master(self) -> NDArray[Any]:
        """Return the master of a parameter that is not offloaded, as the host's parameter and the
        last step define it, in the device's format; read-only."""
        if self._p != "fp32":
            return convert.to_words(self.parameter)
        if not self.keeps_master:
            return convert.to_float32(self.parameter)
        if self._loaded_master is not None:
            return convert.merge_master(self._loaded_master, self.parameter)
        return self._merged() if self._known else convert.to_float32(self.parameter)

    def lose_master(self) -> None:
        """Mark the device's master as lost if the host has all bits; the next step sends it."""
        if self.is_on_host and not self._durable:
            self.last_seen = self._home = self._seen = None

    def resume(self) -> None:
        """Copy the device's parameter to the host, as after a step."""
        self.copy_into(self.parameter)
        self.is_new = False
        self._leave(None)
        self.lose_master()

    def savepoint(self) -> Callable[[], None]:
        """Return a function that restores the present record and marks the master as lost."""
        known = (self.last_seen, self._home, self._loaded_master, self.is_new, self._current)

        def restore() -> None:
            self.last_seen, self._home, self._loaded_master, self.is_new, self._current = known
            self.lose_master()

        return restore

    @torch.inference_mode(False)  # what is made in it cannot be changed in place outside
    def fetch(self, key: str) -> Mapping[str, Tensor]:
        """Return the moment `key` as a new tensor of the parameter's shape, of fp32 unless the rule
        names another dtype; an 8-bit moment as codes, and its scales under their key.

        Raises
        ------
        InterruptedStepError : the moment may be partly old and partly new.
        ParameterError : the parameter's number of elements has changed.
        """
        if self.interrupted is not None:
            raise InterruptedStepError(f"read {key} of {self.label}", self.interrupted)
        self.check_size()
        array = self.extent.read(self.layout.moments[key])
        self._traffic.moments_up += array.nbytes
        scales = self.layout.scales.get(key)
        if scales is None:
            return {key: convert.to_tensor(array, self.parameter)}
        found = tensors(self._formats.unpack(array), self.parameter)
        return {key: found.codes, scales: found.scales}

    def send(self, key: str, value: Tensor | Quantized) -> None:
        """Write `value` to the moment `key`; 8-bit codes unchanged if the device keeps codes."""
        self.is_new = False
        name = self.layout.moments[key]
        self.extent.segment.reserve({name: 0.0})
        array: NDArray[Any]
        if isinstance(value, Quantized) and key in self.layout.scales:
            array = self._formats.pack(flat_arrays(value))
        else:
            if isinstance(value, Quantized):
                value = dequantize(value, self.layout.quantized[key])
            array = self._formats.encode(name, convert.to_float32(value))
        self.extent.write(name, array)
        self._traffic.moments_down += array.nbytes

    def reset_moments(self, keys: Iterable[str], arrays: Mapping[str, float]) -> None:
        """Reset these moments to the values that `arrays` has for their arrays.

        A new extent already has these values.
        """
        if self.is_new:
            return
        for key in keys:
            name = self.layout.moments[key]
            wide = np.full(self.extent.count, arrays[name], np.float32)
            values = self._formats.encode(name, wide)
            self.extent.write(name, values)
            self._traffic.moments_down += values.nbytes

    def check_size(self) -> None:
        """Raise `ParameterError` if the parameter's number of elements has changed, or if the rule
        does not keep its dtype."""
        if self._p != "fp32":
            self._formats.check(self.label, self.parameter)
        size = convert.size(self.parameter)
        if size != self.extent.count:
            raise ParameterError(self.label, f"of {self.extent.count} elements", size)

    def fetch_master(self) -> Tensor:
        """Return the fp32 master as a new tensor; that of a 16-bit parameter has all 32 bits."""
        self.check_size()
        if self.offloaded:
            array = self.extent.read("p")
            self._traffic.masters_up += array.nbytes
        else:
            array = self.host_master()
        return convert.to_tensor(array, self.parameter)

    def load_master(self, value: Tensor | None) -> None:
        """Make the next step send the parameter, with a saved master's bits where both agree."""
        self.interrupted = None
        self._end_reads()
        if self.offloaded:
            if not self.keeps_master or self._p != "fp32":
                return
            with torch.no_grad():
                twin = torch.empty_like(self.parameter)
            self.copy_into(twin)
            saved = None if value is None else convert.to_float32(value)
            master = convert.to_float32(twin)
            self.extent.write("p", master if saved is None else convert.merge_master(saved, twin))
            self._traffic.masters_down += master.nbytes
            self._current = "p"
            return
        self.last_seen = self._home = None
        self._loaded_master = None
        if value is not None and self._p == "fp32":
            self._loaded_master = convert.to_float32(value).copy()

    def send_master_if_changed(self, sends: Sends) -> None:
        """Send the host's parameter as the new master, unless it is unchanged since the last step.

        A device that works on the host's memory updates a large fp32 parameter in place: there is
        no other master, nothing to send and nothing to fetch. `check_size` has been called.
        """
        checked, self._checked = self._checked, False
        self._end_reads()
        if checked or self.offloaded or self._lend_parameter() or self._is_as_left:
            return
        self._send_master(sends)

    def push_changes(self) -> None:
        """Send the parameter now if the host changed it; the next step does not compare."""
        self._checked = False
        if not self.offloaded:
            self.check_size()
            send_now(self.send_master_if_changed)
        self._checked = True

    def change_check(self) -> CheckedParameter | None:
        """Return the check that the host has not changed the parameter, or None; the next step does
        not compare.

        None: call `push_changes`, which compares at once.
        """
        if self.offloaded or not isinstance(self.last_seen, int) or not self.parameter.is_cpu:
            return None
        self.check_size()
        self._checked = True
        return CheckedParameter(self.label, convert.part_sums(self.parameter), self.last_seen)

    def read_again(self) -> None:
        """Copy the device's parameter to the host, unless it is offloaded."""
        self._checked = False
        if not self.offloaded:
            self.copy_into(self.parameter)
            convert.mark_changed(self.parameter)

    def push(self, *, unchanged: bool = False) -> None:
        """Offload the parameter: send it if the host changed it, after which the device alone has
        it and the host's memory may be freed.

        `check_size` has been called.

        Parameters
        ----------
        unchanged : the parameter has not changed since it was fetched; skip the comparison.
        """
        if self.offloaded:
            return
        if not unchanged and not self._is_as_left:
            send_now(self._send_master)
            self._current = "p"
        self.offloaded = True
        self.last_seen = self._home = self._landing = self._seen = None

    def drop_views(self) -> None:
        """Drop cached views of the parameter's memory, so that the memory can be freed."""
        self._seen = self._landing = None

    def keep(self) -> None:
        """Cancel `push`: the host's memory was not freed and holds the parameter again."""
        self.offloaded = False

    def pull(self) -> None:
        """Fetch the offloaded parameter into its newly allocated memory.

        Autograd sees no change.
        """
        with _unsafe_preserve_version_counter(self.parameter):
            self.copy_into(self.parameter)
        self.arrived(self.parameter)

    def arrived(self, copy: Tensor | None) -> None:
        """Record that the offloaded parameter is on the host again, with the contents of `copy`;
        None: the caller knows whether the parameter has changed since."""
        exact = self._current != "p" or not self.keeps_master
        if copy is not None:
            self._leave(self._current if exact else None, copy)
        self.offloaded = False

    def source(self) -> tuple[NDArray[Any], Tensor] | None:
        """Return the array of the segment that has an offloaded parameter, and the parameter as a
        flat tensor on it, if it is in memory of this process in the parameter's format; else None.

        Who copies from there calls `copied`.
        """
        segment, name = self.extent.segment, self._current
        whole = segment.host_array(name)
        form = self._p if name == "p" else convert.NAMES[self.parameter.dtype]
        if whole is None or convert.DTYPES[form] != self.parameter.dtype:
            return None
        own = whole[self.extent.start : self.extent.start + self.extent.count]
        return whole, torch.from_numpy(own).view(self.parameter.dtype)

    def copied(self, reader: torch.Event | None = None) -> None:
        """Count a copy of `source`; a write waits for the event of one that still runs."""
        self._traffic.parameters_up += self.extent.count * self.parameter.element_size()
        self.reader = reader or self.reader

    def _end_reads(self) -> None:
        if self.reader is not None:
            self.reader.synchronize()
            self.reader = None

    @property
    def current(self) -> str:
        """Array with the contents of a parameter that is or was offloaded."""
        return self._current

    def peek(self) -> NDArray[Any]:
        """Fetch the device's contents of a parameter that was offloaded."""
        array = self.extent.read(self._current)
        self._traffic.parameters_up += array.nbytes
        return array

    @torch.no_grad()
    def copy_into(self, tensor: Tensor) -> None:
        """Fetch the parameter into `tensor`: the parameter itself, or another tensor like it."""
        plain = self.extent.segment.dtype_of(self._current) == np.float32
        target = convert.landing(tensor) if plain else None
        array = self.extent.read(self._current, target)
        self._traffic.parameters_up += array.nbytes
        if target is None:
            convert.store(array, tensor)

    def _send_master(self, sends: Sends) -> None:
        self._end_reads()
        master = self.host_master()
        sends.send(Sending(self.extent, "p", master, self._sent_master))
        self._traffic.masters_down += master.nbytes

    def _lend_parameter(self) -> bool:
        """Let the device update the parameter in host memory; return whether the device can."""
        array = None if self.is_small else convert.landing(self.parameter, self._p)
        if array is None or not self.extent.lend("p", array, writes=True):
            return False
        self._lent.append("p")
        if self._home is None:
            self._traffic.masters_down += array.nbytes
        self.last_seen, self._home, self._loaded_master = None, array, None
        return True

    def _sent_master(self) -> None:
        self._leave(None if self.keeps_master else "p")
        self._loaded_master = None

    def gradient_format(self, dtype: torch.dtype) -> str:
        """Return the format in which gradients of a dtype are sent: their own if the kernel has it,
        or fp32."""
        return self._formats.gradient_of(dtype) if self._narrow else "fp32"

    @property
    def copy_format(self) -> str | None:
        """Format of the copy of the master that the kernel writes and the host fetches: the
        parameter's, if the kernel has it.

        None: the host fetches the master.
        """
        return self._formats.copy_of(self.parameter.dtype) if self._narrow else None

    def send_gradient(self, gradient: Tensor, sends: Sends, *, negated: bool = False) -> None:
        """Send a gradient of any of `convert.FORMATS` in its `gradient_format`; its negation if
        `negated`.

        A gradient that is large, or alone, is lent if the device accepts the array unchanged:
        nothing may write to the gradient during the step, which ends with `end_loan`.
        """
        form = self.gradient_format(gradient.dtype)
        wide = form == "fp32"
        array = convert.to_float32(gradient) if wide else convert.to_words(gradient)
        if negated:
            array = convert.negated(array)
        name = gradient_array(form)
        if name in self._lent:  # of the first run of a step that has two
            self._lent.remove(name)
            self.extent.end_loan(name)
        if self._lends and self.extent.lend(name, array):
            self._lent.append(name)
        else:
            sends.send(Sending(self.extent, name, array))
        self._traffic.gradients_down += array.nbytes
        self.count_to_host(gradient)

    def count_to_host(self, gradient: Tensor) -> None:
        """Count the copy of a whole gradient from an accelerator to the host."""
        if not self.parameter.is_cpu:
            self._traffic.gradients_to_host += convert.size(gradient) * gradient.element_size()

    def move_in(self, label: str, layout: Layout, traffic: Traffic, *, narrow: bool) -> None:
        """Adopt the parameter for an optimizer; its extent on the device is kept."""
        self.label, self.layout, self._traffic, self._narrow = label, layout, traffic, narrow
        self.is_new = True

    def move_out(self) -> None:
        """Forget every array but the master: the optimizer no longer exists."""
        self._current = "p"
        self.release_gradient()
        self.interrupted = None
        self.last_seen = self._home = self._landing = self._seen = self._loaded_master = None

    def hold_gradient(self, gradient: Tensor, wait: Callable[[], None] | None = None) -> None:
        """Keep a gradient on the device until `release_gradient`; add it to one kept already.

        Parameters
        ----------
        wait : as of `DeviceGradient`; used for the first gradient alone.
        """
        self.count_to_host(gradient)
        assert not isinstance(self.held, SparseGradient), "nothing is added to what was compressed"
        if self.held is not None:
            self.held.add(gradient)
            return
        form = self.gradient_format(gradient.dtype)
        array = gradient_array(form)
        self.held = DeviceGradient(self.extent, array, form, gradient, self._traffic, wait)

    def release_gradient(self) -> None:
        """Free the device's gradient."""
        self._end_gradient()
        self.held = None

    def spend_gradient(self) -> None:
        """Free the device's gradient, which cannot be used again until it is reset."""
        self._end_gradient()
        self.held = SpentGradient()

    def _end_gradient(self) -> None:
        if isinstance(self.held, DeviceGradient):
            self.held.end()

    def interrupt(self, name: str) -> None:
        """Record that the error called `name` interrupted a step of this parameter."""
        self.interrupted = name

    def end_loan(self) -> None:
        """End the step's loans of the parameter and the gradient to the device."""
        self._landing = None
        while self._lent:
            self.extent.end_loan(self._lent.pop())

    def compress(
        self,
        gradient: Tensor,
        residual: Tensor | None,
        compression: Compression,
        memory: Callable[[int], NDArray[np.float32]],
    ) -> Compressed:
        """Select the elements of a gradient to send; the residual of a gradient on the host is
        kept in an array of `memory`, that of one on an accelerator beside the gradient."""
        part = local(gradient)
        if not part.is_cpu:
            left = None if residual is None else flat(residual, part.device)
            chosen = select_largest(compression, flat(part, part.device), left)
            self._traffic.gradients_to_host += chosen.nbytes
            return chosen.compressed()
        before = None if residual is None else convert.to_float32(residual)
        take = self.extent.segment.take_largest or take_largest
        whole = convert.to_float32(gradient)
        return compression.compress(whole, before, take=take, memory=memory)

    @property
    def result(self) -> str:
        """Array that has the parameter after a step: the master, or a copy in its format."""
        form = self.copy_format
        return "p" if form is None else copy_array(form)

    @property
    def is_fetched(self) -> bool:
        """Whether a step fetches the parameter: the parameter is not offloaded, and the device does
        not update it in place."""
        return not self.offloaded and "p" not in self._lent

    def target(self, *, direct: bool, fingerprints: bool) -> Target:
        """Return memory for the result of a step.

        Parameters
        ----------
        direct : use the parameter's own memory if the formats agree; else convert a large result
            into the parameter as soon as it has been fetched.
        fingerprints : compute the fingerprint of the parameter while it is filled.
        """
        count, dtype = self.extent.count, self.extent.segment.dtype_of(self.result)
        if not direct or self.is_small:
            return Target(np.empty(count, dtype))
        found = convert.landing(self.parameter) if self.result == "p" else None
        if found is not None:
            return Target(found, sums=fingerprints)
        return Target(partial(np.empty, count, dtype), count=count, store=self._store)

    def take_result(self, results: Results) -> None:
        """Update the host's parameter from a step's result, rounded to the parameter's format."""
        if self.offloaded:
            self._current = self.result
            convert.mark_changed(self.parameter)
            return
        if "p" in self._lent:
            convert.mark_changed(self.parameter)
            self._traffic.parameters_up += self.parameter.element_size() * self.extent.count
            return
        if self.is_small:
            found = results.take(self.extent)
            self._store(found)
            if found.dtype == np.float32 and self.parameter.dtype != torch.float32:
                self._leave(None)
            else:
                self.last_seen, self._home = found, None
            return
        array = convert.landing(self.parameter) if self.result == "p" else None
        if array is None:
            if not results.is_stored(self.extent):
                self._store(results.take(self.extent))
        else:
            results.take(self.extent, array)
            convert.mark_changed(self.parameter)
            self._traffic.parameters_up += array.nbytes
        of_format = self.result != "p" or not self.keeps_master
        left = None if array is None else results.fingerprint(self.extent)
        self._leave(self.result if of_format else None, fingerprint=left)

    def _store(self, array: NDArray[Any]) -> None:
        target, self._landing = self._landing, None
        if target is None and array.dtype == np.float32:
            target = convert.landing(self.parameter)
        if target is not None:
            target[:] = array
            convert.mark_changed(self.parameter)
        else:
            convert.store(array, self.parameter)
        self._traffic.parameters_up += array.nbytes

    @property
    def _is_as_left(self) -> bool:
        """Whether the host's parameter equals its contents after the last step, bit for bit."""
        if isinstance(self.last_seen, np.ndarray):
            self._landing = self._found_landing()
            words = convert.to_words(self.parameter) if self._landing is None else self._landing
            return (
                words.dtype == self.last_seen.dtype and words.tobytes() == self.last_seen.tobytes()
            )
        if isinstance(self.last_seen, str):
            words = convert.to_words(self.parameter)
            same_format = words.dtype == self.extent.segment.dtype_of(self.last_seen)
            return same_format and bool(self.extent.holds(self.last_seen, words))
        return self.last_seen is not None and convert.fingerprint(self.parameter) == self.last_seen

    def _found_landing(self) -> NDArray[np.float32] | None:
        """Return `convert.landing` of the parameter; the cached array if it is still valid."""
        parameter, seen = self.parameter, self._seen
        if (
            seen is not None
            and is_plain(parameter)
            and parameter.data_ptr() == seen[0]
            and parameter.numel() == seen[1].size
            and not parameter.is_neg()
        ):
            return seen[1]
        array, self._seen = convert.landing(parameter), None
        if array is not None and is_plain(parameter):
            self._seen = parameter.data_ptr(), array
        return array

    def _leave(
        self, array: str | None, copy: Tensor | None = None, *, fingerprint: int | None = None
    ) -> None:
        """Record the contents of the host's parameter: by the device's `array` with the same
        contents, by `fingerprint`, or by the fingerprint of `copy`, an equal tensor."""
        self._home = None
        asked = array is not None and self.extent.segment.compares and not self._moves
        if array is not None and asked:
            self.last_seen = array
        elif fingerprint is not None:
            self.last_seen = fingerprint
        else:
            self.last_seen = convert.fingerprint(self.parameter if copy is None else copy)

    @property
    def _known(self) -> bool:
        """Whether the master after the last step is known."""
        return self.last_seen is not None or self._home is not None

    def _merged(self) -> NDArray[np.float32]:
        if self._home is not None:
            return convert.merge_master(self._home, self.parameter)
        master = self.extent.read("p")
        self._traffic.masters_up += master.nbytes
        return convert.merge_master(master, self.parameter)
