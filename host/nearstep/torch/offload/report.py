"""Counters of an engine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Report:
    """Counters of an engine since it was opened, in bytes unless said otherwise.

    Attributes
    ----------
    parameters : size of all parameters.
    peak : maximum in use on the compute device: parameters, the whole vector of a plan, and
        gradients from their reservation until the owner has them; data that a plan reads in place
        is excluded.
    peak_parameters, peak_gradients : maximum of parameters alone, and of gradients alone.
    parameters_up, parameters_down : fetched from the owner; sent to the owner because the parameter
        was changed on the compute device or had never been sent.
    gradients_down, gradients_up : sent to the owner; fetched from the owner.
    fetches, prefetches : number of parameters fetched on use, and before use.
    releases : number of times the memory of a parameter was freed.
    gradients : number of gradients sent to the owner.
    updates : number of updates in backward, each of one or several modules.
    steps : number of steps of the optimizer.
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
    updates: int
    steps: int
