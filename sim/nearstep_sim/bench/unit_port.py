"""Functional units behind one memory port: cycles of an update."""

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearstep_hw.rule.rtl import FunctionalUnit
from nearstep_hw.verilog import to_verilog
from nearstep_sim.golden.rule_cpp import register_words
from nearstep_sim.verilate.build import Model, stored, verilate_library, verilog_of

__all__ = ["PortRun", "beat_bound", "run_on_port"]

_PREFIX = "VFunctionalUnit"

_HARNESS = """\
// LANES Verilated functional units in step behind a port that moves one beat a cycle, in or out.
//
// Blocks are loaded array after array into landing space of two blocks an array, reserved before
// the block is begun, and stored array after array from as much; loads and stores take turns by
// block. Memory answers at once: what is left is the port, the units' rate and the turns.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "{prefix}.h"
#include "verilated.h"

namespace {{

constexpr int INPUTS = {inputs}, OUTPUTS = {outputs};

void tick({prefix}& unit) {{
    unit.clk = 1;
    unit.eval();
    unit.clk = 0;
    unit.eval();
}}

// One direction of the port: which block of which array is being moved.
struct Mover {{
    int arrays;
    std::uint64_t block, beats;
    std::vector<std::uint64_t> moved;
    int array = 0;
    std::uint64_t base = 0;  // first beat of the block that is in turn

    Mover(int arrays, std::uint64_t block, std::uint64_t beats)
        : arrays(arrays), block(block), beats(beats), moved(arrays, 0) {{}}
    std::uint64_t end() const {{ return std::min(base + block, beats); }}
    bool finished() const {{ return base >= beats || arrays == 0; }}
    // Moves one beat; true when that was the last of its block.
    bool move() {{
        if (++moved[array] < end()) return false;
        if (++array == arrays) {{
            array = 0;
            base += block;
        }}
        return true;
    }}
    std::uint64_t least() const {{
        return arrays ? *std::min_element(moved.begin(), moved.end()) : beats;
    }}
}};

}}  // namespace

extern "C" std::uint64_t port_run(
    std::uint64_t count, int lanes, std::uint64_t block, std::uint64_t max_cycles,
    const std::uint32_t* registers, std::uint64_t* busy, {parameters}) {{
    VerilatedContext context;
    std::vector<std::unique_ptr<{prefix}>> units;
    for (int i = 0; i < lanes; ++i) units.push_back(std::make_unique<{prefix}>(&context, "unit"));
    for (auto& each : units) {{
        {prefix}& unit = *each;
        unit.i_en = 1;
        unit.i_valid = 0;
        unit.rst = 1;
        tick(unit);
        tick(unit);
        unit.rst = 0;
{set_registers}
    }}
    const std::uint64_t beats = (count + lanes - 1) / lanes;
    Mover load(INPUTS, block, beats), store(OUTPUTS, block, beats);
    bool loading = true, within = false;  // within a block that has been begun
    std::uint64_t taken = 0, made = 0, cycles = 0;
    *busy = 0;
    while (!store.finished() && cycles < max_cycles) {{
        if (!within) {{
            const bool space = !load.finished() && load.end() <= taken + 2 * block;
            const bool data = made >= store.end();
            if (loading ? !space && data : !data && space) loading = !loading;
            within = loading ? space : data;
        }}
        const std::uint64_t ready = load.least();
        const bool moves = within;
        if (within) {{
            within = !(loading ? load : store).move();
            if (!within) loading = !loading;
        }}
        *busy += moves;
        const bool full = made >= store.least() + 2 * block;
        const bool send = !full && taken < beats && ready > taken;
        for (int lane = 0; lane < lanes; ++lane) {{
            {prefix}& unit = *units[lane];
            unit.i_en = !full;
            const std::uint64_t i = taken * lanes + lane;
            unit.i_valid = send;
            if (send && i < count) {{
{drive}
            }}
            tick(unit);
            const std::uint64_t o = made * lanes + lane;
            if (!full && unit.o_valid && o < count) {{
{collect}
            }}
        }}
        if (!full && units[0]->o_valid) ++made;
        taken += send;
        ++cycles;
    }}
    for (auto& unit : units) unit->final();
    return store.finished() ? cycles : 0;
}}
"""


@dataclass(frozen=True)
class PortRun:
    """Results of one update behind a port.

    Attributes
    ----------
    cycles : from the first beat read to the last beat written.
    busy_cycles : cycles in which the port transferred a beat.
    """

    arrays: dict[str, NDArray[np.float32]]
    cycles: int
    busy_cycles: int


def beat_bound(unit: FunctionalUnit, count: int, *, lanes: int) -> int:
    """Cycles that the port alone needs: every array read and every array written once."""
    rule = unit.rule
    return -(-count // lanes) * (len(rule.arrays_in) + len(rule.arrays_out))


def run_on_port(
    unit: FunctionalUnit,
    arrays: Mapping[str, NDArray[Any]],
    scalars: Mapping[str, float],
    *,
    lanes: int = 16,
    block_beats: int = 256,
) -> PortRun:
    """Run `lanes` Verilated units behind a port of `lanes` elements a cycle, in or out.

    Raises
    ------
    TimeoutError : the update did not end within four times its beats.
    """
    rule = unit.rule
    given = [np.ascontiguousarray(arrays[name], np.float32) for name in rule.arrays_in]
    count = given[0].size if given else 0
    written = {name: np.zeros(count, np.float32) for name in rule.arrays_out}
    words = register_words(rule, scalars)
    function = ctypes.CDLL(str(_library(unit))).port_run
    function.restype = ctypes.c_uint64
    pointer = ctypes.c_void_p
    function.argtypes = [
        ctypes.c_uint64, ctypes.c_int, ctypes.c_uint64, ctypes.c_uint64, pointer, pointer,
        *[pointer] * (len(given) + len(written)),
    ]  # fmt: skip
    busy = ctypes.c_uint64()
    bound = beat_bound(unit, count, lanes=lanes)
    limit = 4 * bound + 16 * block_beats + 4 * unit.latency
    cycles = function(
        count,
        lanes,
        block_beats,
        limit,
        words.ctypes.data,
        ctypes.byref(busy),
        *(array.ctypes.data for array in given),
        *(array.ctypes.data for array in written.values()),
    )
    if not cycles:
        raise TimeoutError(f"Update of {count} elements did not end within {limit} cycles")
    return PortRun(written, cycles, busy.value)


def _library(unit: FunctionalUnit) -> Path:
    rule = unit.rule
    indented = " " * 16
    text = _HARNESS.format(
        prefix=_PREFIX,
        inputs=len(rule.arrays_in),
        outputs=len(rule.arrays_out),
        parameters=", ".join(
            [
                *(f"const std::uint32_t* in_{name}" for name in rule.arrays_in),
                *(f"std::uint32_t* out_{name}" for name in rule.arrays_out),
            ]
        ),
        set_registers="\n".join(
            f"        unit.s_{name} = registers[{index}];"
            for index, name in enumerate(rule.registers())
        ),
        drive="\n".join(f"{indented}unit.i_{name} = in_{name}[i];" for name in rule.arrays_in),
        collect="\n".join(f"{indented}out_{name}[o] = unit.o_{name};" for name in rule.arrays_out),
    )
    harness = stored("rule", {"port.cpp": text}) / "port.cpp"
    name = f"unit_{rule.name}"
    model = Model(
        top=name, verilog=verilog_of(unit.key, lambda: to_verilog(unit, name)), prefix=_PREFIX
    )
    return verilate_library(f"port_{rule.name}", [model], [harness], cxxflags=["-O1"])
