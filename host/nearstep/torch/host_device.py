"""This machine's processor as the device of an optimizer whose state is on drives."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor

from nearstep.device import open_processor
from nearstep.errors import ArgumentError
from nearstep.torch import convert
from nearstep.torch.errors import UnsupportedOptionError
from nearstep.torch.rule import BoundRule
from nearstep.torch.settings import Settings
from nearstep.updater.processor_device import ProcessorDevice
from nearstep_spec.blockwise import DYNAMIC8
from nearstep_spec.updater.config import GRADIENT_FORMATS, ConfigError, UpdateKernelConfig


def host_device(
    url: str, settings: Settings, rule: BoundRule, parameters: Iterable[Tensor]
) -> ProcessorDevice:
    """Make a device of the processor for the rules of an optimizer, with the formats that
    `nearstep.torch.host_table.HostTable` has for these parameters.

    Raises
    ------
    UnsupportedOptionError : parameters of several dtypes, or formats that the rule does not have.
    ArgumentError : the rule has other arrays than parameters, gradients and state.
    """
    settings.check_host()
    settings.check_optimizer(rule.definition)
    processor = open_processor(url)
    dtypes = sorted({p.dtype for p in parameters} & convert.NAMES.keys(), key=str)
    if len(dtypes) > 1:
        reason = "drives and nearstep.offload keep parameters of one dtype, not of "
        reason += f"{' and '.join(map(str, dtypes))}: make an optimizer for each"
        raise UnsupportedOptionError("device", url, reason)
    dtype = dtypes[0] if dtypes else torch.float32
    try:
        config = _config(settings, rule, dtype, processor.order)
    except ConfigError as error:
        raise ArgumentError(str(error)) from error
    return ProcessorDevice(processor, url, config)


def _config(
    settings: Settings, rule: BoundRule, dtype: torch.dtype, order: str
) -> UpdateKernelConfig:
    definition, wanted = rule.definition, settings.state_dtype
    own = any(form.rule.formats for form in definition.all_forms)
    state = DYNAMIC8 if wanted is torch.uint8 else convert.NAMES[wanted or dtype]
    found = UpdateKernelConfig(
        rules=(rule.named,) if rule.named else _rules(rule, order),
        order=order,  # type: ignore[arg-type]
        gradient_formats=GRADIENT_FORMATS,
        gradient_scale=True,
        parameter_format="fp32" if own else convert.NAMES[dtype],
        state_format="fp32" if own else state,
        scan=True,  # the host searches for infinities, but gradients can be divided
        address_width=64,
    )
    if not settings.stochastic:
        return found
    if not found.stochastic:
        reason = "no parameter and no state is in bf16: state_dtype=torch.bfloat16 makes it so"
        raise UnsupportedOptionError("rounding", "stochastic", reason)
    return replace(found, stochastic_rounding=True)


def _rules(rule: BoundRule, order: str) -> tuple[str, ...]:
    """Return the names of the rules of an optimizer that has this order of the arithmetic."""
    definition = rule.definition
    return tuple(
        name
        for name, form in definition.by_rule.items()
        if not definition.orders or order == "default" or order in form.orders
    )
