"""Cover points that are sampled from the registers of Verilated devices."""

from collections.abc import Mapping
from functools import cache
from weakref import WeakKeyDictionary

from nearstep_sim.coverage.points import OWNERS, folder_of_points, hit
from nearstep_spec.coarse import registers as coarse
from nearstep_spec.coarse.config import CoarseConfig
from nearstep_spec.csr.model import Register, RegisterMap
from nearstep_spec.rule.rules import BY_RULE
from nearstep_spec.updater.config import UpdateKernelConfig
from nearstep_spec.updater.registers import RunKind, device_maps

__all__ = ["saw_flags", "saw_register"]

KERNELS = ("adam", "updater")
"""Names of the register map of an update kernel."""


@cache
def _registers(config: object) -> tuple[int, Mapping[int, tuple[int, RegisterMap, Register]]]:
    """Bytes of the registers of a device, of which a pool has several; and of each register the
    base of its block, the block and itself, by address.
    """
    blocks: Mapping[str, tuple[int, RegisterMap]]
    size = 1 << 64
    if isinstance(config, CoarseConfig):
        blocks, size = coarse.device_maps(config), coarse.register_bytes(config)
    elif isinstance(config, UpdateKernelConfig):
        blocks = device_maps(config)
    else:
        blocks = config.maps()  # type: ignore[attr-defined]
    return size, {
        base + each.offset: (base, block, each) for base, block in blocks.values() for each in block
    }


_known: WeakKeyDictionary[object, dict[tuple[int, str], int]] = WeakKeyDictionary()
"""The last word of each register of a device that was read from it, or that it accepted."""


def saw_register(
    device: object, family: str, config: object, address: int, word: int, *, units: bool = False
) -> None:
    """Sample a word that a Verilated device has answered, or accepted.

    Parameters
    ----------
    family : start of the names of cover points.
    units : its functional units are RTL.
    """
    if not folder_of_points():
        return
    size, registers = _registers(config)
    if address % size not in registers:
        return  # the upper word of a pair
    base, block, register = registers[address % size]
    base += address // size * size
    known = _known.setdefault(device, {})
    known[base, register.name] = word
    if block.name == "arbiter" and register.name == "status":
        saw_flags(register, word)
    elif register.name == "error":
        part = "module" if hasattr(config, "channels") else "kernel"
        point = part if block.name in KERNELS else block.name
        causes = block.lookup("error.cause")[1].values
        assert causes is not None
        hit(f"{family}.{point}", causes(word & block.lookup("error.cause")[1].mask).name)
    elif register.name == "status" and block.name in KERNELS and units:
        done = block.lookup("status.done")[1].mask
        kind = known.get((base, "operation"), RunKind.UPDATE)
        if word == done and known.get((base, "committed"), 0) and kind == RunKind.UPDATE:
            _updated(config, known.get((base, "rule"), 0))


def saw_flags(status: Register, word: int) -> None:
    """Sample the arbiter's status register."""
    for each in status.fields:
        if each.name not in OWNERS and word & each.mask:
            hit("axdimm.arbiter", each.name)


def _updated(config: object, index: int) -> None:
    kernel = getattr(config, "updater" if isinstance(config, CoarseConfig) else "kernel", config)
    rules = kernel.rule_set
    name, rule = rules.names[index], rules.rules[index]
    if name in BY_RULE:  # not of a file
        for state in rule.states:
            hit("rules.format", f"{state} of {name} in {rule.formats.get(state, 'fp32').upper()}")
