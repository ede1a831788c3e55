"""Counters of what an optimizer moved and launched."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass


@dataclass(kw_only=True)
class Traffic:
    """What one optimizer has done since it was made, in bytes where not said otherwise.

    A step that begins anew, since it is found to have begun with parameters that the host had
    changed (`nearstep.torch.homes.peer`), counts once.

    In a plain training loop each step adds to `gradients_down` and `parameters_up` and to
    nothing else: four bytes for each element that was updated, or two of a format of 16 bits that
    the kernel has. Compressed gradients count as what is sent of them: four bytes of index and four
    or two of value for each element kept.

    Attributes
    ----------
    gradients_down, parameters_up : the traffic of steps.
    gradients_to_host : of gradients that are on an accelerator, copied from there to the host:
        whole, or index and value of what is kept of those that are compressed.
    masters_down : parameters sent because the host had changed them, the first step's included. Of
        those that the device updates where the host has them (`golden:axdimm`, large ones) the
        first step alone counts: nothing is sent, and a change cannot be distinguished from the
        step's. Of these and of gradients that it reads where they are, the counters say what a
        memory of its own would get.
    masters_up : fp32 masters fetched to merge a change of 16-bit parameters, or for a checkpoint.
    gradients_up : fetched of those that the device keeps (`nearstep.offload`): to add to them, or
        because they were read.
    moments_down, moments_up : optimizer state sent (load_state_dict, changed by the user) and
        fetched (when read).
    to_drives, from_drives : of arrays of state and parameters, and gradients that the device keeps,
        written to drives and read from there.
    residuals_to_drives, residuals_from_drives : of what error feedback holds back of compressed
        gradients: written by the host to drives, with the step that made it, and read from there
        when a step is resumed. In no other counter; of a residual on an accelerator as many bytes
        come to the host first.
    drives_to_cards, cards_to_drives : moved between the drives of cards and the cards' memory,
        peer to peer: the host's link has no part in it.
    steps, launches, elements : steps done, runs of the kernel that update (on a DIMM of several
        channels with a clock, of pieces of a step), elements updated.
    scans, skipped : runs that only look at gradients; steps that were skipped because of an
        infinity or NaN.
    pairs : elements of compressed gradients that were sent.
    cycles : device cycles in which kernels have their channels: runs, the commands that start them,
        changes of mode; of several channels those of the one that works longest in a step. None on
        a device without a clock.
    step_cycles : device cycles of whole steps, from the first transfer to the last.
    run_seconds : time on the wall clock from a launch to its end. Of an emulated device: of the
        emulation.
    """

    gradients_down: int = 0
    parameters_up: int = 0
    gradients_up: int = 0
    gradients_to_host: int = 0
    masters_down: int = 0
    masters_up: int = 0
    moments_down: int = 0
    moments_up: int = 0
    to_drives: int = 0
    from_drives: int = 0
    residuals_to_drives: int = 0
    residuals_from_drives: int = 0
    drives_to_cards: int = 0
    cards_to_drives: int = 0
    steps: int = 0
    launches: int = 0
    elements: int = 0
    scans: int = 0
    skipped: int = 0
    pairs: int = 0
    cycles: int | None = None
    step_cycles: int | None = None
    run_seconds: float = 0.0

    def as_dict(self) -> dict[str, int | float | None]:
        """Counters by name."""
        return asdict(self)

    def go_back(self, then: Mapping[str, int | float | None]) -> None:
        """Be what `as_dict` returned then."""
        for name, value in then.items():
            setattr(self, name, value)
