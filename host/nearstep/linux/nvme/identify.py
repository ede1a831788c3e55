"""Data structures of Identify and of log pages that concern the whole controller."""

from __future__ import annotations

import struct
import uuid
from collections.abc import Iterable, Sequence

from nearstep.linux.nvme.namespace import FAMILY, DriveNamespace, Namespace
from nearstep.linux.nvme.standard import (
    MDTS,
    Choice,
    CommandSet,
    Status,
    StatusError,
    require,
)

IDENTIFY_BYTES = 4096
SUBSYSTEM = "nqn.2014-08.org.nvmexpress:uuid:"
EVENT_REQUESTS = 4
SUPPORTED = 1
"""CSUPP of the commands supported and effects log, LSUPP of the supported log pages."""

DATA_UNIT_BYTES = 512_000
"""Of SMART: thousands of 512 bytes, rounded up."""

Namespaces = Sequence[Namespace]


def controller_data(
    namespaces: Namespaces, version: int, vendor: tuple[int, int], serial: str
) -> bytes:
    """Identify Controller (CNS 01h)."""
    data = bytearray(IDENTIFY_BYTES)
    struct.pack_into("<HH20s40s8sB", data, 0, *vendor, serial.encode().ljust(20),
                     b"nearstep card".ljust(40), b"0.1".ljust(8), 6)  # fmt: skip
    struct.pack_into("<BHI", data, 77, MDTS, 1, version)  # MDTS, CNTLID, VER
    struct.pack_into("<II", data, 84, 1_000_000, 1_000_000)  # RTD3R, RTD3E: 1 s
    data[111] = 1  # I/O controller
    struct.pack_into("<HBBBBBB", data, 256, 0, 3, EVENT_REQUESTS - 1, 3, 0b110, 0, 0)
    struct.pack_into("<HH", data, 266, 0x157, 0x175)  # WCTEMP, CCTEMP
    struct.pack_into("<BBHIHHBBHHB", data, 512, 0x66, 0x44, 0, len(namespaces), 0, 0, 0, 7,
                     0, 0, 0)  # fmt: skip
    struct.pack_into("<256s", data, 768, f"{SUBSYSTEM}{uuid.uuid5(FAMILY, serial)}".encode())
    struct.pack_into("<H", data, 2048, 2500)  # 25 W
    return bytes(data)


def descriptors(namespace: Namespace) -> bytes:
    """Namespace identification descriptors (CNS 03h): UUID and command set.

    Linux ignores a namespace without the latter.
    """
    return (
        struct.pack("<BBH", 3, 16, 0) + namespace.uuid
        + struct.pack("<BBHB", 4, 1, 0, namespace.command_set)
    )  # fmt: skip


def independent(namespace: Namespace) -> bytes:
    """I/O command set independent Identify Namespace (CNS 08h): ready, in reachability group 0."""
    data = bytearray(24)
    data[14] = 1  # NSTAT.NRDY
    return bytes(data)


def combinations(namespaces: Namespaces) -> bytes:
    """I/O command set combinations (CNS 1Ch): the only one has all that the namespaces need."""
    return struct.pack("<Q", sum(1 << kind for kind in {e.command_set for e in namespaces}))


def identify(namespaces: Namespaces, cns: int, number: int, command_set: int, head: bytes) -> bytes:
    """Data of Identify, without trailing zeros.

    Parameters
    ----------
    namespaces : those of the enabled command sets, by NSID.
    number : NSID.
    command_set : CSI.
    head : `controller_data`.

    Raises
    ------
    StatusError : an unknown structure, namespace or command set.
    """
    by_number = {each.number: each for each in namespaces}
    if cns in (0x02, 0x07):
        require(number < 0xFFFFFFFE, Status.INVALID_NAMESPACE)
        wanted = [
            each.number
            for each in namespaces
            if each.number > number and (cns == 0x02 or each.command_set == command_set)
        ]
        return struct.pack(f"<{len(wanted)}I", *wanted)
    if cns == 0x01:
        return head
    if cns == 0x06:
        # CSI 0 has no limits beyond MDTS; no list of fields is known for CSI 3 and 4: zeros.
        require(command_set in set(CommandSet), Status.INVALID_COMMAND_SET)
        return b""
    if cns == 0x1C:
        return combinations(namespaces)
    require(cns in (0x00, 0x03, 0x05, 0x08))
    require(number in by_number, Status.INVALID_NAMESPACE)
    namespace = by_number[number]
    if cns == 0x03:
        return descriptors(namespace)
    if cns == 0x08:
        return independent(namespace)
    if cns == 0x05:
        require(namespace.command_set == command_set, Status.INVALID_COMMAND_SET)
        return namespace.identification
    if not isinstance(namespace, DriveNamespace):
        raise StatusError(Choice.IDENTIFIES_OTHERS)
    return namespace.identify_blocks()


def effects(admin: Iterable[int], io: Iterable[int]) -> bytes:
    """Commands supported and effects (LID 05h): supported, without effects on others."""
    data = bytearray(IDENTIFY_BYTES)
    for first, opcodes in ((0, admin), (1024, io)):
        for opcode in opcodes:
            data[first + 4 * opcode] = SUPPORTED
    return bytes(data)


def supported_logs(identifiers: Iterable[int]) -> bytes:
    """Supported log pages (LID 00h)."""
    data = bytearray(1024)
    for identifier in identifiers:
        data[4 * identifier] = SUPPORTED
    return bytes(data)


def health(namespaces: Namespaces) -> bytes:
    """SMART / health information (LID 02h): 300 K, all spare capacity left, traffic of drives."""
    data = bytearray(512)
    struct.pack_into("<BHBBB", data, 0, 0, 300, 100, 10, 0)
    traffic = [each.traffic for each in namespaces if isinstance(each, DriveNamespace)]
    totals = (
        sum(-(-each.read_bytes // DATA_UNIT_BYTES) for each in traffic),
        sum(-(-each.written_bytes // DATA_UNIT_BYTES) for each in traffic),
        sum(each.reads for each in traffic),
        sum(each.writes for each in traffic),
    )
    for number, total in enumerate((*totals, 0, 1)):  # busy time, power cycles
        struct.pack_into("<Q", data, 32 + 16 * number, total)
    return bytes(data)
