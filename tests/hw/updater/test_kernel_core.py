"""The kernel without its functional units, beside its golden model: faults, counters, cycles.

Small, and in Amaranth's simulator: nothing is built. The benches under cocotb have more.
"""

from dataclasses import dataclass
from itertools import product

import numpy as np
import pytest

from nearstep_hw.updater import kernel_core
from nearstep_sim.bench.axi_memory import DECERR, SLVERR, BurstError, Stalls
from nearstep_spec.updater.config import UpdateKernelConfig
from nearstep_spec.updater.registers import (
    Compression,
    CopyOutFormat,
    ErrorCause,
    GradientFormat,
    RunKind,
    Stream,
)

from .shell_bench import MEMORY_BYTES, PLACE_BYTES, ShellBench

BLOCK, BEAT = 16, 8  # elements, bytes
SMALL = {"lanes": 2, "functional_units": 1, "block_bytes": 4 * BLOCK}
KERNELS = {
    "ultrascale_plus": UpdateKernelConfig(**SMALL),
    "ecp5": UpdateKernelConfig(**SMALL, technology="ecp5", windows=1),  # a cycle for each window
}
READS = {"p": Stream.P_READ, "g": Stream.G_READ, "m": Stream.M_READ, "v": Stream.V_READ}
KINDS = ("read", "write", "valid")
WRITES = {"p": Stream.P_WRITE, "m": Stream.M_WRITE, "v": Stream.V_WRITE}


@pytest.fixture(params=KERNELS)
def bench(request: pytest.FixtureRequest) -> ShellBench:
    return ShellBench(KERNELS[request.param])


@dataclass(frozen=True)
class Took:
    """Cycles of a run with a memory that never stalls, and those that the units waited."""

    cycles: int
    for_input: int
    for_space: int


TOOK = {
    "ultrascale_plus": {
        0: Took(1, 0, 0),
        1: Took(69, 22, 0),
        3: Took(72, 22, 0),
        16: Took(115, 37, 0),
        35: Took(161, 53, 1),
    },
    "ecp5": {
        0: Took(1, 0, 0),
        1: Took(165, 36, 0),
        3: Took(168, 36, 0),
        16: Took(196, 42, 0),
        35: Took(236, 58, 0),
    },
}


def test_runs_of_any_size_change_memory_as_the_model_and_take_known_cycles(bench):
    found = {}

    async def runs(bench):
        for count in (0, 1, 3, 16, 35):
            bench.disturb("free", latency=5)
            cycles = await bench.run({"count.value": count})
            waited = [await bench.read(f"stall_{name}") for name in ("read_data", "write_space")]
            found[count] = Took(cycles, *waited)
            bench.disturb("both", latency=5)
            await bench.run({"count.value": count})

    bench.simulate(runs)
    print(found)
    assert found == TOOK[bench.config.technology]


def test_what_may_not_run_is_refused_and_nothing_moves(bench):
    """Each reason, for each array: cause, stream and address are those of the model."""
    count = 35
    places = {name: bench.defaults[f"{name}_address.value"] for name in READS}
    whole = {"count.value": count}
    refused = [
        {"formats.gradient": 1},
        {"formats.copy_out": 2},
        {"gradient_scale.value": 1},
        {"copy_out_address.value": 1 << 40},
    ]
    for name, place in places.items():
        register = f"{name}_address.value"
        refused += [{register: at} for at in (place + BEAT // 2, place + 1)]
        refused += [{register: at} for at in (MEMORY_BYTES - 136, 1 << 32, (1 << 64) - BEAT)]
        refused += [
            {register: places[other] + by}
            for other in places
            for by in (144 - BEAT, BEAT - 144)
            if other != name and places[other] + by >= 0
        ]
    refused += [{"count.value": 1 << 62}, {"count.value": (1 << 64) - 1}]
    granted = {
        f"window{index}_{field}.value": value
        for index, place in enumerate(places.values())
        for field, value in (("base", place), ("limit", place + 144))
    }
    for k, name in enumerate(places):
        granted |= {
            f"window{k}_permissions.{each}": int(name != "g" or each != "write") for each in KINDS
        }
    for k, name in enumerate(places):
        changes = [
            {f"window{k}_base.value": places[name] + 1},
            {f"window{k}_limit.value": places[name] + 143},
            {f"window{k}_permissions.read": 0},
            {f"window{k}_permissions.valid": 0},
        ]
        if name in WRITES:
            changes.append({f"window{k}_permissions.write": 0})
        refused += [granted | change for change in changes]
    if bench.config.cut:  # each takes several times as long
        granted = {"window0_limit.value": 3 * PLACE_BYTES + 144}
        late = {"window0_limit.value": 3 * PLACE_BYTES + 143}
        refused = [*refused[:34:3], late, *({f"window0_permissions.{e}": 0} for e in KINDS)]
    causes, longest = set(), 0

    async def runs(bench):
        nonlocal longest
        before = bench.data.copy()
        for fields in refused:
            longest = max(longest, await bench.run(whole | fields))
            causes.add(await bench.field("error.cause"))
        assert (bench.data == before).all()
        assert not any(bench.checker.transfers.values())
        await bench.run(whole | granted)
        assert bench.checker.transfers["w"] == 3 * -(-count // 2)

    bench.simulate(runs)
    assert causes == {
        ErrorCause.UNSUPPORTED,
        ErrorCause.ALIGNMENT,
        ErrorCause.ADDRESS_RANGE,
        ErrorCause.OVERLAP,
        ErrorCause.WINDOW,
    }
    print(f"{len(refused)} refused, at most {longest} cycles")
    conditions = 3 * len(places) + 6 + (1 if bench.config.cut else 4)  # up to a write window
    each = 3 + bench.config.window_count if bench.config.cut else 1
    assert longest == 1 + each * conditions


def test_an_error_on_the_bus_ends_the_run_and_is_told(bench):
    count = 2 * BLOCK + 3
    cases = [(False, READS, index, index % 2 * 2) for index in range(4)]
    cases += [(True, WRITES, index, nth) for index in range(3) for nth in (0, 2)]
    if bench.config.cut:
        cases = cases[::-2]
    committed = []

    async def ends_early(bench, write, streams, index, nth):
        name, stream = list(streams.items())[index]
        response = DECERR if index % 2 else SLVERR
        errors = tuple(  # of which the first counts
            BurstError(write=write, nth=each, id=index, response=response) for each in range(nth, 3)
        )
        before = bench.data.copy()
        bench.disturb("both" if nth else "free", latency=5, errors=errors)
        await bench.configure({"count.value": count})
        bench.run_model()
        await bench.go({"count.value": count})
        await bench.until_idle()
        cause = ErrorCause.WRITE_RESPONSE if write else ErrorCause.READ_RESPONSE
        error = {"cause": cause, "stream": stream, "response": response}
        assert {each: await bench.field(f"error.{each}") for each in error} == error
        address = bench.defaults[f"{name}_address.value"] + 4 * BLOCK * nth
        assert await bench.read("error_address") == address
        assert (await bench.field("status.done"), await bench.field("status.error")) == (0, 1)
        await bench.compare_counters()
        whole = await bench.read("committed")
        assert whole % BLOCK == 0
        assert whole <= nth * BLOCK
        committed.append(whole)
        for state in WRITES:
            at = bench.defaults[f"{state}_address.value"]
            new, now = bench.golden.memory.data[at:], bench.data[at:]
            assert (now[: 4 * whole] == new[: 4 * whole]).all(), "what is committed is new"
            either = (now == new) | (now == before[at:])
            assert either[:PLACE_BYTES].all(), "every byte is new or old"
        at = bench.defaults["g_address.value"]
        assert (bench.data[at:][:PLACE_BYTES] == before[at:][:PLACE_BYTES]).all()

    async def runs(bench):
        for case in cases:
            await ends_early(bench, *case)
        bench.disturb()
        await bench.run({"count.value": count})

    bench.simulate(runs)
    assert max(committed) == 2 * BLOCK


def test_abort_and_reset_at_any_moment_leave_a_kernel_that_works(bench):
    count = 2 * BLOCK + 1
    ended = []

    async def runs(bench):
        for cycles, reset in product((1, 40, 55, 90), (False, True)):
            bench.disturb("both", latency=5)
            await bench.go({"count.value": count})
            for _ in range(cycles):
                await bench.cycle()
            if reset:
                await bench.reset()
                assert await bench.read("status") == 0
            else:
                await bench.write("control", 1)
                await bench.until_idle()
                ended.append(await bench.field("error.cause"))
                assert not await bench.field("status.done")
                await bench.compare_counters()
            await bench.run({"count.value": 5})

    bench.simulate(runs)
    assert ended == 4 * [ErrorCause.ABORTED]


@pytest.mark.parametrize("write", [False, True])
def test_memory_that_never_answers_is_recovered_by_a_reset(bench, write):
    """ABORT cannot end the run; nothing of it reaches the next one."""
    ended = []

    async def runs(bench):
        for nth in (0, 2):
            bench.disturb(errors=(BurstError(write=write, nth=nth, response=None),))
            await bench.go({"count.value": 2 * BLOCK + 1})
            for action in (400, 200):
                for _ in range(action):
                    await bench.cycle()
                ended.append(await bench.field("status.busy"))
                await bench.write("control", 1)
            await bench.reset()
            ended.append(await bench.read("status"))
            bench.disturb()
            await bench.run({"count.value": 2 * BLOCK + 1})

    bench.simulate(runs)
    assert ended == 2 * [1, 1, 0]


def test_what_a_run_is_told_may_not_change_in_it():
    bench = ShellBench(KERNELS["ultrascale_plus"])

    async def runs(bench):
        bench.disturb("free", latency=40)
        bench.golden.memory.write(0, bench.data)
        await bench.go({"count.value": 9})
        for name in ("start", "p_address", "count", "formats", "window0_limit", "step_size"):
            assert await bench.write(name, 1), name
        assert await bench.field("status.refused") == 1
        await bench.until_idle()
        assert await bench.read("committed") == 9
        await bench.write("control", 4)
        assert await bench.field("status.refused") == 0
        await bench.run({"count.value": 9})

    bench.simulate(runs)


def test_no_gradient_of_a_run_that_was_aborted_reaches_the_next_run(monkeypatch):
    """The next run has no pairs, and is launched while the decompressor offers one of before."""
    made = {}

    def kept(name):
        kind = getattr(kernel_core, name)
        return lambda *given, **named: made.setdefault(name, kind(*given, **named))

    for name in ("PairLoad", "RunControl"):
        monkeypatch.setattr(kernel_core, name, kept(name))
    bench = ShellBench(
        UpdateKernelConfig(
            **SMALL, rules=("sgd",), technology="ecp5", windows=1, compression=("fused",)
        )
    )
    pairs, gap = 9, 40  # elements from one pair to the next, and cycles between them when discarded
    index = bench.defaults["index_address.value"]
    bench.data[index : index + 4 * pairs] = np.arange(0, pairs * gap, gap, np.uint32).view(np.uint8)
    bench.defaults["compression.form"] = Compression.FUSED
    offered, launched = [], []

    def watch(ctx):
        o, control = made["PairLoad"].o, made["RunControl"]
        if ctx.get(o.valid & o.payload.any()):
            offered.append(bench.checker.cycles)
        if ctx.get(control.o_launch):
            launched.append(bench.checker.cycles)

    async def runs(bench):
        bench.beside.append(watch)
        dense = {"pairs.value": 0, "count.value": 3}
        await bench.configure(dense)
        begin = bench.checker.cycles
        await bench.run(dense)
        to_launch = launched[-1] - begin
        await bench.go({"pairs.value": pairs, "count.value": pairs * gap})
        for _ in range(220):
            await bench.cycle()
        await bench.write("control", 1)
        await bench.until_idle()
        await bench.configure(dense)
        offered.clear()
        while not offered:
            await bench.cycle()
        for _ in range((offered[0] - bench.checker.cycles - to_launch) % gap):
            await bench.cycle()
        await bench.run(dense)

    bench.simulate(runs)
    assert launched[-1] == offered[-1]


def test_a_run_that_is_stopped_has_committed_every_block_that_was_acknowledged():
    """Also if the last responses come in consecutive cycles."""
    config = UpdateKernelConfig(**SMALL, rules=("sgd",), technology="ecp5", windows=1)
    bench = ShellBench(config)
    committed = []

    async def runs(bench):
        for bursts in (1, 2, 3):
            bench.disturb()
            bench.memory.stalls = Stalls(b=1)
            bench.memory.writes.clear()
            await bench.go({"count.value": 5 * BLOCK})
            while len(bench.memory.writes) < bursts:
                await bench.cycle()
            await bench.write("control", 1)
            for _ in range(40):  # until all but the responses have come
                await bench.cycle()
            bench.memory.stalls = Stalls()
            await bench.until_idle()
            assert await bench.field("error.cause") == ErrorCause.ABORTED
            committed.append(await bench.read("committed"))
            assert committed[-1] == BLOCK * len(bench.memory.writes)
            bench.checks += 1

    bench.simulate(runs)
    assert max(committed) >= 2 * BLOCK


RICH = UpdateKernelConfig(
    **SMALL,
    rules=("adam", "sgd_momentum"),
    gradient_formats=("fp32", "fp16", "bf16"),
    gradient_scale=True,
    parameter_format="bf16",
    state_format="bf16",
    stochastic_rounding=True,
    copy_out_formats=("fp16", "bf16"),
    scan=True,
    compression=("fused", "scatter"),
)


@pytest.mark.deep
def test_every_kind_of_run_of_a_kernel_that_has_all_of_them():
    count, total = 35, 9
    bench = ShellBench(RICH)
    bench.defaults |= {"count.value": count, "rounding_seed.value": 77, "rounding_step.value": 5}
    copy = 6 * PLACE_BYTES
    pairs = {"pairs.value": total, "compression.form": Compression.FUSED}
    scan = {"operation.kind": RunKind.SCAN}
    dense = [
        {},
        {"rule.value": 1},
        {"formats.gradient": GradientFormat.FP16, "gradient_scale.value": 0x40000000},
        {"formats.copy_out": CopyOutFormat.BF16, "copy_out_address.value": copy},
        {"rounding.p": 1, "rounding.v": 3, "element_index.value": 1 << 20},
        scan,
        scan | {"formats.gradient": GradientFormat.BF16},
        {"compression.form": Compression.SCATTER, "pairs.value": 0},
        # What a run does not have may lie anywhere.
        {"compression.form": Compression.FUSED, "index_address.value": 4, "g_address.value": 4},
        {"pairs.value": total, "index_address.value": 4},
        scan | {"p_address.value": 4, "rule.value": 9},
        {"rule.value": 1, "v_address.value": 4},
        {"formats.gradient": GradientFormat.BF16, "g_address.value": MEMORY_BYTES - 72},
    ]
    refused = [
        {"rule.value": 2},
        {"formats.gradient": 3},
        {"formats.copy_out": 3},
        {"compression.form": 3},
        {"operation.kind": 2},
        {"element_index.value": 1},
        {"element_within.value": 1},
        {"element_index.value": 1 << 60},
        scan | pairs,
        scan | {"formats.copy_out": 1, "copy_out_address.value": copy},
        scan | {"count.value": 1 << 32},
        pairs | {"count.value": 1 << 32},
        pairs | {"pairs.value": 1 << 32},
        pairs | {"index_address.value": 4},
        pairs | {"index_address.value": MEMORY_BYTES - BEAT},
        {"formats.copy_out": 1, "copy_out_address.value": 0},
        {"formats.copy_out": 1, "copy_out_address.value": copy, "window0_limit.value": copy},
    ]
    causes = []

    async def runs(bench):
        for mode, some in (("both", dense), ("free", dense[:1])):
            bench.disturb(mode, latency=5)
            for fields in some:
                await bench.run(fields)
                assert await bench.field("status.done") == 1
        bench.disturb()
        moved = dict(bench.checker.transfers)
        for fields in refused:
            await bench.run(fields)
            causes.append(await bench.field("error.cause"))
        assert bench.checker.transfers == moved
        at = bench.defaults["index_address.value"]
        index = np.sort(bench.rng.integers(0, count, total)).astype(np.uint32)
        index[4] = index[3]
        for form in (Compression.FUSED, Compression.SCATTER):
            for wrong in (None, count, 0):
                words = index.copy()
                if wrong is not None:
                    words[-1] = wrong
                bench.data[at : at + 4 * total] = words.view(np.uint8)
                bench.disturb("both" if wrong is None else "free", latency=5)
                await bench.run(pairs | {"compression.form": form})
                causes.append(await bench.field("error.cause"))

    bench.simulate(runs)
    assert causes[: len(refused)].count(ErrorCause.UNSUPPORTED) == 13
    ends = causes[len(refused) :]
    assert ends == 2 * [ErrorCause.NONE, ErrorCause.PAIR_RANGE, ErrorCause.PAIR_ORDER]
