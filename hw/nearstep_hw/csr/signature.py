"""The register port, between a bus adapter and a bank."""

from amaranth.lib.wiring import In, Out, Signature

from nearstep_spec.csr.model import ADDRESS_WIDTH, WORD_BITS, WORD_BYTES


class CsrSignature(Signature):
    """A port for one 32-bit access at a time, answered in a later cycle.

    In a cycle with `read` or `write` high the initiator makes a request; one cycle or more
    later `ack` is high, with `error` and, for a read, `read_data`. The initiator makes no
    request up to and in the cycle of an `ack`, so that the effects of a write are visible to
    the next request. `read` and `write` are never high together.

    *Timing*: that of the target, at best a request every two cycles.

    Parameters
    ----------
    address_width : bits of a byte address: of one block, or of several consecutive blocks.

    Members
    -------
    address : byte address within the block; the two low bits are ignored.
    read, write : request strobes.
    write_data, write_mask : word to write, and one bit for each of its bytes. The bank writes
        whole words: a mask other than all ones is an error, and nothing is written.
    ack : the response is valid.
    error : unmapped address, write of a read-only register, partial write, or write refused
        because the block is busy. Nothing was changed.
    read_data : word read; 0 with an error.
    """

    def __init__(self, address_width: int = ADDRESS_WIDTH) -> None:
        self.address_width = address_width
        super().__init__(
            {
                "address": Out(address_width),
                "read": Out(1),
                "write": Out(1),
                "write_data": Out(WORD_BITS),
                "write_mask": Out(WORD_BYTES),
                "ack": In(1),
                "error": In(1),
                "read_data": In(WORD_BITS),
            }
        )
