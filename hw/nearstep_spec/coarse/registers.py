"""Registers of a COARSE memory device, as a function of its configuration."""

from nearstep_spec.coarse.config import (
    ELEMENT_BITS,
    FRAME_PHITS,
    PAGE_COUNT_BITS,
    PORTS,
    CoarseConfig,
)
from nearstep_spec.csr.block import block_map, register, value_register, value_registers
from nearstep_spec.csr.model import BLOCK_BYTES, Access, Kind, NamedValue, RegisterMap
from nearstep_spec.updater.registers import adam_kernel_map

SYNC_IDENT = int.from_bytes(b"SYNC", "big")
DEVICE_IDENT = int.from_bytes(b"POOL", "big")
VERSION = (1, 0)
UPDATER = "updater"  # the block of the update kernel
RETRY_CYCLES = 1 << 12
"""Default of `retry`: cycles after which entries are sent again."""


class ErrorCause(NamedValue):
    """`error.cause` of both blocks: the reason why the jobs of a device ended."""

    NONE = 0, "No error."
    READ_RESPONSE = 1, "A read of the local DRAM was answered other than OKAY."
    WRITE_RESPONSE = 2, "A write of the local DRAM was answered other than OKAY."
    WINDOW = 3, "Source or destination lie outside the window; nothing was read or written."
    ALIGNMENT = 4, "Source or destination do not start on a memory beat."
    OVERLAP = 5, "Source and destination overlap: the old values would be lost."
    UNSUPPORTED = 6, "An operation, wire format or ring that this device does not have."
    MISMATCH = 7, "The device before this one in the ring has another job."
    SILENT = 8, "No valid frame was received from a link for longer than the limit."
    PEER = 9, "Another device ended its jobs; error_link has its number and the cause."
    ABORTED = 10, "The host ended the jobs."


class Stream(NamedValue):
    """`error.stream` of both blocks: the stream with the error."""

    NONE = 0, "No stream."
    SOURCE = 1, "Elements in."
    DESTINATION = 2, "Elements out."
    RECEIVE = 3, "Entries in."
    LINK0 = 4, "Link 0."
    LINK1 = 5, "Link 1."


class ReduceOp(NamedValue):
    """`job.operation`."""

    SUM = 0, "Sum of all devices."
    AVERAGE = 1, "Sum, times scale, rounded once more."
    MAX = 2, "Greatest of all devices; NaN if there is one; +0 is greater than -0."


class Wire(NamedValue):
    """`job.wire`: format of elements on a link; elements are rounded at every hop."""

    FP32 = 0, "binary32."
    FP16 = 1, "binary16."
    BF16 = 2, "bfloat16."


SYNC_COUNTERS = {
    "cycles": "Cycles in which a job was running.",
    "beats": "Beats of the ALUs.",
    "stall_local": "Cycles in which the ALUs waited for elements of the local DRAM.",
    "stall_receive": "Cycles in which the ALUs waited for an entry.",
    "stall_send": "Cycles in which the ALUs waited for space in SendBuf.",
    "stall_write": "Cycles in which the ALUs waited for the local DRAM to take results.",
}
LINK_COUNTERS = {
    "sent_phits": "Phits sent.",
    "payload_phits": "Phits of entries among them, those sent again included.",
    "replays": "Entries sent again.",
    "received_entries": "Entries accepted.",
    "bad_frames": "Frames with a wrong CRC, or cut short.",
    "gaps": "Gaps: times that an entry was received after a lost one.",
    "duplicates": "Entries that had been accepted before.",
    "stall": "Cycles in which a phit waited for the link.",
}
SNAPSHOT_COUNTERS = {"pages_copied": "Pages copied.", "stall": "Cycles in which a write waited."}


def sync_core_map(config: CoarseConfig) -> RegisterMap:
    """The register map of one sync core. START puts a job into its queue, busy or not."""
    wires, exact = (
        sum(1 << Wire[name.upper()] for name in names)
        for names in (config.wire_formats, config.exact)
    )
    exact_formats = ("exact", 28, 4, "A bit for each value of job.wire with exact sums.", exact)
    return block_map(
        "sync",
        doc="A sync core and its queue of jobs (COARSE paper, section IV-A).",
        ident=SYNC_IDENT,
        version=VERSION,
        capabilities=[
            ("alus", 0, 8, "FP32 lanes.", config.alus),
            ("queue_jobs", 8, 16, "Jobs that can wait.", config.queue_jobs),
            ("wire_formats", 24, 4, "A bit for each value of job.wire that is supported.", wires),
            *([exact_formats] if config.exact else []),
        ],
        configuration=[
            ("entry_phits", 0, 16, "Phits of a full entry.", config.entry_phits),
            ("buffer_entries", 16, 8, "Entries of each buffer.", config.buffer_entries),
            ("chunks_ahead", 24, 8, "Interleaved chunks.", config.chunks_ahead),
        ],
        causes=ErrorCause,
        streams=Stream,
        queued=True,
        lines=[
            [*_JOB, *(_ADDENDS if config.exact else [])],
            [_RING],
            _QUEUE,
            value_registers(Access.COUNTER, SYNC_COUNTERS),
        ],
    )


def device_map(config: CoarseConfig) -> RegisterMap:
    """The register map of the parts shared by the sync cores of a device: links, window and
    snapshot.

    START opens a snapshot. `control.abort` ends all jobs, clears all entries and errors, and adopts
    the epoch; the snapshot is kept.
    """
    return block_map(
        "pool",
        doc="Links, window and snapshot of a memory device (COARSE paper, section IV-A).",
        ident=DEVICE_IDENT,
        version=VERSION,
        capabilities=[
            ("groups", 0, 8, "Sync cores.", config.groups),
            ("ports", 8, 8, "Links.", PORTS),
            ("frame_phits", 16, 8, "Phits of a frame beside its entry.", FRAME_PHITS),
        ],
        configuration=[
            ("address_width", 0, 8, "Bits of a memory address.", config.address_width),
            ("snapshot_pages", 8, 24, "Most pages of a snapshot.", config.snapshot_pages),
        ],
        causes=ErrorCause,
        streams=Stream,
        queued=True,
        lines=[
            value_registers(Access.CONFIG, _WINDOW, prefix="window_", locked=True),
            _LINK,
            _SNAPSHOT,
            *(
                value_registers(
                    Access.COUNTER, LINK_COUNTERS, prefix=f"link{port}_", at=("links", port)
                )
                for port in range(PORTS)
            ),
            value_registers(Access.COUNTER, SNAPSHOT_COUNTERS, prefix="snapshot_"),
        ],
    )


def device_maps(config: CoarseConfig) -> dict[str, tuple[int, RegisterMap]]:
    """Register blocks of a device: name to offset in bytes and register map."""
    core = sync_core_map(config)
    maps = {
        "pool": (0, device_map(config)),
        **{f"sync{group}": ((1 + group) * BLOCK_BYTES, core) for group in range(config.groups)},
    }
    if config.updater is not None:
        maps[UPDATER] = ((1 + config.groups) * BLOCK_BYTES, adam_kernel_map(config.updater))
    return maps


def register_bytes(config: CoarseConfig) -> int:
    """Register space of a device, a power of two; that of the next device follows in a pool."""
    return 1 << (len(device_maps(config)) * BLOCK_BYTES - 1).bit_length()


_JOB = [
    *value_registers(
        Access.CONFIG,
        {
            "source": "Byte address of this device's elements: fp32.",
            "destination": "Byte address of the result; the source is not changed.",
        },
    ),
    value_register("elements", Access.CONFIG, "Elements; any number.", width=ELEMENT_BITS),
    value_register("scale", Access.CONFIG, "Factor of an average.", kind=Kind.FLOAT32),
    register(
        "job",
        Access.CONFIG,
        "Further fields of the job; equal on all devices of a ring.",
        ("operation", 0, 2, "Operation on the elements of all devices.", ReduceOp),
        ("wire", 2, 2, "Format on the links.", Wire),
        ("tag", 16, 16, "Number of the job, equal on all devices."),
    ),
]
_ADDENDS = [
    value_register(
        "stride", Access.CONFIG, "Bytes from an array of this device to the next.", width=64
    ),
    register(
        "addends",
        Access.CONFIG,
        "Exact sum: rounded once, to the wire format; equal on all devices of a ring.",
        ("count", 0, 16, "Arrays of each device; in all devices at most 1024."),
        ("divisor", 16, 16, "The sum is divided by it; 0: not an exact sum."),
    ),
]
_RING = register(
    "ring",
    Access.CONFIG,
    "Place of the core in its ring.",
    ("members", 0, 8, "Devices of the ring, at least 2.", 2),
    ("position", 8, 8, "Number of this device, in the order of sending."),
    ("send_port", 16, 1, "Link to the next device."),
    ("receive_port", 17, 1, "Link from the previous device."),
    locked=True,
)
_QUEUE = [
    register(
        "jobs",
        Access.STATUS,
        "State of the queue.",
        ("waiting", 0, 16, "Jobs in the queue, without the running one."),
        ("overflow", 16, 1, "A job was dropped because the queue was full."),
        ("tag", 17, 15, "Low bits of the tag of the running or last job."),
    ),
    value_register("completed", Access.STATUS, "Jobs completed since the last abort."),
]
_WINDOW = {
    "base": "First byte of the window that jobs may access.",
    "limit": "First byte behind the window.",
}
_LINK = [
    register(
        "link",
        Access.CONFIG,
        "Settings of both links.",
        ("device", 0, 8, "Number of this device, for error_link of others."),
        ("epoch", 8, 4, "Frames of another epoch are dropped; adopted at an abort."),
        ("used", 16, PORTS, "A bit for each link that has a peer."),
    ),
    value_register(
        "silence_limit",
        Access.CONFIG,
        "Cycles without a valid frame after which a peer is dead; 0: never.",
        reset=1 << 16,
    ),
    value_register(
        "keepalive",
        Access.CONFIG,
        "Cycles without a frame after which one is sent.",
        reset=1 << 10,
    ),
    value_register(
        "retry",
        Access.CONFIG,
        "Cycles without progress after which entries are sent again.",
        reset=RETRY_CYCLES,
    ),
    register(
        "error_link",
        Access.STATUS,
        "The device that detected the first fault.",
        ("cause", 0, 8, "Cause of the fault.", ErrorCause),
        ("device", 8, 8, "Number of the device."),
        ("port", 16, 1, "Link of the device with the fault, if any."),
    ),
]
_SNAPSHOT = [
    *value_registers(
        Access.CONFIG,
        {
            "snapshot_base": "First byte frozen; starts a page.",
            "snapshot_area": "Area to which a page is copied before it changes, "
            "at its offset; starts a page.",
        },
    ),
    value_register("snapshot_pages", Access.CONFIG, "Pages frozen."),
    register(
        "snapshot_control",
        Access.PULSE,
        "Closes a snapshot; START opens one.",
        ("close", 0, 1, "Writing 1 closes the snapshot."),
    ),
    register(
        "snapshot",
        Access.STATUS,
        "State of the snapshot.",
        ("open", 0, 1, "Pages are copied before they change."),
        ("failed", 1, 1, "A copy failed: the snapshot is incomplete."),
        ("taken", 4, PAGE_COUNT_BITS, "Pages marked in snapshot_copied; wraps."),
        ("written", 16, PAGE_COUNT_BITS, "Marked pages completely copied to the area; wraps."),
    ),
    register(
        "page",
        Access.CONFIG,
        "The pages that snapshot_copied shows.",
        ("number", 0, 32, "Number of the first page, divided by 32."),
    ),
    value_register(
        "snapshot_copied",
        Access.STATUS,
        "Bit i: page 32 * page.number + i is in the area, or will be when written equals taken.",
    ),
]
