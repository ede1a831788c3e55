"""What an engine has done, in figures."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Report:
    """What an engine has done since it was opened, in bytes where not said otherwise.

    Attributes
    ----------
    parameters : of all parameters.
    peak : most that was on the compute device: parameters, the whole vector of a plan, and
        gradients from before they are made until their owner has them; without what is in place by
        a plan.
    peak_parameters, peak_gradients : most of one of them.
    parameters_up, parameters_down : fetched from their owner, and sent there because they were
        changed here, or had never been there.
    gradients_down, gradients_up : sent to their owner, and fetched from there.
    fetches, prefetches : how many parameters were fetched when they were used, and before.
    releases : how many times a parameter gave up its memory.
    gradients : how many gradients went to their owner.
    steps : of the optimizer; with updates in backward, of modules.
    """

    budget: int
    parameters: int
    peak: int
    peak_parameters: int
    peak_gradients: int
    parameters_up: int
    parameters_down: int
    gradients_down: int
    gradients_up: int
    fetches: int
    prefetches: int
    releases: int
    gradients: int
    steps: int
