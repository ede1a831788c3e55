"""Commands of the admin queue and of the three namespaces, with their statuses."""

from __future__ import annotations

import hashlib
import os
import struct
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch

import nearstep
from nearstep.backends.emulated import Injection
from nearstep.linux.nvme.card import DRIVE, MEMORY, PROGRAMS
from nearstep.linux.nvme.programs import ProgramNamespace
from nearstep.linux.nvme.standard import Admin, Choice, Memory, Nvm, Program, Status
from nearstep.updater.arguments import rule_arguments
from nearstep.updater.pairs import Pairs
from nearstep_spec.rule.rules import OPTIMIZERS

from ..optim.conftest import like_torch
from .guest import DRIVE_BYTES, PAGE, SHAPE, SLM_BYTES, Guest, entry, guest_of, ranges_of, until

COUNT = 4096 + 16
"""Parameters of the AdamW runs."""


def names(
    guest: Guest, opcode: int, rows: list[tuple[int, dict[str, int]]], io: bool = True
) -> list[str]:
    """Names of the statuses of commands."""
    return [Status(guest.run(opcode, nsid, io=io, **row).status).name for nsid, row in rows]


def slm_write(guest: Guest, start: int, data: bytes) -> None:
    """Write local memory by way of the scratch pages, which are contiguous."""
    step = 16 * PAGE
    listed = guest.scratch + 32 * PAGE
    for at in range(0, len(data), step):
        part = data[at : at + step]
        guest.put(guest.scratch, part)
        guest.put(listed, struct.pack("<15Q", *(guest.scratch + PAGE * n for n in range(1, 16))))
        prp2 = listed if len(part) > 2 * PAGE else guest.scratch + PAGE
        found = guest.run(Memory.WRITE, MEMORY, io=True, prp1=guest.scratch, prp2=prp2,
                          dw10=start + at, dw12=len(part))  # fmt: skip
        assert found.status == 0


def slm_read(guest: Guest, start: int, nbytes: int) -> bytes:
    out = b""
    for at in range(0, nbytes, PAGE):
        size = min(PAGE, nbytes - at)
        found = guest.run(
            Memory.READ, MEMORY, io=True, prp1=guest.scratch, dw10=start + at, dw12=size
        )
        assert found.status == 0
        out += guest.get(guest.scratch, size)
    return out


def test_identify_as_linux_asks(guest: Guest) -> None:
    at = guest.scratch

    def identify(cns: int, nsid: int = 0, csi: int = 0) -> bytes:
        guest.put(at, b"\xff" * PAGE)
        found = guest.run(Admin.IDENTIFY, nsid, prp1=at, dw10=cns, dw11=csi << 24)
        return guest.get(at, PAGE) if found.status == 0 else Status(found.status).name.encode()

    head = identify(1)
    assert head[24:64].rstrip() == b"nearstep card"
    assert (head[77], head[111], head[512], head[513], head[525]) == (9, 1, 0x66, 0x44, 7)
    assert struct.unpack_from("<I", head, 516) == (3,)
    assert struct.unpack_from("<I", head, 536) == (0,)  # no SGLs
    assert head[768:].startswith(b"nqn.")
    assert struct.unpack_from("<4I", identify(2)) == (1, 2, 3, 0)
    assert struct.unpack_from("<4I", identify(2, nsid=1)) == (2, 3, 0, 0)
    assert struct.unpack_from("<2I", identify(7, csi=4)) == (3, 0)
    identifiers = set()
    for nsid, csi in ((DRIVE, 0), (MEMORY, 3), (PROGRAMS, 4)):
        found = identify(3, nsid)
        assert found[:4] + found[20:25] == bytes([3, 16, 0, 0, 4, 1, 0, 0, csi])
        identifiers.add(found[4:20])
        assert identify(8, nsid)[14] == 1
        assert len(identify(6, csi=csi)) == PAGE
    assert len(identifiers) == 3
    space = identify(0, DRIVE)
    assert struct.unpack_from("<3Q", space) == (DRIVE_BYTES // PAGE,) * 3
    assert (space[25], space[26], space[130]) == (0, 0, 12)
    assert struct.unpack_from("<HHHBxQB", identify(5, PROGRAMS, 4)) == (12, 256, 2, 16, 0, 0)
    assert identify(0x1C)[:9] == b"\x19" + bytes(8)
    wrong = [(0, 4, 0), (0, 0, 0), (0, MEMORY, 0), (3, 9, 0), (5, DRIVE, 3), (6, 0, 2), (0x7F, 1,
             0),
             (2, 0xFFFFFFFF, 0)]  # fmt: skip
    assert [identify(*each).decode() for each in wrong] == [
        "INVALID_NAMESPACE", "INVALID_NAMESPACE", "INVALID_COMMAND_SET", "INVALID_NAMESPACE",
        "INVALID_COMMAND_SET", "INVALID_COMMAND_SET", "INVALID_FIELD", "INVALID_NAMESPACE",
    ]  # fmt: skip
    assert guest.run(Admin.IDENTIFY, prp1=at + 2048, prp2=at + 8 * PAGE, dw10=1).status == 0
    assert guest.get(at + 2048, 2048) + guest.get(at + 8 * PAGE, 2048) == head  # across a page


def test_log_pages(guest: Guest) -> None:
    at = guest.scratch

    def log(
        lid: int, nsid: int = 0, nbytes: int = 512, offset: int = 0, **more: int
    ) -> bytes | str:
        found = guest.run(Admin.GET_LOG, nsid, prp1=at, dw10=lid | (nbytes // 4 - 1) << 16,
                          dw12=offset, **more)  # fmt: skip
        return guest.get(at, nbytes) if found.status == 0 else Status(found.status).name

    for csi, opcode in ((0, Nvm.READ), (3, Memory.READ), (4, Program.EXECUTE)):
        effects = log(5, nbytes=PAGE, dw14=csi << 24)
        assert effects[1024 + 4 * opcode] == 1
        assert effects[4 * Admin.IDENTIFY] == 1
        assert effects[4 * Admin.MANAGE_RANGES] == (csi == 4)
    assert log(5, nbytes=PAGE, dw14=1 << 24) == "INVALID_COMMAND_SET"
    supported = log(0, nbytes=1024)
    assert [n for n in range(256) if supported[4 * n]] == [0, 1, 2, 3, 5, 0x82, 0x83, 0x84]
    programs = log(0x82, PROGRAMS, 13 * 64)
    assert struct.unpack_from("<I", programs) == (12,)
    space = guest.controller.namespaces[2]
    assert isinstance(space, ProgramNamespace)
    for number, each in enumerate(space.programs):
        assert programs[64 * (number + 1)] == 0b1010
        assert programs[64 * (number + 1) + 8 :][:8] == each.identifier
        assert (each.identifier.hex() == each.form.digest) == (number < 4)
    assert log(0x82, PROGRAMS, 64, 64) == programs[64:128]
    assert log(0x83, PROGRAMS, 32) == bytes(32)
    assert [log(0x82), log(0x82, MEMORY), log(0x77), log(2, offset=516), log(2, offset=2)] == [
        "INVALID_NAMESPACE", "INVALID_NAMESPACE", "INVALID_LOG_PAGE", "INVALID_FIELD",
        "INVALID_FIELD",
    ]  # fmt: skip


def test_features(guest: Guest) -> None:
    def get(feature: int, select: int = 0) -> int:
        return guest.run(Admin.GET_FEATURES, dw10=feature | select << 8).result

    assert get(6) == 1
    assert guest.run(Admin.SET_FEATURES, dw10=4, dw11=0x160).status == 0
    assert (get(4), get(4, 1), get(4, 3)) == (0x160, 0x157, 4)
    rows = [(0, {"dw10": 7, "dw11": 3}), (0, {"dw10": 0x55}), (0, {"dw10": 4 | 1 << 31}),
            (0, {"dw10": 0x19, "dw11": 1}), (0, {"dw10": 0x19}), (0, {"dw10": 7,
            "dw11": 0xFFFF})]  # fmt: skip
    assert names(guest, Admin.SET_FEATURES, rows, io=False) == [
        "SEQUENCE_ERROR", "INVALID_FIELD", "NOT_SAVEABLE", "COMBINATION_REJECTED", "SUCCESS",
        "INVALID_FIELD",
    ]  # fmt: skip
    assert guest.run(Admin.DELETE_SQ, dw10=1).status == 0
    alone = guest.run(Admin.SET_FEATURES, dw10=7, dw11=3)  # a completion queue is there
    assert alone.status == Status.SEQUENCE_ERROR
    assert guest.run(Admin.DELETE_CQ, dw10=1).status == 0
    assert guest.run(Admin.SET_FEATURES, dw10=7, dw11=1 | 99 << 16).result == 1 | 7 << 16
    assert guest.run(Admin.GET_FEATURES, dw10=4 | 4 << 8).status == Status.INVALID_FIELD
    assert guest.run(Admin.ABORT, dw10=1).result == 1
    for opcode in (0x03, 0x0D, 0x10, 0x21, 0x80, 0xC0, 0xFF):
        assert guest.run(opcode).status == Status.INVALID_OPCODE
    assert guest.run(Admin.IDENTIFY, flags=0x40, dw10=1).status == Status.INVALID_FIELD


def test_the_drive(guest: Guest) -> None:
    at, data = guest.scratch, np.random.default_rng(3).bytes(2 * PAGE)
    last = DRIVE_BYTES // PAGE - 1
    guest.put(at, data)
    rows = [(DRIVE, {"prp1": at, "prp2": at + PAGE, "dw10": 5, "dw12": 1}),
            (DRIVE, {"prp1": at, "dw10": last, "dw12": 1 << 30}),
            (DRIVE, {"prp1": at, "prp2": at + PAGE, "dw10": last, "dw12": 1}),
            (DRIVE, {"prp1": at, "dw11": 1}), (DRIVE, {"prp1": at, "dw11": 0xFFFFFFFF}),
            (DRIVE, {"prp1": at, "dw12": 0xFFFF}), (DRIVE, {"prp1": 1 << 40}), (4,
            {"prp1": at})]  # fmt: skip
    wanted = ["SUCCESS", "SUCCESS", "LBA_OUT_OF_RANGE", "LBA_OUT_OF_RANGE", "LBA_OUT_OF_RANGE",
              "INVALID_FIELD", "DATA_TRANSFER_ERROR", "INVALID_NAMESPACE"]  # fmt: skip
    assert names(guest, Nvm.WRITE, rows) == wanted
    assert names(guest, Nvm.READ, rows) == wanted
    guest.put(at, bytes(2 * PAGE))
    assert names(guest, Nvm.READ, rows[:1]) == ["SUCCESS"]
    assert guest.get(at, 2 * PAGE) == data
    assert names(guest, Nvm.FLUSH, [(DRIVE, {}), (0xFFFFFFFF, {}), (0, {})]) == [
        "SUCCESS", "SUCCESS", "INVALID_NAMESPACE",
    ]  # fmt: skip
    assert names(guest, 0x7F, [(DRIVE, {}), (MEMORY, {}), (PROGRAMS, {})]) == ["INVALID_OPCODE"] * 3


def test_smart_counts_commands_that_succeeded_and_their_bytes(guest: Guest) -> None:
    def counts() -> tuple[int, ...]:
        assert guest.run(Admin.GET_LOG, prp1=guest.scratch, dw10=2 | 127 << 16).status == 0
        return struct.unpack("<QQQQQQQQ", guest.get(guest.scratch + 32, 64))[::2]

    assert counts() == (0, 0, 0, 0)
    listed = guest.scratch + 63 * PAGE
    guest.put(listed, struct.pack("<60Q", *(guest.scratch + PAGE * n for n in range(1, 61))))
    rows = [(DRIVE, {"prp1": guest.scratch, "prp2": listed, "dw12": 59}),
            (DRIVE, {"prp1": guest.scratch, "dw10": 1 << 20})]  # fmt: skip
    for _ in range(3):
        assert names(guest, Nvm.WRITE, rows) == ["SUCCESS", "LBA_OUT_OF_RANGE"]
    assert names(guest, Nvm.READ, rows) == ["SUCCESS", "LBA_OUT_OF_RANGE"]
    assert counts() == (1, 2, 1, 3)  # of 245,760 and 737,280 bytes, in 512,000, rounded up


def test_without_a_cache_a_write_is_durable_when_it_completes(
    guest: Guest, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    monkeypatch.setattr("os.fdatasync", synced.append)
    write = {"prp1": guest.scratch, "dw10": 5}
    found = []
    for enabled in (1, 0, 1):
        assert guest.run(Admin.SET_FEATURES, dw10=6, dw11=enabled).status == 0
        assert names(guest, Nvm.WRITE, [(DRIVE, write)] * 2) == ["SUCCESS"] * 2
        assert guest.run(Memory.WRITE, MEMORY, io=True, prp1=guest.scratch, dw12=64).status == 0
        found.append(len(synced))
    assert found == [0, 3, 3]  # at the switch what was written before, and each write
    assert names(guest, Nvm.WRITE, [(DRIVE, {**write, "dw12": 1 << 30})]) == ["SUCCESS"]
    assert len(synced) == 4


def test_a_drive_that_lost_blocks_is_an_internal_error(guest: Guest, tmp_path: Path) -> None:
    os.truncate(tmp_path / "drive", PAGE + 100)
    read = {"prp1": guest.scratch, "dw10": 1}
    assert names(guest, Nvm.READ, [(DRIVE, read), (DRIVE, {**read, "dw10": 0})]) == [
        "INTERNAL_ERROR", "SUCCESS",
    ]  # fmt: skip


def test_the_local_memory(guest: Guest) -> None:
    at = guest.scratch
    assert slm_read(guest, 0, PAGE) == bytes(PAGE)
    data = np.random.default_rng(4).bytes(100_000)
    slm_write(guest, 8, data)  # words of any bits, NaNs among them
    assert slm_read(guest, 8, 100_000) == data
    rows = [{"dw10": 2, "dw12": 4}, {"dw12": 6}, {"dw10": SLM_BYTES - 4, "dw12": 8}, {"dw11": 1,
            "dw12": 4},
            {"dw12": 0xFFFFFFFC}, {"dw10": 0xFFFFFFFC, "dw11": 0xFFFFFFFF, "dw12": 4}]  # fmt: skip
    for opcode in (Memory.READ, Memory.WRITE, *Choice.FILLS):
        found = names(guest, opcode, [(MEMORY, {"prp1": at, **row}) for row in rows])
        assert found == ["INVALID_FIELD"] * 6
    assert names(guest, Memory.READ, [(MEMORY, {"prp1": at + 1, "dw12": 8})]) == [
        "PRP_OFFSET_INVALID"
    ]
    for opcode, start in zip(Choice.FILLS, (16, 32), strict=True):
        assert guest.run(opcode, MEMORY, io=True, dw10=start, dw12=8).status == 0
    cleared = bytearray(data)
    cleared[8:16] = cleared[24:32] = bytes(8)
    assert slm_read(guest, 8, 100_000) == bytes(cleared)


def test_copies_to_the_local_memory(guest: Guest) -> None:
    at, table = guest.scratch, guest.scratch + 8 * PAGE
    data = np.random.default_rng(5).bytes(PAGE)
    guest.put(at, data)
    assert guest.run(Nvm.WRITE, DRIVE, io=True, prp1=at, dw10=9).status == 0
    slm_write(guest, 0x8000, data[::-1])

    def copy(form: int, entries: list[bytes], length: int, start: int = 0) -> str:
        guest.put(table, b"".join(entries))
        found = guest.run(Memory.COPY, MEMORY, io=True, prp1=table, dw2=length, dw10=start,
                          dw12=len(entries) - 1 | form << 8)  # fmt: skip
        return Status(found.status).name

    def of_bytes(nsid: int, first: int, size: int, options: int = 0) -> bytes:
        return struct.pack("<I4xQIHH8x", nsid, first, size, 0, options)

    def of_blocks(nsid: int, first: int, count: int, options: int = 0) -> bytes:
        return struct.pack("<I4xQIHH8x", nsid, first, 0, count - 1, options)

    assert copy(2, [of_blocks(DRIVE, 9, 1)], PAGE) == "SUCCESS"
    assert (
        copy(4, [of_bytes(MEMORY, 0x8000, 8), of_bytes(MEMORY, 0x8010, 4)], 12, 0x4000) == "SUCCESS"
    )
    assert slm_read(guest, 0, PAGE) == data
    assert slm_read(guest, 0x4000, 12) == data[::-1][:8] + data[::-1][16:20]
    found = [
        copy(1, [of_bytes(MEMORY, 0, 4)], 4), copy(4, [of_bytes(DRIVE, 0, 4)], 4),
        copy(4, [of_bytes(9, 0, 4)], 4), copy(2, [of_blocks(MEMORY, 0, 1)], PAGE),
        copy(2, [of_blocks(DRIVE, 9, 1, 1 << 15)], PAGE), copy(4, [of_bytes(MEMORY, 0, 8)], 8, 4),
        copy(4, [of_bytes(MEMORY, 0x8000, 8)], 12), copy(2, [of_blocks(DRIVE, 1 << 40, 1)], PAGE),
        copy(4, [of_bytes(MEMORY, SLM_BYTES, 4)], 4), copy(4, [of_bytes(MEMORY, 2, 4)], 4),
        copy(2, [of_blocks(DRIVE, 9, 1)], PAGE, SLM_BYTES - 4),
        copy(4, [of_bytes(MEMORY, 0x8000, 4)] * 129, 516),
    ]  # fmt: skip
    assert found == [
        "INVALID_FIELD", "INVALID_NAMESPACE", "INVALID_NAMESPACE", "INCOMPATIBLE_NAMESPACE",
        "FAST_COPY_NOT_POSSIBLE", "OVERLAPPING_IO_RANGE", "INVALID_FIELD", "LBA_OUT_OF_RANGE",
        "INVALID_FIELD", "INVALID_FIELD", "INVALID_FIELD", "INVALID_FIELD",
    ]  # fmt: skip
    assert slm_read(guest, 0, PAGE) == data


def test_programs_and_range_sets_are_managed(guest: Guest) -> None:
    table = guest.scratch

    def manage(data: bytes, count: int | None = None, **more: int) -> str:
        guest.put(table, data)
        found = guest.run(Admin.MANAGE_RANGES, PROGRAMS, prp1=table,
                          dw11=len(data) // 32 if count is None else count, **more)  # fmt: skip
        return Status(found.status).name

    good = ranges_of((0, 64), (64, 64))
    assert [
        manage(b""), manage(good, dw10=1 << 16), manage(good, dw10=5),
        manage(ranges_of(*[(64 * n, 4) for n in range(17)])),
        manage(ranges_of((0, 64), namespace=1)), manage(ranges_of((2, 64))),
        manage(ranges_of((0, 6))), manage(ranges_of((0, 0))),
        manage(ranges_of((SLM_BYTES - 4, 8))), manage(ranges_of((0, 64), (60, 4))),
        manage(b"", dw10=1 | 7 << 16), manage(good),
    ] == [
        "INVALID_FIELD", "INVALID_FIELD", "INVALID_FIELD", "TOO_MANY_RANGES",
        "INVALID_MEMORY_NAMESPACE", "INVALID_RANGE_SET", "INVALID_RANGE_SET", "INVALID_RANGE_SET",
        "INVALID_RANGE_SET", "OVERLAPPING_RANGES", "INVALID_RANGE_SET_ID", "SUCCESS",
    ]  # fmt: skip
    assert guest.run(Admin.GET_LOG, PROGRAMS, prp1=table, dw10=0x84 | 23 << 16).status == 0
    assert guest.get(table, 96) == struct.pack("<HH28x", 1, 2) + good
    for _ in range(255):
        assert manage(good) == "SUCCESS"
    assert manage(good) == "TOO_MANY_RANGE_SETS"
    assert manage(b"", dw10=1 | 256 << 16) == "SUCCESS"
    activate = [
        {"dw10": 1 | 1 << 16},
        {"dw10": 1},
        {"dw10": 0 | 1 << 16},
        {"dw10": 13 | 1 << 16},
        {"dw10": 1 | 2 << 16},
    ]
    assert names(guest, Admin.ACTIVATE_PROGRAM, [(PROGRAMS, row) for row in activate],
    io=False) == [
        "SUCCESS", "SUCCESS", "INVALID_PROGRAM_INDEX", "INVALID_PROGRAM_INDEX", "INVALID_FIELD",
    ]  # fmt: skip
    load = [{"dw10": 0}, {"dw10": 1}, {"dw10": 13}]
    assert names(guest, Admin.LOAD_PROGRAM, [(PROGRAMS, row) for row in load], io=False) == [
        "INVALID_PROGRAM_INDEX", "NOT_DOWNLOADABLE", "INVALID_PROGRAM_INDEX",
    ]  # fmt: skip
    for opcode in (Admin.LOAD_PROGRAM, Admin.ACTIVATE_PROGRAM, Admin.MANAGE_RANGES):
        assert names(guest, opcode, [(MEMORY, {}), (7, {})], io=False) == [
            "INVALID_NAMESPACE", "INVALID_NAMESPACE",
        ]  # fmt: skip


def block(step: int, **hyper: float) -> bytes:
    """Argument block of a step of AdamW."""
    found = rule_arguments(OPTIMIZERS["adamw"], "default", step=step, **hyper)
    rule = found.form.rule
    words = [struct.pack("<f", found.scalars[name]) for name in rule.scalars]
    words += [struct.pack("<I", found.scalars[name]) for name in rule.switches]
    return (struct.pack("<II", 1, len(words)) + b"".join(words)).ljust(64, b"\0")


@pytest.fixture
def adamw() -> tuple[list[np.ndarray], list[str]]:
    """Parameters and ten gradients, and SHA-256 of p, m and v after torch's steps."""
    torch.manual_seed(1)
    p = torch.randn(COUNT)
    arrays = [p.numpy().copy()]
    parameter = torch.nn.Parameter(p.clone())
    optimizer = torch.optim.AdamW([parameter], lr=1e-3, fused=True)
    for _ in range(10):
        parameter.grad = torch.randn(COUNT)
        arrays.append(parameter.grad.numpy().copy())
        optimizer.step()
    state = optimizer.state[parameter]
    wanted = [parameter.detach(), state["exp_avg"], state["exp_avg_sq"]]
    return arrays, [hashlib.sha256(each.numpy().tobytes()).hexdigest() for each in wanted]


@like_torch
@pytest.mark.parametrize("way", ["set and data", "inline", "set", "inline and data"])
def test_ten_steps_of_adamw_have_torchs_bits(
    guest: Guest, adamw: tuple[list[np.ndarray], list[str]], way: str
) -> None:
    """The argument block is the data, or the last range, in four ways to name arrays; three of them
    work without DLEN, which Linux does not send.
    """
    train(guest, adamw, way)


@like_torch
@pytest.mark.deep
@pytest.mark.parametrize("bus", ["bar", "pcie"])
def test_ten_steps_on_the_rtl_have_torchs_bits(
    tmp_path: Path, adamw: tuple[list[np.ndarray], list[str]], bus: str
) -> None:
    with guest_of(tmp_path, f"{SHAPE.replace('golden', 'sim')}&bus={bus}") as guest:
        train(guest, adamw, "set and data")


def train(guest: Guest, adamw: tuple[list[np.ndarray], list[str]], way: str) -> None:
    """Ten steps, and the comparison with torch's."""
    arrays, wanted = adamw
    nbytes, at = 4 * COUNT, guest.scratch
    span = -(-nbytes // 64) * 64
    spans = [(span * number, nbytes) for number in range(4)]
    arguments_at = 4 * span
    in_memory = way in ("set", "inline")
    table = ranges_of(*spans, *([(arguments_at, 64)] if in_memory else []))
    slm_write(guest, 0, arrays[0].tobytes())
    assert guest.run(Admin.ACTIVATE_PROGRAM, PROGRAMS, dw10=1 | 1 << 16).status == 0
    number = 0
    if way.startswith("set"):
        guest.put(at, table)
        number = guest.run(Admin.MANAGE_RANGES, PROGRAMS, prp1=at, dw11=len(table) // 32).result
        assert number == 1
    for step in range(1, 11):
        slm_write(guest, span, arrays[step].tobytes())
        data = block(step, lr=1e-3)
        if in_memory:
            slm_write(guest, arguments_at, data)
            data = b""
        inline = 0 if number else len(table) // 32
        data = (table if inline else b"") + data
        guest.put(at, data)
        dlen = len(data) if way == "inline and data" else 0
        found = guest.run(Program.EXECUTE, PROGRAMS, io=True, prp1=at, dw2=1 | number << 16,
                          dw3=inline, dw4=dlen)  # fmt: skip
        assert (found.status, found.result) == (0, COUNT)
    got = [slm_read(guest, span * index, nbytes) for index in (0, 2, 3)]
    assert [hashlib.sha256(each).hexdigest() for each in got] == wanted


@pytest.mark.parametrize("form", ["fused", "scatter"])
def test_decompressors_are_programs_behind_the_rules(tmp_path: Path, form: str) -> None:
    """The bits of the device itself, with the same pairs; wrong pairs change nothing."""
    url = f"{SHAPE}&rules=adam,sgd&compression=scatter,fused"
    count, chosen = 512, np.array([3, 17, 17, 130, 511], np.uint32)
    draw = np.random.default_rng(7)
    p, value = draw.standard_normal((2, count)).astype(np.float32)
    value = value[: chosen.size]
    arguments = rule_arguments(OPTIMIZERS["adamw"], "default", step=1, lr=1e-3)
    with nearstep.open(url) as card:
        own = {name: card.alloc(count) for name in "pmv"}
        own["p"].write(p)
        for name in "mv":
            own[name].fill(0.0)
        index, values = card.alloc(chosen.size, dtype=np.uint32), card.alloc(chosen.size)
        index.write(chosen)
        values.write(value)
        card.run_rule(arguments, {**own, "g": Pairs(index, values, form)}).wait()
        wanted = [own[name].read().tobytes() for name in "pmv"]
    with guest_of(tmp_path, url) as guest:
        (space,) = (e for e in guest.controller.namespaces if isinstance(e, ProgramNamespace))
        assert [(e.form.rule.name, e.compression) for e in space.programs] == [
            (rule, kind) for kind in ("", "scatter", "fused") for rule in ("adam", "sgd")
        ]  # fmt: skip
        assert len({each.identifier for each in space.programs}) == 6
        pid = 3 if form == "scatter" else 5
        digest = hashlib.sha256(f"{arguments.form.digest} {form}".encode()).digest()
        assert space.programs[pid - 1].identifier == digest[:8]
        assert guest.run(Admin.ACTIVATE_PROGRAM, PROGRAMS, dw10=pid | 1 << 16).status == 0
        few = 4 * chosen.size
        spans = [(0, 2048), (2048, few), (4096, few), (8192, 2048), (12288, 2048)]
        slm_write(guest, 0, p.tobytes())
        slm_write(guest, 4096, value.tobytes())

        def execute(indices: np.ndarray, *ranges: tuple[int, int]) -> tuple[str, int]:
            slm_write(guest, 2048, indices.astype(np.uint32).tobytes())
            guest.put(guest.scratch, ranges_of(*ranges) + block(1, lr=1e-3))
            found = guest.run(Program.EXECUTE, PROGRAMS, io=True, prp1=guest.scratch, dw2=pid,
                              dw3=len(ranges), dw4=32 * len(ranges) + 64)  # fmt: skip
            return Status(found.status).name, found.result

        outside = np.array([3, 17, 17, 130, count])
        assert execute(outside, *spans) == ("INVALID_FIELD", 0)
        assert execute(chosen, *spans[:1], *spans[2:]) == ("INVALID_RANGE_SET", 0)
        assert execute(chosen, spans[0], (2048, few - 4), *spans[2:]) == ("INVALID_FIELD", 0)
        assert slm_read(guest, 0, 2048) == p.tobytes()
        assert slm_read(guest, 8192, 8192) == bytes(8192)  # m and v
        assert execute(chosen, *spans) == ("SUCCESS", count)
        assert [slm_read(guest, at, 2048) for at in (0, 8192, 12288)] == wanted


def test_execute_is_refused_before_anything_runs(guest: Guest) -> None:
    at = guest.scratch
    spans = [(4096 * number, 4096) for number in range(4)]
    arguments, table = block(1, lr=1e-3), ranges_of(*spans)

    def execute(
        data: bytes,
        *,
        pind: int = 1,
        rsid: int = 0,
        numr: int = 4,
        dlen: int | None = None,
        **more: int,
    ) -> str:
        guest.put(at, data)
        found = guest.run(Program.EXECUTE, PROGRAMS, io=True, prp1=at, dw2=pind | rsid << 16,
        dw3=numr,
                          dw4=len(data) if dlen is None else dlen, **more)  # fmt: skip
        return Status(found.status).name

    assert execute(table + arguments) == "PROGRAM_NOT_ACTIVATED"
    for index in (1, 2):
        assert guest.run(Admin.ACTIVATE_PROGRAM, PROGRAMS, dw10=index | 1 << 16).status == 0
    version, registers, tail = (bytearray(arguments) for _ in range(3))
    version[0], registers[4], tail[63] = 2, 3, 1
    switch = bytearray(arguments)
    switch[8 + 4 * 7] = 2
    infinite = bytearray(arguments)
    infinite[8:12] = struct.pack("<f", float("inf"))
    odd = ranges_of((4, 4096), (8192, 4096), (16384, 4096), (32768, 4096))  # not on a beat
    uneven = ranges_of((0, 4096), (8192, 2048), (16384, 4096), (32768, 4096))
    assert [
        execute(table + arguments, pind=0), execute(table + arguments, pind=13),
        execute(table + arguments, rsid=1), execute(arguments, rsid=0, numr=0),
        execute(arguments, rsid=9, numr=0), execute(table + arguments, dw10=1),
        execute(table + arguments, dw13=1), execute(table, numr=17), execute(table,
        numr=0xFFFFFFFF),
        execute(table, dlen=96), execute(ranges_of(*spans[:3]) + arguments, numr=3),
        execute(table + arguments, pind=2), execute(ranges_of(*spans, namespace=1) + arguments),
        execute(ranges_of(*spans[:3], spans[0]) + arguments), execute(table + bytes(version)),
        execute(table + bytes(registers)), execute(table + bytes(tail)),
        execute(table + bytes(switch)),
        execute(table + bytes(infinite)), execute(table + arguments[:60]), execute(table, dlen=0),
        execute(odd + arguments), execute(uneven + arguments), execute(table + arguments,
        dlen=1 << 30),
    ] == [
        "INVALID_PROGRAM_INDEX", "INVALID_PROGRAM_INDEX", "INVALID_FIELD", "INVALID_FIELD",
        "INVALID_RANGE_SET_ID", "INVALID_FIELD", "INVALID_FIELD", "TOO_MANY_RANGES",
        "TOO_MANY_RANGES",
        "INVALID_FIELD", "INVALID_RANGE_SET", "INVALID_RANGE_SET", "INVALID_MEMORY_NAMESPACE",
        "OVERLAPPING_RANGES", "INVALID_FIELD", "INVALID_FIELD", "INVALID_FIELD", "INVALID_FIELD",
        "INVALID_FIELD", "INVALID_FIELD", "INVALID_FIELD", "INVALID_FIELD", "INVALID_FIELD",
        "INVALID_FIELD",
    ]  # fmt: skip
    assert slm_read(guest, 0, 4 * 4096) == bytes(4 * 4096)
    assert execute(table + arguments) == "SUCCESS"
    assert guest.run(Program.EXECUTE, MEMORY, io=True, dw2=1).status == Status.INVALID_FIELD


def test_programs_and_sets_in_use_are_kept(guest: Guest) -> None:
    memory = guest.controller.namespaces[1]
    at = guest.scratch
    spans = [(4096 * number, 4096) for number in range(4)]
    guest.put(at, ranges_of(*spans))
    assert guest.run(Admin.MANAGE_RANGES, PROGRAMS, prp1=at, dw11=4).result == 1
    assert guest.run(Admin.ACTIVATE_PROGRAM, PROGRAMS, dw10=1 | 1 << 16).status == 0
    guest.put(at + PAGE, block(1, lr=1e-3))
    with memory.turn:  # type: ignore[attr-defined]
        guest.io.push(entry(Program.EXECUTE, 9, PROGRAMS, prp1=at + PAGE, dw2=1 | 1 << 16))
        space = guest.controller.namespaces[2]
        assert isinstance(space, ProgramNamespace)
        until(lambda: space.programs[0].running)
        assert (
            guest.run(Admin.MANAGE_RANGES, PROGRAMS, dw10=1 | 1 << 16).status
            == Status.RANGE_SET_IN_USE
        )
        assert guest.run(Admin.ACTIVATE_PROGRAM, PROGRAMS, dw10=1).status == Status.PROGRAM_IN_USE
    assert guest.io.wait()[:3] == (1024, 0, 9)
    assert guest.run(Admin.MANAGE_RANGES, PROGRAMS, dw10=1 | 1 << 16).status == 0
    assert guest.run(Admin.ACTIVATE_PROGRAM, PROGRAMS, dw10=1).status == 0


def test_a_fault_of_the_card_is_an_internal_error_and_the_next_command_works(guest: Guest) -> None:
    memory = guest.controller.namespaces[1]
    backend = memory.card.backend  # type: ignore[attr-defined]
    checked = 0
    for write, host in product((False, True), (False, True)):
        backend.inject(Injection(kind="slverr", write=write, host=host))
        spans = [(4096 * number, 4096) for number in range(4)]
        guest.put(guest.scratch, ranges_of(*spans) + block(1, lr=1e-3))
        guest.run(Admin.ACTIVATE_PROGRAM, PROGRAMS, dw10=1 | 1 << 16)
        fields = {"prp1": guest.scratch, "dw2": 1, "dw3": 4, "dw4": 192}
        found = guest.run(Program.EXECUTE, PROGRAMS, io=True, **fields).status
        if host:
            guest.run(Memory.WRITE, MEMORY, io=True, prp1=guest.scratch, dw12=64)
            found = guest.run(Memory.READ, MEMORY, io=True, prp1=guest.scratch, dw12=64).status
        assert found == Status.INTERNAL_ERROR
        backend.heal()
        assert guest.run(Program.EXECUTE, PROGRAMS, io=True, **fields).status in (
            0,
            Status.INVALID_FIELD,
        )
        assert guest.run(Memory.FILL, MEMORY, io=True, dw12=SLM_BYTES).status == 0
        checked += 1
    assert checked == 4
