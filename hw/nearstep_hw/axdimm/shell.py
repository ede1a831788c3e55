"""The Adam kernel without its functional units."""

from amaranth import Cat, Const, Elaboratable, Module, Mux, Signal, Value
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out
from amaranth.utils import exact_log2

from nearstep_hw.axdimm.commit import CommitCounter
from nearstep_hw.axdimm.config import ELEMENT_BYTES, AdamKernelConfig
from nearstep_hw.axdimm.counters import EventCounters
from nearstep_hw.axdimm.load import LoadPath
from nearstep_hw.axdimm.registers import COUNTERS, GradientFormat, adam_kernel_map, update_rule
from nearstep_hw.axdimm.run_control import RunControl
from nearstep_hw.axdimm.sequencer import UnitSequencer
from nearstep_hw.axdimm.start_check import StartCheck
from nearstep_hw.axdimm.store import StorePath
from nearstep_hw.axdimm.unit_bank import ELEMENT_WIDTH, UnitBankSignature
from nearstep_hw.axi.burst import id_width
from nearstep_hw.axi.signature import Axi4Signature, connect_channels
from nearstep_hw.csr.bank import CsrBank
from nearstep_hw.csr.line import CsrLineSignature
from nearstep_hw.csr.signature import CsrSignature

EVENTS = tuple(name for name in COUNTERS if name != "committed")


def unit_bank(config: AdamKernelConfig) -> UnitBankSignature:
    """The port to the functional units of a kernel."""
    rule = update_rule(config)
    return UnitBankSignature(
        units=config.units,
        inputs=rule.arrays_in,
        outputs=rule.arrays_out,
        scalars={
            **dict.fromkeys(rule.scalars, ELEMENT_WIDTH),
            **dict.fromkeys(rule.switches, 1),
        },
    )


class KernelShell(wiring.Component):
    """Everything of an update kernel but the functional units: registers, movers, FIFOs, control.

    Blocks of the arrays of the rule (p, g, m and v for Adam) are loaded in turn, taken through the
    units beat by beat, and those that it writes (p, m and v) stored in turn, in place, all three at
    the same time on different blocks. Each FIFO has two blocks. Of several rules the register
    `rule` chooses one for a run; arrays that it does not have are neither loaded nor stored.
    Gradients in FP16 or BF16 take half the beats and are widened as they are loaded. Bytes
    behind the last element are read, if they share a beat with it, and never written. `status.done`
    comes after the last B.

    The first answer other than OKAY, a burst outside the windows, or ABORT stop the issue of
    bursts; what has been issued is completed and what comes in is discarded; then the kernel is
    idle, `error` tells the first cause, `committed` what is whole, and START works again. Blocks
    not announced by then are untouched. If memory never answers, the kernel stays busy until `rst`,
    which has to reset the path to memory as well.

    *Timing*: with a memory that reads and writes a beat a cycle, cycles = a + 4 per beat (3.5 with
    gradients of 16 bits); a is near four blocks of beats and the latency of the units (1,100 for 16
    lanes and 16 KiB): what is left to compute and to store after the last beat is read.

    Parameters
    ----------
    config : of the kernel.
    line : there is a port for whole lines of registers as well.
    memory_bytes : end of the memory, see `StartCheck`.

    Members
    -------
    csr : registers, see `adam_kernel_map`.
    csr_line : the same registers, by lines; if `line`.
    m_axi : AXI4. IDs of reads are numbers in `config.arrays` (0 to 3 are p, g, m, v); of writes in
        `config.states` (0 to 2 are p, m, v).
    fu : functional units.
    o_busy : a run goes on, as `status.busy` says.

    Ref: AXDIMM paper, section 3.3 and figure 3.
    """

    def __init__(
        self, config: AdamKernelConfig, *, line: bool = False, memory_bytes: int | None = None
    ) -> None:
        self.config = config
        self.memory_bytes = memory_bytes
        self.has_line = line
        super().__init__(
            {
                "csr": In(CsrSignature()),
                **({"csr_line": In(CsrLineSignature())} if line else {}),
                "m_axi": Out(
                    Axi4Signature(
                        address_width=config.address_width,
                        data_width=config.data_width,
                        id_width=id_width(len(config.arrays)),
                    )
                ),
                "fu": Out(unit_bank(config)),
                "o_busy": Out(1),
            }
        )

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        config = self.config
        rule = update_rule(config)
        m.submodules.bank = bank = CsrBank(adam_kernel_map(config), line=self.has_line)
        m.submodules.control = control = RunControl()
        m.submodules.check = check = StartCheck(config, memory_bytes=self.memory_bytes)
        m.submodules.load = load = LoadPath(config)
        m.submodules.store = store = StorePath(config)
        m.submodules.sequencer = sequencer = UnitSequencer(
            config,
            unit=unit_bank(config),
            inputs=rule.arrays_in,
            outputs=rule.arrays_out,
            beats_width=len(load.i_beats),
            optional=len(config.rules) > 1,
        )
        m.submodules.commit = commit = CommitCounter(
            streams=len(config.states),
            block_elements=config.block_elements,
            count_width=config.address_width - 1,
            blocks_ahead=2 * store.bursts_ahead,
            optional=len(config.rules) > 1,
        )
        m.submodules.counters = counters = EventCounters(EVENTS)

        wiring.connect(m, wiring.flipped(self.csr), bank.bus)
        if self.has_line:
            wiring.connect(m, wiring.flipped(self.csr_line), bank.line)
        connect_channels(m, load.bus, self.m_axi)
        connect_channels(m, store.bus, self.m_axi)
        connect_channels(m, sequencer.unit, self.fu)
        for name in rule.arrays_in:
            wiring.connect(m, getattr(load, f"o_{name}"), getattr(sequencer, f"i_{name}"))
        for name in rule.arrays_out:
            wiring.connect(m, getattr(sequencer, f"o_{name}"), getattr(store, f"i_{name}"))
        self._connect_run(m, bank, control, check, commit)
        self._connect_data(m, bank, control, load, store, sequencer)
        m.d.comb += commit.i_block_done.eq(store.o_block_done)
        if len(config.rules) > 1:
            self._connect_rule(m, bank, check, load, store, sequencer, commit)
        self._connect_windows(m, bank, check, load, store)
        self._connect_counters(m, bank, control, sequencer, counters)
        return m

    def _no_rule(self, bank: CsrBank) -> Value:
        """The register names a rule that the kernel does not have."""
        rules = len(self.config.rules)
        return bank.o_rule >= rules if rules > 1 else Const(0, 1)

    def _unsupported(self, bank: CsrBank) -> Value:
        """A register asks for a format, a scale or a rule that the kernel does not have."""
        gradient: Value = bank.o_formats_gradient
        if self.config.mixed:
            known = [GradientFormat[name.upper()] for name in self.config.gradient_formats]
            gradient = ~Cat(bank.o_formats_gradient == form for form in known).any()
        scale = Const(0, 1) if self.config.gradient_scale else bank.o_gradient_scale
        return Cat(gradient, bank.o_formats_copy_out, scale, self._no_rule(bank)).any()

    def _connect_rule(
        self,
        m: Module,
        bank: CsrBank,
        check: StartCheck,
        load: LoadPath,
        store: StorePath,
        sequencer: UnitSequencer,
        commit: CommitCounter,
    ) -> None:
        """Arrays and switches of the rule that the register names."""
        rules = self.config.rule_set
        reads = Signal(len(self.config.arrays))
        writes = Signal(len(self.config.states))
        with m.Switch(bank.o_rule):
            for index, rule in enumerate(rules.rules):
                with m.Case(index):
                    m.d.comb += [
                        reads.eq(Cat(name in rule.arrays_in for name in self.config.arrays)),
                        writes.eq(Cat(name in rule.arrays_out for name in self.config.states)),
                    ]
        m.d.comb += [
            check.i_use.eq(reads),
            load.i_use.eq(reads),
            sequencer.i_use_in.eq(reads),
            store.i_use.eq(writes),
            sequencer.i_use_out.eq(writes),
            commit.i_use.eq(writes),
            *(
                getattr(self.fu, f"s_{name}").eq(bank.o_rule == index)
                for index, name in enumerate(rules.selectors, 1)
            ),
        ]

    def _connect_run(
        self,
        m: Module,
        bank: CsrBank,
        control: RunControl,
        check: StartCheck,
        commit: CommitCounter,
    ) -> None:
        m.d.comb += [
            control.i_go.eq(bank.o_start_go),
            control.i_abort.eq(bank.o_control_abort),
            control.i_empty.eq(bank.o_count == 0),
            control.i_checked.eq(check.o_done),
            control.i_check_fault.eq(check.o_fault),
            control.i_whole.eq(commit.o_whole),
            check.i_start.eq(control.o_check),
            check.i_count.eq(bank.o_count),
            check.i_formats.eq(self._unsupported(bank)),
            check.i_copy_out.eq(bank.o_copy_out_address.any()),
            check.i_clear.eq(control.i_abort),
            bank.i_status_busy.eq(control.o_busy),
            self.o_busy.eq(control.o_busy),
            bank.i_status_done.eq(control.o_done),
            bank.i_status_error.eq(control.o_error),
            bank.i_error_cause.eq(control.o_fault.cause),
            bank.i_error_stream.eq(control.o_fault.stream),
            bank.i_error_response.eq(control.o_fault.response),
            bank.i_error_address.eq(control.o_fault.address),
            commit.i_count.eq(bank.o_count),
            commit.i_clear.eq(control.o_check),
            bank.i_committed.eq(commit.o_committed),
        ]
        if self.config.mixed:
            m.d.comb += check.i_narrow.eq(bank.o_formats_gradient != GradientFormat.FP32)
        for name, address in zip(self.config.arrays, check.i_address, strict=True):
            m.d.comb += address.eq(getattr(bank, f"o_{name}_address"))

    def _connect_data(
        self,
        m: Module,
        bank: CsrBank,
        control: RunControl,
        load: LoadPath,
        store: StorePath,
        sequencer: UnitSequencer,
    ) -> None:
        lane_bits = exact_log2(self.config.lanes)
        beats = Signal.like(load.i_beats)
        used = Signal(range(self.config.lanes + 1))  # lanes of the last beat, 0 for all
        m.d.comb += [
            used.eq(bank.o_count[:lane_bits]),
            beats.eq((bank.o_count >> lane_bits) + (used != 0)),
            store.i_tail.eq(
                Cat(
                    ((lane < used) | (used == 0)).replicate(ELEMENT_BYTES)
                    for lane in range(self.config.lanes)
                )
            ),
            load.i_taken.eq(sequencer.o_taken),
            store.i_made.eq(sequencer.o_made),
            control.i_fault.eq(Mux(load.o_fault.cause != 0, load.o_fault, store.o_fault)),
            control.i_drained.eq(load.o_idle & store.o_idle & sequencer.o_empty),
        ]
        if self.config.mixed:
            m.d.comb += load.i_format.eq(bank.o_formats_gradient)
        for part in (load, store, sequencer):
            m.d.comb += [
                part.i_launch.eq(control.o_launch),
                part.i_beats.eq(beats),
                part.i_stop.eq(control.o_stop),
                part.i_clear.eq(control.o_clear),
            ]
        for names, part in ((self.config.arrays, load), (self.config.states, store)):
            for name, base in zip(names, part.i_base, strict=True):
                m.d.comb += base.eq(getattr(bank, f"o_{name}_address"))
        rule = update_rule(self.config)
        for name in rule.scalars:
            m.d.comb += getattr(self.fu, f"s_{name}").eq(getattr(bank, f"o_{name}"))
        for name in self.config.rule_set.switches:
            m.d.comb += getattr(self.fu, f"s_{name}").eq(getattr(bank, f"o_mode_{name}"))

    def _connect_windows(self, m: Module, bank: CsrBank, *users: object) -> None:
        for user in users:
            for index, window in enumerate(user.window):
                stem = f"o_window{index}"
                m.d.comb += [
                    window.base.eq(getattr(bank, f"{stem}_base")),
                    window.limit.eq(getattr(bank, f"{stem}_limit")),
                    *(
                        getattr(window, bit).eq(getattr(bank, f"{stem}_permissions_{bit}"))
                        for bit in ("read", "write", "valid")
                    ),
                ]

    def _connect_counters(
        self,
        m: Module,
        bank: CsrBank,
        control: RunControl,
        sequencer: UnitSequencer,
        counters: EventCounters,
    ) -> None:
        bus = self.m_axi
        events = {
            "cycles": control.o_busy,
            "read_beats": bus.rvalid,
            "write_beats": bus.wvalid & bus.wready,
            "stall_read_address": bus.arvalid & ~bus.arready,
            "stall_read_data": sequencer.o_starved,
            "stall_write_space": sequencer.o_blocked,
            "stall_write_data": bus.wvalid & ~bus.wready,
        }
        m.d.comb += counters.i_clear.eq(control.o_check)
        for name, event in events.items():
            m.d.comb += [
                getattr(counters, f"i_{name}").eq(event),
                getattr(bank, f"i_{name}").eq(getattr(counters, f"o_{name}")),
            ]
