"""One parameter whose fp32 master and moments live on a device."""

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
from nearstep.torch.device_gradient import DeviceGradient, SparseGradient
from nearstep.torch.dtensor import local
from nearstep.torch.errors import InterruptedStepError, ParameterError
from nearstep.torch.exchange import SMALL_ELEMENTS, Results, Sending, Sends, Target, send_now
from nearstep.torch.formats import (
    Coded,
    Formats,
    copy_array,
    decoded,
    flat_arrays,
    gradient_array,
    tensors,
)
from nearstep.torch.homes.host_changes import Expected
from nearstep.torch.layout import Layout
from nearstep.torch.select import flat, select_largest
from nearstep.torch.topk import take_largest
from nearstep.torch.traffic import Traffic


class DeviceParameter:
    """A parameter on the host and its extent on the device; moves data between the two.

    The host's copy is the one that the user sees and may change at any time. So each time before a
    step its contents are compared with what the last step left there, and if they differ, they
    become the master. The last step left there what the device has: a device that can tell whether
    it still does (`nearstep.buffer.Buffer.holds`) is asked; for others
    `convert.fingerprint` is kept, and of small parameters what was fetched.

    Parameters
    ----------
    narrow : there are arrays of 16 bits.
    moves : arrays on the device are evicted, and cannot be asked what the host has.
    durable : the master outlasts the memory of the device, and changes of the host are sent, or
        found, before a step is prepared (`push_changes`, `expected`).

    Attributes
    ----------
    label : what the parameter is called in errors.
    is_small : whether it is copied together with its neighbours.
    is_new : the arrays are what they were allocated with.
    interrupted : name of what a step of this parameter failed with half way; cleared by
        `load_master`.
    left : what the last step left in the host's parameter: an array on the device with the same
        contents, by name; a fingerprint; or, of a small parameter, what was fetched. None if that
        is not known.
    away : the device alone has the parameter (`push`): steps neither send nor fetch it.
    held : its gradient, if that is on the device until a step, or has been compressed for one.
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
        self._current = "p"  # array with the contents of a parameter that is away
        self._traffic = traffic
        self._formats = formats
        self.last_seen: str | int | NDArray[Any] | None = None
        self._lent: list[str] = []
        self._landing: NDArray[np.float32] | None = None  # for the step that looked for it
        self._home: NDArray[np.float32] | None = None  # the master, if it stays on the host
        self._loaded_master: NDArray[np.float32] | None = None
        self.is_new = True
        self._seen: tuple[int, NDArray[np.float32]] | None = None
        self._narrow = narrow
        self._moves = moves
        self._durable = durable
        self._checked = False  # for changes of the host, for the step that follows
        self._p = formats.state_of("p")
        self.is_small = extent.count < SMALL_ELEMENTS

    @property
    def elements(self) -> int:
        """Of the parameter."""
        return self.extent.count

    @property
    def keeps_master(self) -> bool:
        return convert.NAMES[self.parameter.dtype] != self._p

    @property
    def is_on_host(self) -> bool:
        """Whether the host has all bits of the master."""
        return not (self.offloaded or self.keeps_master)

    def host_master(self) -> NDArray[Any]:
        """The master of a parameter that is not away, as the host has it and the last step left it,
        in the format of the device; to be read only."""
        if self._p != "fp32":
            return convert.to_words(self.parameter)
        if not self.keeps_master:
            return convert.to_float32(self.parameter)
        if self._loaded_master is not None:
            return convert.merge_master(self._loaded_master, self.parameter)
        return self._merged() if self._known else convert.to_float32(self.parameter)

    def lose_master(self) -> None:
        """The memory of the master is gone: the next step sends it, if the host has it."""
        if self.is_on_host and not self._durable:
            self.last_seen = self._home = self._seen = None

    def resume(self) -> None:
        """Make what the device has the parameter, as a step would have left it."""
        self.copy_into(self.parameter)
        self.is_new = False
        self._leave(None)
        self.lose_master()

    def savepoint(self) -> Callable[[], None]:
        """What restores what is known of the parameter now; the memory of the master is gone."""
        known = (self.last_seen, self._home, self._loaded_master, self.is_new, self._current)

        def restore() -> None:
            self.last_seen, self._home, self._loaded_master, self.is_new, self._current = known
            self.lose_master()

        return restore

    def fetch(self, key: str) -> Mapping[str, Tensor]:
        """The moment `key` as a new tensor of the parameter's shape, of fp32 unless the rule says
        otherwise; one in 8 bits as its codes, and its scales under their key.

        Raises
        ------
        InterruptedStepError : it may be part old and part new.
        ParameterError : the parameter has been given another number of elements.
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

    def send(self, key: str, value: Tensor | Coded) -> None:
        """Make `value` the moment `key`; in 8 bits as it is, if the device keeps it so."""
        self.is_new = False
        name = self.layout.moments[key]
        self.extent.segment.reserve({name: 0.0})
        array: NDArray[Any]
        if isinstance(value, Coded) and key in self.layout.scales:
            array = self._formats.pack(flat_arrays(value))
        else:
            if isinstance(value, Coded):
                value = decoded(value, self.layout.coded[key])
            array = self._formats.encode(name, convert.to_float32(value))
        self.extent.write(name, array)
        self._traffic.moments_down += array.nbytes

    def reset_moments(self, keys: Iterable[str], arrays: Mapping[str, float]) -> None:
        """Give these moments the values that `arrays` has for their arrays.

        A new extent has them.
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
        """Raise `ParameterError` if the parameter was given another number of elements, or a
        dtype that the rule does not keep."""
        if self._p != "fp32":
            self._formats.check(self.label, self.parameter)
        size = convert.size(self.parameter)
        if size != self.extent.count:
            raise ParameterError(self.label, f"of {self.extent.count} elements", size)

    def fetch_master(self) -> Tensor:
        """The fp32 master as a new tensor; of a 16-bit parameter it has more bits than that."""
        self.check_size()
        if self.offloaded:
            array = self.extent.read("p")
            self._traffic.masters_up += array.nbytes
        else:
            array = self.host_master()
        return convert.to_tensor(array, self.parameter)

    def load_master(self, value: Tensor | None) -> None:
        """Have the next step send the parameter, with a saved master's bits where they agree."""
        self.interrupted = None
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
        """Make the host's parameter the master, unless it is what the last step left there.

        A device that works on the host's memory takes a large fp32 parameter where it is: there is
        no other master, nothing to send and nothing to fetch. `check_size` has been called.
        """
        checked, self._checked = self._checked, False
        if checked or self.offloaded or self._lend_parameter() or self._is_as_left:
            return
        self._send_master(sends)

    def push_changes(self) -> None:
        """Send the parameter now, if the host changed it; the step that follows need not look."""
        self._checked = False
        if not self.offloaded:
            self.check_size()
            send_now(self.send_master_if_changed)
        self._checked = True

    def expected(self) -> Expected | None:
        """What shows that the host has not changed the parameter; the step that follows need not
        look.

        None: `push_changes` finds it at once.
        """
        if self.offloaded or not isinstance(self.last_seen, int) or not self.parameter.is_cpu:
            return None
        self.check_size()
        self._checked = True
        return Expected(self.label, convert.part_sums(self.parameter), self.last_seen)

    def read_again(self) -> None:
        """Make the host's parameter what its home has."""
        self._checked = False
        if not self.offloaded:
            self.copy_into(self.parameter)

    def push(self, *, unchanged: bool = False) -> None:
        """Have the device know the parameter as the host has it, and from then on alone: it is
        `offloaded`, and its memory may be freed.

        `check_size` has been called.

        Parameters
        ----------
        unchanged : nothing has changed the parameter since it came: that need not be looked for.
        """
        if self.offloaded:
            return
        if not unchanged and not self._is_as_left:
            send_now(self._send_master)
            self._current = "p"
        self.offloaded = True
        self.last_seen = self._home = self._landing = self._seen = None

    def keep(self) -> None:
        """After `push`: the parameter's memory has not gone, and counts again as it is."""
        self.offloaded = False

    def pull(self) -> None:
        """Fetch the parameter, which is away, into the memory that it has got again.

        To autograd this is no change.
        """
        with _unsafe_preserve_version_counter(self.parameter):
            self.copy_into(self.parameter)
        self.arrived(self.parameter)

    def arrived(self, copy: Tensor) -> None:
        """The parameter, which was away, has got what `copy` has."""
        self.offloaded = False
        exact = self._current != "p" or not self.keeps_master
        self._leave(self._current if exact else None, copy)

    @property
    def current(self) -> str:
        """Array with the contents of a parameter that is away, or has come from there."""
        return self._current

    def peek(self) -> NDArray[Any]:
        """Fetch what the device has of a parameter that has come from there."""
        array = self.extent.read(self._current)
        self._traffic.parameters_up += array.nbytes
        return array

    @torch.no_grad()
    def copy_into(self, tensor: Tensor) -> None:
        """Fetch the parameter into a tensor like it: the parameter itself, or another one."""
        plain = self.extent.segment.dtype_of(self._current) == np.float32
        target = convert.landing(tensor) if plain else None
        array = self.extent.read(self._current, target)
        self._traffic.parameters_up += array.nbytes
        if target is None:
            convert.store(array, tensor)

    def _send_master(self, sends: Sends) -> None:
        master = self.host_master()
        sends.send(Sending(self.extent, "p", master, self._sent_master))
        self._traffic.masters_down += master.nbytes

    def _lend_parameter(self) -> bool:
        """Have the device update the parameter where it is, if it can."""
        array = None if self.is_small else convert.landing(self.parameter)
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

    def gradient_format(self, gradient: Tensor) -> str:
        """Format in which a gradient is sent: its own if the kernel takes it, else fp32."""
        return self._formats.gradient_of(gradient.dtype) if self._narrow else "fp32"

    @property
    def copy_format(self) -> str | None:
        """Format of the copy of the master that the kernel makes and the host fetches: the
        parameter's, if the kernel has it.

        None: the master is fetched.
        """
        return self._formats.copy_of(self.parameter.dtype) if self._narrow else None

    def send_gradient(self, gradient: Tensor, sends: Sends, *, negated: bool = False) -> None:
        """Send a gradient of any of `convert.FORMATS`, as `gradient_format` says; its
        negation if `negated`.

        A large one is lent, if the device takes it as it is: nobody changes it during a step, which
        ends with `end_loan`.
        """
        form = self.gradient_format(gradient)
        wide = form == "fp32"
        array = convert.to_float32(gradient) if wide else convert.to_words(gradient)
        if negated:
            array = convert.negated(array)
        name = gradient_array(form)
        if not self.is_small and self.extent.lend(name, array):
            self._lent.append(name)
        else:
            sends.send(Sending(self.extent, name, array))
        self._traffic.gradients_down += array.nbytes
        self.count_to_host(gradient)

    def count_to_host(self, gradient: Tensor) -> None:
        """A whole gradient is on the host, or is about to be."""
        if not self.parameter.is_cpu:
            self._traffic.gradients_to_host += convert.size(gradient) * gradient.element_size()

    def move_in(self, label: str, layout: Layout, traffic: Traffic, *, narrow: bool) -> None:
        """An optimizer has adopted the parameter where it is on the device."""
        self.label, self.layout, self._traffic, self._narrow = label, layout, traffic, narrow
        self.is_new = True

    def move_out(self) -> None:
        """The optimizer is gone, and with it every array but the master."""
        self._current = "p"
        self.held = self.interrupted = None
        self.last_seen = self._home = self._landing = self._seen = self._loaded_master = None

    def hold_gradient(self, gradient: Tensor, wait: Callable[[], None] | None = None) -> None:
        """Have the device keep a gradient until `release_gradient`; one that it has is added to.

        Parameters
        ----------
        wait : as of `DeviceGradient`, of a first gradient.
        """
        self.count_to_host(gradient)
        assert not isinstance(self.held, SparseGradient), "nothing is added to what was compressed"
        if self.held is not None:
            self.held.add(gradient)
            return
        form = self.gradient_format(gradient)
        array = gradient_array(form)
        self.held = DeviceGradient(self.extent, array, form, gradient, self._traffic, wait)

    def release_gradient(self) -> None:
        """The device need not keep a gradient any more."""
        self.held = None

    def interrupt(self, name: str) -> None:
        """A step of this parameter failed half way, with what is called `name`."""
        self.interrupted = name

    def end_loan(self) -> None:
        """The step has ended: the device lets go of parameter and gradient."""
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
        """What of a gradient is to be sent instead of it, and what of it stays: on the host in an
        array of `memory`, on an accelerator beside the gradient."""
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
        """Array that has the parameter behind a step: the master, or a copy in its format."""
        form = self.copy_format
        return "p" if form is None else copy_array(form)

    @property
    def is_fetched(self) -> bool:
        """Whether a step fetches the parameter: the host has memory for it, which the device does
        not update itself."""
        return not self.offloaded and "p" not in self._lent

    def target(self, *, direct: bool, fingerprints: bool) -> Target:
        """Memory for the result of a step.

        Parameters
        ----------
        direct : the parameter's own, if it takes the result as it is; else the parameter takes the
            result, if that is large, as soon as it has been fetched.
        fingerprints : make the fingerprint of such a parameter while it is filled.
        """
        count, dtype = self.extent.count, self.extent.segment.dtype_of(self.result)
        if not direct or self.is_small:
            return Target(np.empty(count, dtype))
        found = convert.landing(self.parameter) if self.result == "p" else None
        if found is not None:
            return Target(found, sums=fingerprints)
        return Target(partial(np.empty, count, dtype), count=count, store=self._store)

    def take_result(self, results: Results) -> None:
        """Take over the result of a step: the master, rounded to the parameter's format."""
        if self.offloaded:
            self._current = self.result
            convert.mark_changed(self.parameter)
            return
        if "p" in self._lent:
            convert.mark_changed(self.parameter)
            self._traffic.parameters_up += 4 * self.extent.count
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
        """Whether the host's parameter is what the last step left there, bit for bit."""
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
        """`convert.landing` of the parameter: that of the step before, if it still is."""
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
        """The host's parameter is what the next step is to find; `array` on the device has the
        same contents, if it is given, and so has `copy`; `fingerprint` is its own, if known."""
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
        """Whether there is a master that the last step left."""
        return self.last_seen is not None or self._home is not None

    def _merged(self) -> NDArray[np.float32]:
        if self._home is not None:
            return convert.merge_master(self._home, self.parameter)
        master = self.extent.read("p")
        self._traffic.masters_up += master.nbytes
        return convert.merge_master(master, self.parameter)
