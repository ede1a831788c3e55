"""Registers of a COARSE memory device, as a function of its configuration."""

from nearstep_spec.coarse.config import (
    ELEMENT_BITS,
    FRAME_PHITS,
    PAGE_COUNT_BITS,
    PORTS,
    CoarseConfig,
)
from nearstep_spec.csr.block import block_map, constant_field, value_register
from nearstep_spec.csr.model import (
    BLOCK_BYTES,
    Access,
    Field,
    Kind,
    NamedValue,
    Register,
    RegisterMap,
)
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


class Operation(NamedValue):
    """`job.operation`."""

    SUM = 0, "Sum of all devices."
    AVERAGE = 1, "Sum, times scale, rounded once more."
    MAX = 2, "Greatest of all devices; NaN if there is one; +0 is greater than -0."


class Wire(NamedValue):
    """`job.wire`: format of elements on a link. They are rounded at every hop."""

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


def sync_core_map(config: CoarseConfig) -> RegisterMap:
    """The register map of one sync core. START puts a job into its queue, busy or not."""
    return block_map(
        "sync",
        doc="A sync core and its queue of jobs (COARSE paper, section IV-A).",
        ident=SYNC_IDENT,
        version=VERSION,
        capabilities=[
            constant_field("alus", 0, 8, config.alus, "FP32 lanes."),
            constant_field("queue_jobs", 8, 16, config.queue_jobs, "Jobs that can wait."),
            constant_field(
                "wire_formats",
                24,
                4,
                sum(1 << Wire[name.upper()] for name in config.wire_formats),
                "A bit for each value of job.wire that is supported.",
            ),
        ],
        configuration=[
            constant_field("entry_phits", 0, 16, config.entry_phits, "Phits of a full entry."),
            constant_field(
                "buffer_entries", 16, 8, config.buffer_entries, "Entries of each buffer."
            ),
            constant_field("chunks_ahead", 24, 8, config.chunks_ahead, "Interleaved chunks."),
        ],
        causes=ErrorCause,
        streams=Stream,
        queued=True,
        lines=[_job(), _ring(), _queue(), _counters(SYNC_COUNTERS)],
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
            constant_field("groups", 0, 8, config.groups, "Sync cores."),
            constant_field("ports", 8, 8, PORTS, "Links."),
            constant_field("frame_phits", 16, 8, FRAME_PHITS, "Phits of a frame beside its entry."),
        ],
        configuration=[
            constant_field(
                "address_width", 0, 8, config.address_width, "Bits of a memory address."
            ),
            constant_field(
                "snapshot_pages", 8, 24, config.snapshot_pages, "Most pages of a snapshot."
            ),
        ],
        causes=ErrorCause,
        streams=Stream,
        queued=True,
        lines=[
            _window(),
            _link(),
            _snapshot(),
            *(_counters(LINK_COUNTERS, f"link{port}_", ("links", port)) for port in range(PORTS)),
            _counters(
                {"pages_copied": "Pages copied.", "stall": "Cycles that a write waited."},
                "snapshot_",
            ),
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


def _config(name: str, lsb: int, width: int, doc: str, reset: int = 0) -> Field:
    return Field(name=name, access=Access.CONFIG, lsb=lsb, width=width, reset=reset, doc=doc)


def _status(name: str, lsb: int, width: int, doc: str) -> Field:
    return Field(name=name, access=Access.STATUS, lsb=lsb, width=width, doc=doc)


def _job() -> list[Register]:
    return [
        value_register(
            "source", Access.CONFIG, "Byte address of this device's elements: fp32.", width=64
        ),
        value_register(
            "destination",
            Access.CONFIG,
            "Byte address of the result; the source is not changed.",
            width=64,
        ),
        value_register("elements", Access.CONFIG, "Elements; any number.", width=ELEMENT_BITS),
        value_register("scale", Access.CONFIG, "Factor of an average.", kind=Kind.FLOAT32),
        Register(
            name="job",
            doc="Further fields of the job; equal on all devices of a ring.",
            fields=(
                Field(
                    name="operation",
                    access=Access.CONFIG,
                    width=2,
                    values=Operation,
                    doc="Operation on the elements of all devices.",
                ),
                Field(
                    name="wire",
                    access=Access.CONFIG,
                    lsb=2,
                    width=2,
                    values=Wire,
                    doc="Format on the links.",
                ),
                _config("tag", 16, 16, "Number of the job, equal on all devices."),
            ),
        ),
    ]


def _ring() -> list[Register]:
    return [
        Register(
            name="ring",
            doc="Place of the core in its ring.",
            locked=True,
            fields=(
                _config("members", 0, 8, "Devices of the ring, at least 2.", 2),
                _config("position", 8, 8, "Number of this one, in the order of sending."),
                _config("send_port", 16, 1, "Link to the next."),
                _config("receive_port", 17, 1, "Link from the one before."),
            ),
        )
    ]


def _queue() -> list[Register]:
    return [
        Register(
            name="jobs",
            doc="State of the queue.",
            fields=(
                _status("waiting", 0, 16, "Jobs in the queue, without the running one."),
                _status("overflow", 16, 1, "A job was dropped because the queue was full."),
                _status("tag", 17, 15, "Low bits of the tag of the running or last job."),
            ),
        ),
        value_register("completed", Access.STATUS, "Jobs completed since the last abort."),
    ]


def _counters(
    counters: dict[str, str], prefix: str = "", path: tuple[str | int, ...] = ()
) -> list[Register]:
    return [
        value_register(
            prefix + name, Access.COUNTER, doc, width=64, path=(*path, name) if path else ()
        )
        for name, doc in counters.items()
    ]


def _window() -> list[Register]:
    return [
        value_register(
            "window_base", Access.CONFIG, "First byte that jobs may touch.", width=64, locked=True
        ),
        value_register(
            "window_limit", Access.CONFIG, "First byte behind those.", width=64, locked=True
        ),
    ]


def _link() -> list[Register]:
    return [
        Register(
            name="link",
            doc="Settings of both links.",
            fields=(
                _config("device", 0, 8, "Number of this device, for error_link of others."),
                _config("epoch", 8, 4, "Frames of another epoch are dropped; adopted at an abort."),
                _config("used", 16, PORTS, "A bit for each link that has a peer."),
            ),
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
        Register(
            name="error_link",
            doc="The device that detected the first fault.",
            fields=(
                Field(
                    name="cause",
                    access=Access.STATUS,
                    width=8,
                    values=ErrorCause,
                    doc="Cause of the fault.",
                ),
                _status("device", 8, 8, "Its number."),
                _status("port", 16, 1, "Its link, if the fault is of one."),
            ),
        ),
    ]


def _snapshot() -> list[Register]:
    return [
        value_register(
            "snapshot_base", Access.CONFIG, "First byte frozen; starts a page.", width=64
        ),
        value_register(
            "snapshot_area",
            Access.CONFIG,
            "Area to which a page is copied before it changes, at its offset; starts a page.",
            width=64,
        ),
        value_register("snapshot_pages", Access.CONFIG, "Pages frozen."),
        Register(
            name="snapshot_control",
            doc="Closes a snapshot; START opens one.",
            fields=(
                Field(name="close", access=Access.PULSE, doc="Writing 1 closes the snapshot."),
            ),
        ),
        Register(
            name="snapshot",
            doc="State of the snapshot.",
            fields=(
                _status("open", 0, 1, "Pages are copied before they change."),
                _status("failed", 1, 1, "A copy failed: the snapshot is incomplete."),
                _status("taken", 4, PAGE_COUNT_BITS, "Pages marked in snapshot_copied; wraps."),
                _status(
                    "written",
                    16,
                    PAGE_COUNT_BITS,
                    "Of these, completely copied to the area; wraps.",
                ),
            ),
        ),
        Register(
            name="page",
            doc="The pages that snapshot_copied shows.",
            fields=(_config("number", 0, 32, "Number of the first of them, divided by 32."),),
        ),
        value_register(
            "snapshot_copied",
            Access.STATUS,
            "Bit i: page 32 * page.number + i is in the area, or will be when written equals "
            "taken.",
        ),
    ]
