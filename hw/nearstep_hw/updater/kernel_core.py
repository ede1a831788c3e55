"""An update kernel without its functional units."""

from collections.abc import Iterable

from amaranth import (
    Cat,
    ClockDomain,
    ClockSignal,
    Const,
    Elaboratable,
    Module,
    Mux,
    ResetInserter,
    ResetSignal,
    Signal,
    Value,
)
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Member, Out, PureInterface
from amaranth.utils import exact_log2

from nearstep_hw.axi.burst import id_width
from nearstep_hw.axi.cut import AxiCut
from nearstep_hw.axi.join import AxiReadJoin
from nearstep_hw.axi.signature import Axi4Signature, connect_channels
from nearstep_hw.axi.window import WindowSignature, within
from nearstep_hw.csr.bank import CsrBank
from nearstep_hw.csr.counters import EventCounters
from nearstep_hw.csr.line import CsrLineSignature
from nearstep_hw.csr.signature import CsrSignature
from nearstep_hw.stream.slice import StreamSlice
from nearstep_hw.updater.array_lengths import WIDE_COUNT
from nearstep_hw.updater.commit import CommitCounter
from nearstep_hw.updater.free_sequencer import FreeSequencer
from nearstep_hw.updater.load import LoadPath
from nearstep_hw.updater.pairs.load import INDEX_STREAM, VALUE_STREAM, PairLoad
from nearstep_hw.updater.run_control import RunControl
from nearstep_hw.updater.scan import GradientScan
from nearstep_hw.updater.sequencer import UnitSequencer
from nearstep_hw.updater.start_check import StartCheck
from nearstep_hw.updater.store import StorePath
from nearstep_hw.updater.unit_bank import ELEMENT_WIDTH, UnitBankSignature
from nearstep_spec.csr.model import NamedValue
from nearstep_spec.rounding import INDEX_BITS, alignment
from nearstep_spec.rule.scale import GRADIENT
from nearstep_spec.updater.config import (
    COPY_OUT,
    ELEMENT_BYTES,
    HALF_BYTES,
    INDEX,
    UpdateKernelConfig,
)
from nearstep_spec.updater.pair_registers import form_value
from nearstep_spec.updater.registers import (
    COUNTERS,
    Compression,
    CopyOutFormat,
    GradientFormat,
    RunKind,
    adam_kernel_map,
    update_rule,
)

EVENTS = tuple(name for name in COUNTERS if name != "committed")


def unit_bank(config: UpdateKernelConfig) -> UnitBankSignature:
    """Return the port to the functional units of a kernel."""
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


def pairs_clock(config: UpdateKernelConfig) -> dict[str, Member]:
    """Return the members for the clock of pairs, if the kernel takes pairs."""
    return {"i_pairs_clk": In(1), "o_pairs_enable": Out(1)} if config.compression else {}


class KernelCore(wiring.Component):
    """An update kernel without its functional units: registers, movers, FIFOs, control.

    Blocks of the arrays of the rule (p, g, m and v for Adam) are loaded in turn and passed through
    the units beat by beat; the arrays that the rule writes (p, m and v) are stored in turn, in
    place. Loading, computing and storing overlap on different blocks. Each FIFO holds two blocks.
    With several rules the register `rule` selects one for a run; arrays that the rule does not have
    are neither loaded nor stored. Elements in FP16 or BF16 take half the beats; elements are
    widened when loaded and results narrowed when stored, to nearest even or stochastically. Bytes
    after the last element in its beat are read but never written. `status.done` follows the last B.
    The first response other than OKAY, a burst outside the windows, or ABORT stops the issue of
    bursts; issued bursts complete and their data are discarded; then the kernel is idle, `error`
    has the first cause, `committed` the number of elements written in full, and START is accepted
    again. Blocks without an issued burst are unchanged. If memory never responds, the kernel is
    busy until `rst`, which must reset the path to memory as well.

    *Timing*: with a memory that reads and writes a beat a cycle, cycles = a + 4 per beat (3.5 with
    gradients of 16 bits); a is near four blocks of beats and the latency of the units (1,100 for 16
    lanes and 16 KiB): results are computed and stored after the last beat is read.

    Parameters
    ----------
    line : adds the port `csr_line`.
    memory_bytes : end of the memory, see `StartCheck`.

    Members
    -------
    csr : registers, see `adam_kernel_map`.
    csr_line : the registers by lines; if `line`. START and ABORT are never written in one cycle.
    m_axi : AXI4. IDs of reads are indices into `config.arrays` (0 to 3 are p, g, m, v); with the
        top bit set, 0 is the indices and 1 the values of pairs. IDs of writes are indices into
        `config.states` (0 to 2 are p, m, v), then the copy of p.
    fu : functional units.
    i_pairs_clk, o_pairs_enable : clock of the decompressor of pairs, which may be the clock of
        `sync`, and the enable for a clock gate. If the kernel takes pairs.
    o_busy : a run is in progress, as `status.busy`.

    Ref: AXDIMM paper, section 3.3 and figure 3.
    """

    def __init__(
        self, config: UpdateKernelConfig, *, line: bool = False, memory_bytes: int | None = None
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
                        id_width=id_width(len(config.arrays)) + bool(config.compression),
                    )
                ),
                "fu": Out(unit_bank(config)),
                "o_busy": Out(1),
                **pairs_clock(config),
            }
        )

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        config = self.config
        rule = update_rule(config)
        m.submodules.bank = bank = CsrBank(
            adam_kernel_map(config), line=self.has_line, cut=config.cut
        )
        self._modes(m, bank)
        m.submodules.control = control = RunControl(cut=config.cut)
        m.submodules.check = check = StartCheck(config, memory_bytes=self.memory_bytes)
        m.submodules.load = load = LoadPath(config)
        m.submodules.store = store = StorePath(config)
        m.submodules.sequencer = sequencer = (FreeSequencer if config.cut else UnitSequencer)(
            config,
            unit=unit_bank(config),
            inputs=rule.arrays_in,
            outputs=rule.arrays_out,
            beats_width=len(load.i_beats),
            optional=config.selective,
        )
        m.submodules.commit = commit = CommitCounter(
            streams=len(store.streams),
            block_elements=config.block_elements,
            count_width=len(load.i_beats) + exact_log2(config.lanes),
            blocks_ahead=2 * store.bursts_ahead,
            optional=store.schedule.optional,
            cut=config.cut,
        )
        m.submodules.counters = counters = EventCounters(EVENTS)

        wiring.connect(m, wiring.flipped(self.csr), bank.bus)
        if self.has_line:
            wiring.connect(m, wiring.flipped(self.csr_line), bank.line)
        memory = self._memory(m)
        connect_channels(m, store.bus, memory)
        wiring.connect(m, sequencer.unit, wiring.flipped(self.fu))
        for name in rule.arrays_in:
            if name != GRADIENT:
                wiring.connect(m, getattr(load, f"o_{name}"), getattr(sequencer, f"i_{name}"))
        for name in rule.arrays_out:
            wiring.connect(m, getattr(sequencer, f"o_{name}"), getattr(store, f"i_{name}"))
        self._connect_run(m, bank, control, check, commit)
        pairs = self._connect_reads(m, bank, control, load, memory)
        self._connect_data(m, bank, control, load, store, sequencer, commit, pairs)
        m.d.comb += commit.i_block_done.eq(store.o_block_done)
        self._connect_gradients(m, bank, control, load, sequencer, pairs)
        self._connect_use(m, bank, check, load, store, sequencer, commit)
        windows = (check, load, store) if pairs is None else (check, load, store, pairs)
        self._connect_windows(m, bank, *windows)
        self._connect_counters(m, bank, control, sequencer, counters)
        return m

    def _memory(self, m: Module) -> object:
        """Return the movers' port: the port to memory, or a cut in front of it."""
        if not self.config.cut:
            return self.m_axi
        m.submodules.cut = cut = AxiCut(self.m_axi.signature)
        connect_channels(m, cut.m_axi, self.m_axi)
        return cut.s_axi

    def _running(self, control: RunControl) -> Value:
        """Return whether the outputs of the parts are of this run: launched in an earlier cycle."""
        return ~control.o_clear & ~control.o_launch

    def _modes(self, m: Module, bank: CsrBank) -> None:
        """Decode the mode registers, which are stable during a run."""
        config = self.config
        self.scanning, self.paired = Signal(name="scanning"), Signal(name="paired")
        self.some_pairs = Signal(name="some_pairs")
        to = m.d.sync if config.cut else m.d.comb
        if config.scan:
            to += self.scanning.eq(bank.o_operation_kind == RunKind.SCAN)
        if config.compression:
            to += [
                self.paired.eq(bank.o_compression_form != Compression.NONE),
                self.some_pairs.eq(bank.o_pairs.any()),
            ]

    def _scanning(self) -> Value:
        """Return whether the run is a scan."""
        return self.scanning if self.config.scan else Const(0, 1)

    def _paired(self) -> Value:
        """Return whether gradients are pairs."""
        return self.paired if self.config.compression else Const(0, 1)

    def _copying(self, bank: CsrBank) -> Value:
        """Return whether the run writes a copy of the parameters."""
        return bank.o_formats_copy_out != CopyOutFormat.NONE

    def _unsupported(self, bank: CsrBank) -> Value:
        """Return whether a register selects a format, scale, rule or kind of run that the kernel
        lacks.
        """
        config = self.config

        def unknown(field: Value, kinds: type[NamedValue], names: Iterable[str]) -> Value:
            return ~Cat(field == kinds[name.upper()] for name in names).any()

        scanning, paired = self._scanning(), self._paired()
        wrong = [
            unknown(bank.o_formats_gradient, GradientFormat, config.gradient_formats),
            unknown(bank.o_formats_copy_out, CopyOutFormat, ("none", *config.copy_out_formats)),
            Const(0, 1) if config.gradient_scale else bank.o_gradient_scale.any(),
        ]
        if config.stochastic_rounding:
            index, within = bank.o_element_index, bank.o_element_within
            low = exact_log2(alignment(config.lanes))
            wrong.append(index[:low].any() | within[:low].any() | index[INDEX_BITS:].any())
        if len(config.programs) > 1:
            wrong.append((bank.o_rule >= len(config.programs)) & ~scanning)
        if config.scan:
            wrong.append(bank.o_operation_kind > max(RunKind))
            wrong.append(scanning & (paired | self._copying(bank)))
        if config.compression:
            wrong.append(
                ~Cat(
                    bank.o_compression_form == form_value(form)
                    for form in ("none", *config.compression)
                ).any()
            )
            wrong.append(paired & bank.o_pairs[WIDE_COUNT:].any())
        if config.scan or config.compression:
            wrong.append((scanning | paired) & bank.o_count[WIDE_COUNT:].any())
        return Cat(wrong).any()

    def _connect_use(
        self,
        m: Module,
        bank: CsrBank,
        check: StartCheck,
        load: LoadPath,
        store: StorePath,
        sequencer: UnitSequencer,
        commit: CommitCounter,
    ) -> None:
        """Select the arrays of the run by its rule and mode."""
        config = self.config
        rules = config.rule_set
        reads = Signal(len(config.arrays))
        writes = Signal(len(config.states))
        numbers = range(len(config.programs))
        with m.Switch(bank.o_rule if len(numbers) > 1 else Const(0, 1)):
            for index, rule in zip(numbers, rules.rules, strict=True):
                with m.Case(index):
                    m.d.comb += [
                        reads.eq(Cat(name in rule.arrays_in for name in config.arrays)),
                        writes.eq(Cat(name in rule.arrays_out for name in config.states)),
                    ]
        scanning, paired, copying = self._scanning(), self._paired(), self._copying(bank)
        gradient = config.arrays.index(GRADIENT)
        loaded = Signal.like(reads)
        stored = Signal(len(store.streams))
        m.d.comb += [
            loaded.eq(Mux(scanning, 1 << gradient, Mux(paired, reads & ~(1 << gradient), reads))),
            stored.eq(Cat(writes, copying)),
        ]
        for index, name in enumerate(rules.selectors, 1):
            self._hold(m, name, bank.o_rule == index)
        if config.selective:
            m.d.comb += [
                load.i_use.eq(loaded),
                sequencer.i_use_in.eq(reads),
                sequencer.i_use_out.eq(writes),
            ]
        if store.schedule.optional:
            m.d.comb += [store.i_use.eq(stored), commit.i_use.eq(stored)]
        if check.selective:
            some = self.some_pairs if config.compression else Const(0, 1)
            used = {
                **dict(zip(config.arrays, loaded, strict=True)),
                GRADIENT: Mux(paired, some, loaded[gradient]),
                INDEX: paired & some,
                COPY_OUT: copying,
            }
            m.d.comb += check.i_use.eq(Cat(used[name] for name in check.operands))

    def _connect_reads(
        self, m: Module, bank: CsrBank, control: RunControl, load: LoadPath, memory: object
    ) -> PairLoad | None:
        """Connect the read channels of the port: of the arrays alone, or of pairs too."""
        config = self.config
        if not config.compression:
            connect_channels(m, load.bus, memory)
            return None
        m.domains.pairs = ClockDomain("pairs", local=True)
        m.domains.pairs_clk = ClockDomain("pairs_clk", local=True, reset_less=True)
        pairs_reset = Signal(init=1)  # registered in the pairs' clock
        was_reset = Signal(init=1)
        m.d.pairs_clk += pairs_reset.eq(ResetSignal())
        m.d.sync += was_reset.eq(0)
        m.submodules.pairs = pairs = PairLoad(config)
        m.submodules.join = join = AxiReadJoin(
            ports=2,
            address_width=config.address_width,
            data_width=config.data_width,
            id_width=id_width(len(config.arrays)),
        )
        for bus, port in zip((load.bus, pairs.bus), join.s_axi, strict=True):
            connect_channels(m, bus, port)  # the IDs of pairs have fewer bits
        connect_channels(m, join.m_axi, memory)
        paired = self._paired()
        m.d.comb += [
            ClockSignal("pairs").eq(self.i_pairs_clk),
            ClockSignal("pairs_clk").eq(self.i_pairs_clk),
            ResetSignal("pairs").eq(pairs_reset),
            self.o_pairs_enable.eq((control.o_busy & paired) | was_reset),
            pairs.i_base[INDEX_STREAM].eq(bank.o_index_address),
            pairs.i_base[VALUE_STREAM].eq(bank.o["address"][GRADIENT]),
            pairs.i_pairs.eq(bank.o_pairs),
            pairs.i_count.eq(bank.o_count),
            pairs.i_dry.eq(control.o_verifying),
            pairs.i_launch.eq(control.o_verify | (control.o_launch & paired)),
            pairs.i_stop.eq(control.o_stop),
            pairs.i_clear.eq(control.o_clear),
            control.i_verify.eq(paired & self.some_pairs),
            control.i_verified.eq(pairs.o_verified),
        ]
        if config.mixed:
            m.d.comb += pairs.i_format.eq(bank.o_formats_gradient)
        if len(config.compression) > 1:
            m.d.comb += pairs.i_scatter.eq(bank.o_compression_form == Compression.SCATTER)
        if config.decompressors:  # The unit may leave records, which are read before the run ends.
            with m.If(paired & ~pairs.o_counted):
                m.d.comb += control.i_whole.eq(0)
        with m.If(control.o_check):
            m.d.sync += bank.i_duplicates.eq(0)
        with m.Elif(self._running(control) & paired & pairs.o_counted):
            m.d.sync += bank.i_duplicates.eq(pairs.o_duplicates)
        return pairs

    def _connect_gradients(
        self,
        m: Module,
        bank: CsrBank,
        control: RunControl,
        load: LoadPath,
        sequencer: UnitSequencer,
        pairs: PairLoad | None,
    ) -> None:
        """Connect dense gradients, from memory or pairs, to the units or the scan."""
        dense = getattr(load, f"o_{GRADIENT}")
        sink = getattr(sequencer, f"i_{GRADIENT}")
        if self.config.cut:
            cut = StreamSlice(self.config.data_width)
            m.submodules.gradients = ResetInserter(control.o_clear)(cut)
            wiring.connect(m, cut.o, sink)
            sink = cut.i
        paired, scanning = self._paired(), self._scanning()
        taken = Signal()
        m.d.comb += [
            sink.payload.eq(dense.payload),
            sink.valid.eq(dense.valid & ~scanning),
            dense.ready.eq(sink.ready),
            load.i_taken.eq(sequencer.o_taken | taken),
        ]
        if pairs is not None:
            m.d.comb += pairs.o.ready.eq(sink.ready & paired)
            # A register takes beats at the launch, those of an earlier run that was stopped.
            valid = pairs.o.valid & self._running(control) if self.config.cut else pairs.o.valid
            with m.If(paired):
                m.d.comb += [
                    sink.payload.eq(pairs.o.payload),
                    sink.valid.eq(valid),
                    dense.ready.eq(0),
                ]
        if not self.config.scan:
            return
        m.submodules.scan = scan = GradientScan(lanes=self.config.lanes)
        m.d.comb += [
            scan.i_start.eq(control.o_launch & scanning),
            scan.i_count.eq(bank.o_count),
            scan.i.valid.eq(dense.valid & scanning),
            scan.i.payload.eq(dense.payload),
            taken.eq(scan.i.valid & scan.i.ready),
        ]
        with m.If(scanning):
            m.d.comb += [dense.ready.eq(scan.i.ready), control.i_whole.eq(scan.o_done)]
        with m.If(control.o_check):
            m.d.sync += [bank.i_scan_found_inf.eq(0), bank.i_sum_of_squares.eq(0)]
        with m.Elif(self._running(control) & scanning & scan.o_done):
            m.d.sync += [
                bank.i_scan_found_inf.eq(scan.o_found_inf),
                bank.i_sum_of_squares.eq(scan.o_sum),
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
            control.i_checked.eq(check.o_done),
            control.i_check_fault.eq(check.o_fault),
            control.i_whole.eq(commit.o_whole),
            check.i_start.eq(control.o_check),
            check.i_count.eq(bank.o_count),
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
        to = m.d.sync if self.config.cut else m.d.comb
        to += [
            control.i_empty.eq(bank.o_count == 0),
            check.i_formats.eq(self._unsupported(bank)),
        ]
        if not self.config.copy_out_formats:
            to += check.i_copy_out.eq(bank.o_copy_out_address.any())
        if self.config.mixed:
            m.d.comb += check.i_narrow.eq(bank.o_formats_gradient != GradientFormat.FP32)
        if self.config.compression:
            m.d.comb += [check.i_paired.eq(self._paired()), check.i_pairs.eq(bank.o_pairs)]
        for name, address in zip(check.operands, check.i_address, strict=True):
            m.d.comb += address.eq(bank.o["address"][name])

    def _connect_data(
        self,
        m: Module,
        bank: CsrBank,
        control: RunControl,
        load: LoadPath,
        store: StorePath,
        sequencer: UnitSequencer,
        commit: CommitCounter,
        pairs: PairLoad | None,
    ) -> None:
        lane_bits = exact_log2(self.config.lanes)
        beats = Signal.like(load.i_beats)
        update = ~self._scanning()
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
            store.i_beat_ready.eq(sequencer.o_beat_ready),
        ]
        always = Const(1, 1)
        faults = [(always, load.o_fault), (always, store.o_fault)]
        idle = [load.o_idle, store.o_idle, sequencer.o_empty]
        if pairs is not None:
            faults.append((self._paired(), pairs.o_fault))
            idle.append(pairs.o_idle)
        if self.config.cut:
            idle.append(~commit.o_waits)
        for counts, fault in reversed(faults):
            with m.If(counts & (fault.cause != 0)):
                m.d.comb += control.i_fault.eq(fault)
        m.d.comb += control.i_drained.eq(Cat(idle).all())
        if self.config.mixed:
            m.d.comb += load.i_format.eq(bank.o_formats_gradient)
        for part in (load, store, sequencer):
            launch = control.o_launch if part is load else control.o_launch & update
            m.d.comb += [
                part.i_launch.eq(launch),
                part.i_beats.eq(beats),
                part.i_stop.eq(control.o_stop),
                part.i_clear.eq(control.o_clear),
            ]
        for names, part in ((self.config.arrays, load), (store.streams, store)):
            for name, base in zip(names, part.i_base, strict=True):
                m.d.comb += base.eq(bank.o["address"][name])
        if store.copies:
            m.d.comb += store.i_copy_format.eq(bank.o_formats_copy_out)
        if store.stochastic:
            m.d.comb += [
                store.i_seed.eq(bank.o_rounding_seed),
                store.i_step.eq(bank.o_rounding_step),
                store.i_index.eq(bank.o_element_index),
                store.i_within.eq(bank.o_element_within),
                store.i_skip.eq(bank.o_element_skip),
                *(
                    getattr(store, f"i_stream_{name}").eq(getattr(bank, f"o_rounding_{name}"))
                    for name in store.stochastic
                ),
            ]
        if store.narrow:
            used = bank.o_count[: lane_bits + 1]  # numbers of 16 bits in the last beat, 0 for all
            m.d.comb += store.i_narrow_tail.eq(
                Cat(
                    ((number < used) | (used == 0)).replicate(HALF_BYTES)
                    for number in range(2 * self.config.lanes)
                )
            )
        if store.quantized:
            codes = bank.o_count[: lane_bits + 2]  # in the last beat, 0 for all
            m.d.comb += store.i_quantized_tail.eq(
                Cat((number < codes) | (codes == 0) for number in range(self.config.beat_bytes))
            )
        rule = update_rule(self.config)
        for name in rule.scalars:
            self._hold(m, name, bank.o["scalar"][name])
        for name in self.config.rule_set.switches:
            self._hold(m, name, bank.o["mode"][name])

    def _hold(self, m: Module, name: str, value: Value) -> None:
        """Connect a scalar, a switch or a selector, stable during a run, to the units."""
        if self.config.cut:
            near = Signal(value.shape(), name=f"near_{name}")
            m.d.sync += near.eq(value)
            value = near
        m.d.comb += getattr(self.fu, f"s_{name}").eq(value)

    def _connect_windows(self, m: Module, bank: CsrBank, *users: object) -> None:
        config = self.config
        width = config.address_width
        windows = []
        for index in range(config.window_count):
            granted = bank.o["window"][index]
            permissions = granted["permissions"]
            base, limit, is_there = within(width, base=granted["base"], limit=granted["limit"])
            window = WindowSignature(width).create(path=("window", str(index)))
            m.d.comb += [
                window.base.eq(base),
                window.limit.eq(limit),
                window.read.eq(permissions["read"]),
                window.write.eq(permissions["write"]),
                window.valid.eq(permissions["valid"] & is_there),
            ]
            windows.append(window)
        if config.cut:
            windows = [self._in_turn(m, windows)]
        for user in users:
            for window, its in zip(windows, user.window, strict=True):
                wiring.connect(m, window, its)

    def _in_turn(self, m: Module, windows: list[PureInterface]) -> PureInterface:
        """Return a register that holds each of the windows in turn."""
        turn = Signal(range(len(windows)))
        one = WindowSignature(self.config.address_width).create(path=("window",))
        m.d.sync += turn.eq(Mux(turn == len(windows) - 1, 0, turn + 1))
        with m.Switch(turn):
            for index, window in enumerate(windows):
                with m.Case(index):
                    m.d.sync += [
                        getattr(one, name).eq(getattr(window, name))
                        for name in one.signature.members
                    ]
        return one

    def _connect_counters(
        self,
        m: Module,
        bank: CsrBank,
        control: RunControl,
        sequencer: UnitSequencer,
        counters: EventCounters,
    ) -> None:
        ar, r, w = self.m_axi.ar, self.m_axi.r, self.m_axi.w
        events = {
            "cycles": control.o_busy,
            "read_beats": r.valid,
            "write_beats": w.valid & w.ready,
            "stall_read_address": ar.valid & ~ar.ready,
            "stall_read_data": sequencer.o_starved,
            "stall_write_space": sequencer.o_blocked,
            "stall_write_data": w.valid & ~w.ready,
        }
        m.d.comb += counters.i_clear.eq(control.o_check)
        for name, event in events.items():
            m.d.comb += [
                counters.i[name].eq(event),
                bank.i["counter"][name].eq(counters.o[name]),
            ]
