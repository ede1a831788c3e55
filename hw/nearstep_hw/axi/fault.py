"""Report of a mover on an error response of the bus."""

from amaranth.lib.wiring import Out, Signature

from nearstep_hw.axi.burst import id_width
from nearstep_hw.axi.signature import Response


class BusFaultSignature(Signature):
    """One answer other than OKAY.

    Parameters
    ----------
    streams : number of streams.
    address_width : bits of a byte address.

    Members
    -------
    valid : in this cycle; the others count only then.
    stream : of the answer.
    address : byte address of the answered access.
    response : the answer.
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
