"""Clock ratios and latencies of the DDR4 ports, as plain data."""

from nearstep_spec.dram.geometry import BEAT_BYTES
from nearstep_spec.dram.timing import BURST_CLOCKS, DramTiming, dram_timing

__all__ = [
    "HOST_COMMAND_DELAY",
    "HOST_DATA_BYTES",
    "HOST_PHASES",
    "HOST_READ_LATENCY",
    "HOST_WRITE_LATENCY",
    "HOST_WRITE_TO_READ",
    "LOOKAHEAD",
    "PHASES",
    "PHY_READ_DELAY",
    "PHY_WRITE_DELAY",
    "TPHY_RDLAT",
    "TPHY_WRLAT",
    "tphy_rdlat",
    "tphy_wrlat",
]

PHASES = 4  # an 800 MHz DRAM clock on a 200 MHz fabric
HOST_PHASES = 2  # the host's 400 MHz clock
HOST_DATA_BYTES = BEAT_BYTES // 2  # a host burst takes two fabric cycles

# Beats inside the controller: latency from a precharge after a write to the column, and 15 other
# banks. When the channel is released their commands are still issued.
LOOKAHEAD = 32

# Fabric cycles that the PHY adds between a write command and its data.
PHY_WRITE_DELAY = 0
PHY_READ_DELAY = 2  # fabric cycles of input capture and clock crossing


def tphy_wrlat(timing: DramTiming, phases: int = PHASES) -> int:
    """Fabric cycles from a write command to its (first) `wrdata`: CWL rounded up."""
    return -(-timing.cwl // phases) + PHY_WRITE_DELAY


def tphy_rdlat(timing: DramTiming, phases: int = PHASES) -> int:
    """Fabric cycles from a read command to its (first) `rddata`: CL and the transfer of one cycle
    of data rounded up, and the PHY's own delay."""
    return -(-(timing.cl + min(phases, BURST_CLOCKS)) // phases) + PHY_READ_DELAY


TPHY_WRLAT = tphy_wrlat(dram_timing("DDR4-1600"))  # ceil(9 / 4) = 3
TPHY_RDLAT = tphy_rdlat(dram_timing("DDR4-1600"))  # ceil((11 + 4) / 4) + 2 = 6

HOST_COMMAND_DELAY = 2  # cycles from the host's pins to the DRAM's: a register at either end

HOST_READ_LATENCY = HOST_COMMAND_DELAY + TPHY_RDLAT + 1
"""Fabric cycles from a read command of the host to the first half of its data, always."""

HOST_WRITE_LATENCY = TPHY_WRLAT
"""Fabric cycles from a write command of the host to the first half of its data. The second half
arrives a cycle later and passes a register in another cycle, when the DRAM needs all data: two
cycles, the command's own delay.
"""


HOST_WRITE_TO_READ = -(-dram_timing("DDR4-1600").write_to_read_other_rank * HOST_PHASES // PHASES)
"""Host clocks from a write to a read of another rank of its channel, at least: four of the DRAM's.
On its own bus, with its latencies, a host needs none: the write's data have ended long before.
"""
