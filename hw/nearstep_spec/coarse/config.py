"""Configuration of a COARSE memory device: plain data."""

from dataclasses import dataclass
from typing import Annotated

from nearstep_spec.codec import Option
from nearstep_spec.rule.rules import BY_RULE
from nearstep_spec.updater.config import ELEMENT_BYTES, ConfigError, UpdateKernelConfig

BEAT_BYTES = 64  # of the local DRAM's port
BEAT_ELEMENTS = BEAT_BYTES // ELEMENT_BYTES
PAGE_BYTES = 4096  # of a snapshot; no burst crosses a multiple
BURST_BEATS = 16
PAGE_COUNT_BITS = 12  # of counts of pages of a snapshot, which wrap
PHIT_BYTES = 16  # bytes that a link moves in a cycle, in each direction
FRAME_PHITS = 2  # of a frame with an entry, beside the entry: header and trailer
PORTS = 2  # links of a device
MAX_GROUPS = 4  # acknowledgements and credits in a header
MAX_DEVICES = 64
LEAST_UPDATED_BYTES = 1 << 16  # smallest memory that an update kernel can address
SEQUENCE_BITS = 6  # of entries, acknowledgements and credits: modulo 64
ELEMENT_BITS = 32  # of the number of elements of a job
TAG_BITS = 16  # of the number of a job, equal on all devices
MAX_ADDENDS = 1 << 10  # of an exact sum, for which accumulators are wide enough
WIRE_FORMATS = {"fp32": 4, "fp16": 2, "bf16": 2}
"""Formats of elements on a link, and their bytes."""

_UPDATER = "_updater"


@dataclass(frozen=True, kw_only=True)
class CoarseConfig:
    """Shape of a memory device: its sync cores, their buffers, its DRAM.

    A tensor of fp32 is cut into chunks of one entry for each device of the ring; an entry is the
    unit of the ring buffers and the payload of a frame. A frame has two phits beside its entry, so
    that with the defaults 128 of 130 phits are payload.

    Parameters
    ----------
    groups : sync cores, each in its own ring; adjacent rings run in opposite directions.
    alus : FP32 lanes of a sync core: elements that it adds in a cycle.
    entry_phits : payload of a full entry, in phits of 16 bytes; a power of two.
    buffer_entries : entries of each RecvBuf and each SendBuf; a power of two.
    local_beats : beats of each LocalBuf, 64 bytes each; a power of two.
    chunks_ahead : chunks with interleaved entries, so that a link does not wait for an entry to
        pass the ring.
    queue_jobs : jobs that wait for each sync core; a power of two.
    snapshot_pages : most pages of a snapshot, 4096 bytes each; a power of two.
    memory_bytes : local DRAM; a power of two.
    wire_formats : formats that elements can have on a link, of fp32, fp16 and bf16.
    exact : formats of exact sums, of `wire_formats`.
    rules : update rules of the device's update kernel, as of `UpdateKernelConfig`; none: the device
        has no kernel. With rules its memory must have at least 64 KiB.

    Raises
    ------
    ConfigError : with the value and what is allowed.

    Ref: COARSE paper, sections III-D, IV-A and figure 11.
    """

    groups: Annotated[
        int,
        Option(
            meaning="sync cores of a device, each in its own ring",
            allowed="a power of two from 1 to 4",
        ),
    ] = 2
    alus: Annotated[
        int, Option(meaning="fp32 lanes of a sync core", allowed="a power of two from 4 to 16")
    ] = 8
    entry_phits: Annotated[
        int,
        Option(
            meaning="payload of an entry, in phits of 16 bytes",
            allowed="a power of two from 4 to 256",
        ),
    ] = 128
    buffer_entries: Annotated[
        int,
        Option(
            meaning="entries of each RecvBuf and SendBuf", allowed="a power of two from 2 to 32"
        ),
    ] = 16
    local_beats: Annotated[
        int,
        Option(
            meaning="beats of each LocalBuf, 64 bytes each",
            allowed="a power of two from 32 to 1024",
        ),
    ] = 128
    chunks_ahead: Annotated[
        int,
        Option(
            meaning="interleaved chunks, so that a link does not wait",
            allowed="1 to 2 buffer_entries - 2",
        ),
    ] = 8
    queue_jobs: Annotated[
        int,
        Option(meaning="jobs that wait for each sync core", allowed="a power of two from 1 to 256"),
    ] = 8
    snapshot_pages: Annotated[
        int,
        Option(
            meaning="most pages of a snapshot, 4 KiB each, on each device",
            allowed="a power of two from 1 to 2**20",
        ),
    ] = 4096
    memory_bytes: Annotated[
        int,
        Option(
            meaning="of each device; host memory is allocated on first use",
            allowed="a power of two from 4096 to 2**40",
        ),
    ] = 64 << 20
    wire_formats: Annotated[
        tuple[str, ...],
        Option(
            meaning="formats of elements on a link",
            choices=tuple(WIRE_FORMATS),
            allowed="fp32 the first",
        ),
    ] = ("fp32", "fp16", "bf16")
    exact: Annotated[
        tuple[str, ...],
        Option(
            meaning="formats of exact sums",
            choices=tuple(WIRE_FORMATS),
            allowed="of wire_formats",
            unset="none",
            optional=True,
        ),
    ] = ()
    rules: Annotated[
        tuple[str, ...],
        Option(
            meaning="update rules of each device's update kernel",
            choices=tuple(BY_RULE),
            allowed="or FILE.py:NAME",
            unset="no kernel",
        ),
    ] = ()

    def __post_init__(self) -> None:
        self._power_of_two("groups", 1, MAX_GROUPS)
        self._power_of_two("alus", 4, BEAT_ELEMENTS)
        self._power_of_two("entry_phits", BEAT_BYTES // PHIT_BYTES, 256)
        self._power_of_two("buffer_entries", 2, 1 << (SEQUENCE_BITS - 1))
        self._power_of_two("local_beats", 2 * BURST_BEATS, 1024)
        self._power_of_two("queue_jobs", 1, 256)
        self._power_of_two("snapshot_pages", 1, 1 << 20)
        self._power_of_two("memory_bytes", PAGE_BYTES, 1 << 40)
        # Space of all entries of a turn on the way to the next core, and of the job's description.
        most = 2 * self.buffer_entries - 2
        if not 1 <= self.chunks_ahead <= most:
            raise ConfigError(
                f"chunks_ahead must be from 1 to {most} with buffer_entries "
                f"{self.buffer_entries}, not {self.chunks_ahead!r}"
            )
        if self.wire_formats[:1] != ("fp32",) or not set(self.wire_formats) <= set(WIRE_FORMATS):
            raise ConfigError(
                f"wire_formats must be fp32 and any of fp16, bf16, not {self.wire_formats!r}"
            )
        if not set(self.exact) <= set(self.wire_formats):
            raise ConfigError(f"exact must be of {self.wire_formats}, not {self.exact!r}")
        object.__setattr__(self, _UPDATER, self._make_updater())

    def _make_updater(self) -> UpdateKernelConfig | None:
        if self.rules == ():
            return None
        if self.memory_bytes < LEAST_UPDATED_BYTES:
            raise ConfigError(
                f"memory_bytes must be at least {LEAST_UPDATED_BYTES} with rules, "
                f"not {self.memory_bytes!r}"
            )
        return UpdateKernelConfig(
            rules=self.rules, address_width=self.address_width, gradient_scale=True
        )

    def _power_of_two(self, name: str, low: int, high: int) -> None:
        value = getattr(self, name)
        if not isinstance(value, int) or value & (value - 1) or not low <= value <= high:
            raise ConfigError(f"{name} must be a power of two from {low} to {high}, not {value!r}")

    @property
    def updater(self) -> UpdateKernelConfig | None:
        """The update kernel of the device; None without rules."""
        found: UpdateKernelConfig | None = vars(self)[_UPDATER]
        return found

    @property
    def entry_bytes(self) -> int:
        """Payload of a full entry."""
        return self.entry_phits * PHIT_BYTES

    @property
    def address_width(self) -> int:
        """Bits of a byte address of the local DRAM."""
        return max(self.memory_bytes.bit_length() - 1, 13)

    def entry_beats(self, wire: str) -> int:
        """Memory beats of fp32 whose elements fill an entry in format `wire`."""
        return self.entry_bytes // WIRE_FORMATS[wire] // BEAT_ELEMENTS

    def entry_elements(self, wire: str) -> int:
        """Elements that fill an entry in format `wire`."""
        return self.entry_bytes // WIRE_FORMATS[wire]
