"""AXI4 ports, as an initiator sees them, and the constants of the protocol."""

from amaranth.lib import enum
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


def _address(prefix: str, address_width: int, id_width: int) -> dict[str, object]:
    return {
        f"{prefix}valid": Out(1),
        f"{prefix}ready": In(1),
        f"{prefix}id": Out(id_width),
        f"{prefix}addr": Out(address_width),
        f"{prefix}len": Out(8),
        f"{prefix}size": Out(3),
        f"{prefix}burst": Out(BurstType),
    }


def _check(address_width: int, data_width: int, id_width: int) -> None:
    if data_width not in (8, 16, 32, 64, 128, 256, 512, 1024):
        raise ValueError(f"AXI data width must be 8 to 1024 bits, a power of 2, not {data_width!r}")
    if not 12 <= address_width <= 64:
        raise ValueError(f"AXI address width must be 12 to 64 bits, not {address_width!r}")
    if id_width < 1:
        raise ValueError(f"AXI ID width must be at least 1 bit, not {id_width!r}")


class Axi4ReadSignature(Signature):
    """The channels AR and R.

    Members have the lower-case AMBA names: `arvalid arready arid araddr arlen arsize arburst`,
    `rvalid rready rid rdata rresp rlast`.

    Parameters
    ----------
    address_width, data_width, id_width : bits.
    """

    def __init__(self, *, address_width: int, data_width: int, id_width: int) -> None:
        _check(address_width, data_width, id_width)
        super().__init__(
            {
                **_address("ar", address_width, id_width),
                "rvalid": In(1),
                "rready": Out(1),
                "rid": In(id_width),
                "rdata": In(data_width),
                "rresp": In(Response),
                "rlast": In(1),
            }
        )


class Axi4WriteSignature(Signature):
    """The channels AW, W and B.

    Members have the lower-case AMBA names: `awvalid awready awid awaddr awlen awsize awburst`,
    `wvalid wready wdata wstrb wlast`, `bvalid bready bid bresp`.

    Parameters
    ----------
    address_width, data_width, id_width : bits.
    """

    def __init__(self, *, address_width: int, data_width: int, id_width: int) -> None:
        _check(address_width, data_width, id_width)
        super().__init__(
            {
                **_address("aw", address_width, id_width),
                "wvalid": Out(1),
                "wready": In(1),
                "wdata": Out(data_width),
                "wstrb": Out(data_width // 8),
                "wlast": Out(1),
                "bvalid": In(1),
                "bready": Out(1),
                "bid": In(id_width),
                "bresp": In(Response),
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


def connect_channels(m: object, part: object, port: object) -> None:
    """Connect a read or write port `part` of a submodule to the same channels of `port`."""
    for name, member in part.signature.members.items():
        inner, outer = getattr(part, name), getattr(port, name)
        m.d.comb += outer.eq(inner) if member.flow is Out else inner.eq(outer)
