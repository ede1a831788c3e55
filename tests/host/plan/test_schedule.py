"""The moves of iterations, replayed by a store that knows only bytes and places."""

import random
from collections import Counter
from collections.abc import Sequence

import pytest

from nearstep.plan.pieces import Item, Layer, Piece, cut
from nearstep.plan.residency import NoRoomError, belady, updated_first
from nearstep.plan.schedule import Move, Schedule, uses

from .machines import random_layers

ARRAYS = ("p", "m", "v")


class Replay:
    """Versions of arrays, in memory and on drives; an update makes the next version of all."""

    def __init__(self, capacity: Sequence[int]) -> None:
        self.capacity = capacity
        self.memory: dict[Item, int] = {}
        self.drives: dict[Item, int] = {}
        self.version: Counter[Piece] = Counter()
        self.fetched: list[int] = []
        self.checks = 0

    def do(self, move: Move) -> None:
        item = move.item
        if move.kind == "send":
            self.memory[item] = 0 if item.array == "g" else self.version[item.piece]
        elif move.kind == "load":
            self.memory[item] = self.drives[item]
        elif move.kind == "evict":
            self.drives[item] = self.memory.pop(item)
        elif move.kind == "drop":
            version = self.memory.pop(item)
            assert item.array == "g" or self.drives[item] == version
        elif move.kind == "fetch":
            place = self.memory if move.source == "memory" else self.drives
            assert place[item] == self.version[item.piece]
            assert move.source == "memory" or item not in self.memory
        else:
            for array in ARRAYS:
                one = Item(item.piece, array)
                assert self.memory[one] == self.version[item.piece]
                self.memory[one] += 1
            assert Item(item.piece, "g") in self.memory
            self.version[item.piece] += 1
        for channel, capacity in enumerate(self.capacity):
            held = sum(each.nbytes for each in self.memory if each.piece.channel == channel)
            assert held <= capacity
        self.checks += 1


@pytest.mark.parametrize("policy", ["updated_first", "belady"])
@pytest.mark.parametrize("seed", range(4))
def test_every_array_is_in_one_state_and_memory_is_never_exceeded(policy: str, seed: int) -> None:
    print(f"seed {seed}")
    choose = random.Random(seed)
    checks = refused = 0
    for _ in range(30):
        layers = random_layers(choose)
        channels = choose.randint(1, 3)
        pieces = cut(layers, channels, 1500)
        borrowed = {
            index: [piece for piece in pieces[0] if piece.parameter == 0]
            for index, layer in enumerate(layers)
            if layer.borrowed
        }
        whole = 16 * sum(layer.elements for layer in layers) // channels
        capacity = [choose.randint(4 * 4 * 800, max(4 * 4 * 1600, whole)) for _ in range(channels)]
        schedule = Schedule(
            pieces,
            borrowed=borrowed,
            capacity=capacity,
            policy=updated_first if policy == "updated_first" else belady(*uses(pieces, borrowed)),
            from_compute=choose.random() < 0.5,
        )
        replay = Replay(capacity)
        for move in schedule.place():  # new arrays come from the compute device
            place = replay.memory if move.kind == "send" else replay.drives
            place[move.item] = 0
        try:
            for _ in range(3):
                iteration(schedule, layers, pieces, replay)
        except NoRoomError:
            refused += 1
            continue
        assert set(replay.version.values()) == {3}
        peaks = zip(schedule.peak_bytes, capacity, strict=True)
        assert all(peak <= room for peak, room in peaks)
        checks += replay.checks
    assert checks > 1000
    assert refused < 15


def iteration(
    schedule: Schedule, layers: Sequence[Layer], pieces: Sequence[Sequence[Piece]], replay: Replay
) -> None:
    for index in range(len(layers)):
        for move in schedule.fetch(index):
            replay.do(move)
    for index in reversed(range(len(layers))):
        if index < len(layers) - 1:
            for move in schedule.fetch(index):
                replay.do(move)
        for piece in reversed(pieces[index]):
            for move in schedule.update(piece):
                replay.do(move)
    schedule.end_iteration()


def moved(policy: str, capacity: int) -> Counter[str]:
    """Bytes by kind in the second iteration of twelve equal layers."""
    layers = [Layer(name=str(i), parameters=(100,)) for i in range(12)]
    pieces = cut(layers, 1, 100)
    chosen = updated_first if policy == "updated_first" else belady(*uses(pieces))
    schedule = Schedule(pieces, capacity=[capacity], policy=chosen)
    schedule.place()
    found: Counter[str] = Counter()
    for _ in range(2):
        found.clear()
        moves: list[Move] = []
        for index in range(12):
            moves += schedule.fetch(index)
        for index in reversed(range(12)):
            moves += schedule.fetch(index) if index < 11 else []
            moves += schedule.update(pieces[index][0])
        schedule.end_iteration()
        for move in moves:
            found[f"{move.kind} {move.source}" if move.kind == "fetch" else move.kind] += (
                move.nbytes
            )
    return found


@pytest.mark.parametrize("policy", ["updated_first", "belady"])
def test_with_room_for_all_nothing_goes_to_the_drives(policy: str) -> None:
    assert moved(policy, 16 * 1200) == {
        "fetch memory": 4 * (1200 + 1100),
        "send": 4 * 1200,
        "update": 0,
    }


def test_with_room_for_one_piece_all_but_its_arrays_come_and_go_each_time() -> None:
    found = moved("updated_first", 16 * 100)
    assert found["evict"] == 3 * 4 * 1200
    assert found["load"] == 2 * 4 * 1200  # m and v: p comes from the compute device
    assert found["send"] == 2 * 4 * 1200
    # The first layer is updated last, so forward finds it in memory, once.
    assert found["fetch memory"] == 4 * 100


@pytest.mark.parametrize("pieces", [1, 2, 4, 6, 9, 11])
def test_belady_moves_no_more_over_the_drives(pieces: int) -> None:
    def over_drives(policy: str) -> int:
        found = moved(policy, 16 * 100 * pieces)
        return found["evict"] + found["load"] + found["fetch drives"]

    assert over_drives("belady") <= over_drives("updated_first")


@pytest.mark.parametrize("policy", ["updated_first", "belady"])
def test_a_tied_piece_is_fetched_once_an_iteration(policy: str) -> None:
    layers = [Layer(name=str(i), parameters=(100,)) for i in range(3)]
    pieces = cut([*layers, Layer(name="head", parameters=())], 1, 100)
    borrowed = {3: pieces[0]}
    order, length = uses(pieces, borrowed)
    assert length == 3 + 2 + 3  # forward; backward, where the device keeps the tied one; updates
    assert len(order[Item(pieces[0][0], "p")]) == 2
    chosen = updated_first if policy == "updated_first" else belady(order, length)
    schedule = Schedule(pieces, borrowed=borrowed, capacity=[16 * 150], policy=chosen)
    schedule.place()
    for _ in range(2):
        fetched: Counter[int] = Counter()
        for index in (0, 1, 2, 3, 2, 1, 0):  # backward of the last layer follows its forward
            fetched.update(move.item.piece.layer for move in schedule.fetch(index))
        assert fetched == {0: 1, 1: 2, 2: 2}
        for each in reversed(pieces[:3]):
            schedule.update(each[0])
        schedule.end_iteration()
