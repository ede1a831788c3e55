"""A command slot of the host, decoded."""

from amaranth import Cat, Module, Value
from amaranth.lib.data import StructLayout, View

from nearstep_spec.dram.command import ADDRESS_BITS, ALL_BANKS, Command, encode
from nearstep_spec.dram.geometry import DramGeometry

__all__ = [
    "CODE",
    "HostCommandLayout",
    "code_of",
    "decode",
    "is_calibration",
    "is_refresh",
    "not_selected",
    "numbered",
]

CODE = slice(14, 17)  # WE_n, CAS_n and RAS_n among the address pins
RESERVED = 0b011  # the one code without a command
A10 = ALL_BANKS.bit_length() - 1


def code_of(command: Command) -> int:
    """Return the pins `CODE` of a command with `act_n` high."""
    return encode(command).address >> CODE.start & 7


def numbered(name: str, rank: int) -> str:
    """Return the name of a rank's signal; rank 0 has no number."""
    return f"{name}{rank}" if rank else name


def not_selected(pins: object, rank: int = 0) -> Value:
    """Return the chip select of a rank on the pins of a `CommandSignature`; 0 selects the rank."""
    return pins.cs_n if len(pins.cs_n) == 1 else pins.cs_n[rank]


def is_refresh(pins: object, rank: int = 0) -> Value:
    """Return whether the pins of a `CommandSignature` are REF of a rank."""
    code = pins.address[CODE] == code_of(Command.REF)
    return ~not_selected(pins, rank) & pins.act_n & code


def is_calibration(pins: object, rank: int = 0) -> Value:
    """Return whether the pins of a `CommandSignature` are ZQCS or ZQCL of a rank."""
    code = pins.address[CODE] == code_of(Command.ZQCS)
    return ~not_selected(pins, rank) & pins.act_n & code


class HostCommandLayout(StructLayout):
    """Pins of one slot, decoded for one rank.

    Members
    -------
    cs_n, act_n, address, bg, ba : undecoded; `cs_n` is that of the rank.
    bank : number among all banks of the rank, the bank group in the high bits.
    activate, precharge, precharge_all, refresh, read, write, set_mode, calibrate, calibrate_long,
        reserved : at most one is high; none with `cs_n` high or for NOP.
    closes : a read or write with automatic precharge.
    """

    def __init__(self, geometry: DramGeometry) -> None:
        self.geometry = geometry
        flags = (
            *("activate", "precharge", "precharge_all", "refresh", "read", "write", "closes"),
            *("set_mode", "calibrate", "calibrate_long", "reserved"),
        )
        super().__init__(
            {
                "cs_n": 1,
                "act_n": 1,
                "address": ADDRESS_BITS,
                "bg": 2,
                "ba": 2,
                "bank": range(geometry.banks),
                **dict.fromkeys(flags, 1),
            }
        )


def decode(m: Module, pins: object, out: View, rank: int = 0) -> None:
    """Drive `out`, of `HostCommandLayout`, from the pins of a `CommandSignature`."""
    geometry = out.shape().geometry
    cs_n = not_selected(pins, rank)
    coded = ~cs_n & pins.act_n
    code = pins.address[CODE]
    a10 = pins.address[A10]

    def is_(command: Command) -> Value:
        return coded & (code == code_of(command))

    m.d.comb += [
        out.cs_n.eq(cs_n),
        *(getattr(out, name).eq(getattr(pins, name)) for name in ("act_n", "address")),
        out.bg.eq(pins.bg),
        out.ba.eq(pins.ba),
        out.bank.eq(Cat(pins.ba[: geometry.bank_bits], pins.bg[: geometry.bank_group_bits])),
        out.activate.eq(~cs_n & ~pins.act_n),
        out.precharge.eq(is_(Command.PRE) & ~a10),
        out.precharge_all.eq(is_(Command.PRE) & a10),
        out.refresh.eq(is_refresh(pins, rank)),
        out.read.eq(is_(Command.RD)),
        out.write.eq(is_(Command.WR)),
        out.set_mode.eq(is_(Command.MRS)),
        out.calibrate.eq(is_(Command.ZQCS) & ~a10),
        out.calibrate_long.eq(is_(Command.ZQCL) & a10),
        out.reserved.eq(coded & (code == RESERVED)),
        out.closes.eq((is_(Command.RD) | is_(Command.WR)) & a10),
    ]
