"""DDR4 timing parameters, from the nanoseconds of the standard to whole clocks, as plain data.

A part of 32Gb is a package, because the standard has no die above 16Gb. It is that of the AXDIMM
paper, K4ABG165WA-MC: x16, two dies of 16Gb x8 side by side, which share commands. So banks, pages
and refresh, 550 ns, are those of such a die.

Ref: JESD79-4 (DDR4 SDRAM), "Timing Parameters by Speed Grade", "Refresh Parameters by Device
Density" (tRFC1 of 16Gb: 550 ns; the same in JESD79-4C and in Ramulator 2's `DDR4.cpp`), "Speed
Bins", and "Rounding Algorithms"; Samsung, DDR4 SDRAM Memory Product Guide, May 2018, ordering
information (BG: 32Gb, M: dual-die package).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from nearstep_spec.errors import NearstepError

__all__ = [
    "BURST_CLOCKS",
    "BURST_LENGTH",
    "DENSITIES",
    "MAX_POSTPONED_REFRESHES",
    "PARTS",
    "RANK_SWITCH",
    "SPEED_GRADES",
    "WIDTHS",
    "DramTiming",
    "Minimum",
    "SpeedGrade",
    "TimingError",
    "die_of",
    "dram_timing",
]

BURST_LENGTH = 8  # transfers of a column command; burst chop is not used
BURST_CLOCKS = BURST_LENGTH // 2
MAX_POSTPONED_REFRESHES = 8  # and as many pulled in, in the 1x refresh mode
DENSITIES = ("4Gb", "8Gb", "16Gb", "32Gb")
WIDTHS = ("x8", "x16")

RANK_SWITCH = 2
"""tRTRS, clocks between the data of two ranks: a read preamble of one clock and the half clock of
the postamble before it do not overlap, and the termination of a write, RTT_WR, which begins two
clocks before its data (ODTLcnw = CWL - 2), does not reach into those of another rank. JEDEC leaves
the first to the controller."""

_DIES: Mapping[tuple[str, str], tuple[str, str]] = MappingProxyType(
    {
        **{(density, width): (density, width) for density in DENSITIES[:3] for width in WIDTHS},
        ("32Gb", "x16"): ("16Gb", "x8"),
    }
)
"""Density and width of the dies in a part, which answer to one chip select."""

PARTS = tuple(_DIES)
"""Density and width of each part."""

_ROUNDING_GUARD = 974  # thousandths of a clock: JEDEC forgives a 2.5 % overshoot of a rounded tCK


class TimingError(NearstepError, ValueError):
    """A speed grade, density, width or latency that is not in the table."""


def die_of(density: str, width: str) -> tuple[str, str]:
    """Density and width of the dies of a part; those of the part, unless it has several dies.

    Raises
    ------
    TimingError : there is no such part; with the value and what is allowed.
    """
    for what, value, allowed in (("density", density, DENSITIES), ("width", width, WIDTHS)):
        if value not in allowed:
            raise TimingError(f"{what} must be one of {allowed}, not {value!r}")
    if (density, width) not in _DIES:
        widths = tuple(each for part, each in PARTS if part == density)
        raise TimingError(f"width of {density} must be one of {widths}, not {width!r}")
    return _DIES[density, width]


@dataclass(frozen=True)
class Minimum:
    """A JEDEC minimum: the larger of `nck` clocks and `ps` picoseconds."""

    ps: int = 0
    nck: int = 0

    def clocks(self, tck_ps: int) -> int:
        """Compute whole clocks: truncate(ps / tCK + 0.974), as in JEDEC, but at least `nck`."""
        return max(self.nck, (self.ps * 1000 // tck_ps + _ROUNDING_GUARD) // 1000)

    def arithmetic(self, tck_ps: int) -> str:
        """Format the computation of `clocks`."""
        parts = [f"{self.nck} nCK"] if self.nck else []
        if self.ps:
            ratio = self.ps / tck_ps
            parts.append(f"{self.ps / 1000:g} ns / {tck_ps / 1000:g} ns = {ratio:g} up")
        chosen = f"max({', '.join(parts)})" if len(parts) > 1 else "".join(parts)
        return f"{chosen} = {self.clocks(tck_ps)} nCK"


@dataclass(frozen=True, kw_only=True)
class SpeedGrade:
    """A clock with its latencies.

    Parameters
    ----------
    name : data rate, such as `DDR4-1600`.
    tck_ps : clock period, ps.
    cl, cwl : read and write latency, nCK.
    """

    name: str
    tck_ps: int
    cl: int
    cwl: int


SPEED_GRADES: Mapping[str, SpeedGrade] = MappingProxyType(
    {
        grade.name: grade
        for grade in (
            # 1600K, 11-11-11; CWL 9 is the first set with a preamble of one clock
            SpeedGrade(name="DDR4-1600", tck_ps=1250, cl=11, cwl=9),
            # The clock at which the host sees the AXDIMM; JEDEC's table begins at 1600. The same
            # nanoseconds; CL = tAA / tCK = 13.75 / 2.5 = 5.5, up. A module adds to both latencies.
            SpeedGrade(name="DDR4-800", tck_ps=2500, cl=6, cwl=5),
        )
    }
)

_EVERY_PART: Mapping[str, Minimum] = MappingProxyType(
    {
        "tRCD": Minimum(ps=13_750),
        "tRP": Minimum(ps=13_750),
        "tRAS": Minimum(ps=35_000),
        "tRC": Minimum(ps=48_750),
        "tCCD_S": Minimum(nck=4),
        "tCCD_L": Minimum(nck=5, ps=6_250),
        "tWR": Minimum(ps=15_000),
        "tWTR_S": Minimum(nck=2, ps=2_500),
        "tWTR_L": Minimum(nck=4, ps=7_500),
        "tRTP": Minimum(nck=4, ps=7_500),
        "tMRD": Minimum(nck=8),
        "tMOD": Minimum(nck=24, ps=15_000),
        "tZQCS": Minimum(nck=128),
        "tZQoper": Minimum(nck=512),
    }
)

# By page size of a die: x8 has 1 KiB, x16 has 2 KiB.
_BY_WIDTH: Mapping[str, Mapping[str, Minimum]] = MappingProxyType(
    {
        "x8": {
            "tRRD_S": Minimum(nck=4, ps=5_000),
            "tRRD_L": Minimum(nck=4, ps=6_000),
            "tFAW": Minimum(nck=20, ps=25_000),
        },
        "x16": {
            "tRRD_S": Minimum(nck=4, ps=6_000),
            "tRRD_L": Minimum(nck=4, ps=7_500),
            "tFAW": Minimum(nck=28, ps=35_000),
        },
    }
)

_BY_DENSITY: Mapping[str, Minimum] = MappingProxyType(
    {
        "4Gb": Minimum(ps=260_000),
        "8Gb": Minimum(ps=350_000),
        "16Gb": Minimum(ps=550_000),
    }
)

_TREFI_PS = 7_800_000  # average refresh interval up to 85 degrees Celsius

_CALIBRATION_PS = 128_000_000_000
"""Time between two ZQCS, by the example of JESD79-4, "ZQ Calibration Description": one corrects
0.5 %; at 1.5 %/K and 1 K/s, 0.15 %/mV and 15 mV/s, it is 0.5 / (1.5 + 2.25) = 0.133 s."""


@dataclass(frozen=True, kw_only=True)
class DramTiming:
    """Timing of one part at one clock. Every number is in clocks (nCK) of that clock.

    `table` has the same numbers by JEDEC name, `arithmetic` how each was rounded.
    `calibration_interval` is the longest time between two ZQCS, 128 ms.
    """

    speed: SpeedGrade
    density: str
    width: str
    cl: int
    cwl: int
    t_rcd: int
    t_rp: int
    t_ras: int
    t_rc: int
    t_ccd_s: int
    t_ccd_l: int
    t_rrd_s: int
    t_rrd_l: int
    t_faw: int
    t_wr: int
    t_wtr_s: int
    t_wtr_l: int
    t_rtp: int
    t_mrd: int
    t_mod: int
    t_zqcs: int
    t_zqoper: int
    t_rfc: int
    t_refi: int
    calibration_interval: int
    arithmetic: Mapping[str, str] = field(repr=False, compare=False)

    @property
    def tck_ps(self) -> int:
        """Clock period, ps."""
        return self.speed.tck_ps

    @property
    def table(self) -> dict[str, int]:
        """Clocks by JEDEC name."""
        names = [*_EVERY_PART, *_BY_WIDTH["x8"], "tRFC", "tREFI"]
        values = {name: int(getattr(self, "t_" + name[1:].lower())) for name in names}
        return {"CL": self.cl, "CWL": self.cwl, "BL": BURST_LENGTH, **values}

    @property
    def read_to_write(self) -> int:
        """READ to WRITE: the write burst follows the read burst after two idle clocks."""
        return self.cl + BURST_CLOCKS + 2 - self.cwl

    @property
    def write_to_read_s(self) -> int:
        """WRITE to READ of another bank group: tWTR_S after the last data."""
        return self.cwl + BURST_CLOCKS + self.t_wtr_s

    @property
    def write_to_read_l(self) -> int:
        """WRITE to READ of the same bank group: tWTR_L after the last data."""
        return self.cwl + BURST_CLOCKS + self.t_wtr_l

    @property
    def column_to_column_other_rank(self) -> int:
        """READ to READ, or WRITE to WRITE, of another rank: tRTRS between the data."""
        return BURST_CLOCKS + RANK_SWITCH

    @property
    def read_to_write_other_rank(self) -> int:
        """READ to WRITE of another rank: tRTRS between the data."""
        return self.cl + BURST_CLOCKS + RANK_SWITCH - self.cwl

    @property
    def write_to_read_other_rank(self) -> int:
        """WRITE to READ of another rank: tRTRS between the data."""
        return max(1, self.cwl + BURST_CLOCKS + RANK_SWITCH - self.cl)

    @property
    def write_to_precharge(self) -> int:
        """WRITE to PRECHARGE of its bank: tWR after the last data."""
        return self.cwl + BURST_CLOCKS + self.t_wr

    @property
    def max_refresh_interval(self) -> int:
        """Longest time between two REFRESH commands: eight of them postponed."""
        return (MAX_POSTPONED_REFRESHES + 1) * self.t_refi

    @property
    def refresh_bound(self) -> float:
        """Share of the time in which a rank at the average refresh rate is not in refresh."""
        return 1 - self.t_rfc / self.t_refi


def dram_timing(
    speed: str = "DDR4-1600",
    density: str = "8Gb",
    width: str = "x8",
    *,
    cl: int | None = None,
    cwl: int | None = None,
) -> DramTiming:
    """Compute the timing of a part.

    Parameters
    ----------
    speed : a key of `SPEED_GRADES`.
    density : bits of a part: 4Gb, 8Gb, 16Gb, or 32Gb of two dies.
    width : data pins of a part: x8 or x16; of 32Gb x16.
    cl, cwl : latencies in nCK, if other than those of the grade: a module with a buffer has longer
        ones for its host.

    Raises
    ------
    TimingError : with the value and what is allowed.
    """
    if speed not in SPEED_GRADES:
        raise TimingError(f"speed must be one of {tuple(SPEED_GRADES)}, not {speed!r}")
    die_density, die_width = die_of(density, width)
    grade = SPEED_GRADES[speed]
    cl = grade.cl if cl is None else cl
    cwl = grade.cwl if cwl is None else cwl
    if cwl < 1 or cl < cwl:
        raise TimingError(f"latencies must be 1 <= CWL <= CL, not CL {cl!r} and CWL {cwl!r}")
    minima = {**_EVERY_PART, **_BY_WIDTH[die_width], "tRFC": _BY_DENSITY[die_density]}
    arithmetic = {name: m.arithmetic(grade.tck_ps) for name, m in minima.items()}
    # A maximum, so it is rounded down.
    refi = _TREFI_PS // grade.tck_ps
    arithmetic["tREFI"] = (
        f"{_TREFI_PS / 1000:g} ns / {grade.tck_ps / 1000:g} ns = "
        f"{_TREFI_PS / grade.tck_ps:g} down = {refi} nCK"
    )
    clocks = {"t_" + name[1:].lower(): m.clocks(grade.tck_ps) for name, m in minima.items()}
    return DramTiming(
        speed=grade,
        density=density,
        width=width,
        cl=cl,
        cwl=cwl,
        t_refi=refi,
        calibration_interval=_CALIBRATION_PS // grade.tck_ps,
        arithmetic=MappingProxyType(arithmetic),
        **clocks,
    )
