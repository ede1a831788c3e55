"""Bytes that an update cannot do without: each array of it once, whatever a device moved.

Shares of a bound are of these, so that a device which reads twice what it needs comes out worse.
"""

from __future__ import annotations

from nearstep_spec.updater.config import UpdateKernelConfig
from nearstep_spec.updater.operands import element_bytes, operands

INDEX_BYTES = 4


def update_bytes(
    config: UpdateKernelConfig, rule: str, count: int, *, pairs: int | None = None
) -> int:
    """Bytes of an update: arrays that are read and arrays that are written, each once.

    Parameters
    ----------
    config : of the kernel.
    rule : name in the configuration.
    count : elements.
    pairs : of fp32 values, where the gradients come so; an index and a value each.
    """
    found = config.rule_set.rules[config.rule_set.names.index(rule)]
    table = operands(config)
    needed = sum(
        count * element_bytes(table[name].format)
        for names in (found.arrays_in, found.arrays_out)
        for name in names
        if name != "g"
    )
    width = element_bytes("fp32")
    return needed + (count * width if pairs is None else pairs * (INDEX_BYTES + width))


def scan_bytes(count: int) -> int:
    """Bytes of a scan of fp32 gradients: each once."""
    return count * element_bytes("fp32")
