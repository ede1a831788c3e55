"""AXI4 protocol rules, checked at every clock edge."""

from collections import deque
from collections.abc import Sequence

from nearstep_sim.bench.axi_sample import Address, AxiSample

PAGE_BYTES = 4096
INCR = 1
CHANNELS = ("ar", "r", "aw", "w", "b")
RULES = {
    "valid_held": "valid does not fall before the transfer",
    "payload_held": "the payload does not change before the transfer",
    "burst_type": "bursts are INCR",
    "burst_size": "beats are as wide as the bus",
    "burst_aligned": "bursts start on a beat",
    "burst_page": "bursts do not cross 4 KiB",
    "id_range": "the ID is one that the initiator has",
    "write_data_after_address": "a beat of W belongs to a burst whose AW is or was shown",
    "write_last": "WLAST marks the last beat of a burst, and no other",
    "response_to_burst": "B answers a burst whose address and data are all taken",
    "read_beat_of_burst": "R belongs to a burst whose AR was taken",
    "read_last": "RLAST marks the last beat of a burst, and no other",
    "always_ready": "R and B are ready when valid (an initiator that reserves landing space)",
    "quiet_end": "nothing is outstanding at the end",
}


class ProtocolError(AssertionError):
    """A rule of `RULES` was broken: by which values, in which cycle."""

    def __init__(self, rule: str, cycle: int, detail: str) -> None:
        self.rule = rule
        self.cycle = cycle
        super().__init__(f"cycle {cycle}: {rule} ({RULES[rule]}): {detail}")


class AxiChecker:
    """Monitors one port and raises `ProtocolError` at the first violated rule.

    Parameters
    ----------
    beat_bytes : bytes of a beat.
    read_ids, write_ids : how many IDs the initiator uses on AR and on AW.
    always_ready : whether the initiator promises RREADY and BREADY.

    Attributes
    ----------
    cycles : clock edges sampled.
    transfers : transfers, by channel.
    most_ahead : most read bursts outstanding at once.
    """

    def __init__(
        self, *, beat_bytes: int, read_ids: int, write_ids: int, always_ready: bool = True
    ) -> None:
        self.beat_bytes = beat_bytes
        self.ids = {"ar": read_ids, "aw": write_ids}
        self.always_ready = always_ready
        self.cycles = 0
        self.transfers = dict.fromkeys(CHANNELS, 0)
        self.most_ahead = 0
        self._last = AxiSample()
        self._reads: list[deque[int]] = [deque() for _ in range(read_ids)]  # beats left
        self._writes: deque[list[int]] = deque()  # ID, beats left, AW taken; in order
        self._unanswered = [0] * write_ids

    def reset(self) -> None:
        """Drop outstanding transfers after a reset of the port."""
        for queue in self._reads:
            queue.clear()
        self._writes.clear()
        self._unanswered = [0] * len(self._unanswered)
        self._last = AxiSample()

    def step(self, sample: AxiSample) -> None:
        """Check one clock edge.

        Raises
        ------
        ProtocolError
        """
        self._held(sample)
        if self.always_ready:
            for channel in ("r", "b"):
                if getattr(sample, channel) is not None and channel not in sample.ready:
                    self._fail("always_ready", f"{channel.upper()} is not ready")
        waited = self._last.aw is not None and "aw" not in self._last.ready
        if sample.aw is not None and not waited:
            self._writes.append([sample.aw.id, self._address("aw", sample.aw), 0])
        # A response belongs to a request of an earlier edge: responses first.
        for channel in ("r", "b", "w", "aw", "ar"):
            if sample.fires(channel):
                self.transfers[channel] += 1
                getattr(self, f"_{channel}")(getattr(sample, channel))
        self._last = sample
        self.cycles += 1

    def finish(self) -> None:
        """Check the end of a test.

        Raises
        ------
        ProtocolError
        """
        reads = sum(map(len, self._reads))
        writes = len(self._writes) + sum(self._unanswered)
        if reads or writes:
            self._fail("quiet_end", f"{reads} reads and {writes} writes are outstanding")

    def _fail(self, rule: str, detail: str) -> None:
        raise ProtocolError(rule, self.cycles, detail)

    def _held(self, sample: AxiSample) -> None:
        for channel in CHANNELS:
            before = getattr(self._last, channel)
            if before is None or channel in self._last.ready:
                continue
            now = getattr(sample, channel)
            if now is None:
                self._fail("valid_held", f"{channel.upper()} showed {before}")
            if now != before:
                self._fail("payload_held", f"{channel.upper()} changed from {before} to {now}")

    def _address(self, channel: str, burst: Address) -> int:
        nbytes = (burst.len + 1) * self.beat_bytes
        checks: Sequence[tuple[str, bool]] = (
            ("burst_type", burst.burst == INCR),
            ("burst_size", 1 << burst.size == self.beat_bytes),
            ("burst_aligned", burst.addr % self.beat_bytes == 0),
            ("burst_page", burst.addr % PAGE_BYTES + nbytes <= PAGE_BYTES),
            ("id_range", burst.id < self.ids[channel]),
        )
        for rule, holds in checks:
            if not holds:
                self._fail(rule, f"{channel.upper()} {burst}")
        return burst.len + 1

    def _ar(self, burst: Address) -> None:
        beats = self._address("ar", burst)
        self._reads[burst.id].append(beats)
        self.most_ahead = max(self.most_ahead, sum(map(len, self._reads)))

    def _aw(self, burst: Address) -> None:
        self._writes[-1][2] = 1
        self._retire()

    def _w(self, beat: object) -> None:
        burst = self._writes[0] if self._writes else None
        if burst is None or not burst[1]:
            self._fail("write_data_after_address", f"W {beat}")
        burst[1] -= 1
        if bool(beat.last) != (burst[1] == 0):
            self._fail("write_last", f"WLAST is {beat.last}, {burst[1]} beats are to come")
        self._retire()

    def _retire(self) -> None:
        """Count the oldest write as to be answered, if its address and its data are taken."""
        write_id, beats, address_taken = self._writes[0]
        if not beats and address_taken:
            self._writes.popleft()
            self._unanswered[write_id] += 1

    def _b(self, response: object) -> None:
        known = response.id < len(self._unanswered)
        if not known or not self._unanswered[response.id]:
            self._fail("response_to_burst", f"B {response}")
        self._unanswered[response.id] -= 1

    def _r(self, beat: object) -> None:
        known = beat.id < len(self._reads)
        if not known or not self._reads[beat.id]:
            self._fail("read_beat_of_burst", f"R {beat}")
        queue = self._reads[beat.id]
        queue[0] -= 1
        if bool(beat.last) != (queue[0] == 0):
            self._fail("read_last", f"RLAST is {beat.last}, {queue[0]} beats are to come")
        if queue[0] == 0:
            queue.popleft()
