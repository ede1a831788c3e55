"""Four devices as `nearstep rtl` writes them, in one object: bits and cycles are `sim:coarse`'s.

`sim:coarse` has an object of each device, a register in front of its reset, functional units
outside, in RTL or in C++, and links and their wiring in C++. Here all of that is inside.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from itertools import permutations

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from nearstep.backends.emulated import Injection
from nearstep.backends.options import DeviceUrl
from nearstep.coarse import CoarsePool
from nearstep.coarse.errors import (
    JobRefusedError,
    MemoryResponseError,
    PoolAbortedError,
    SilentLinkError,
)
from nearstep.errors import ArgumentError, KernelError, MismatchError
from nearstep_hw.generate import command
from nearstep_sim.coarse.options import SIM, VerilatedPoolOptions
from nearstep_sim.coarse.pool_values import (
    SMALL,
    SMALL_MEMORY,
    SMALLEST,
    Floats,
    compare,
    draw,
    reduced,
)
from nearstep_sim.coarse.ring_library import header
from nearstep_sim.coarse.ring_top import TOP, device_verilog, numbered, ring_verilog
from nearstep_sim.coarse.shipped_ring import shipped_ring
from nearstep_sim.models.link.faults import LinkFault
from nearstep_spec.coarse.config import CoarseConfig

from .small_pool import backend, random

RING = f"{SMALL}&{SMALL_MEMORY}"
"""Smaller devices than those without an option: 4 lanes, entries of 8 phits."""
OPTIONS = RING.partition("&")[2].replace("=1MiB", "=1048576")
"""Of `nearstep rtl`: those of a device."""
SHIPPED = "devices=4&memory_bytes=64MiB"
"""`nearstep rtl coarse_device` without an option."""
WITH_KERNEL = f"{SHIPPED}&rules=adam,sgd"
SIZES = (1, 17, 2048, 5003)
SEED = 19
WRITTEN = dict.fromkeys(
    ("source", "destination", "window_base", "window_limit", "snapshot_base", "snapshot_area"), 64
) | dict.fromkeys(("elements", "silence_limit", "keepalive", "retry", "snapshot_pages"), 32)
"""Bits of registers that hold a number."""

Log = list[object]


class Course:
    """What a pool is led through; everything that it tells, with the cycle, is kept.

    Two pools that are alike in each cycle keep the same. Sums are compared with golden's as well.
    Arrays have a share `1 / parts` of the elements.
    """

    def __init__(self, pool: CoarsePool, parts: int = 1) -> None:
        self.pool = pool
        self.parts = parts
        self.middle = pool.devices // 2
        self.random = random(SEED)
        self.log: Log = []
        self.compared = 0

    def note(self, *values: object) -> None:
        self.log.append((self.pool.device.cycles, *values))

    def sum(self, size: int, op: str, wire: str, group: int | None = None) -> None:
        self.sum_of(draw(self.pool, -(-size // self.parts), self.random), op, wire, group)

    def sum_of(self, arrays: list[Floats], op: str, wire: str, group: int | None = None) -> None:
        tensor = self.pool.tensor(arrays)
        self.pool.all_reduce(tensor, op, wire, group=group)
        self.compared += compare(tensor, reduced(self.pool, arrays, op, wire, group))
        self.note(self.pool.counters())
        tensor.free()

    def sums(self) -> None:
        """Every operation and wire, on one ring and on both, of odd sizes."""
        kinds = [
            (op, wire) for op in ("sum", "average", "max") for wire in ("fp32", "fp16", "bf16")
        ]
        for number, (op, wire) in enumerate(kinds):
            self.sum(SIZES[number % len(SIZES)], op, wire, (None, 0, 1)[number % 3])

    def wide(self) -> None:
        """Numbers of any magnitude, which nearly cancel each other on two devices; many chunks."""
        for number, (op, wire) in enumerate(
            [
                ("sum", "fp16"),
                ("average", "bf16"),
                ("max", "fp16"),
                ("sum", "fp32"),
                ("max", "bf16"),
            ]
        ):
            most = 14 if wire == "fp16" else 100
            arrays = [
                (each * np.exp2(self.random.uniform(-2 * most, most, each.size))).astype("f4")
                for each in draw(self.pool, 512, self.random)
            ]
            nearly = 1 + np.exp2(-self.random.uniform(1, 24, 512))
            arrays[1] = np.where(
                self.random.random(512) < 0.5, -arrays[0] * nearly, arrays[1]
            ).astype("f4")
            self.sum_of(arrays, op, wire, (1, 0, 1, None, 0)[number])
        self.sum_of(draw(self.pool, 12_000, self.random), "sum", "fp32")

    def registers(self) -> None:
        """Every bit that a host may write, while nothing runs; then jobs that no core takes."""
        for node in self.pool.device.nodes:
            for block in (node.pool, node.sync0, node.sync1):
                for name, bits in WRITTEN.items():
                    if hasattr(block, name):
                        register = getattr(block, name)
                        for value in ((1 << bits) - 1, 0, register.value):
                            register.value = value
                            assert register.value == value
                            self.compared += 1
        for operation, address in ((3, 64), (0, (1 << 64) - 64), (1, 4)):
            for node in self.pool.device.nodes:
                for core in (node.sync0, node.sync1):
                    core.source.value = core.destination.value = address
                    core.elements.value = 1 << 31
                    core.job.operation = operation
                    core.start.go = 1
            backend(self.pool).run(500)
            for node in self.pool.device.nodes:
                assert node.sync0.status.error
                self.note(node.sync0.dump(), node.pool.dump())
            self.pool.reset()

    def many(self) -> None:
        """More jobs than a core has places for, while clients and the host use the windows."""
        pool = self.pool
        arrays = draw(pool, 700 // self.parts, self.random)
        tensors = [pool.tensor(arrays) for _ in range(2)]
        area = pool.device.alloc(1 << 13, np.uint8, channel=1)
        content = self.random.integers(0, 256, area.nbytes, np.uint8)
        area.write(content)
        events = [pool.submit(tensor, group=g) for g, tensor in enumerate(tensors)]
        data = self.random.integers(0, 256, 4001, np.uint8)
        push = backend(pool).submit_write(area.address + 64, data)
        content[64 : 64 + data.size] = data
        pull = backend(pool).submit_read(area.address, out := np.empty(50, np.uint8))
        for event in events:
            event.wait()
            self.note(event.done)
        self.note(push.wait().cycles, pull.wait().cycles, out.tobytes())
        np.testing.assert_array_equal(area.read(), content)
        for group, tensor in enumerate(tensors):
            self.compared += compare(tensor, reduced(pool, arrays, group=group))
        for each in (area, *tensors):
            each.free()

    def snapshot(self) -> None:
        """Frozen values stay while jobs and the host write them."""
        pool = self.pool
        arrays = draw(pool, 3000 // self.parts, self.random)
        tensor = pool.tensor(arrays)
        with pool.freeze([tensor]) as frozen:
            event = pool.submit(tensor)
            for device in range(pool.devices):
                np.testing.assert_array_equal(
                    frozen.read(0, device).view("u4"), arrays[device].view("u4")
                )
                self.compared += tensor.size
                self.note(pool.device.nodes[device].pool.dump())
            event.wait()
            pool.all_reduce(tensor, "max")
            tensor.write(self.middle, arrays[0])
            np.testing.assert_array_equal(
                frozen.read(0, self.middle).view("u4"), arrays[self.middle].view("u4")
            )
            self.note(pool.counters())
        tensor.free()

    def failures(self) -> None:
        """Each of them in the midst of a job; then a sum as if nothing had been."""
        pool = self.pool
        faults: list[tuple[type[Exception], Callable[[], None]]] = [
            (MemoryResponseError, self._slverr),
            (PoolAbortedError, self._abort),
            (PoolAbortedError, pool.reset),
            (PoolAbortedError, self._hard_reset),
            (JobRefusedError, self._small_window),
        ]
        for error, happen in faults:
            arrays = draw(pool, 9000 // self.parts, self.random)
            tensor = pool.tensor(arrays)
            self.tensor = tensor
            if happen == self._small_window:
                happen()
            event = pool.submit(tensor)
            backend(pool).run(1500 // self.parts)
            if happen != self._small_window:
                happen()
            with pytest.raises(error) as found:
                event.wait()
            self.note(str(found.value))
            backend(pool).heal()
            pool.reset()
            self.compared += compare(tensor, arrays)
            tensor.free()
            self.sum(600, "average", "fp32")

    def _slverr(self) -> None:
        back = self.tensor.back(self.pool.devices - 1)
        span = {"base": back.address, "limit": back.address + back.nbytes}
        backend(self.pool).inject(
            Injection(kind="slverr", write=True, nth=20 // self.parts**2, **span)
        )

    def _abort(self) -> None:
        self.pool.device.nodes[self.middle].sync1.control.abort = 1

    def _hard_reset(self) -> None:
        self.pool.device.reset()
        self.pool.reset()

    def _small_window(self) -> None:
        self.pool.device.nodes[1].pool.window_limit.value = 4096

    def updates(self) -> None:
        """A step of two rules on every device, and one that ends with an error of memory."""
        pool, size = self.pool, 1500
        values = {name: pool.tensor(draw(pool, size, self.random)) for name in "pgmv"}
        for each in (values["m"], values["v"]):
            for device in range(pool.devices):
                each.write(device, np.zeros(size, np.float32))
        steps = (("adamw", "pgmv", {"lr": 1e-2, "step": 1}), ("sgd", "pg", {"lr": 0.1}))
        for optimizer, names, hyper in steps:
            runs = [
                pool.device.update(
                    optimizer, {name: values[name].front(d) for name in names}, **hyper
                )
                for d in range(pool.devices)
            ]
            for run in runs:
                run.wait()
                self.note(run.cycles, run.committed)
            for device in range(pool.devices):
                self.note(*(values[name].read(device).tobytes() for name in names))
                self.compared += len(names) * size
        bad = values["p"].front(1).address + 2048
        backend(pool).inject(
            Injection(kind="slverr", write=False, base=bad, limit=bad + 64, times=1)
        )
        arrays = {name: values[name].front(1) for name in "pg"}
        with pytest.raises(KernelError) as found:
            pool.device.update("sgd", arrays, lr=0.1).wait()
        self.note(str(found.value))
        backend(pool).heal()

    def end(self) -> None:
        """All registers, all memory, all that was counted."""
        for name, block in self.pool.device.blocks.items():
            self.note(name, block.dump())
        link = backend(self.pool)
        memory = hashlib.sha256(link._memory.data).hexdigest()
        self.note(memory, link.memory_counters, link.transactions())


def led(pool: CoarsePool) -> tuple[Log, int]:
    """What a pool kept of the course, and how many values golden has as well."""
    with pool:
        course = Course(pool)
        course.sums()
        course.many()
        course.snapshot()
        course.failures()
        if pool.device.config.updater is not None:
            course.updates()
        course.end()
        return course.log, course.compared


def same(one: Log, other: Log) -> int:
    """Compare what two pools kept; the number of things that were kept."""
    for number, (expected, found) in enumerate(zip(one, other, strict=True)):
        assert found == expected, f"number {number} differs"
    return len(one)


def ring(options: str, *, links_inside: bool = True) -> CoarsePool:
    return CoarsePool(shipped_ring(f"sim:coarse?{options}", links_inside=links_inside))


@pytest.mark.deep
def test_the_ring_holds_the_bytes_that_are_written(tmp_path) -> None:
    app = typer.Typer()
    app.command(context_settings=command.context_settings)(command)
    pairs = [each.split("=") for each in OPTIONS.split("&")]
    options = [part for name, value in pairs for part in (f"--{name.replace('_', '-')}", value)]
    path = tmp_path / "device.v"
    result = CliRunner().invoke(app, ["coarse_device", *options, "-o", str(path)])
    assert result.exit_code == 0, result.output
    parsed = SIM.parse(DeviceUrl.parse(f"sim:coarse?{RING}").options)
    assert isinstance(parsed, VerilatedPoolOptions)
    config = parsed.config()
    written = path.read_bytes()
    assert len(written) > 1 << 20
    assert written == device_verilog(config).read_bytes()
    whole = ring_verilog(config, 4, 10).read_bytes()
    assert whole.startswith(written)
    around = whole[len(written) :].decode()
    assert around.count("module coarse_ring") == 2
    assert around.count("  coarse_device instance") == 4
    assert around.count("  coarse_ring_link link") == 8
    assert around.count(" reg ") == 3, "the links' phits, valid and place, and no other state"


@pytest.mark.deep
@pytest.mark.parametrize("links_inside", [True, False], ids=["inside", "outside"])
def test_a_course_has_the_bits_and_cycles_of_a_pool_of_objects(links_inside) -> None:
    """And one with a link that is a cycle longer has others."""
    options = f"{RING}&stall=0.1"
    expected, compared = led(CoarsePool.open(f"sim:coarse?{options}&link_latency=10"))
    found, again = led(ring(f"{options}&link_latency=10", links_inside=links_inside))
    kept = same(expected, found)
    print(f"seed {SEED}: {kept} times, cycle {found[-1][0]}, {compared} values golden has")
    assert kept >= 40
    assert compared == again > 100_000
    if links_inside:
        longer, _ = led(CoarsePool.open(f"sim:coarse?{options}&link_latency=11"))
        with pytest.raises(AssertionError, match=r"number \d+ differs"):
            same(longer, found)


@pytest.mark.deep
@pytest.mark.parametrize("url", [SHIPPED, WITH_KERNEL], ids=["plain", "kernel"])
def test_devices_as_they_are_shipped_have_the_bits_and_cycles_of_a_pool_of_objects(url) -> None:
    """Sizes, links and memory are those that there are without an option."""
    parsed = SIM.parse(DeviceUrl.parse(f"sim:coarse?{url}").options)
    assert isinstance(parsed, VerilatedPoolOptions)
    assert parsed.config() == CoarseConfig(rules=("adam", "sgd") if "rules" in url else ())
    expected, compared = led(CoarsePool.open(f"sim:coarse?{url}"))
    found, again = led(ring(url))
    kept = same(expected, found)
    print(f"seed {SEED}: {kept} times, cycle {found[-1][0]}, {compared} values golden has")
    assert kept >= 40
    assert compared == again > 100_000


RATES = "drop=0.01&duplicate=0.01&reorder=0.01&corrupt=0.01&seed=5"


def broken(pool: CoarsePool, *, whole: bool = False, parts: int = 1) -> tuple[Log, int]:
    """What a pool kept of sums, or the whole course, on links with faults at random, of faults one
    by one and of a device that dies; and how many values golden has as well.
    """
    with pool:
        course = Course(pool, parts)
        course.sums()
        if whole:
            course.wide()
            course.registers()
            course.many()
            course.snapshot()
            course.failures()
        for nth, kind in enumerate(("drop", "corrupt", "duplicate", "reorder", "stall")):
            fault = LinkFault(
                kind=kind,
                link=nth % backend(pool).links,
                direction=nth % 2,
                frame="entry",
                nth=nth,
                cycles=900,
            )
            backend(pool).inject_link(fault)
            course.sum(5000, "sum", "fp32")
        tensor = pool.tensor(draw(pool, 9000 // parts, course.random))
        event = pool.submit(tensor)
        backend(pool).run(1000 // parts)
        backend(pool).kill(1)
        with pytest.raises(SilentLinkError) as silent:
            event.wait()
        course.note(str(silent.value))
        backend(pool).revive(1)
        pool.reset()
        course.sum(3000, "max", "bf16")
        ends = [(link, way) for link in range(backend(pool).links) for way in (0, 1)]
        statistics = [backend(pool).link_statistics(*end) for end in ends]
        course.note(statistics)
        found = [
            sum(each[kind] for each in statistics)
            for kind in ("drop", "duplicate", "reorder", "corrupt")
        ]
        assert sum(found) > 5 if whole else min(found) > 5
        course.end()
        return course.log, course.compared


@pytest.mark.deep
def test_faults_of_links_have_the_bits_and_cycles_of_a_pool_of_objects() -> None:
    """Links outside, at random and one by one; a device that dies."""
    expected, compared = broken(CoarsePool.open(f"sim:coarse?{RING}&link_latency=10&{RATES}"))
    found, again = broken(ring(f"{RING}&link_latency=10&{RATES}", links_inside=False))
    assert same(expected, found) > 20
    assert compared == again > 50_000


@pytest.mark.deep
def test_devices_as_they_are_shipped_go_the_course_on_damaged_links() -> None:
    """Coverage of the shipped device is counted here: stalls of memory, and all faults above."""
    url = f"sim:coarse?{SHIPPED}&stall=0.4&link_interval=2&{RATES}".replace(
        "devices=4", "devices=2"
    ).replace("0.01", "0.05")
    pool = CoarsePool(shipped_ring(url, links_inside=False), silence_cycles=1 << 14)
    for node in pool.device.nodes:
        node.pool.retry.value = 2048
        node.pool.keepalive.value = 128
    kept, compared = broken(pool, whole=True, parts=4)
    print(f"seed {SEED}: {len(kept)} times, cycle {kept[-1][0]}, {compared} values golden has")
    assert len(kept) >= 30
    assert compared > 30_000


@pytest.mark.deep
def test_rings_that_are_there_at_once_are_closed_in_any_order() -> None:
    compared = 0
    for order in permutations(range(3)):
        pools = [ring(f"{SMALLEST}&{SMALL_MEMORY}", links_inside=False) for _ in order]
        for place in order:
            for pool in pools:
                if not pool.device.closed:
                    arrays = draw(pool, 50, random(place))
                    tensor = pool.tensor(arrays)
                    pool.all_reduce(tensor)
                    compared += compare(tensor, reduced(pool, arrays))
                    tensor.free()
            pools[place].close()
    assert compared == 6 * (3 + 2 + 1) * 2 * 50


class TestWhatARingCannotBe:
    @pytest.mark.parametrize(
        ("options", "links_inside", "what"),
        [
            ("trace=waves.vcd", True, "trace"),
            ("rules=sgd&fu=native", True, "fu"),
            ("drop=0.1", True, "links"),
            ("link_interval=2", True, "links"),
            ("devices=1&rules=sgd", False, "devices"),
        ],
    )
    def test_is_refused_before_anything_is_built(self, options, links_inside, what) -> None:
        url = f"sim:coarse?memory_bytes=1MiB&{options}"
        with pytest.raises(ArgumentError, match=f"^{what} of a ring in one object must not be"):
            shipped_ring(url, links_inside=links_inside)

    def test_golden_is_another(self) -> None:
        with pytest.raises(MismatchError, match="must be sim:coarse, not golden:coarse"):
            shipped_ring("golden:coarse?devices=4", links_inside=True)

    @pytest.mark.parametrize(("devices", "latency"), [(1, 100), (4, 0)])
    def test_numbers_that_no_ring_has(self, devices, latency) -> None:
        with pytest.raises(ValueError, match="2 or more and latency 1 or more"):
            ring_verilog(CoarseConfig(), devices, latency)


def test_ports_have_the_number_of_their_device() -> None:
    assert numbered("csr__address", 2) == "csr2__address"
    assert numbered("link_out__1__valid", 0) == "link_out0__1__valid"
    assert numbered("o_interrupt", 3) == "o_interrupt3"
    text = header(["o_interrupt", "csr__ack"], 2)
    assert "case 1: return {ring.o_interrupt1, ring.csr1___05Fack};" in text
    assert "default: return {ring.o_interrupt0, ring.csr0___05Fack};" in text
    assert TOP == "coarse_ring"
