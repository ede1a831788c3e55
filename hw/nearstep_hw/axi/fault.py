"""What a mover says when the bus answers with an error."""

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
    stream : the stream that was answered.
    address : byte address of what was answered.
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
