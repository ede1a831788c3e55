"""Results of a flow."""

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nearstep_sim.bitstream.errors import BitstreamError
from nearstep_sim.bitstream.report import Report

__all__ = ["Bitstream"]


@dataclass(frozen=True, kw_only=True)
class Bitstream:
    """A bitstream with its reports.

    Attributes
    ----------
    bit : the file.
    digest : SHA-256 of the bitstream.
    seed : seed of the placer with the largest margin, the lowest of equal ones.
    report : of this seed.
    seeds : report of each placed seed, and the error of each other one.
    tools : versions, by name.
    configuration : configuration of the design.
    warnings : nextpnr's warnings, such as unused constraints.
    kept : lookup tables that are kept free, see `nearstep_hw.boards.free_rows`.
    """

    bit: Path
    digest: str
    seed: int
    report: Report
    seeds: Mapping[int, Report | BitstreamError]
    tools: Mapping[str, str]
    configuration: Mapping[str, Any]
    warnings: tuple[str, ...] = ()
    kept: int = 0

    @property
    def folder(self) -> Path:
        return self.bit.parent

    @property
    def medians(self) -> dict[str, float]:
        """MHz that the seeds reach in the median, by clock."""
        reports = [each for each in self.seeds.values() if isinstance(each, Report)]
        return {
            clock.name: statistics.median(
                other.achieved
                for report in reports
                for other in report.clocks
                if other.name == clock.name
            )
            for clock in self.report.clocks
        }
