"""The fault that ended a run early, as in the error registers."""

from amaranth import Array, Module, Signal, Value, unsigned
from amaranth.lib import data

from nearstep_spec.updater.registers import STREAMS, ErrorCause

CAUSE_WIDTH = max(cause.value for cause in ErrorCause).bit_length()
STREAM_WIDTH = (STREAMS - 1).bit_length()
RESPONSE_WIDTH = 2
ADDRESS_WIDTH = 64


class FaultLayout(data.StructLayout):
    """Members as in the registers ERROR and ERROR_ADDRESS; `cause` 0 is no fault."""

    def __init__(self) -> None:
        super().__init__(
            {
                "cause": unsigned(CAUSE_WIDTH),
                "stream": unsigned(STREAM_WIDTH),
                "response": unsigned(RESPONSE_WIDTH),
                "address": unsigned(ADDRESS_WIDTH),
            }
        )


def mover_fault(
    m: Module, *, bus: object, refused: Value, burst: object, response: ErrorCause, streams: object
) -> Signal:
    """Return a `FaultLayout` signal: the error response of a mover's `bus`, else the refused
    `burst`.

    Parameters
    ----------
    m : module to add the logic to.
    bus : `BusFaultSignature` interface of the mover.
    refused, burst : outputs of the `WindowChecker` before the mover.
    response : cause of an error response.
    streams : `Stream` of each of the mover's streams.
    """
    fault = Signal(FaultLayout())
    names = Array(int(stream) for stream in streams)
    with m.If(bus.valid):
        m.d.comb += [
            fault.cause.eq(response),
            fault.stream.eq(names[bus.stream]),
            fault.response.eq(bus.response),
            fault.address.eq(bus.address),
        ]
    with m.Elif(refused):
        m.d.comb += [
            fault.cause.eq(ErrorCause.WINDOW),
            fault.stream.eq(names[burst.stream]),
            fault.address.eq(burst.address),
        ]
    return fault
