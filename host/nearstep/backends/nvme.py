"""`nvme:`: an NVMe device with the command sets for computational storage."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from nearstep.backends.options import AnyTarget, Family, Variant, parse_options
from nearstep.errors import MismatchError
from nearstep.linux.nvme.standard import CommandSet
from nearstep.linux.nvme_device import LocalMemory, choose, find_siblings
from nearstep.linux.passthrough import IoctlNode, Node, RingNode
from nearstep_spec.codec import Option, check_bounds
from nearstep_spec.rule.rules import BY_RULE
from nearstep_spec.updater.config import UpdateKernelConfig

NODE = "NODE"
"""Placeholder of a node's path in lists of devices."""


@dataclass(frozen=True, kw_only=True)
class NvmeOptions:
    """Options of `nvme:NODE`."""

    passthrough: Annotated[
        Literal["io_uring", "ioctl"],
        Option(meaning="how I/O commands reach the driver; admin commands are ioctls"),
    ] = "io_uring"
    ranges: Annotated[
        Literal["set", "inline"],
        Option(meaning="how a run names its arrays: a memory range set, or data of the command"),
    ] = "set"
    rules: Annotated[
        tuple[str, ...] | None,
        Option(
            meaning="update rules to use, of the device's programs",
            choices=tuple(BY_RULE),
            allowed="or FILE.py:NAME",
            unset="those of nearstep that it has",
        ),
    ] = None
    order: Annotated[
        Literal["default", "paper"], Option(meaning="order of the arithmetic of Adam's program")
    ] = "default"
    timeout: Annotated[
        float, Option(meaning="seconds after which Linux aborts a command", low=1, high=3600)
    ] = 120.0

    def __post_init__(self) -> None:
        check_bounds(self)
        if self.rules is not None:
            UpdateKernelConfig(rules=self.rules, order=self.order)  # checks them


DEVICES = AnyTarget(
    NODE,
    Family(
        f"nvme:{NODE}",
        (
            Variant(
                options=NvmeOptions,
                opens="nearstep.backends.nvme:open_device",
                summary="an NVMe device with computational programs",
            ),
        ),
    ),
)
"""Devices of this backend."""

NODES: dict[str, Callable[[Path, int], Node]] = {"io_uring": RingNode, "ioctl": IoctlNode}


def open_device(path: str, options: dict[str, str]) -> LocalMemory:
    """Open the programs and the local memory of the controller that has the node `path`, of any of
    its namespaces.

    Raises
    ------
    OptionError
    MismatchError : a namespace is missing, or the programs are not those of the rules.
    NodeError, CommandStatusError : as `nearstep.linux.passthrough`.
    """
    chosen = parse_options(NvmeOptions, f"nvme:{path}", options)
    given = Path(path)
    siblings = find_siblings(given)
    nodes: list[Node] = []
    try:
        for each in (CommandSet.PROGRAMS, CommandSet.MEMORY):
            place, number = choose(siblings, given, each)
            nodes.append(NODES[chosen.passthrough](place, round(1000 * chosen.timeout)))
            if nodes[-1].number != number:
                raise MismatchError(f"namespace of {place}", number, nodes[-1].number)
        return LocalMemory(
            *nodes,
            rules=chosen.rules,
            order=chosen.order,
            inline=chosen.ranges == "inline",
        )
    except BaseException:
        for node in nodes:
            node.close()
        raise
