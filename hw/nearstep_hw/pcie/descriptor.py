"""Descriptors of the completer streams."""

from amaranth import unsigned
from amaranth.lib import data, enum

DESCRIPTOR_DWORDS = 4  # of a request
COMPLETION_DWORDS = 3  # of a completion's descriptor
REQUEST_COPY_DWORDS = 5  # behind the descriptor of a completion that is not successful
MAX_REQUEST_DWORDS = 1024
MAX_PAYLOAD_BYTES = 1024  # of the hard block


class RequestType(enum.Enum, shape=4):
    """Request types of the CQ descriptor."""

    MEMORY_READ = 0
    MEMORY_WRITE = 1
    IO_READ = 2
    IO_WRITE = 3
    FETCH_ADD = 4
    SWAP = 5
    COMPARE_AND_SWAP = 6
    LOCKED_READ = 7
    MESSAGE = 12
    VENDOR_MESSAGE = 13
    ATS_MESSAGE = 14


class Status(enum.Enum, shape=3):
    """Completion status."""

    SUCCESSFUL = 0
    UNSUPPORTED_REQUEST = 1
    COMPLETER_ABORT = 4


RequestDescriptor = data.StructLayout(
    {
        "address_type": unsigned(2),
        "address": unsigned(62),  # of dwords
        "dwords": unsigned(11),
        "request_type": unsigned(4),
        "_reserved0": unsigned(1),
        "requester_id": unsigned(16),
        "tag": unsigned(8),
        "function": unsigned(8),
        "bar": unsigned(3),
        "aperture": unsigned(6),
        "traffic_class": unsigned(3),
        "attributes": unsigned(3),
        "_reserved1": unsigned(1),
    }
)
"""The 128 bits in front of a request. Ref: PG213, "Completer Request Descriptor Formats"."""

CompletionDescriptor = data.StructLayout(
    {
        "lower_address": unsigned(7),
        "_reserved0": unsigned(1),
        "address_type": unsigned(2),
        "_reserved1": unsigned(6),
        "byte_count": unsigned(13),
        "locked": unsigned(1),
        "_reserved2": unsigned(2),
        "dwords": unsigned(11),
        "status": Status,
        "poisoned": unsigned(1),
        "_reserved3": unsigned(1),
        "requester_id": unsigned(16),
        "tag": unsigned(8),
        "function": unsigned(8),
        "bus": unsigned(8),
        "completer_id_enable": unsigned(1),
        "traffic_class": unsigned(3),
        "attributes": unsigned(3),
        "force_ecrc": unsigned(1),
    }
)
"""The 96 bits in front of a completion. Ref: PG213, "Completer Completion Descriptor Format"."""

RequestSideband = data.StructLayout(
    {
        "first_be": unsigned(4),
        "last_be": unsigned(4),
        "tph_present": unsigned(1),
        "tph_type": unsigned(2),
        "_reserved0": unsigned(5),
        "tph_st_tag": unsigned(8),
        "_reserved1": unsigned(8),
    }
)
"""The TUSER bits of a request that an unsuccessful completion returns.

Ref: PG213, "Completions with Error Status (UR and CA)".
"""
