"""What the drive of a card can move: the measure of what computes beside it."""

from dataclasses import dataclass

from nearstep_spec.platform.load import load

__all__ = ["CLOCK_HZ", "DriveRate", "drive_rate"]

CLOCK_HZ = 200_000_000  # what rates are given for; no timing is claimed by it


@dataclass(frozen=True)
class DriveRate:
    """Bytes a second between a drive and its card, one way, and where that is from."""

    bytes_per_s: float
    source: str

    def beside(self, bytes_per_s: float) -> str:
        """A rate, and how often the drive's it is."""
        return (
            f"{bytes_per_s / 1e9:.2f} GB/s, {bytes_per_s / self.bytes_per_s:.2f} times what the "
            f"link of a drive carries ({self.bytes_per_s / 1e9:.2f} GB/s, {self.source})"
        )


def drive_rate() -> DriveRate:
    """That of a SmartSSD's drive: of its link, because the drive's own is in a picture alone.

    Ref: Smart-Infinity, section VII-A and figure 14.
    """
    figure = load("smart-infinity").links["card-ssd0"].bytes_per_s
    return DriveRate(float(figure), f"{figure.origin}: PCIe 3.0 x 4")
