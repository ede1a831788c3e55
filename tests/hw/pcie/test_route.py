"""What becomes of a request, by all its byte enables, against the rules of the standard."""

import itertools
from collections import Counter

import pytest
from amaranth.sim import SimulatorContext
from amaranth.utils import exact_log2

from nearstep_hw.pcie.descriptor import RequestType, Status
from nearstep_hw.pcie.route import RequestRouter, Route
from nearstep_sim.smartssd.pcie_card import MEMORY_BASE, REGISTER_BASE
from nearstep_spec.pcie import MEMORY_BAR, REGISTER_BAR, REGISTER_BYTES

from ...sim.smartssd.link_packets import CA, SC, Packet, Rules
from ..simulate import simulate

MEMORY_BYTES = 1 << 16
EVERY = range(0, REGISTER_BYTES, 4)
RULES = Rules(MEMORY_BYTES, 2 * MEMORY_BYTES, EVERY, EVERY)
DWORDS = (1, 2, 3, 64)
OFFSETS = (0, 4, 4096 - 4)


@pytest.mark.parametrize("kind", ["read", "write"])
@pytest.mark.parametrize("bar", [MEMORY_BAR, REGISTER_BAR])
def test_all_byte_enables_are_judged_as_the_standard_does(kind: str, bar: int) -> None:
    dut = RequestRouter(width=128, address_width=16, memory_bytes=MEMORY_BYTES)
    if bar == MEMORY_BAR:
        base, bytes_of_bar = MEMORY_BASE, RULES.bar_bytes
    else:
        base, bytes_of_bar = REGISTER_BASE, REGISTER_BYTES
    enables = itertools.product(DWORDS, OFFSETS, range(16), range(16))
    packets = [
        Packet(kind, base + offset, dwords, first, last) for dwords, offset, first, last in enables
    ]
    seen: Counter[tuple[int, bool]] = Counter()
    carried = {
        (MEMORY_BAR, "read"): Route.MEMORY_READ,
        (MEMORY_BAR, "write"): Route.MEMORY_WRITE,
        (REGISTER_BAR, "read"): Route.REGISTER_READ,
        (REGISTER_BAR, "write"): Route.REGISTER_WRITE,
    }[bar, kind]

    async def give(ctx: SimulatorContext) -> None:
        head = dut.i.payload.head
        ctx.set(dut.i.valid, 1)
        ctx.set(head.descriptor.bar, bar)
        ctx.set(head.descriptor.aperture, exact_log2(bytes_of_bar))
        write = RequestType.MEMORY_WRITE
        ctx.set(head.descriptor.request_type, write if kind == "write" else RequestType.MEMORY_READ)
        for packet in packets:
            ctx.set(head.descriptor.address, packet.address >> 2)
            ctx.set(head.descriptor.dwords, packet.dwords)
            ctx.set(head.sideband.first_be, packet.first)
            ctx.set(head.sideband.last_be, packet.last)
            await ctx.tick()
        ctx.set(dut.i.valid, 0)

    async def look(ctx: SimulatorContext) -> None:
        ctx.set(dut.o.ready, 1)
        out = dut.o.payload
        for packet in packets:
            *_, route, status = await ctx.tick().sample(out.route, out.status).until(dut.o.valid)
            wanted = RULES.verdict(packet)
            if wanted == SC:
                assert route == carried, packet
            elif kind == "write":
                assert route == Route.DROP, packet
            else:
                assert (route, status) == (Route.REFUSE, Status(wanted)), packet
            seen[wanted, packet.forbidden] += 1

    simulate(dut, give, look)
    print(dict(seen))
    assert seen.total() == len(packets)
    assert seen[SC, True] == 0
    assert min(seen[SC, False], seen[CA, True], seen[CA, False]) > 0
