"""Rate of a card's drive, to which compute rates are compared."""

from dataclasses import dataclass

from nearstep_spec.platform.load import load

__all__ = ["CLOCK_HZ", "DriveRate", "drive_rate"]

CLOCK_HZ = 200_000_000  # nominal clock of rates; no timing claim


@dataclass(frozen=True)
class DriveRate:
    """Bytes a second that a card's drive reads and writes, and the origin of these figures."""

    read: float
    write: float
    origin: str

    def beside(self, bytes_per_s: float) -> str:
        """Format a rate, and its ratio to the drive's."""
        return (
            f"{bytes_per_s / 1e9:.2f} GB/s, {bytes_per_s / self.read:.2f} times what a drive "
            f"reads ({self.read / 1e9:.2f} GB/s, {self.origin}) and "
            f"{bytes_per_s / self.write:.2f} times what it writes ({self.write / 1e9:.2f})"
        )


def drive_rate() -> DriveRate:
    """Rate of a SmartSSD's drive.

    Ref: Smart-Infinity, figure 14.
    """
    drive = load("smart-infinity").drives["ssd0"]
    read, write = drive.read_bytes_per_s, drive.write_bytes_per_s
    assert read is not None  # in the description that is shipped
    assert write is not None
    return DriveRate(float(read), float(write), read.origin)
