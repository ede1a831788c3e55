"""`nvme:` as a device of optimizers, in front of a controller without a kernel between."""

from __future__ import annotations

import errno
import shutil
import struct
import subprocess
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import nearstep
from nearstep.backends import nvme
from nearstep.errors import ArgumentError, MismatchError, OptionError, OutOfDeviceMemoryError
from nearstep.linux import passthrough
from nearstep.linux.nvme.standard import CommandSet, Status
from nearstep.linux.nvme_device import LocalMemory, NvmeDevice, _config, choose, find_siblings
from nearstep.linux.passthrough import (
    CommandStatusError,
    IoctlNode,
    NodeBusyError,
    NodeError,
    NodeNotFoundError,
    PassedCommand,
    RingNode,
)
from nearstep.torch.errors import InterruptedStepError

from ..optim.conftest import bits, like_torch
from .driver import DriverStandIn, add_node
from .guest import SHAPE, SLM_BYTES, guest_of, ranges_of

SIZES = (4096 + 16, 16, 1024, 48)
STEPS = 10
Make = Callable[..., nearstep.Device]


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[DriverStandIn]:
    with guest_of(tmp_path) as guest:
        made = DriverStandIn(tmp_path, guest)
        monkeypatch.setattr(passthrough.fcntl, "ioctl", made.ioctl)
        monkeypatch.setattr(nvme, "find_siblings", partial(find_siblings, root=tmp_path))
        yield made


@pytest.fixture
def opened(driver: DriverStandIn) -> Iterator[Make]:
    """What opens devices by the node of the drive; they are closed at the end."""
    made: list[nearstep.Device] = []

    def make(node: str = "ng0n3", **options: str) -> nearstep.Device:
        given = {"passthrough": "ioctl", **options}
        query = "&".join(f"{name}={value}" for name, value in given.items())
        made.append(nearstep.open(f"nvme:{driver.folder}/dev/{node}?{query}"))
        return made[-1]

    yield make
    for each in made:
        each.close()


def tensors(seed: int) -> list[Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=draw) for size in SIZES]


def trained(make: Callable[..., Any], steps: int = STEPS, **options: Any) -> list[Tensor]:
    """Parameters and state after some steps."""
    parameters = [torch.nn.Parameter(each) for each in tensors(1)]
    optimizer = make(parameters, **options)
    for step in range(steps):
        for parameter, gradient in zip(parameters, tensors(2 + step), strict=True):
            parameter.grad = gradient
        optimizer.step()
    return arrays(optimizer, parameters)


def arrays(optimizer: torch.optim.Optimizer, parameters: list[torch.nn.Parameter]) -> list[Tensor]:
    found = [each.detach().clone() for each in parameters]
    for each in parameters:
        state = optimizer.state[each]
        found += [state[name].clone() for name in sorted(state) if state[name].dim()]
    return found


def check_equal(found: list[Tensor], expected: list[Tensor]) -> None:
    assert len(found) == len(expected) > len(SIZES)
    assert all(torch.equal(bits(a), bits(b)) for a, b in zip(found, expected, strict=True))


@like_torch
@pytest.mark.parametrize("ranges", ["set", "inline"])
def test_adamw_has_torchs_bits_after_ten_steps(
    driver: DriverStandIn, opened: Make, ranges: str
) -> None:
    device = opened(ranges=ranges)
    assert isinstance(device, NvmeDevice)
    found = trained(nearstep.optim.AdamW, device=device)
    check_equal(found, trained(partial(torch.optim.AdamW, fused=True)))
    counts = driver.guest.controller.counters.by_opcode
    assert counts[1, 1] == STEPS  # small tensors are one run
    assert counts[0, 0x88] == 1
    assert counts.get((0, 0x89), 0) == (ranges == "set")


RULES: list[tuple[str, dict[str, Any]]] = [
    ("Adam", {"weight_decay": 0.1}), ("SGD", {"lr": 0.1}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True}), ("Adagrad", {"lr": 0.1}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "options"), RULES)
def test_every_rule_of_the_card_has_the_bits_of_the_card_itself(
    opened: Make, name: str, options: dict[str, Any]
) -> None:
    make = partial(getattr(nearstep.optim, name), **options)
    with nearstep.open(SHAPE) as card:
        expected = trained(make, device=card)
    found = trained(make, device=opened())
    assert len(found) == len(expected) >= len(SIZES)
    assert all(torch.equal(bits(a), bits(b)) for a, b in zip(found, expected, strict=True))


def test_what_the_optimizer_reports_is_what_it_reports_of_the_card(opened: Make) -> None:
    def traffic(device: nearstep.Device) -> dict[str, Any]:
        parameters = [torch.nn.Parameter(each) for each in tensors(1)]
        optimizer = nearstep.optim.AdamW(parameters, device=device)
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        return {k: v for k, v in vars(optimizer.traffic).items() if "seconds" not in k}

    with nearstep.open(SHAPE) as card:
        assert traffic(opened()) == traffic(card)


def test_rules_are_found_by_their_digests(opened: Make) -> None:
    for node in ("ng0n1", "ng0n2", "ng0n3"):  # any namespace of the controller
        with opened(node) as device:
            assert isinstance(device, NvmeDevice)
            assert device.config.rules == ("adam", "sgd", "sgd_momentum", "adagrad")
    assert opened(rules="sgd_momentum").backend.config.rules == ("sgd_momentum",)  # type: ignore[attr-defined]


def test_a_rule_that_no_program_has_is_refused_with_both(opened: Make) -> None:
    with pytest.raises(MismatchError, match=r"for rule adam_amsgrad, not \['c5a5b2c668d4c05b'"):
        opened(rules="adam,adam_amsgrad")
    with pytest.raises(MismatchError, match=r"'adam': 'c5a5b2c668d4c05b'.* in rules=, not"):
        _config("/dev/ng0n3", ["0" * 16, None], None, "default")
    with opened(order="paper") as device:  # of Adam the card has the default order
        assert isinstance(device, NvmeDevice)
        assert device.config.rules == ("sgd", "sgd_momentum", "adagrad")
    with pytest.raises(OptionError, match="passthrough"):
        opened(passthrough="spdk")


def test_the_size_of_the_memory_is_found_by_reads(opened: Make) -> None:
    with opened() as device:
        assert device.capacity_bytes == SLM_BYTES
    device = opened(ranges="inline")
    assert device.capacity_bytes == SLM_BYTES - 64  # for the argument block
    with pytest.raises(OutOfDeviceMemoryError, match=str(SLM_BYTES)):
        device.alloc(SLM_BYTES // 4)


def test_bytes_beside_an_access_are_kept(opened: Make) -> None:
    device, draw = opened(), np.random.default_rng(7)
    expected = draw.integers(0, 256, 700_001, np.uint8)
    buffer = device.alloc(expected.size, np.uint8)
    buffer.write(expected)
    for checks in range(24):
        first = int(draw.integers(0, 4096)) * (160 if checks % 2 else 1) + checks % 5
        last = first + int(draw.integers(0, 9)) * (40_000 if checks == 3 else 1)
        last = min(last, expected.size)
        expected[first:last] = draw.integers(0, 256, last - first, np.uint8)
        buffer[first:last].write(expected[first:last])
        assert np.array_equal(buffer[first:last].read(), expected[first:last])
    assert np.array_equal(buffer.read(), expected)


def test_the_oldest_range_set_makes_room(driver: DriverStandIn, opened: Make) -> None:
    device = opened()
    p, g = device.alloc(16 * 300), device.alloc(16 * 300)
    p.fill(0.0)
    g.fill(1.0)
    for number in range(300):
        part = slice(16 * number, 16 * number + 16)
        device.update("sgd", {"p": p[part], "g": g[part]}, lr=0.5).wait()
    assert p.read().tolist() == [-0.5] * (16 * 300)
    assert driver.guest.controller.counters.by_opcode[0, 0x89] == 300 + 2 * (300 - 256)


def test_range_sets_of_others_are_kept(driver: DriverStandIn, opened: Make) -> None:
    device, guest = opened(), driver.guest
    guest.put(guest.scratch, ranges_of((0, 64)))
    for _ in range(255):
        assert guest.run(0x89, 3, prp1=guest.scratch, dw11=1).status == 0
    p, g = device.alloc(16 * 4), device.alloc(16 * 4)
    p.fill(0.0)
    g.fill(1.0)
    for part in (slice(16 * number, 16 * number + 16) for number in range(4)):
        device.update("sgd", {"p": p[part], "g": g[part]}, lr=0.5).wait()
    assert p.read().tolist() == [-0.5] * (16 * 4)
    device.reset()
    assert guest.run(0x89, 3, prp1=guest.scratch, dw11=1).status == 0
    with pytest.raises(CommandStatusError, match="TOO_MANY_RANGE_SETS"):
        device.update("sgd", {"p": p, "g": g}, lr=0.5)


def test_close_leaves_no_program_active_and_no_range_set(
    driver: DriverStandIn, opened: Make
) -> None:
    device = opened()
    trained(nearstep.optim.AdamW, steps=1, device=device)
    programs = driver.guest.controller.namespaces[2]
    assert programs._program_list()[64] == 0x0E  # type: ignore[attr-defined]
    assert len(programs._range_sets()) == 32 + 4 * 32  # type: ignore[attr-defined]
    device.close()
    device.close()
    assert programs._program_list()[64] == 0x0A  # type: ignore[attr-defined]
    assert programs._range_sets() == b""  # type: ignore[attr-defined]
    opened().close()  # nodes are free again


@like_torch
def test_a_reset_of_the_controller_fails_a_step_and_a_checkpoint_goes_on(
    driver: DriverStandIn, opened: Make
) -> None:
    device = opened()
    parameters = [torch.nn.Parameter(each) for each in tensors(1)]
    optimizer = nearstep.optim.AdamW(parameters, device=device)

    def step(number: int) -> None:
        for parameter, gradient in zip(parameters, tensors(2 + number), strict=True):
            parameter.grad = gradient
        optimizer.step()

    for number in range(4):
        step(number)
    saved = optimizer.state_dict()
    held = [each.detach().clone() for each in parameters]
    driver.reset()
    with pytest.raises(CommandStatusError, match="Execute of program 1 on .*ng0n2 must end with "
                       r"SUCCESS, not with PROGRAM_NOT_ACTIVATED \(0x198\)") as at:  # fmt: skip
        step(4)
    assert (at.value.actual, at.value.expected) == (Status.PROGRAM_NOT_ACTIVATED, "SUCCESS")
    with pytest.raises(InterruptedStepError):
        step(4)
    device.reset()
    with torch.no_grad():
        for parameter, each in zip(parameters, held, strict=True):
            parameter.copy_(each)
    optimizer.load_state_dict(saved)
    for number in range(4, STEPS):
        step(number)
    expected = trained(partial(torch.optim.AdamW, fused=True))
    check_equal(arrays(optimizer, parameters), expected)


def test_a_failed_command_and_a_lost_device_are_typed_errors(
    driver: DriverStandIn, opened: Make
) -> None:
    device = opened()
    buffer = device.alloc(64)
    for code, kind in ((errno.ENODEV, NodeNotFoundError), (errno.EIO, NodeError)):
        driver.refuses = code
        with pytest.raises(kind, match=r"cannot send Memory Read at 0x40 to .*ng0n1") as at:
            buffer.read()
        assert at.value.code == code
        assert type(at.value) is kind
    device.close()  # with the device gone
    driver.refuses = 0
    backend = opened().backend
    with pytest.raises(CommandStatusError, match=r"Memory Write at 0x100000 .*INVALID_FIELD"):
        backend.write_memory(SLM_BYTES, np.zeros(4, np.uint8))
    with pytest.raises(NodeBusyError, match=r"cannot lock .*ng0n2: .*EAGAIN.*another"):
        opened()


def test_an_unknown_status_is_shown_as_a_number() -> None:
    error = CommandStatusError("Execute", "/dev/ng0n3", 0x7C1)
    assert str(error) == (
        "Execute on /dev/ng0n3 must end with SUCCESS, not with a status that has no name here "
        "(0x7c1)"
    )


def test_namespaces_are_found_through_sys(tmp_path: Path) -> None:
    rows = {"ng0n1": (2, 3), "ng0n2": (3, 4), "ng0n3": (1, 0), "ng0n4": (4, 4)}
    for node, (nsid, command_set) in rows.items():
        add_node(tmp_path, "nvme0", node, nsid, command_set)
    add_node(tmp_path, "nvme1", "ng1n1", 1, 4)
    dev = Path("/dev")
    found = find_siblings(dev / "ng0n3", tmp_path)
    assert found == {dev / node: row for node, row in rows.items()}
    assert choose(found, dev / "ng0n3", CommandSet.MEMORY) == (dev / "ng0n1", 2)
    assert choose(found, dev / "ng0n4", CommandSet.PROGRAMS) == (dev / "ng0n4", 4)
    with pytest.raises(MismatchError, match=r"with one namespace of command set 4 \(PROGRAMS\), "
                       r"not with 2"):  # fmt: skip
        choose(found, dev / "ng0n3", CommandSet.PROGRAMS)
    with pytest.raises(MismatchError, match=r"set 3 \(MEMORY\), not with 0 \(/dev/ng1n1: 4\)"):
        choose(find_siblings(dev / "ng1n1", tmp_path), dev / "ng1n1", CommandSet.MEMORY)
    with pytest.raises(MismatchError, match=r"a generic node of a namespace .*'ng0n1'"):
        find_siblings(dev / "nvme0n1", tmp_path)
    add_node(tmp_path, "nvme2", "ng2n1", 1, None)
    with pytest.raises(MismatchError, match=r"without .*nvme2n1/csi"):
        find_siblings(dev / "ng2n1", tmp_path)


def test_numbers_are_those_of_linuxs_headers(tmp_path: Path) -> None:
    """gcc prints them; a machine without the headers skips."""
    if shutil.which("gcc") is None or not Path("/usr/include/linux/nvme_ioctl.h").exists():
        pytest.skip("gcc, or headers of Linux, are not installed")
    values = (
        "NVME_IOCTL_ID", "NVME_IOCTL_ADMIN64_CMD", "NVME_IOCTL_IO64_CMD", "NVME_URING_CMD_IO",
        "sizeof(struct nvme_uring_cmd)", "sizeof(struct nvme_passthru_cmd64)",
        "offsetof(struct nvme_passthru_cmd64, result)", "offsetof(struct io_uring_sqe, cmd)",
        "offsetof(struct io_uring_sqe, user_data)", "IORING_OP_URING_CMD",
        "IORING_SETUP_SQE128|IORING_SETUP_CQE32", "sizeof(struct io_uring_params)",
        "IORING_OFF_SQES", "SYS_io_uring_setup", "SYS_io_uring_enter", "IORING_ENTER_GETEVENTS",
        "offsetof(struct nvme_uring_cmd, cdw10)", "offsetof(struct io_uring_params, cq_off)",
    )  # fmt: skip
    source = tmp_path / "numbers.c"
    lines = "\n".join(f'printf("%llu\\n", (unsigned long long)({each}));' for each in values)
    source.write_text(
        "#include <stddef.h>\n#include <stdio.h>\n#include <sys/syscall.h>\n"
        "#include <linux/io_uring.h>\n#include <linux/nvme_ioctl.h>\n"
        f"int main(void) {{ {lines} return 0; }}\n"
    )
    program = tmp_path / "numbers"
    subprocess.run(["gcc", str(source), "-o", str(program)], check=True, capture_output=True)
    printed = subprocess.run([str(program)], check=True, capture_output=True, text=True).stdout
    own = passthrough
    head = struct.calcsize("<BBHIIIQQII")
    assert [int(each) for each in printed.split()] == [
        own.GET_ID, own.ADMIN, own.IO, own.RING_IO, own.PASSED.size,
        own.PASSED.size + own.RESULT.size, own.PASSED.size, own.ENTRY.size, 32, own.PASS_COMMAND,
        own.WIDE_ENTRIES | own.WIDE_COMPLETIONS, own.PARAMETERS.size, own.ENTRIES_AT, own.SETUP,
        own.ENTER, own.GET_EVENTS, head, 80,
    ]  # fmt: skip


@pytest.fixture
def ring(monkeypatch: pytest.MonkeyPatch) -> Iterator[RingNode]:
    """A ring whose commands are for /dev/null, which completes or refuses all."""
    monkeypatch.setattr(passthrough.fcntl, "ioctl", lambda fd, request: 5)
    try:
        made = RingNode(Path("/dev/null"), 1000)
    except NodeError as error:
        pytest.skip(str(error))
    yield made
    made.close()
    made.close()


def answers(ring: RingNode, count: int) -> list[int]:
    """Statuses of some commands: 0, or the error that /dev/null has for all of them."""
    data = np.zeros(64, np.uint8)
    command = PassedCommand(name="nothing", opcode=2, namespace=5, data=data)
    try:
        return [each.status for each in ring.answers([command] * count)]
    except NodeError as error:
        return [-error.code] * count


def test_a_ring_completes_more_commands_than_it_has_entries(ring: RingNode) -> None:
    checks = 0
    for count in (1, 8, 9, 300):
        statuses = answers(ring, count)
        assert len(statuses) == count
        assert set(statuses) <= {0, -errno.EOPNOTSUPP}
        assert not ring._flying
        checks += count
    assert ring._sent == checks


@pytest.mark.parametrize("moment", range(1, 7))
def test_an_interrupted_ring_is_usable(
    ring: RingNode, monkeypatch: pytest.MonkeyPatch, moment: int
) -> None:
    answers(ring, 5)
    calls, real = 0, ring._system_call

    def interrupted(*arguments: int) -> int:
        nonlocal calls
        calls += 1
        if calls == moment:
            if moment % 2:
                real(*arguments)  # the signal came during the call
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(ring, "_system_call", interrupted)
    with pytest.raises(KeyboardInterrupt):
        deque((answers(ring, 3) for _ in range(moment)), maxlen=0)
    assert ring._flying or moment % 2
    monkeypatch.setattr(ring, "_system_call", real)
    assert len(answers(ring, 17)) == 17
    assert not ring._flying


def test_options_have_both_ways(tmp_path: Path) -> None:
    assert {"io_uring": RingNode, "ioctl": IoctlNode} == nvme.NODES
    assert nvme.NvmeOptions().passthrough == "io_uring"
    with pytest.raises(NodeNotFoundError, match="ENOENT"):
        IoctlNode(tmp_path / "nothing", 1000)
    assert issubclass(LocalMemory, nearstep.backends.base.Backend)


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"max_grad_norm": 1.0}, "scan"),
        ({"state_dtype": torch.bfloat16}, "state_dtype"),
        ({"compression": 0.1}, "compression"),
        ({"rounding": "stochastic", "state_dtype": torch.bfloat16}, "state_dtype|rounding"),
        ({"amsgrad": True}, "adam_amsgrad"),
    ],
)
def test_what_no_program_computes_is_refused_before_anything_is_sent(
    driver: DriverStandIn, opened: Make, options: dict[str, Any], what: str
) -> None:
    device = opened()
    before = dict(driver.guest.controller.counters.by_opcode)
    with pytest.raises(ArgumentError, match=what):
        trained(partial(nearstep.optim.AdamW, device=device, **options), steps=1)
    assert driver.guest.controller.counters.by_opcode == before
