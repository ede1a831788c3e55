"""What the endpoint refuses, and what it does when memory fails."""

import cocotb
from cocotb.triggers import ClockCycles
from cocotbext.pcie.core.tlp import CplStatus, TlpType
from pcie_bench import CONFIG, MODES, PcieBench

from nearstep_spec.pcie import REGISTER_BYTES

PAGE = 4096
BEAT = CONFIG.data_width // 8


def count(dut: object, name: str) -> int:
    return int(getattr(dut, f"o_{name}").value)


@cocotb.test()
async def bad_addresses(dut: object) -> None:
    """Nothing is behind the end of the memory, nor behind the registers."""
    bench = PcieBench(dut)
    await bench.begin()
    end = CONFIG.memory_bytes
    for offset, dwords in ((end, 1), (end - 4, 2), (end, 1024), (CONFIG.bar_bytes - 4, 1)):
        await bench.refused(bench.memory_read(offset, dwords), CplStatus.UR)
        bench.post(bench.memory_write(offset, bytes(4 * min(dwords, 32))))
    await bench.settle()
    assert count(dut, "dropped") == 4
    assert count(dut, "failed_reads") == 4
    last = await bench.accepted(bench.memory_read(end - 8, 2))
    assert last == bench.mirror[end - 8 : end].tobytes()
    for offset in (0xFFC, 0x40 - 4, REGISTER_BYTES - 4, 0x1000 + 16 * CONFIG.vectors):
        await bench.refused(bench.register_read(offset), CplStatus.UR)
    await bench.refused(bench.register_read(REGISTER_BYTES - 4, 2), CplStatus.UR)
    assert count(dut, "failed_reads") == 9
    await bench.finish()


@cocotb.test()
async def reads_and_writes_across_a_page(dut: object) -> None:
    """The host cannot make them; one that comes nevertheless is refused as a whole."""
    bench = PcieBench(dut)
    await bench.begin()
    for offset, dwords in ((PAGE - 4, 2), (4, 1024), (PAGE - 64, 17), (2 * PAGE - 4, 1024)):
        await bench.refused(bench.memory_read(offset, dwords), CplStatus.CA)
    for offset, dwords in ((PAGE - 4, 2), (PAGE - 64, 17)):
        bench.post(bench.memory_write(offset, bench.random.randbytes(4 * dwords)))
    await bench.settle()
    assert count(dut, "dropped") == 2
    assert count(dut, "failed_reads") == 4
    assert bench.checker.transfers["aw"] == 0
    whole = await bench.accepted(bench.memory_read(PAGE, 1024))
    assert whole == bench.mirror[PAGE : 2 * PAGE].tobytes()
    await bench.finish()


@cocotb.test()
async def byte_enables_that_no_request_has(dut: object) -> None:
    """A last dword where there is one; none of the first or last of several; gaps between them."""
    bench = PcieBench(dut)
    await bench.begin()
    wrong = [(256, *case) for case in ((1, 0xF, 1), (1, 0, 8), (2, 0, 0xF), (2, 0xF, 0), (2, 0, 0))]
    wrong += [(256, *case) for case in ((64, 0, 0xF), (64, 8, 0), (3, 5, 0xF), (16, 0xF, 9))]
    wrong += [(260, *case) for case in ((2, 7, 0xF), (2, 0xF, 0xE), (2, 9, 3), (17, 0xF, 0xA))]
    for offset, dwords, first, last in wrong:
        read = bench.memory_read(offset, dwords, first=first, last=last)
        await bench.refused(read, CplStatus.CA)
        data = bench.random.randbytes(4 * dwords)
        bench.post(bench.memory_write(offset, data, first=first, last=last))
    await bench.settle()
    assert count(dut, "dropped") == count(dut, "failed_reads") == len(wrong)
    assert bench.checker.transfers["aw"] == 0
    await bench.finish()


@cocotb.test()
@cocotb.parametrize(mode=list(MODES))
async def registers_of_the_wrong_size(dut: object, mode: str) -> None:
    """One or two whole dwords, and nothing else; one dword of no byte does nothing."""
    bench = PcieBench(dut, mode=mode)
    await bench.begin()
    low, high, wide = (bench.map[name].offset for name in ("low", "high", "wide"))
    values = {low: 7, high: 0, wide: 0, wide + 4: 0}

    async def check() -> None:
        for offset, value in values.items():
            got = await bench.accepted(bench.register_read(offset))
            assert int.from_bytes(got, "little") == value, hex(offset)
            bench.checks += 1

    dropped = refused = 0
    wrong = [(1, first, 0) for first in range(1, 15)]
    wrong += [(2, 0xF, 7), (2, 0xE, 0xF), (2, 0xF, 1), (2, 8, 1), (3, 0xF, 0xF), (16, 0xF, 0xF)]
    for dwords, first, last in wrong:
        tlp = bench.register_read(low, dwords, first=first, last=last)
        await bench.refused(tlp, CplStatus.CA)
        data = bench.random.randbytes(4 * dwords)
        bench.post(bench.register_write(low, data, first=first, last=last))
        dropped += 1
        refused += 1
    await check()
    assert count(dut, "dropped") == dropped

    for _ in range(10):
        for offset in (low, high, wide, wide + 4):
            values[offset] = bench.random.getrandbits(32)
            bench.post(bench.register_write(offset, values[offset].to_bytes(4, "little")))
        await check()
        for offset in (low, wide):
            data = bench.random.randbytes(8)
            bench.post(bench.register_write(offset, data))
            values[offset] = int.from_bytes(data[:4], "little")
            values[offset + 4] = int.from_bytes(data[4:], "little")
            assert await bench.accepted(bench.register_read(offset, 2)) == data
            bench.checks += 8
        await check()
    assert await bench.register("id") == 0xCAFE_F00D

    bench.post(bench.register_write(low, bytes(4), first=0))
    await bench.accepted(bench.register_read(low, first=0))
    await bench.accepted(bench.register_read(0xFFC, first=0))  # nothing is there, nothing is read
    await check()
    bench.post(bench.register_write(bench.map["id"].offset, bytes(4)))
    bench.post(bench.register_write(low, bytes(8)))
    values[low] = values[high] = 0
    await check()
    assert count(dut, "failed_writes") == 1
    assert count(dut, "dropped") == dropped
    assert count(dut, "failed_reads") == refused
    await bench.finish()


@cocotb.test()
async def other_requests(dut: object) -> None:
    """Whatever waits for an answer gets one."""
    bench = PcieBench(dut)
    await bench.begin()
    kinds = [
        (TlpType.IO_READ, 1, b""),
        (TlpType.IO_WRITE, 1, bytes(4)),
        (TlpType.FETCH_ADD, 1, bytes(4)),
        (TlpType.FETCH_ADD_64, 2, bytes(8)),
        (TlpType.SWAP, 1, bytes(4)),
        (TlpType.CAS, 2, bytes(8)),
        (TlpType.MEM_READ_LOCKED, 1, b""),
        (TlpType.MEM_READ_LOCKED_64, 4, b""),
    ]
    for kind, dwords, data in kinds:
        for base in (bench.base, bench.register_base):
            tlp = bench.request(kind, base + 64, dwords, data=data)
            await bench.refused(tlp, CplStatus.UR)
            locked = kind in (TlpType.MEM_READ_LOCKED, TlpType.MEM_READ_LOCKED_64)
            packet = bench.monitor.packets[-1]
            assert packet.locked == locked
            operands = 2 if kind is TlpType.CAS else 1
            assert packet.byte_count == 4 * dwords // operands
            assert packet.lower_address == (64 if locked else 0)
            bench.checks += 1
    assert count(dut, "failed_reads") == 2 * len(kinds)
    await bench.finish()


@cocotb.test()
@cocotb.parametrize(mode=list(MODES))
async def damaged_payloads(dut: object, mode: str) -> None:
    """A payload that the hard block marks as damaged at its end changes nothing."""
    bench = PcieBench(dut, mode=mode)
    await bench.begin()
    rng, damaged = bench.random, 0
    for _ in range(60):
        dwords = rng.choice((1, 2, 15, 16, 17, 31, 64))
        offset = rng.randrange(0, PAGE - 4 * dwords, 4) + rng.randrange(3) * PAGE
        data = rng.randbytes(4 * dwords)
        write = bench.memory_write(offset, data)
        write.discontinue = rng.random() < 0.5
        bench.post(write)
        if write.discontinue:
            damaged += 1
        else:
            bench.mirror[offset : offset + 4 * dwords] = list(data)
    write = bench.register_write(bench.map["low"].offset, bytes(4))
    write.discontinue = True
    bench.post(write)
    await bench.compare()
    assert await bench.register("low") == 7
    assert 10 < damaged < 50
    assert count(dut, "dropped") == damaged + 1
    await bench.finish()


@cocotb.test()
@cocotb.parametrize(mode=list(MODES))
async def memory_that_fails(dut: object, mode: str) -> None:
    """A read that meets a bad beat ends with Completer Abort, and the next one is right."""
    bench = PcieBench(dut, mode=mode)
    await bench.begin()
    rng = bench.random
    ends = 0
    for _ in range(25):
        bad = rng.randrange(CONFIG.memory_bytes // BEAT)
        bench.read_faults = {bad}
        page = bad * BEAT // PAGE * PAGE
        start = rng.randrange(page, bad * BEAT + 1, 4)
        stop = rng.randrange(bad * BEAT + 4, page + PAGE + 1, 4)
        reads = [cocotb.start_soon(bench.exchange(bench.memory_read(start, (stop - start) // 4)))]
        other = (page + PAGE) % CONFIG.memory_bytes
        reads.append(cocotb.start_soon(bench.exchange(bench.memory_read(other, 40))))
        answers = await reads[0]
        assert answers[-1].status == CplStatus.CA
        ends += 1
        data = b"".join(bytes(answer.get_data()) for answer in answers[:-1])
        assert data == bench.mirror[start : start + len(data)].tobytes()
        piece = bench.monitor.max_payload
        assert start + len(data) == max(start, bad * BEAT // piece * piece)
        whole = b"".join(bytes(answer.get_data()) for answer in await reads[1])
        assert whole == bench.mirror[other : other + 160].tobytes()
        bench.checks += len(data) + len(whole)
    bench.read_faults = set()
    assert count(dut, "failed_reads") == ends

    bench.write_faults = {5}
    for beat in (4, 5, 6, 5):
        data = rng.randbytes(BEAT)
        await bench.write(beat * BEAT, data)
    await bench.settle()
    bench.mirror[5 * BEAT : 6 * BEAT] = bench.memory[5 * BEAT : 6 * BEAT]
    assert count(dut, "failed_writes") == 2
    await ClockCycles(dut.clk, 5)
    await bench.finish()
