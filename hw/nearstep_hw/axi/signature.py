"""AXI4 ports, from the initiator's side, and constants of the protocol.

A channel is a stream. At the top of a design the signals of a channel have the names of AMBA:
`m_axi` with a channel `ar` becomes `m_axi__arvalid arready arid araddr ...`, see
`nearstep_hw.verilog`.
"""

from amaranth import Module
from amaranth.lib import data, enum, stream
from amaranth.lib.wiring import In, Out, Signature

PAGE_BYTES = 4096  # no burst crosses a multiple of this
MAX_BURST_BEATS = 256  # AxLEN is 8 bits: beats - 1


class BurstType(enum.Enum, shape=2):
    """AxBURST."""

    FIXED = 0
    INCR = 1
    WRAP = 2


class Response(enum.Enum, shape=2):
    """RRESP and BRESP."""

    OKAY = 0
    EXOKAY = 1
    SLVERR = 2
    DECERR = 3


class ChannelLayout(data.StructLayout):
    """The payload of a channel; members have the names of AMBA without the channel's prefix."""


class AddressLayout(ChannelLayout):
    """The payload of AR and AW: `id addr len size burst`.

    Parameters
    ----------
    address_width, id_width : bits.
    """

    def __init__(self, *, address_width: int, id_width: int) -> None:
        if not 12 <= address_width <= 64:
            raise ValueError(f"AXI address width must be 12 to 64 bits, not {address_width!r}")
        super().__init__(
            {
                "id": _id(id_width),
                "addr": address_width,
                "len": 8,
                "size": 3,
                "burst": BurstType,
            }
        )


class ReadDataLayout(ChannelLayout):
    """The payload of R: `data id resp last`.

    Parameters
    ----------
    data_width, id_width : bits.
    """

    def __init__(self, *, data_width: int, id_width: int) -> None:
        super().__init__(
            {"data": _data(data_width), "id": _id(id_width), "resp": Response, "last": 1}
        )


class WriteDataLayout(ChannelLayout):
    """The payload of W: `data strb last`.

    Parameters
    ----------
    data_width : bits.
    """

    def __init__(self, *, data_width: int) -> None:
        super().__init__({"data": _data(data_width), "strb": data_width // 8, "last": 1})


class WriteResponseLayout(ChannelLayout):
    """The payload of B: `id resp`.

    Parameters
    ----------
    id_width : bits.
    """

    def __init__(self, *, id_width: int) -> None:
        super().__init__({"id": _id(id_width), "resp": Response})


def _data(width: int) -> int:
    if width not in (8, 16, 32, 64, 128, 256, 512, 1024):
        raise ValueError(f"AXI data width must be 8 to 1024 bits, a power of 2, not {width!r}")
    return width


def _id(width: int) -> int:
    if width < 1:
        raise ValueError(f"AXI ID width must be at least 1 bit, not {width!r}")
    return width


class Axi4ReadSignature(Signature):
    """The channels AR and R.

    Parameters
    ----------
    address_width, data_width, id_width : bits.

    Members
    -------
    ar : stream of `AddressLayout`.
    r : stream of `ReadDataLayout`, to the initiator.
    """

    def __init__(self, *, address_width: int, data_width: int, id_width: int) -> None:
        address = AddressLayout(address_width=address_width, id_width=id_width)
        beat = ReadDataLayout(data_width=data_width, id_width=id_width)
        super().__init__({"ar": Out(stream.Signature(address)), "r": In(stream.Signature(beat))})


class Axi4WriteSignature(Signature):
    """The channels AW, W and B.

    Parameters
    ----------
    address_width, data_width, id_width : bits.

    Members
    -------
    aw : stream of `AddressLayout`.
    w : stream of `WriteDataLayout`.
    b : stream of `WriteResponseLayout`, to the initiator.
    """

    def __init__(self, *, address_width: int, data_width: int, id_width: int) -> None:
        address = AddressLayout(address_width=address_width, id_width=id_width)
        beat = WriteDataLayout(data_width=data_width)
        response = WriteResponseLayout(id_width=id_width)
        super().__init__(
            {
                "aw": Out(stream.Signature(address)),
                "w": Out(stream.Signature(beat)),
                "b": In(stream.Signature(response)),
            }
        )


class Axi4Signature(Signature):
    """An AXI4 port: `Axi4ReadSignature` and `Axi4WriteSignature` side by side.

    Parameters
    ----------
    address_width, data_width, id_width : bits.
    """

    def __init__(self, *, address_width: int, data_width: int, id_width: int) -> None:
        widths = {
            "address_width": address_width,
            "data_width": data_width,
            "id_width": id_width,
        }
        super().__init__(
            {
                **dict(Axi4ReadSignature(**widths).members.items()),
                **dict(Axi4WriteSignature(**widths).members.items()),
            }
        )


def copied(to: data.View, source: data.View) -> list[object]:
    """Return the assignments of a channel's payload.

    IDs may differ in width: they are extended with zeros, or truncated.
    """
    if to.shape() == source.shape():
        return [to.eq(source)]
    return [to[name].eq(source[name]) for name, _ in source.shape()]


def connect_channels(m: Module, part: object, port: object) -> None:
    """Connect a port `part` of a submodule to the same channels of `port`.

    IDs may have fewer bits on one side: IDs of requests are zero-extended, IDs of responses
    truncated.

    Parameters
    ----------
    part : port of a submodule, with all or some channels of `port`.
    port : a port of the component that has the submodule, of the same direction, or one of another
        submodule, of the other direction.
    """
    for name, member in part.signature.members.items():
        inner, outer = getattr(part, name), getattr(port, name)
        source, sink = (inner, outer) if member.flow is Out else (outer, inner)
        m.d.comb += [
            sink.valid.eq(source.valid),
            source.ready.eq(sink.ready),
            *copied(sink.payload, source.payload),
        ]
