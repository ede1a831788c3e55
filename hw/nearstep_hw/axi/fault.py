"""Report of a mover on an error response of the bus."""

from amaranth.lib.wiring import Out, Signature

from nearstep_hw.axi.burst import id_width
from nearstep_hw.axi.signature import Response


class BusFaultSignature(Signature):
    """A response other than OKAY.

    Parameters
    ----------
    streams : number of streams.
    address_width : bits of a byte address.

    Members
    -------
    valid : a fault in this cycle; qualifies the others.
    stream : stream of the access.
    address : byte address of the access.
    response : RRESP or BRESP.
    """

    def __init__(self, *, streams: int, address_width: int) -> None:
        super().__init__(
            {
                "valid": Out(1),
                "stream": Out(id_width(streams)),
                "address": Out(address_width),
                "response": Out(Response),
            }
        )
