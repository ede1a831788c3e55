"""Tensors on drives: what is written is read, and generations stand side by side."""

from __future__ import annotations

import random
import threading
from unittest import mock

import numpy as np
import pytest

from nearstep.errors import ArgumentError, OutOfBoundsError
from nearstep.storage.aligned import aligned_empty, is_aligned
from nearstep.storage.blocks import BLOCK_BYTES
from nearstep.storage.drive_errors import (
    ClosedStoreError,
    DriveAccessError,
    DriveFullError,
    NoGenerationError,
    StorageError,
    UnknownTensorError,
)
from nearstep.storage.in_flight import InFlight
from nearstep.storage.store import Store
from nearstep.work.errors import WorkError
from nearstep.work.executor import execute
from nearstep.work.graph import Graph
from nearstep_sim.models.drive import FailAt, Flush, Journal, after_cut, every_cut

from .drives import (
    EXTENT,
    OWNER,
    contents,
    images_of,
    memory_set,
    open_images,
    random_bytes,
    reopened,
)

RNG_SEED = 11


@pytest.fixture
def rng() -> np.random.Generator:
    print(f"seed {RNG_SEED}")
    return np.random.default_rng(RNG_SEED)


def new(drives: int = 2, blocks: int = 64) -> Store:
    return open_images(memory_set(drives, blocks))[0]


def again(store: Store, **options: object) -> Store:
    """The same drives, opened anew."""
    store.close()
    return reopened(store, **options)


def test_what_is_committed_is_there_when_the_drives_are_opened_again(rng) -> None:
    store, data = new(), random_bytes(rng, 3 * EXTENT + 77)
    store.add("p", len(data), {"dtype": "<f4", "shape": [3, 4]})
    store.write("p", data)
    assert store.commit({"step": 7}) == 1
    store = again(store)
    assert (store.generation, store.meta) == (1, {"step": 7})
    assert store.tensors["p"].attributes == {"dtype": "<f4", "shape": [3, 4]}
    assert contents(store) == {"p": data}


def test_the_last_generation_holds_what_was_committed_alone(rng) -> None:
    checks, store = 0, new()
    for nbytes in (1, BLOCK_BYTES, EXTENT, 3 * EXTENT + 77):
        name, data = f"t{nbytes}", random_bytes(rng, nbytes)
        store.add(name, nbytes)
        assert not store.holds(name, bytes(nbytes)), "never written"
        store.write(name, data)
        assert not store.holds(name, data), "not committed"
        store.commit()
        assert store.holds(name, data)
        assert not store.holds(name, data[1:]), "shorter"
        for at in {0, nbytes // 2, nbytes - 1}:
            other = bytearray(data)
            other[at] ^= 1
            assert not store.holds(name, other)
            checks += 1
    store.write(name, bytes(nbytes))
    assert store.holds(name, data), "the other contents are not committed"
    assert checks == 10


def test_what_is_not_committed_is_gone(rng) -> None:
    store = new()
    store.add("p", 100)
    store.write("p", random_bytes(rng, 100))
    store.commit()
    kept = contents(store)
    store.write("p", random_bytes(rng, 100))
    store.add("q", 9)
    assert contents(store).keys() == {"p", "q"}
    assert contents(again(store)) == kept


def test_a_tensor_is_striped_over_the_drives(rng) -> None:
    store = new(drives=3, blocks=64)
    store.add("p", 12 * EXTENT)
    store.write("p", random_bytes(rng, 12 * EXTENT))
    assert [drive.bytes_written for drive in store.drives] == [4 * EXTENT] * 3
    assert [each.drive for each in store.tensors["p"].table.extents()] == [0, 1, 2] * 4


def test_a_tensor_may_have_smaller_extents_which_are_written_whole(rng) -> None:
    store, data = new(drives=1), random_bytes(rng, 3 * EXTENT)
    store.add("whole", len(data))
    store.add("small", len(data), extent_bytes=BLOCK_BYTES)
    for life in range(2):
        for name, read in (("whole", (life + 1) * len(data)), ("small", 0)):  # no zeros
            before = store.drives[0].bytes_read
            for at in range(0, len(data), BLOCK_BYTES):
                store.write(name, data[at : at + BLOCK_BYTES], at)
            assert store.drives[0].bytes_read - before == read, (life, name)
        store.commit()
        store = again(store)
        assert contents(store) == {"whole": data, "small": data}
        assert {each.blocks for each in store.tensors["small"].table.extents()} == {1}
    for bad in (0, BLOCK_BYTES - 1, EXTENT + BLOCK_BYTES, 1.5 * BLOCK_BYTES, float(EXTENT) + 0.5):
        with pytest.raises(ArgumentError, match=f"at most {EXTENT}, not {bad}"):
            store.add("p", 1, extent_bytes=bad)
    assert contents(store).keys() == {"whole", "small"}


def test_small_tensors_are_spread_as_well(rng) -> None:
    store = new(drives=2)
    for number in range(6):
        store.add(f"t{number}", 10)
        store.write(f"t{number}", bytes(10))
    assert [drive.bytes_written for drive in store.drives] == [3 * BLOCK_BYTES] * 2


def test_zeros_of_a_new_tensor_take_no_space() -> None:
    store = new()
    free = store.free_bytes
    store.add("large", 1 << 30)
    out = bytearray(b"x" * 100)
    store.read("large", out, offset=(1 << 30) - 100)
    assert (bytes(out), store.free_bytes) == (bytes(100), free)


def test_written_again_before_the_commit_takes_no_more_space(rng) -> None:
    store = new()
    store.add("p", 3 * EXTENT)
    store.write("p", random_bytes(rng, 3 * EXTENT))
    free = store.free_bytes
    data = random_bytes(rng, 3 * EXTENT)
    for _ in range(20):
        store.write("p", data)
    assert store.free_bytes == free
    assert contents(store) == {"p": data}


@pytest.mark.parametrize("committed", [False, True])
def test_a_part_leaves_the_rest_as_it_is(rng, committed: bool) -> None:
    store, nbytes = new(), 5 * EXTENT + 333
    expected = bytearray(random_bytes(rng, nbytes))
    store.add("p", nbytes)
    store.write("p", expected)
    checks = 0
    ends = [(0, 1), (nbytes - 1, nbytes), (10, nbytes - 10), (nbytes - 400, nbytes)]
    for first, last in (*ends, (EXTENT - 1, EXTENT + 1), (EXTENT, 2 * EXTENT), (4096, 4096)):
        if committed:
            store.commit()
        data = random_bytes(rng, last - first)
        store.write("p", data, first)
        expected[first:last] = data
        assert contents(store) == {"p": bytes(expected)}
        out = bytearray(last - first)
        store.read("p", out, first)
        assert bytes(out) == data
        checks += 1
    assert checks == 7


def test_aligned_arrays_and_others_are_the_same(rng) -> None:
    store = new()
    values = rng.standard_normal(3 * EXTENT // 4).astype(np.float32)
    aligned = aligned_empty(values.shape)
    aligned[:] = values
    assert is_aligned(aligned.view(np.uint8))
    assert not is_aligned(aligned[1:].view(np.uint8))
    for name, array in (("a", values), ("b", aligned), ("c", aligned[1:])):
        store.add(name, array.nbytes)
        store.write(name, array)
        for out in (np.empty_like(array), aligned_empty(array.shape)):
            store.read(name, out)
            assert (out.view(np.uint32) == array.view(np.uint32)).all()


def test_the_generation_before_stays_until_the_next_commit(rng) -> None:
    store, states = new(), []
    store.add("p", 2 * EXTENT)
    for number in range(1, 6):
        states.append(random_bytes(rng, 2 * EXTENT))
        store.write("p", states[-1])
        store.commit({"step": number})
        assert store.generations.keys() == {number - 1, number}
        assert contents(store, number) == {"p": states[-1]}
        if number > 1:
            assert contents(store, number - 1) == {"p": states[-2]}
    view = store.at(4)
    store.write("p", bytes(2 * EXTENT))
    assert contents(store, 4) == {"p": states[3]}
    store.commit()
    with pytest.raises(NoGenerationError) as caught:
        view.read("p", bytearray(1))
    assert (caught.value.expected, caught.value.actual) == (4, (5, 6))


def test_an_older_generation_can_be_gone_on_from(rng) -> None:
    store = new()
    store.add("p", 100)
    for number in (1, 2):
        store.write("p", bytes([number]) * 100)
        store.commit({"step": number})
    store = again(store, generation=1)
    assert (store.generation, store.meta) == (1, {"step": 1})
    assert contents(store, 2) == {"p": b"\2" * 100}
    store.write("p", b"new", 5)
    assert store.commit() == 3
    store = again(store)
    assert store.generations.keys() == {1, 3}
    assert contents(store) == {"p": b"\1" * 5 + b"new" + b"\1" * 92}
    with pytest.raises(NoGenerationError):
        again(store, generation=2)


def test_abort_gives_everything_back(rng) -> None:
    store = new()
    store.add("p", 3 * EXTENT)
    store.write("p", random_bytes(rng, 3 * EXTENT))
    store.commit()
    before, free = contents(store), store.free_bytes
    for _ in range(10):
        store.write("p", random_bytes(rng, 100), 50)
        store.add("q", EXTENT)
        store.write("q", bytes(EXTENT))
        store.remove("p")
        store.abort()
        assert (contents(store), store.free_bytes) == (before, free)


def test_a_full_set_says_so_and_is_as_before(rng) -> None:
    store = new(drives=2, blocks=24)
    store.add("p", 30 * BLOCK_BYTES)
    store.write("p", random_bytes(rng, 30 * BLOCK_BYTES))
    store.commit()
    before, free = contents(store), store.free_bytes
    with pytest.raises(DriveFullError) as caught:
        store.write("p", bytes(30 * BLOCK_BYTES))
    assert (caught.value.expected, caught.value.actual) == (30 * BLOCK_BYTES, free)
    assert (contents(store), store.free_bytes) == (before, free)
    data = random_bytes(rng, 8)
    store.write("p", data, 5 * BLOCK_BYTES)  # what fits goes on
    store.commit()
    expected = before["p"][: 5 * BLOCK_BYTES] + data + before["p"][5 * BLOCK_BYTES + 8 :]
    assert contents(again(store)) == {"p": expected}


def test_a_commit_without_space_for_its_index_can_be_made_later() -> None:
    store = new(drives=1, blocks=16)
    store.add("p", store.free_bytes)
    store.write("p", b"\5" * store.tensors["p"].nbytes)
    assert store.free_bytes == 0
    with pytest.raises(DriveFullError):
        store.commit()
    store.remove("p")
    store.add("q", 10)
    store.write("q", b"0123456789")
    assert store.commit() == 1
    assert contents(again(store)) == {"q": b"0123456789"}


def test_giving_up_the_other_generation_makes_room(rng) -> None:
    store = new(drives=1, blocks=32)
    nbytes = 12 * BLOCK_BYTES
    store.add("p", nbytes)
    for number in range(6):
        data = random_bytes(rng, nbytes)
        if number > 1:
            with pytest.raises(DriveFullError):
                store.write("p", data)
            store.drop_other()
            assert store.generations.keys() == {number}
        store.write("p", data)
        store.commit()
    assert contents(again(store)) == {"p": data}


def test_space_in_pieces_is_used_to_the_last_block(rng) -> None:
    """Every second block is free: a tensor has one extent for each."""
    store = new(drives=1, blocks=64)
    for number in range(50):
        store.add(f"t{number}", BLOCK_BYTES)
        store.write(f"t{number}", bytes(BLOCK_BYTES))
    for number in range(0, 50, 2):
        store.remove(f"t{number}")
    store.add("p", store.free_bytes - BLOCK_BYTES)
    data = random_bytes(rng, store.tensors["p"].nbytes)
    store.write("p", data)
    assert len(store.tensors["p"].table) > 25
    assert store.free_bytes == BLOCK_BYTES
    out = bytearray(len(data))
    store.read("p", out)
    assert bytes(out) == data


def test_a_table_never_changes_and_writes_under_way_stand_while_extents_are_cut(rng) -> None:
    store = new(drives=1, blocks=96)
    store.add("p", 10 * EXTENT)
    for number in range(84):
        store.add(f"t{number}", BLOCK_BYTES)
        store.write(f"t{number}", bytes(BLOCK_BYTES))
    for number in range(0, 84, 2):
        store.remove(f"t{number}")
    data = bytearray(10 * EXTENT)
    tables = [store.tensors["p"].table]
    before = [tables[0].rows.copy()]
    for at in [EXTENT * int(each) for each in rng.permutation(10)] + [5_000, 30_000, 70_001]:
        part = random_bytes(rng, EXTENT)
        data[at : at + EXTENT] = part
        store.submit_write("p", part, at)
        tables.append(store.tensors["p"].table)
        before.append(tables[-1].rows.copy())
    assert len(tables[-1]) > 10
    assert contents(store)["p"] == data
    store.commit()
    for table, rows in zip(tables, before, strict=True):
        assert not table.rows.flags.writeable
        assert np.array_equal(table.rows, rows)
    assert contents(again(store))["p"] == data
    assert len(tables) == 14


def test_drives_of_different_sizes_are_filled(rng) -> None:
    from nearstep.storage.drive_set import create_set
    from nearstep_sim.models.drive import MemoryBlocks

    places = [MemoryBlocks(bytes(blocks * BLOCK_BYTES), n) for n, blocks in enumerate((64, 16))]
    create_set(places, drive_bytes=16 * BLOCK_BYTES, owner=OWNER, extent_bytes=EXTENT)
    store = reopened(places)
    data = random_bytes(rng, store.free_bytes - BLOCK_BYTES)
    store.add("p", len(data))
    store.write("p", data)
    store.commit()
    assert contents(again(store)) == {"p": data}


def model_test(seed: int, steps: int) -> int:
    """Any calls, many under way at once, against a dictionary."""
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    store = new(drives=int(rng.integers(1, 4)), blocks=200)
    model: dict[str, bytearray] = {}
    committed: dict[str, bytes] = {}
    under_way, reads = [], []
    checks = 0
    for _ in range(steps):
        kind, name = rng.random(), f"t{rng.integers(0, 5)}"
        if name not in model:
            nbytes = int(rng.integers(0, 10 * EXTENT))
            store.add(name, nbytes)
            model[name] = bytearray(nbytes)
        elif kind < 0.5:
            first, last = sorted(int(each) for each in rng.integers(0, len(model[name]) + 1, 2))
            data = random_bytes(rng, last - first)
            try:
                under_way.append(store.submit_write(name, data, first))
            except DriveFullError:
                store.drop_other()
                continue
            model[name][first:last] = data
        elif kind < 0.8:
            first, last = sorted(int(each) for each in rng.integers(0, len(model[name]) + 1, 2))
            out = bytearray(last - first)
            reads.append((store.submit_read(name, out, first), out, bytes(model[name][first:last])))
        elif kind < 0.85:
            store.remove(name)
            del model[name]
        elif kind < 0.9:
            try:
                store.commit()
            except DriveFullError:
                store.drop_other()
                continue
            committed = {each: bytes(data) for each, data in model.items()}
        elif kind < 0.93:
            store.abort()
            model = {each: bytearray(data) for each, data in committed.items()}
        else:
            for transfer in under_way:
                assert transfer.wait().done
            for transfer, out, expected in reads:
                transfer.wait()
                assert bytes(out) == expected
                checks += 1
            under_way, reads = [], []
    for transfer in under_way:
        transfer.wait()
    assert contents(store) == {each: bytes(data) for each, data in model.items()}
    assert contents(again(store)) == committed
    return checks + len(model)


def test_any_calls_do_what_a_dictionary_does() -> None:
    assert sum(model_test(seed, 150) for seed in range(6)) > 100


@pytest.mark.deep
@pytest.mark.parametrize("seed", range(100, 110))
def test_many_calls_do_what_a_dictionary_does(seed: int) -> None:
    assert sum(model_test(1000 * seed + each, 400) for each in range(20)) > 1000


def test_several_threads_write_at_once(rng) -> None:
    store, datas = new(drives=2, blocks=400), [random_bytes(rng, 20 * EXTENT) for _ in range(4)]
    errors: list[Exception] = []

    def work(number: int) -> None:
        try:
            store.add(f"t{number}", len(datas[number]))
            for first in range(0, len(datas[number]), 3_000):
                store.write(f"t{number}", datas[number][first : first + 3_000], first)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    store.commit()
    assert contents(again(store)) == {f"t{n}": data for n, data in enumerate(datas)}


def test_transfers_are_operations_of_a_graph() -> None:
    """Modelled by their seconds: both are under way at once, and waited for at their ends."""
    store = new()
    data, out = np.full(EXTENT, 7, np.uint8), np.zeros(EXTENT, np.uint8)
    for name in "pq":
        store.add(name, EXTENT)
    store.write("q", data)
    graph = Graph()
    graph.add("write", "drive 0", seconds=2e-3, action=lambda: store.submit_write("p", data))
    graph.add("read", "drive 1", seconds=1e-3, action=lambda: store.submit_read("q", out))
    timeline = execute(graph)
    assert (out == data).all()
    assert contents(store)["p"] == data.tobytes()
    assert [(entry.start, entry.end > 0) for entry in timeline.entries] == [(0, True)] * 2
    graph = Graph()
    graph.add("read", "drive 1", action=lambda: store.submit_read("q", out))
    store.drives[0].blocks.fault = store.drives[1].blocks.fault = FailAt("read")
    with pytest.raises(WorkError):
        execute(graph)


def test_a_transfer_waits_for_those_of_the_same_blocks_alone() -> None:
    transfers = [mock.Mock(ended=False) for _ in range(4)]
    in_flight = InFlight()
    blocks = [("p", 0, 2, True), ("p", 4, 6, True), ("p", 2, 4, False), ("q", 2, 4, True)]
    for (name, first, last, writes), transfer in zip(blocks, transfers, strict=True):
        in_flight.add(name, first, last, transfer, writes=writes)
    for writes, expected in ((False, [0, 0, 0, 0]), (True, [0, 0, 1, 0])):
        in_flight.join("p", 2, 4, writes=writes)
        assert [each.join.call_count for each in transfers] == expected
    in_flight.join("p", 1, 5, writes=False)
    assert [each.join.call_count for each in transfers] == [1, 1, 1, 0]


def test_bad_arguments_are_refused_before_anything_is_touched(rng) -> None:
    store = new()
    store.add("p", 100)
    store.commit()
    journal = images_of(store)
    bad = [
        (UnknownTensorError, lambda: store.add("p", 5)),
        (UnknownTensorError, lambda: store.write("q", b"")),
        (UnknownTensorError, lambda: store.read("q", bytearray(1))),
        (UnknownTensorError, lambda: store.remove("q")),
        (UnknownTensorError, lambda: store.at(1).read("q", bytearray(1))),
        (OutOfBoundsError, lambda: store.write("p", bytes(101))),
        (OutOfBoundsError, lambda: store.write("p", b"x", 100)),
        (OutOfBoundsError, lambda: store.read("p", bytearray(1), -1)),
        (ArgumentError, lambda: store.read("p", bytearray(1), 0.5)),
        (ArgumentError, lambda: store.read("p", bytes(1))),
        (ArgumentError, lambda: store.write("p", "text")),
        (ArgumentError, lambda: store.write("p", np.zeros((4, 4), np.uint8)[:, 1])),
        (ArgumentError, lambda: store.write("p", np.array([None]))),
        (ArgumentError, lambda: store.add("", 5)),
        (ArgumentError, lambda: store.add("r", -1)),
        (ArgumentError, lambda: store.add("r", True)),
        (ArgumentError, lambda: store.add("r", 1, {"x": object()})),
        (ArgumentError, lambda: store.commit({"loss": float("nan")})),
        (ArgumentError, lambda: store.commit([1])),
        (NoGenerationError, lambda: store.at(9)),
        (ArgumentError, lambda: Store.open([each.blocks for each in store.drives], owner="")),
    ]
    for expected, action in bad:
        with pytest.raises(expected):
            action()
    assert images_of(store) == journal
    assert len(bad) == 21


def test_a_store_that_is_closed_or_read_only_says_so() -> None:
    store = new()
    store.add("p", 10)
    store.commit()
    store = again(store, read_only=True)
    out, view = bytearray(10), store.at(1)
    store.read("p", out)
    for action in (
        lambda: store.write("p", b"x"),
        lambda: store.commit(),
        lambda: store.abort(),
        lambda: store.drop_other(),
        lambda: store.add("q", 1),
    ):
        with pytest.raises(DriveAccessError):
            action()
    store.close()
    store.close()
    with pytest.raises(ClosedStoreError):
        store.read("p", out)
    with pytest.raises(ClosedStoreError, match="cannot read 'p': the store is closed"):
        view.read("p", out)
    with pytest.raises(StorageError):
        store.at(1)


def test_what_a_killed_process_wrote_is_flushed_before_the_drives_are_read() -> None:
    images, journal = memory_set(2), Journal()
    open_images(images, journal, read_only=True)[0].close()
    assert journal.events == []
    open_images(images, journal)[0].close()
    assert journal.events[:2] in ([Flush(0), Flush(1)], [Flush(1), Flush(0)])


def test_a_generation_with_a_name_is_kept_until_it_is_dropped(rng) -> None:
    store, size = new(2, 64), 2 * EXTENT
    first = random_bytes(rng, size)
    store.add("p", size)
    store.write("p", first)
    store.commit({"step": 1}, name="one")
    with pytest.raises(ArgumentError, match="not 'one': drop the other first"):
        store.commit(name="one")
    for step in range(2, 9):
        last = random_bytes(rng, size)
        store.write("p", last)
        store.commit({"step": step}, name="six" if step == 6 else "")
        if step % 3 == 0:
            store = again(store)
        out = bytearray(size)
        store.at(1).read("p", out)
        assert out == first
        assert store.at(1).meta == {"step": 1}
        assert store.kept == {"one": 1} | ({"six": 6} if step >= 6 else {})
    assert sorted(store.generations) == [7, 8]
    store.abort()
    assert store.kept == {"one": 1, "six": 6}
    free = store.free_bytes
    with pytest.raises(ArgumentError, match=r"one of \['one', 'six'\], not 'two'"):
        store.drop("two")
    for name, left in (("one", {"six": 6}), ("six", {})):
        store.drop(name)
        store.abort()
        assert store.kept == left, "a rollback does not undo it"
        assert store.free_bytes == free, "until the generations that refer to it are replaced"
        for _ in range(2):
            store.commit()
        assert store.free_bytes >= free + size
        store.write("p", last)  # over the blocks that were its
        store.abort()
        store = again(store)
        assert (store.kept, contents(store)) == (left, {"p": last})
        assert store.free_bytes >= free + size
        free = store.free_bytes
    with pytest.raises(NoGenerationError):
        store.at(1)


def test_a_power_cut_leaves_a_kept_generation_as_it_was(rng) -> None:
    begin, journal = memory_set(2, 64), Journal()
    store, _ = open_images(begin, journal)
    size, drawn = 2 * EXTENT, random.Random(RNG_SEED)
    data = [random_bytes(rng, size) for _ in range(5)]
    events, ended = journal.events, list[int]()
    store.add("p", size)
    for number, each in enumerate(data):
        store.write("p", each)
        store.commit({"step": number}, name="first" if number == 0 else "")
        ended.append(len(events))
    store.close()
    cuts = 0
    for at in range(ended[0], len(events), 2):
        for kept in every_cut(events[:at], 2, drawn):
            cut = open_images(after_cut(begin, events[:at], kept))[0]
            out = bytearray(size)
            cut.at(cut.kept["first"]).read("p", out)
            assert out == data[0], (at, kept)
            assert cut.meta["step"] in {sum(end <= at for end in ended) - n for n in (0, 1)}
            cut.close()
            cuts += 1
    assert cuts > 40


def test_a_part_of_an_extent_is_written_where_only_single_blocks_are_free(rng) -> None:
    """The extent is split, and bytes lie in one of its pieces alone, at any place."""
    store, checks = new(1, 40), 0
    for number in range(20):
        store.add(f"small {number}", 10)
        store.write(f"small {number}", b"small")
    store.commit()
    for number in range(0, 20, 2):
        store.remove(f"small {number}")
    for _ in range(2):
        store.commit()
    rest = store.free_bytes - 8 * BLOCK_BYTES  # the largest gap, with blocks of indices
    store.add("rest", rest)
    store.write("rest", bytes(rest))
    for offset in (0, 5, BLOCK_BYTES - 3, BLOCK_BYTES, BLOCK_BYTES + 4, 2 * BLOCK_BYTES - 444):
        store.add("split", EXTENT)
        expected = bytearray(EXTENT)
        for begin, data in ((offset, random_bytes(rng, 444)), (7, b"once more")):
            store.write("split", data, begin)
            expected[begin : begin + len(data)] = data
        assert len(store.tensors["split"].table) == 2
        assert contents(store)["split"] == expected
        store.remove("split")
        checks += 1
    assert checks == 6
