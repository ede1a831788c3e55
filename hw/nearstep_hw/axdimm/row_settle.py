"""Detection that the DRAM can accept any command."""

from amaranth import Cat, Elaboratable, Module, Signal
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from nearstep_hw.axdimm.host_command import CODE, code_of
from nearstep_hw.dram.dfi import PHASES, CommandSignature
from nearstep_spec.dram.command import ALL_BANKS, Command
from nearstep_spec.dram.timing import DramTiming


class RowSettle(wiring.Component):
    """Watches the pins of a DRAM and detects when every minimum of its timing has elapsed.

    The next owner of the channel waits for this instead of tracking earlier commands.

    *Timing*: a command decided in a cycle with `o_settled`, on the pins a cycle later in any phase,
    keeps every minimum distance to earlier commands.

    Parameters
    ----------
    timing : of the part.

    Members
    -------
    p0, p1, p2, p3 : pins of the DRAM.
    o_settled : all minima have elapsed.
    """

    def __init__(self, timing: DramTiming) -> None:
        self.timing = timing
        super().__init__(
            {
                **{f"p{phase}": In(CommandSignature()) for phase in range(PHASES)},
                "o_settled": Out(1),
            }
        )

    def wait(self, clocks: int) -> int:
        """Return the unsettled cycles, without that of the command: the command may be in the last
        phase and the next one in the first; the next one is on the pins a cycle later.
        """
        return max(0, -(-(clocks + PHASES - 1) // PHASES) - 2)

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        t = self.timing
        precharged = t.t_rp  # an automatic precharge ends that much later
        clocks = {
            Command.RD: max(t.t_ccd_l, t.t_rtp + precharged, t.read_to_write),
            Command.WR: max(t.t_ccd_l, t.write_to_precharge + precharged, t.write_to_read_l),
            Command.PRE: t.t_rp,
            Command.REF: t.t_rfc,
            Command.MRS: max(t.t_mrd, t.t_mod),
            Command.ZQCS: t.t_zqcs,
            Command.ZQCL: t.t_zqoper,
        }
        a10 = ALL_BANKS.bit_length() - 1
        # A PRE separates two ACT of a bank and adds tRP: tRC less tRP remains.
        activate = max(t.t_rc - t.t_rp, t.t_ras, t.t_rcd, t.t_rrd_l, t.t_faw)
        longest = max(self.wait(each) for each in (*clocks.values(), activate))
        left = Signal(range(longest + 1))
        busy = Signal()
        wanted = Signal.like(left)

        for phase in range(PHASES):
            pins = getattr(self, f"p{phase}")
            with m.If(~pins.cs_n):
                m.d.comb += busy.eq(1)
        waits = {kind: self.wait(each) for kind, each in clocks.items()}
        for wait in sorted({*waits.values(), self.wait(activate)}):
            found = Signal(PHASES, name=f"found{wait}")
            for phase in range(PHASES):
                pins = getattr(self, f"p{phase}")
                kinds = [
                    (pins.address[CODE] == code_of(kind))
                    # The two calibrations differ in A10; ZQCL is the longer one.
                    & (pins.address[a10] if kind is Command.ZQCL else 1)
                    for kind, each in waits.items()
                    if each == wait
                ]
                is_code = pins.act_n & Cat(kinds).any()
                is_activate = ~pins.act_n & (wait == self.wait(activate))
                m.d.comb += found[phase].eq(~pins.cs_n & (is_code | is_activate))
            with m.If(found.any()):
                m.d.comb += wanted.eq(wait)
        with m.If(wanted >= left):
            m.d.sync += left.eq(wanted)
        with m.Else():
            m.d.sync += left.eq(left - 1)
        m.d.comb += self.o_settled.eq((left == 0) & ~busy)
        return m
