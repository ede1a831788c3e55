"""Several emulated SmartSSD cards as one device: a channel for each card, on one clock."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from nearstep.backends.base import Completion, Poll, TakeLargest
from nearstep.backends.emulated import EmulatedBackend, Injection
from nearstep.backends.peer import PeerBackend, PeerTraffic
from nearstep.errors import NearstepError, OutOfBoundsError, WaitTimeoutError
from nearstep.threads import at_once
from nearstep.work.clock import QUANTUM_CYCLES
from nearstep_sim.smartssd.bar import BarBackend, BarTraffic
from nearstep_sim.smartssd.options import CardOptions
from nearstep_sim.updater.transfer import DeviceTransfer
from nearstep_spec.smartssd.array import ArrayConfig


class CardArray(EmulatedBackend, PeerBackend):
    """Cards with separate BARs, each with a drive, as one device.

    Registers and memory are those of `ArrayConfig`. All cards share one time: before an access a
    card is advanced to the time of the others, and during a wait all cards advance, none by more
    than `QUANTUM_CYCLES` ahead of another.

    Parameters
    ----------
    make : opens a card.

    Attributes
    ----------
    cards : the backends, for tests and tools.
    """

    family = "smartssd"

    def __init__(self, config: ArrayConfig, make: Callable[[], BarBackend]) -> None:
        self.config = config
        self.capacity_bytes = config.memory_bytes
        self.cards: list[BarBackend] = []
        try:
            for _ in range(config.cards):
                self.cards.append(make())
        except BaseException:
            self.close()
            raise
        self.compares_memory = self.cards[0].compares_memory
        self._transfers: list[DeviceTransfer] = []  # in flight, and some that have ended
        self._now = 0
        self._offsets = [-(card.cycles or 0) for card in self.cards]

    @property
    def take_largest(self) -> TakeLargest | None:
        return self.cards[0].take_largest

    @property
    def regions(self) -> Sequence[tuple[int, int]]:
        nbytes = self.config.card.memory_bytes
        return tuple((number * nbytes, nbytes) for number in range(self.config.cards))

    @property
    def cycles(self) -> int | None:
        return None if self.cards[0].cycles is None else self._now

    @property
    def traffic(self) -> BarTraffic:
        """Return the traffic on the links of all cards."""
        return BarTraffic(**_sums([card.traffic for card in self.cards]))

    @property
    def peer_traffic(self) -> PeerTraffic:
        return PeerTraffic(**_sums([card.peer_traffic for card in self.cards]))

    def read_register(self, address: int) -> int:
        number, local = self._register(address)
        with self._on(number) as card:
            return card.read_register(local)

    def write_register(self, address: int, value: int) -> None:
        number, local = self._register(address)
        with self._on(number) as card:
            card.write_register(local, value)

    def read_memory(self, address: int, out: NDArray[np.uint8]) -> None:
        number, local = self._card(address)
        with self._on(number) as card:
            card.read_memory(local, out)

    def write_memory(self, address: int, data: NDArray[np.uint8]) -> None:
        number, local = self._card(address)
        with self._on(number) as card:
            card.write_memory(local, data)

    def fill_memory(self, address: int, nbytes: int, element: NDArray[np.uint8]) -> None:
        number, local = self._card(address)
        with self._on(number) as card:
            card.fill_memory(local, nbytes, element)

    def memory_holds(self, address: int, data: NDArray[np.uint8]) -> bool | None:
        number, local = self._card(address)
        with self._on(number) as card:
            return card.memory_holds(local, data)

    def lend_memory(self, address: int, data: NDArray[np.uint8], *, writes: bool) -> bool:
        number, local = self._card(address)
        with self._on(number) as card:
            return card.lend_memory(local, data, writes=writes)

    def end_loan(self, address: int) -> None:
        number, local = self._card(address)
        with self._on(number) as card:
            card.end_loan(local)

    def submit_peer_read(self, address: int, out: NDArray[np.uint8]) -> Completion:
        number, local = self._card(address)
        with self._on(number) as card:
            return self._of_card(number, card.submit_peer_read(local, out))

    def submit_peer_write(self, address: int, data: NDArray[np.uint8]) -> Completion:
        number, local = self._card(address)
        with self._on(number) as card:
            return self._of_card(number, card.submit_peer_write(local, data))

    def submit_host_read(self, address: int, out: NDArray[np.uint8]) -> Completion:
        number, local = self._card(address)
        with self._on(number) as card:
            return self._of_card(number, card.submit_host_read(local, out))

    def submit_host_write(self, address: int, data: NDArray[np.uint8]) -> Completion:
        number, local = self._card(address)
        with self._on(number) as card:
            return self._of_card(number, card.submit_host_write(local, data))

    def peer_window(self, address: int, nbytes: int) -> NDArray[np.uint8] | None:
        number, local = self._card(address)
        with self._on(number) as card:
            return card.peer_window(local, nbytes)

    def end_peer_write(self, address: int, nbytes: int) -> None:
        number, local = self._card(address)
        self.cards[number].end_peer_write(local, nbytes)

    def end_peer_read(self, address: int, nbytes: int) -> None:
        number, local = self._card(address)
        self.cards[number].end_peer_read(local, nbytes)

    def _of_card(self, number: int, transfer: Completion) -> Completion:
        """A transfer of a card, with the common time, whose error names the card."""
        if isinstance(transfer, DeviceTransfer):
            transfer.backend, transfer.note = self, self._note(number)
            self._transfers = [each for each in self._transfers if not each.ended]
            self._transfers.append(transfer)
        elif transfer.error is not None:
            transfer.error.add_note(self._note(number))
        return transfer

    def flush(self) -> None:
        """Flush posted writes to memory.

        Raises
        ------
        PostedWriteError
        """
        for number in range(len(self.cards)):
            with self._on(number) as card:
                card.flush()

    def wait(self, polls: Sequence[Poll], max_cycles: int) -> None:
        own = self._by_card(polls)
        if self.cycles is None:
            self._wait_in_steps(own, max_cycles)
            return
        end = self._now + max_cycles
        while not self._met(own):
            if self._now >= end:
                raise WaitTimeoutError(
                    "any of " + ", ".join(f"register {each.address:#x}" for each in polls),
                    max_cycles,
                    transactions=self.transactions(),
                )
            self._pass(own, min(QUANTUM_CYCLES, end - self._now))

    def advance(self, max_cycles: int, polls: Sequence[Poll] = ()) -> None:
        own = self._by_card(polls)
        if self.cycles is None:
            for number, card in enumerate(self.cards):
                with self._named(number):
                    card.advance(max_cycles, own[number])
            return
        end = self._now + max_cycles
        self._transfers = [each for each in self._transfers if not each.ended]
        while self._now < end and not self._met(own):
            self._pass(own, min(QUANTUM_CYCLES, end - self._now))
            if any(each.ended for each in self._transfers):
                return

    def _wait_in_steps(self, own: Sequence[Sequence[Poll]], max_cycles: int) -> None:
        """Wait for cards without a clock in turn: each completes its work in its own wait."""
        if self._met(own):
            return
        late: WaitTimeoutError | None = None
        for number, polls in enumerate(own):
            if not polls:
                continue
            try:
                with self._named(number):
                    self.cards[number].wait(polls, max_cycles)
                return
            except WaitTimeoutError as error:
                late = late or error
        if late is not None:
            raise late
        with self._named(0):
            self.cards[0].wait((), max_cycles)

    def _pass(self, own: Sequence[Sequence[Poll]], cycles: int) -> None:
        """Advance all cards by `cycles`; by fewer if a condition is met or a transfer ends on the
        only card that has any."""
        for number in range(len(self.cards)):
            self._reach(number, self._now)
        moving = {id(each.device) for each in self._transfers if not each.ended}
        watched = [
            number for number, polls in enumerate(own) if polls or id(self.cards[number]) in moving
        ]
        end = self._now + cycles
        if len(watched) == 1:  # all stop where its condition is met
            (number,) = watched
            with self._named(number):
                self.cards[number].advance(cycles, own[number])
            end = min(end, max(self._time(number), self._now))
            self._now = max(self._now, end)
        else:
            self._now = end
        rest = [n for n in range(len(self.cards)) if self._time(n) < self._now]
        at_once([partial(self._reach, n, self._now) for n in rest])

    def _met(self, own: Sequence[Sequence[Poll]]) -> bool:
        for number, polls in enumerate(own):
            for poll in polls:
                with self._on(number) as card:
                    if poll.holds(card.read_register(poll.address)):
                        return True
        return False

    def reset(self) -> None:
        for number in range(len(self.cards)):
            self.reset_card(number)

    def reset_card(self, number: int) -> None:
        """Reset one card; the others continue."""
        with self._on(number) as card:
            card.reset()

    def close(self) -> None:
        for card in self.cards:
            card.close()

    def transactions(self) -> Sequence[str]:
        return [
            f"card {number}: {line}"
            for number, card in enumerate(self.cards)
            for line in card.transactions()
        ]

    def protect(self, address: int, nbytes: int) -> None:
        number, local = self._card(address)
        self.cards[number].protect(local, nbytes)

    def claim(self, address: int, nbytes: int) -> None:
        number, local = self._card(address)
        self.cards[number].claim(local, nbytes)

    def inject(self, injection: Injection) -> None:
        span = self.config.card.memory_bytes
        for number, card in enumerate(self.cards):
            base = max(injection.base - number * span, 0)
            limit = min(injection.limit - number * span, span)
            if base < limit:
                card.inject(replace(injection, base=base, limit=limit))

    def heal(self) -> None:
        for card in self.cards:
            card.heal()

    def _card(self, address: int) -> tuple[int, int]:
        return self._split("memory", address, self.config.card.memory_bytes)

    def _register(self, address: int) -> tuple[int, int]:
        return self._split("register", address, self.config.card.register_bytes)

    def _split(self, what: str, address: int, nbytes: int) -> tuple[int, int]:
        """Return the card that has an address, and the address in that card."""
        if not 0 <= address < len(self.cards) * nbytes:
            raise OutOfBoundsError(what, address, address + 1, len(self.cards) * nbytes)
        return divmod(address, nbytes)

    def _by_card(self, polls: Sequence[Poll]) -> list[list[Poll]]:
        own: list[list[Poll]] = [[] for _ in self.cards]
        for poll in polls:
            number, local = self._register(poll.address)
            own[number].append(replace(poll, address=local))
        return own

    def _time(self, number: int) -> int:
        return (self.cards[number].cycles or 0) + self._offsets[number]

    def _reach(self, number: int, cycle: int) -> None:
        """Run a card until a cycle, if it has a clock."""
        card = self.cards[number]
        while card.cycles is not None and self._time(number) < cycle:
            with self._named(number):
                card.advance(cycle - self._time(number))

    @contextmanager
    def _on(self, number: int) -> Iterator[BarBackend]:
        """Return a card advanced to the time of the others, for an access that takes time."""
        self._reach(number, self._now)
        try:
            with self._named(number):
                yield self.cards[number]
        finally:
            if self.cards[number].cycles is not None:
                self._now = max(self._now, self._time(number))

    @contextmanager
    def _named(self, number: int) -> Iterator[None]:
        """Name the card in errors."""
        try:
            yield
        except NearstepError as error:
            note = self._note(number)
            if note not in getattr(error, "__notes__", ()):
                error.add_note(note)
            raise

    def _note(self, number: int) -> str:
        return f"card {number} of {len(self.cards)}"


def _sums(counts: Sequence[BarTraffic] | Sequence[PeerTraffic]) -> dict[str, int]:
    names = [field.name for field in fields(counts[0])]
    return {name: sum(getattr(each, name) for each in counts) for name in names}


def array_of(options: CardOptions, make: Callable[[], BarBackend]) -> BarBackend | CardArray:
    """Open one card, or as many as the options specify.

    Parameters
    ----------
    make : opens a card.
    """
    made: BarBackend | CardArray
    if options.cards == 1:
        made = make()
    else:
        made = CardArray(ArrayConfig(card=options.config(), cards=options.cards), make)
    made.drive_places = options.drive_places
    return made
