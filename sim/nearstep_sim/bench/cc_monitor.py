"""Monitor of an endpoint's CC stream: the rules of the hard block."""

from dataclasses import dataclass

from cocotb.triggers import RisingEdge

RCB_BYTES = 128  # of an endpoint


class StreamError(AssertionError):
    """The CC stream broke a rule."""


@dataclass(frozen=True)
class Completion:
    """A packet of the CC stream."""

    dwords: tuple[int, ...]

    @property
    def lower_address(self) -> int:
        return self.dwords[0] & 0x7F

    @property
    def byte_count(self) -> int:
        return self.dwords[0] >> 16 & 0x1FFF

    @property
    def locked(self) -> int:
        return self.dwords[0] >> 29 & 1

    @property
    def length(self) -> int:
        return self.dwords[1] & 0x7FF

    @property
    def status(self) -> int:
        return self.dwords[1] >> 11 & 7

    @property
    def tag(self) -> int:
        return self.dwords[2] & 0xFF


class CcMonitor:
    """Collects the packets of the stream at clock edges.

    Raises `StreamError` when TVALID falls before a packet ends or before a beat is taken, when a
    beat changes before it is taken, when TKEEP has a hole, when a packet's length contradicts its
    descriptor, and when a completion is split at an illegal address.

    Attributes
    ----------
    packets : all packets.
    checks : packets checked.
    """

    def __init__(self, dut: object, clock: object = None, reset: object = None) -> None:
        self.dut, self.clock, self.reset = dut, clock, reset
        self.packets: list[Completion] = []
        self.checks = 0
        self.max_payload = 128
        self._words: list[int] = []
        self._shown: tuple[int, ...] | None = None

    async def run(self) -> None:
        names = ("tvalid", "tready", "tdata", "tkeep", "tlast", "tuser")
        signals = {name: getattr(self.dut, f"s_axis_cc__{name}") for name in names}
        while True:
            await RisingEdge(self.clock)
            if self.reset.value:
                self._words, self._shown = [], None
                continue
            valid = bool(signals["tvalid"].value)
            if not valid:
                self.step(None, ready=False)
                continue
            beat = tuple(int(signals[name].value) for name in names[2:])
            self.step(beat, ready=bool(signals["tready"].value))

    def step(self, beat: tuple[int, ...] | None, *, ready: bool) -> None:
        """Advance one clock edge, with or without a beat (TDATA, TKEEP, TLAST, TUSER)."""
        if beat is None:
            if self._words or self._shown is not None:
                raise StreamError("TVALID fell inside a packet")
            return
        if self._shown is not None and beat != self._shown:
            raise StreamError(f"a beat changed from {self._shown} to {beat}")
        self._shown = None if ready else beat
        if not ready:
            return
        data, keep, last, _ = beat
        count = keep.bit_count()
        if not keep or keep & (keep + 1):
            raise StreamError(f"TKEEP {keep:#x} has a hole")
        self._words += [data >> 32 * index & 0xFFFF_FFFF for index in range(count)]
        if last:
            self._finish(Completion(tuple(self._words)))
            self._words = []

    def _finish(self, packet: Completion) -> None:
        expected = 3 + packet.length if packet.status == 0 else 8
        if len(packet.dwords) != expected:
            raise StreamError(f"a packet of {len(packet.dwords)} dwords, expected {expected}")
        if packet.status:
            if packet.length:
                raise StreamError(f"status {packet.status} with {packet.length} dwords of payload")
        else:
            if 4 * packet.length > self.max_payload:
                raise StreamError(f"{packet.length} dwords, at most {self.max_payload} bytes")
            start = packet.lower_address
            end = (start & ~3) + 4 * packet.length
            if packet.byte_count > end - start and end % RCB_BYTES:
                raise StreamError(f"cut at {end % RCB_BYTES:#x} of {RCB_BYTES:#x} bytes")
        self.packets.append(packet)
        self.checks += 1
