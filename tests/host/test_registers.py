"""Register objects over the golden register bank: what is sent, what is read, what is refused."""

import copy
import math
import random
import struct
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from rich.console import Console

from nearstep.backends.base import Poll
from nearstep.errors import ArgumentError, BusError, BusyError, MismatchError
from nearstep.registers import (
    FieldValueError,
    ReadOnlyFieldError,
    RefusedWriteError,
    Registers,
    UnknownRegisterError,
)
from nearstep_sim.golden.registers import RegisterFile
from nearstep_spec.csr.model import BLOCK_BYTES, Access, Kind
from nearstep_spec.updater.config import UpdateKernelConfig
from nearstep_spec.updater.registers import ErrorCause, GradientFormat, adam_kernel_map, device_maps

BASE = 3 * BLOCK_BYTES
SLVERR = 2


class Bus:
    """A backend's registers: one golden bank at `BASE`, and a log of what was sent."""

    def __init__(self, config: UpdateKernelConfig | None = None) -> None:
        self.bank = RegisterFile(adam_kernel_map(config or UpdateKernelConfig()))
        self.log: list[tuple[str, int, int]] = []
        self.dead: set[int] = set()

    def read_register(self, address: int) -> int:
        answer = self.bank.read(address - BASE)
        if answer.error or address in self.dead:
            raise BusError(address, SLVERR, write=False)
        self.log.append(("r", address - BASE, answer.value))
        return answer.value

    def write_register(self, address: int, value: int) -> None:
        self.log.append(("w", address - BASE, value))
        if self.bank.write(address - BASE, value).error:
            raise BusError(address, SLVERR, write=True)

    def sent(self) -> list[tuple[str, int, int]]:
        log, self.log = self.log, []
        return log


@pytest.fixture
def bus() -> Bus:
    return Bus()


@pytest.fixture
def regs(bus: Bus) -> Registers:
    kernel = adam_kernel_map(UpdateKernelConfig())
    registers = Registers(bus, {"adam0": (BASE, kernel)})
    bus.sent()
    return registers


def offset(name: str) -> int:
    return adam_kernel_map(UpdateKernelConfig())[name].offset


def test_pair_is_written_and_read_low_word_first(bus: Bus, regs: Registers) -> None:
    regs.adam0.count.value = 0x1_2345_6789
    assert bus.sent() == [("w", offset("count"), 0x2345_6789), ("w", offset("count") + 4, 1)]
    assert regs.adam0.count.value == 0x1_2345_6789
    assert [kind for kind, _, _ in bus.sent()] == ["r", "r"]


def test_start_is_one_write(bus: Bus, regs: Registers) -> None:
    regs.adam0.start.go = 1
    assert bus.sent() == [("w", 0x40, 1)]


def test_field_of_a_shared_register_keeps_its_neighbours(bus: Bus, regs: Registers) -> None:
    regs.adam0.mode.set(decoupled=1, m_from_g=1)
    assert bus.sent() == [("w", offset("mode"), 3)]
    regs.adam0.mode.decoupled = False
    assert regs.adam0.mode.get() == {"decoupled": 0, "m_from_g": 1}
    assert regs.adam0.mode.bits == 2
    regs.adam0.mode.bits = 1
    assert bus.bank["mode.decoupled"] == 1


@pytest.mark.parametrize("order", ["default", "paper"])
def test_every_configuration_field_holds_what_was_written(order: str) -> None:
    config = UpdateKernelConfig(order=order, windows=8)
    bus = Bus(config)
    regs = Registers(bus, {"adam0": (BASE, adam_kernel_map(config))})
    seed = 11
    print(f"seed {seed}")
    rng = random.Random(seed)
    wanted = {}
    for register, field in bus.bank.register_map.fields():
        if field.access is Access.CONFIG and field.kind is Kind.UINT:
            value = rng.getrandbits(field.width)
            setattr(regs.adam0[register.name], field.name, value)
            wanted[register.name, field.name] = value
    for (register_name, field_name), value in wanted.items():
        assert bus.bank[f"{register_name}.{field_name}"] == value
        assert getattr(regs.adam0[register_name], field_name) == value
    assert len(wanted) >= 40


@pytest.mark.parametrize("one", [1, True, np.True_, np.uint8(1), np.int64(1)])
def test_integers_of_every_kind_are_taken(bus: Bus, regs: Registers, one: object) -> None:
    regs.adam0.mode.decoupled = one
    assert bus.bank["mode.decoupled"] == 1


def test_float_is_rounded_once_to_nearest_even(regs: Registers) -> None:
    seed = 7
    print(f"seed {seed}")
    rng = random.Random(seed)
    values = [1e-8, 0.1, -0.0, math.inf, 1e-46, 2.0**-149 * 0.75, 1.0 + 2.0**-24, 3]
    values += [math.ldexp(rng.uniform(-1, 1), rng.randint(-148, 127)) for _ in range(200)]
    checked = 0
    for value in values:
        regs.adam0.eps.value = value
        # struct rounds once as well, and by other code than numpy's
        assert regs.adam0.eps.bits == int.from_bytes(struct.pack("<f", value), "little"), value
        assert math.copysign(1, regs.adam0.eps.value) == math.copysign(1, value)
        if math.isfinite(value):
            near = np.float32(regs.adam0.eps.value)
            error = abs(Fraction(value) - Fraction(float(near)))
            for other in (np.nextafter(near, np.float32(s)) for s in (-np.inf, np.inf)):
                assert not np.isfinite(other) or error <= abs(
                    Fraction(value) - Fraction(float(other))
                )
        checked += 1
    assert checked == 208


def test_float_bits_are_taken_as_they_are(bus: Bus, regs: Registers) -> None:
    regs.adam0.eps.bits = 0x7FC0_0001
    assert bus.bank["eps.value"] == 0x7FC0_0001
    assert math.isnan(regs.adam0.eps.value)


def test_named_values_read_as_members(bus: Bus, regs: Registers) -> None:
    bus.bank["error.cause"] = ErrorCause.WINDOW
    assert regs.adam0.error.cause is ErrorCause.WINDOW
    bus.bank["error.cause"] = 200
    assert regs.adam0.error.cause == 200
    regs.adam0.formats.gradient = GradientFormat.BF16
    assert bus.bank["formats.gradient"] == 2


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("count", 1 << 64, "0xffffffffffffffff"),
        ("count", -1, "from 0"),
        ("count", 1.5, "an integer"),
        ("count", "1", "an integer"),
        ("eps", "1e-8", "a float"),
        ("eps", None, "a float"),
        ("eps", 1e39, "range of binary32"),
        ("eps", 2**53 + 1, "at most 2"),
        ("eps", 1 + 2j, "a float"),
    ],
)
def test_value_that_does_not_fit_is_refused_before_the_device(
    bus: Bus, regs: Registers, name: str, value: object, message: str
) -> None:
    with pytest.raises(FieldValueError, match=message) as caught:
        regs.adam0[name].value = value
    assert caught.value.actual == value
    assert bus.sent() == []


@pytest.mark.parametrize(
    "register", [r for r in adam_kernel_map(UpdateKernelConfig()) if not r.writable]
)
def test_read_only_register_is_refused_before_the_device(
    bus: Bus, regs: Registers, register: object
) -> None:
    handle = regs.adam0[register.name]
    for field in register.fields:
        with pytest.raises(ReadOnlyFieldError, match=field.name):
            setattr(handle, field.name, 0)
    with pytest.raises(ReadOnlyFieldError):
        handle.bits = 0
    assert bus.sent() == []


def test_unknown_names_list_what_is_near(bus: Bus, regs: Registers) -> None:
    with pytest.raises(UnknownRegisterError, match="adam0") as caught:
        _ = regs.adam1
    assert caught.value.near == ("adam0",)
    with pytest.raises(AttributeError, match="p_address"):
        _ = regs.adam0.p_adress
    with pytest.raises(AttributeError, match="decoupled"):
        regs.adam0.mode.decopled = 1
    with pytest.raises(AttributeError, match="there is value"):
        _ = regs.adam0.count.val
    with pytest.raises(ArgumentError, match=r"assign to a field of adam0\.mode"):
        regs.adam0.mode = 1
    assert not hasattr(regs.adam0, "nothing")
    assert {"status", "count"} <= set(dir(regs.adam0))
    assert "busy" in dir(regs.adam0.status)
    assert bus.sent() == []


def test_write_while_busy_is_refused_by_name_with_a_dump(bus: Bus, regs: Registers) -> None:
    regs.adam0.count.value = 5
    bus.bank["status.busy"] = 1
    with pytest.raises(RefusedWriteError, match=r"adam0\.count was refused") as caught:
        regs.adam0.count.value = 6
    assert isinstance(caught.value, BusyError)
    assert caught.value.registers["adam0.count"] == 5
    assert caught.value.registers["adam0.status.busy"] == 1
    with pytest.raises(RefusedWriteError, match=r"adam0\.start"):
        regs.adam0.start.go = 1
    assert regs.adam0.status.refused == 0, "the flag is taken with the error"
    assert regs.adam0.count.value == 5


def test_other_bus_errors_stay_bus_errors(bus: Bus, regs: Registers) -> None:
    bus.dead = {BASE + offset("count")}
    with pytest.raises(BusError) as caught:
        _ = regs.adam0.count.value
    assert caught.value.address == BASE + offset("count")


@pytest.mark.parametrize("name", ["id", "version", "map_hash"])
def test_other_hardware_is_refused_at_open(bus: Bus, name: str) -> None:
    kernel = adam_kernel_map(UpdateKernelConfig())
    for register, field in kernel.fields():
        if register.name == name:
            bus.bank[f"{name}.{field.name}"] ^= 1
    with pytest.raises(MismatchError, match=rf"adam0\.{name}") as caught:
        Registers(bus, {"adam0": (BASE, kernel)})
    assert caught.value.expected != caught.value.actual
    assert all(kind == "r" for kind, _, _ in bus.sent())


def test_a_kernel_with_the_identity_of_version_1_is_refused_with_both_values(bus: Bus) -> None:
    bus.bank["id.value"] = int.from_bytes(b"ADAM", "big")
    with pytest.raises(MismatchError, match=r"adam0\.id") as caught:
        Registers(bus, {"adam0": (BASE, adam_kernel_map(UpdateKernelConfig()))})
    found = [bytes.fromhex(text[2:]) for text in (caught.value.expected, caught.value.actual)]
    assert found == [b"UPDT", b"ADAM"]
    assert all(kind == "r" for kind, _, _ in bus.sent())


def test_other_configuration_is_refused_at_open() -> None:
    bus = Bus(UpdateKernelConfig(lanes=8))
    with pytest.raises(MismatchError, match="map_hash"):
        Registers(bus, {"adam0": (BASE, adam_kernel_map(UpdateKernelConfig(lanes=16)))})


def test_dump_has_every_readable_field_and_survives_a_dead_register(
    bus: Bus, regs: Registers
) -> None:
    kernel = adam_kernel_map(UpdateKernelConfig())
    readable = [f for _, f in kernel.fields() if f.access is not Access.PULSE]
    dump = regs.dump()
    assert len(dump) == len(readable) > 40
    assert dump["adam0.map_hash"] == kernel.hash()
    assert all(kind == "r" for kind, _, _ in bus.sent())
    bus.dead = {BASE + offset("cycles")}
    assert set(dump) - set(regs.dump()) == {"adam0.cycles"}


def test_table_shows_numbers_and_names(bus: Bus, regs: Registers) -> None:
    bus.bank["error.cause"] = ErrorCause.WINDOW
    bus.dead = {BASE + offset("cycles")}
    regs.adam0.eps.value = 0.5
    console = Console(width=120)
    with console.capture() as capture:
        console.print(regs.adam0.table())
    text = capture.get()
    assert "3 window" in text
    assert "bus error" in text
    assert [line for line in text.splitlines() if "adam0.eps" in line and "0.5" in line]


def test_poll_names_word_mask_and_value(regs: Registers) -> None:
    status = BASE + offset("status")
    assert regs.adam0.status.poll(done=1, busy=0) == Poll(address=status, mask=3, value=2)
    with pytest.raises(ArgumentError, match="one word"):
        regs.adam0.count.poll(value=1)


def test_objects_can_be_copied_without_touching_the_device(bus: Bus, regs: Registers) -> None:
    copy.copy(regs)
    copy.copy(regs.adam0)
    copy.copy(regs.adam0.status)
    assert bus.sent() == []


def test_device_maps_do_not_overlap() -> None:
    maps = device_maps(UpdateKernelConfig())
    ranges = sorted((base, base + each.size) for base, each in maps.values())
    assert ranges
    assert all(end <= start for (_, end), (start, _) in pairwise(ranges))


def test_a_block_is_not_assigned_to(bus):
    registers = Registers(bus, {"adam0": (BASE, adam_kernel_map(UpdateKernelConfig()))})
    bus.sent()
    with pytest.raises(ArgumentError, match=r"assign to a field of a register of adam0 \(id,"):
        registers.adam0 = 1
    with pytest.raises(UnknownRegisterError, match="no block 'adam1'; there is adam0"):
        registers.adam1 = 1
    with pytest.raises(ArgumentError, match=r"assign to a field of adam0\.count"):
        registers.adam0.count = 1
    with pytest.raises(UnknownRegisterError):
        registers.adam0.name = "adam1"
    with pytest.raises(UnknownRegisterError):
        registers.adam0.count.address = 0
    assert bus.sent() == []
    assert registers.adam0.name == "adam0"
