"""The completer streams of the UltraScale+ PCIe block, and the layout of their TUSER."""

from dataclasses import dataclass

from amaranth.lib.wiring import Out, Signature

DWORD_BITS = 32
DWORD_BYTES = 4
WIDTHS = (64, 128, 256, 512)


@dataclass(frozen=True)
class CqUser:
    """Lowest bits of the fields of `m_axis_cq_tuser`, of the first packet in a beat."""

    width: int
    first_be: int
    last_be: int
    byte_en: int
    discontinue: int
    tph_present: int
    tph_type: int
    tph_st_tag: int


CQ_USER_NARROW = CqUser(88, 0, 4, 8, 41, 42, 43, 45)
CQ_USER_512 = CqUser(183, 0, 8, 16, 96, 97, 99, 103)
CC_USER_NARROW_BITS = 33
CC_USER_512_BITS = 81


def check_width(width: int) -> None:
    """Raise ValueError unless the hard block has streams of `width` bits."""
    if width not in WIDTHS:
        raise ValueError(f"PCIe stream width must be one of {WIDTHS} bits, not {width!r}")


def cq_user(width: int) -> CqUser:
    """Return the TUSER layout of a CQ stream of `width` bits."""
    return CQ_USER_512 if width == 512 else CQ_USER_NARROW


class PcieStreamSignature(Signature):
    """A stream of the hard block: an AXI4-Stream with a bit of TKEEP for each dword.

    Parameters
    ----------
    width : bits of TDATA: 64, 128, 256 or 512.
    user_width : bits of TUSER.

    Members
    -------
    tdata, tkeep, tlast, tuser, tvalid, tready : names of PG213, without prefix.
    """

    def __init__(self, width: int, user_width: int) -> None:
        check_width(width)
        self.width = width
        super().__init__(
            {
                "tdata": Out(width),
                "tkeep": Out(width // DWORD_BITS),
                "tlast": Out(1),
                "tuser": Out(user_width),
                "tvalid": Out(1),
                "tready": Out(1).flip(),
            }
        )


class CqSignature(PcieStreamSignature):
    """Completer requests, from the hard block: `m_axis_cq`, dword aligned, without straddle.

    Ref: PG213, "Completer Request Interface".
    """

    def __init__(self, width: int) -> None:
        super().__init__(width, cq_user(width).width)


class CcSignature(PcieStreamSignature):
    """Completer completions, to the hard block: `s_axis_cc`, dword aligned, without straddle.

    Ref: PG213, "Completer Completion Interface".
    """

    def __init__(self, width: int) -> None:
        super().__init__(width, CC_USER_512_BITS if width == 512 else CC_USER_NARROW_BITS)
