"""On-chip memory of one chunk of gradients: banks cleared by reads."""

from amaranth import Elaboratable, Module, Mux, Signal
from amaranth.lib import data, wiring
from amaranth.lib.memory import Memory
from amaranth.lib.wiring import In, Out, Signature

from nearstep_spec.fp import FP32

__all__ = ["BankWrites", "CellLayout", "ChunkBuffer"]


class CellLayout(data.StructLayout):
    """An element: its value, and whether it was written."""

    def __init__(self) -> None:
        super().__init__({"value": FP32.width, "present": 1})


class BankWrites(Signature):
    """Two writes to a bank in a cycle; if both are to one row, the second overrides the first.

    Parameters
    ----------
    row_width : bits of a row.
    """

    def __init__(self, row_width: int) -> None:
        write = {"en": Out(1), "row": Out(row_width), "value": Out(FP32.width)}
        super().__init__({f"{k}_{name}": each for k in ("a", "b") for name, each in write.items()})


class ChunkBuffer(wiring.Component):
    """A row of banks, element e in bank e mod `banks`, row e div `banks`.

    In a cycle either a row of all banks is read, or pairs are written, two a bank. A read clears
    its row; `rst` does not.

    *Timing*: `o_row` is valid from the cycle after `i_read` until the next `i_read` or write. Both
    ports of a bank have one address and one enable each, as a true dual-port block RAM has.

    Parameters
    ----------
    banks, rows : powers of two.

    Members
    -------
    write : In, `BankWrites` of each bank; not with `i_read`.
    i_read, i_row : read and clear this row of all banks.
    o_row : a `CellLayout` for each bank.
    """

    def __init__(self, *, banks: int, rows: int) -> None:
        self.banks = banks
        self.rows = rows
        row_width = (rows - 1).bit_length()
        super().__init__(
            {
                "write": In(BankWrites(row_width)).array(banks),
                "i_read": In(1),
                "i_row": In(row_width),
                "o_row": Out(data.ArrayLayout(CellLayout(), banks)),
            }
        )

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        for k, bank in enumerate(self.write):
            memory = Memory(shape=CellLayout(), depth=self.rows, init=[])
            m.submodules[f"bank{k}"] = memory
            a, b = memory.write_port(), memory.write_port()
            read = memory.read_port()
            same = Signal(name=f"same{k}")
            m.d.comb += [
                same.eq(bank.b_en & (bank.a_row == bank.b_row)),
                a.addr.eq(Mux(self.i_read, self.i_row, bank.a_row)),
                a.en.eq(self.i_read | (bank.a_en & ~same)),
                a.data.value.eq(Mux(self.i_read, 0, bank.a_value)),
                a.data.present.eq(~self.i_read),
                b.addr.eq(bank.b_row),
                b.en.eq(bank.b_en),
                b.data.value.eq(bank.b_value),
                b.data.present.eq(1),
                read.addr.eq(a.addr),
                read.en.eq(a.en),
                self.o_row[k].eq(read.data),
            ]
        return m
