"""A store whose power is cut again and again, beside a plain model of what it should hold."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from nearstep.storage.check import check_drives
from nearstep.storage.drive_errors import (
    DriveFullError,
    StorageError,
    TornIndexError,
    UncertainCommitError,
)
from nearstep.storage.store import Store
from nearstep.storage.superblock import SLOTS, Superblock
from nearstep_sim.models.drive import FailAt, Flush, MemoryBlocks, Write

from ..host.storage.drives import NEVER, OWNER, State
from .life import DEEPEST, LIES, Life, Tally, WrongError, heard, new_set


@dataclass
class Made:
    """A generation that was committed, or perhaps.

    Attributes
    ----------
    key : in its meta data.
    before : key of the last generation while it was committed, which its commit must leave.
    name : under which later ones keep it; empty: they do not.
    kept : keys of earlier generations by name.
    index : blocks of its index, by drive.
    begun, ended : events of the journal before its superblock, and when the commit had returned.
    given_up, gone : events when it began to be given up, and was.
    """

    key: int
    number: int
    state: State
    before: int
    name: str = ""
    kept: dict[str, int] = field(default_factory=dict)
    index: set[tuple[int, int]] = field(default_factory=set)
    begun: int = 0
    ended: int = 0
    given_up: int = NEVER
    gone: int = NEVER

    @property
    def names(self) -> dict[str, int]:
        """What the next generation keeps."""
        return {**self.kept, **({self.name: self.key} if self.name else {})}


class StoreLife(Life):
    """Lives of a store on one set of drives, each ended by a fault and begun by a recovery."""

    def __init__(self, rng: random.Random, tally: Tally) -> None:
        drives, blocks = rng.randint(1, 3), rng.choice((20, 28, 36))
        super().__init__(rng, tally, new_set(drives, blocks))
        self.history = {0: Made(0, 0, {}, 0)}
        self.there = [0]
        """Keys of the generations that may be found, in the order of their commits."""

    def run(self) -> None:
        deepest = self.rng.randint(1, DEEPEST)
        chosen = self.rng.randrange(deepest)
        with self.turns.installed():
            for depth in range(deepest + 1):
                opened = self.recover(go_on=depth < deepest, depth=depth)
                if opened is None or depth == deepest:
                    return
                faulty = self.profile if depth == chosen else "honest"
                self.live(*opened, faulty)
                self.end(faulty, depth)

    # -- recovery ---------------------------------------------------------------------------------

    def recover(self, *, go_on: bool, depth: int) -> tuple[Store, Made] | None:
        """Open the drives and look at everything; None: an error says what is damaged."""
        now, self.looks_whole = self.begin(), False
        if depth and self.rng.random() < 0.2:
            self.look(now)
        allowed, must = self.expected(depth)
        opened = self.open(now, None, allowed)
        if go_on and opened is not None and self.rng.random() < 0.1:
            opened.close()
            self.tally.faults["opened at the generation before"] += 1
            now = [bytes(each.image) for each in self.places]
            opened = self.open(now, min(opened.generations), allowed)
        if opened is None:
            return None
        self.ready = len(self.journal.events)
        found = self.compare(opened, must)
        self.settle(found)
        return opened, self.history[self.key_of(opened.meta)]

    def expected(self, depth: int) -> tuple[set[int], set[int]]:
        """Keys of which one must be the last generation, and those that must be there."""
        if not depth:
            return {0}, {0}
        cut, there = self.cut, [self.history[key] for key in self.there]
        whole = [each for each in there if each.ended <= cut and each.gone > cut]
        whole.sort(key=lambda each: each.number)
        doubt = [each for each in there if each.begun < cut < each.ended]
        base = [each for each in whole if each.given_up >= cut][-1]
        last = {
            whole[-1].key,
            base.key,
            *(key for each in doubt for key in (each.key, each.before)),
        }
        must = {each.before for each in doubt} or {base.key}
        before = self.history[base.before]
        if not doubt and before.given_up >= cut:
            must.add(before.key)
        return last, must

    def open(self, images: Sequence[bytes], number: int | None, allowed: set[int]) -> Store | None:
        order = self.plug(images)
        with heard() as said:
            try:
                store = Store.open(order, owner=OWNER, generation=number, queue_depth=2)
            except StorageError as error:
                self.check_error(error)
                whole = [*error.whole] if isinstance(error, TornIndexError) else []
                if not whole or number is not None:
                    return None
                other = self.open(images, whole[0], allowed)
                if other is None and self.has_to_recover:
                    raise WrongError(f"{whole} cannot be opened either: {error!r}") from error
                return other
        self.hear(said)
        if store.generation == 0:
            self.history[0].index = blocks_of(store.superblock)
        if number is None:
            last, numbers = self.key_of(store.meta), [self.history[key].number for key in allowed]
            damage = bool(said or store.notes)
            self.outcome(store.generation, last in allowed, min(numbers), max(numbers), said=damage)
        return store

    def index_blocks(self, number: int) -> set[tuple[int, int]]:
        made = (each.index for each in self.history.values() if each.number == number)
        return set[tuple[int, int]]().union(*made)

    def key_of(self, meta: Any) -> int:
        return int(meta.get("key", 0))

    def compare(self, store: Store, must: set[int]) -> list[Made]:
        """Every bit of every generation; those that were found."""
        found = []
        for number, meta in store.generations.items():
            made = self.history.get(self.key_of(meta))
            if made is None or made.number != number:
                raise WrongError(f"generation {number} was never committed: {meta}")
            found.append(made)
            self.read(store, number, made)
        missing = must - {each.key for each in found}
        if missing and self.is_honest:
            numbers = [self.history[key].number for key in missing]
            raise WrongError(f"generations {numbers} must be there, not {[*store.generations]}")
        last = self.history[self.key_of(store.meta)]
        kept = {name: self.history[key] for name, key in last.names.items()}
        if store.kept != {name: each.number for name, each in kept.items()}:
            raise WrongError(f"generations {kept} must be kept, not {store.kept}")
        for name, number in store.kept.items():
            try:
                key = self.key_of(store.at(number).meta)
            except TornIndexError as error:
                self.check_error(error)
                continue
            if key != kept[name].key:
                raise WrongError(f"generation {kept[name]} must be kept as {name!r}, not {key}")
            self.read(store, number, kept[name])
        return found

    def read(self, store: Store, number: int, made: Made) -> None:
        view = store.at(number)
        if view.tensors.keys() != made.state.keys():
            raise WrongError(f"tensors of {number} are {[*view.tensors]}, not {[*made.state]}")
        torn = 0
        for name, tensor in view.tensors.items():
            out = bytearray(tensor.nbytes)
            try:
                view.read(name, out)
            except StorageError as error:
                torn += 1
                self.check_error(error)
                if self.looks_whole:
                    raise WrongError(f"storage check finds no damage: {error!r}") from error
                continue
            if out != made.state[name]:
                raise WrongError(f"wrong bits in {name!r} of generation {number}, without a word")
        self.tally.outcomes["generations read, bit by bit"] += not torn

    def look(self, images: Sequence[bytes]) -> None:
        """`storage check` reads all, and finds no damage where there is none."""
        places = [MemoryBlocks(each, at) for at, each in enumerate(images)]
        try:
            report = check_drives(places)
        except StorageError as error:
            self.check_error(error)
            return
        if self.is_honest and not self.warned and not report.whole:
            raise WrongError(f"storage check: {report}")
        self.looks_whole = report.whole
        self.tally.outcomes["storage check: " + ("whole" if report.whole else "damage")] += 1

    def settle(self, found: Sequence[Made]) -> None:
        """What was found is there from now on; after a kill from the next flush on."""
        for each in found:
            each.given_up = each.gone = NEVER
        if not self.events:
            for at, each in enumerate(found):
                each.begun = each.ended = 0
                each.before = found[max(at - 1, 0)].key
            self.there = [each.key for each in found]
            return
        later = range(self.before, len(self.journal.events))
        flushed = next((at for at in later if self.journal.events[at] == Flush(0)), NEVER - 1) + 1
        for each in map(self.history.__getitem__, self.there):
            if each in found and each.ended > self.before:
                each.ended = flushed
            if each not in found and each.given_up < self.before < each.gone:
                each.gone = flushed
        self.there = [key for key in self.there if self.history[key].begun < self.before]

    # -- life -------------------------------------------------------------------------------------

    def live(self, store: Store, made: Made, faulty: str) -> None:
        """Random operations; an error ends the life, or is rolled back."""
        rng = self.rng
        self.store, self.current, self.names = store, made, made.names
        self.rolled_back()
        if faulty in LIES:
            self.arm(faulty)
        if faulty == "errors":
            action = rng.choice(("write", "write", "read", "flush", "look"))
            fault = FailAt(action, rng.randrange(16))
            rng.choice(self.places).fault = fault
        for _ in range(rng.choice((8, 16, 24) if faulty != "honest" else (0, 3, 8, 16))):
            try:
                with heard() as said:
                    self.operate()
                self.warned |= bool(said)
                if said and faulty != "errors":
                    raise WrongError(f"it warned: {said[0].message}")
            except DriveFullError:
                self.tally.outcomes["drives were full"] += 1
            except UncertainCommitError:
                self.doubtful = True
                break
            except StorageError as error:
                self.failed(error, faulty)
                if rng.random() < 0.3:
                    break
                if rng.random() < 0.5:
                    continue  # until it is rolled back nothing can be committed
                try:
                    self.store.abort()
                except StorageError:
                    break
                self.rolled_back()
        if faulty == "errors":
            self.tally.faults["errors of a drive"] += fault.fired
        if rng.random() < 0.5:
            self.turns.all()

    def failed(self, error: StorageError, faulty: str) -> None:
        if faulty not in ("errors", *LIES) and self.is_honest:
            raise WrongError(f"without a fault: {error!r}")

    def rolled_back(self) -> None:
        self.state = dict(self.current.state)

    def operate(self) -> None:
        rng, store = self.rng, self.store
        choice = rng.random()
        if choice < 0.3:
            self.commit()
        elif choice < 0.35:
            store.abort()
            self.rolled_back()
        elif choice < 0.4:
            self.drop_other()
        elif choice < 0.44 and self.names:
            name = rng.choice(sorted(self.names))
            store.drop(name)
            del self.names[name]
        elif choice < 0.47 and self.names:
            name = rng.choice(sorted(self.names))
            store.restore(name)
            key = self.names[name]
            self.rolled_back()
            self.state = dict(self.history[key].state)
        elif choice < 0.52 and self.state:
            name = rng.choice(sorted(self.state))
            out = bytearray(len(self.state[name]))
            store.read(name, out)
            if out != self.state[name]:
                raise WrongError(f"wrong bits of {name!r} in the life of its write")
        elif choice < 0.56 and self.state:
            name = rng.choice(sorted(self.state))
            store.remove(name)
            del self.state[name]
        else:
            self.write()

    def write(self) -> None:
        rng, name = self.rng, self.rng.choice("abcd")
        if name not in self.state:
            nbytes = rng.choice((5, 4096, 9_000, 20_000, rng.randrange(24_000)))
            self.store.add(name, nbytes, drive=rng.choice((None, None, 0)))
            self.state[name] = bytes(nbytes)
        old = self.state[name]
        first, last = sorted(rng.randrange(len(old) + 1) for _ in range(2))
        if rng.random() < 0.5:
            first, last = 0, len(old)
        data = rng.randbytes(last - first)
        transfer = self.store.submit_write(name, data, first)
        self.state[name] = old[:first] + data + old[last:]
        if rng.random() < 0.5:
            transfer.wait()

    def commit(self) -> None:
        key = len(self.history)
        events = self.journal.events
        begin = len(events)
        made = Made(key, self.store._transaction.last + 1, dict(self.state), self.current.key)
        made.kept, made.begun, made.ended = dict(self.names), NEVER, NEVER
        if self.rng.random() < 0.15:
            made.name = next((each for each in "xy" if each not in self.names), "")
        self.history[key] = made
        self.there.append(key)
        try:
            number = self.store.commit({"key": key}, name=made.name)
        except UncertainCommitError:
            made.begun = self.superblock_after(begin)
            raise
        except BaseException:
            self.there.remove(key)
            raise
        finally:
            if self.store.written is not None:
                made.index = blocks_of(self.store.written)
        if number != made.number:
            raise WrongError(f"generation {number} follows {made.number - 1}")
        made.begun, made.ended = self.superblock_after(begin), len(events)
        self.current, self.names = made, made.names

    def superblock_after(self, begin: int) -> int:
        """The event at which a commit writes its superblock."""
        events = self.journal.events
        return next(
            (
                at
                for at in range(begin, len(events))
                if isinstance(events[at], Write)
                and events[at].drive == 0
                and events[at].block in SLOTS
            ),
            len(events),
        )

    def drop_other(self) -> None:
        numbers = set(self.store.generations) - {self.store.generation}
        gone = [e for e in map(self.history.__getitem__, self.there) if e.number in numbers]
        for each in gone:
            each.given_up = len(self.journal.events)
        self.store.drop_other()
        for each in gone:
            each.gone = len(self.journal.events)


def blocks_of(superblock: Superblock) -> set[tuple[int, int]]:
    """Return the blocks of an index, by drive."""
    runs = superblock.runs
    return {(run.drive, run.block + each) for run in runs for each in range(run.blocks)}
