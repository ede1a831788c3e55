"""Smart-Infinity's transfer handler as a plan over the graph, against its closed form.

Ref: Smart-Infinity, section IV-B and Figure 5.
"""

from __future__ import annotations

import numpy as np
import pytest

from nearstep.work.executor import execute
from nearstep.work.graph import Graph
from nearstep.work.operation import Range, Rate
from nearstep.work.trace import picture, write_trace

PS = 1e-12
READ, UPDATE, WRITE = "read", "update", "write"


def handler(subgroups, buffers, seconds, *, drive=("drive",), calculate=None):
    """Read, update and write back of subgroups that take turns in preallocated buffers."""
    graph = Graph()
    ports = {READ: drive[0], UPDATE: "updater", WRITE: drive[-1]}
    for number in range(subgroups):
        buffer = Range("memory", number % buffers, number % buffers + 1)
        state = Range("file", number, number + 1)
        touches = {
            READ: {"reads": [state], "writes": [buffer]},
            UPDATE: {"reads": [buffer], "writes": [buffer]},
            WRITE: {"reads": [buffer], "writes": [state]},
        }
        for name in (READ, UPDATE, WRITE):
            graph.add(
                f"{name} {number}",
                ports[name],
                **touches[name],
                seconds=seconds[name],
                action=None if calculate is None else calculate(name, number),
            )
    return graph


def spent(*times):
    return {name: t * PS for name, t in zip((READ, UPDATE, WRITE), times, strict=True)}


@pytest.mark.parametrize("buffers", [1, 3])
@pytest.mark.parametrize("subgroups", [1, 2, 3, 8, 17])
@pytest.mark.parametrize("times", [(5, 3, 4), (2, 9, 4), (4, 4, 4), (1, 2, 9), (3, 0, 0)])
def test_one_buffer_is_the_naive_order_and_enough_hide_all_but_the_slowest(
    subgroups, times, buffers
):
    """A pipeline of three resources: all stages once, and the slowest for every other subgroup."""
    graph = handler(subgroups, buffers, spent(*times), drive=("reads", "writes"))
    each_other = sum(times) if buffers == 1 else max(times)
    assert execute(graph).makespan == sum(times) + (subgroups - 1) * each_other


@pytest.mark.parametrize("subgroups", [2, 3, 8, 17])
@pytest.mark.parametrize("times", [(5, 3, 4), (4, 4, 4), (6, 1, 2), (3, 0, 5)])
def test_two_buffers_and_one_drive(subgroups, times):
    """Reads and writes share the drive, which goes read, read, write, write: an update hides behind
    the read or the write of the other buffer, but for that of a last subgroup without a partner."""
    read, update, write = times
    assert update <= min(read, write)
    timeline = execute(handler(subgroups, 2, spent(*times)))
    assert timeline.busy("drive") == subgroups * (read + write)
    assert timeline.makespan == subgroups * (read + write) + subgroups % 2 * update


def test_results_are_those_of_the_order_of_the_program(tmp_path):
    """Actions in the place of a device: what is overlapped in time computes the same."""
    files = np.arange(12, dtype=np.float32)
    memory = np.zeros(2, np.float32)

    def calculate(name, number):
        def act():
            if name == READ:
                memory[number % 2] = files[number]
            elif name == UPDATE:
                memory[number % 2] = memory[number % 2] * np.float32(3) + np.float32(1)
            else:
                files[number] = memory[number % 2]

        return act

    rate = Rate(bytes_per_s=3.2e9, latency_s=80e-6)
    seconds = {READ: rate.seconds(1 << 20), UPDATE: 2e-4, WRITE: rate.seconds(3 << 19)}
    timeline = execute(handler(12, 2, seconds, calculate=calculate))
    np.testing.assert_array_equal(files, np.arange(12, dtype=np.float32) * 3 + 1)
    naive = execute(handler(12, 1, seconds, calculate=None)).makespan
    print("naive", naive, "handler", timeline.makespan, "drive", timeline.busy("drive"))
    assert timeline.makespan < naive
    write_trace(timeline, tmp_path / "trace.json")
    first = (tmp_path / "trace.json").read_bytes()
    write_trace(timeline, tmp_path / "trace.json")
    assert (tmp_path / "trace.json").read_bytes() == first
    picture(timeline, tmp_path / "handler.png")
    assert (tmp_path / "handler.png").read_bytes().startswith(b"\x89PNG")


def test_urgent_parameters_are_written_before_moments():
    """The parameters of a subgroup go back to the drive before what is needed in the next
    iteration alone; the reads of the next subgroup wait for neither but for their buffers."""
    graph = Graph()
    arrays = ("p", "m", "v")
    for number in range(4):
        buffers = {name: Range(name, number % 2, number % 2 + 1) for name in arrays}
        for name, buffer in buffers.items():
            graph.add(f"read {name}{number}", "drive", writes=[buffer], seconds=4 * PS, priority=1)
        every = list(buffers.values())
        graph.add(f"update {number}", "updater", reads=every, writes=every, seconds=3 * PS)
        for name, buffer in buffers.items():
            urgent = 0 if name == "p" else 2
            graph.add(
                f"write {name}{number}", "drive", reads=[buffer], seconds=4 * PS, priority=urgent
            )
    timeline = execute(graph)
    at = {e.operation.name: e for e in timeline.entries}
    for number in range(4):
        assert at[f"write p{number}"].start < at[f"write m{number}"].start
    assert at["write p0"].start < at["write m0"].start
    # The drive never rests but for the first read, and while the last subgroup is updated.
    assert timeline.makespan - timeline.busy("drive") <= 2 * 3
