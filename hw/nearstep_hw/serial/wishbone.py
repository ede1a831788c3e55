"""A Wishbone port, from the initiator's side."""

from amaranth.lib.wiring import In, Out, Signature

from nearstep_spec.csr.model import WORD_BITS, WORD_BYTES

ADDRESS_BITS = 30  # of words: 4 GiB


class WishboneSignature(Signature):
    """Classic cycles of 32 bits, with the names of the standard, without bursts.

    Members
    -------
    adr : address in words.
    dat_w, dat_r : word to write, word read.
    sel : one bit for each byte.
    cyc, stb : a cycle is requested, until `ack` or `err`.
    we : the cycle writes.
    ack, err : the cycle has ended, or has failed.

    Ref: Wishbone B4, section 3.
    """

    def __init__(self) -> None:
        super().__init__(
            {
                "adr": Out(ADDRESS_BITS),
                "dat_w": Out(WORD_BITS),
                "dat_r": In(WORD_BITS),
                "sel": Out(WORD_BYTES),
                "cyc": Out(1),
                "stb": Out(1),
                "we": Out(1),
                "ack": In(1),
                "err": In(1),
            }
        )
