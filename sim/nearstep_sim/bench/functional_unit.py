"""Functional units of update rules, Verilated and run in this process over whole arrays."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearstep_hw.rule.rtl import FunctionalUnit
from nearstep_hw.verilog import to_verilog
from nearstep_sim.golden.rule import ArrayMismatchError
from nearstep_sim.golden.rule_cpp import register_words
from nearstep_sim.verilate.abi import load
from nearstep_sim.verilate.build import Model, stored, verilate_library, verilog_of

__all__ = ["UnitRun", "VerilatedUnit", "harness_source"]

_PREFIX = "VFunctionalUnit"

_HARNESS = """\
// Drives LANES objects of one Verilated functional unit: element i goes to lane i % lanes.
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "{prefix}.h"
#include "verilated.h"

namespace {{

struct Random {{
    std::uint64_t state;
    std::uint64_t next() {{
        state += 0x9E3779B97F4A7C15u;
        std::uint64_t z = state;
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
        z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
        return z ^ (z >> 31);
    }}
    bool chance(std::uint32_t of_256) {{ return (next() & 0xFF) < of_256; }}
}};

class Lanes {{
    VerilatedContext context_;
    std::vector<std::unique_ptr<{prefix}>> units_;

  public:
    explicit Lanes(int lanes) {{
        for (int i = 0; i < lanes; ++i)
            units_.push_back(std::make_unique<{prefix}>(&context_, "unit"));
        for (auto& unit : units_) {{
            unit->i_en = 1;
            unit->i_valid = 0;
            unit->rst = 1;
            for (int i = 0; i < 2; ++i) tick(*unit);
            unit->rst = 0;
        }}
    }}
    ~Lanes() {{
        for (auto& unit : units_) unit->final();
    }}
    static void tick({prefix}& unit) {{
        unit.clk = 1;
        unit.eval();
        unit.clk = 0;
        unit.eval();
    }}
    std::size_t size() const {{ return units_.size(); }}
    {prefix}& operator[](std::size_t lane) {{ return *units_[lane]; }}
}};

}}  // namespace

// Returns a new set of units; they are given back with unit_close.
extern "C" void* unit_open(int lanes) {{ return new Lanes(lanes); }}
extern "C" void unit_close(void* lanes) {{ delete static_cast<Lanes*>(lanes); }}

// Results: enabled and idle cycles, enabled cycles from the first element to its result, changes of
// an output during an idle cycle, results that came too many, results missing at the end.
extern "C" void unit_run(
    void* handle, std::size_t count, const std::uint32_t* registers, std::uint64_t max_cycles,
    std::uint32_t stall, std::uint32_t bubble, std::uint64_t seed, std::uint64_t* report,
    {parameters}) {{
    Lanes& lanes = *static_cast<Lanes*>(handle);
    const std::size_t width = lanes.size();
    Random random{{seed}};
    for (std::size_t lane = 0; lane < width; ++lane) {{
        {prefix}& unit = lanes[lane];
{set_registers}
    }}
    const bool free = stall == 0 && bubble == 0;
    std::size_t sent = 0, received = 0;
    std::uint64_t enabled = 0, idle = 0, first = 0, moved = 0, extra = 0;
    while (received < count && enabled + idle < max_cycles) {{
        if (!free && random.chance(stall)) {{
            for (std::size_t lane = 0; lane < width; ++lane) {{
                {prefix}& unit = lanes[lane];
                const auto valid = unit.o_valid;
{save}
                unit.i_en = 0;
                unit.i_valid = random.next() & 1;
{noise}
                Lanes::tick(unit);
                moved += unit.o_valid != valid{changed};
                unit.i_en = 1;
            }}
            ++idle;
            continue;
        }}
        const bool send = sent < count && (free || !random.chance(bubble));
        std::size_t out = 0;
        for (std::size_t lane = 0; lane < width; ++lane) {{
            {prefix}& unit = lanes[lane];
            const std::size_t i = sent + lane;
            unit.i_valid = send && i < count;
            if (unit.i_valid) {{
{drive}
            }} else if (!free) {{
{noise}
            }}
            Lanes::tick(unit);
            if (unit.o_valid) {{
                const std::size_t o = received + lane;
                if (o < count) {{
{collect}
                    ++out;
                }} else {{
                    ++extra;
                }}
            }}
        }}
        ++enabled;
        if (received == 0 && out != 0) first = enabled;
        if (send) sent += width;
        received += out;
    }}
    report[0] = enabled;
    report[1] = idle;
    report[2] = first;
    report[3] = moved;
    report[4] = extra;
    report[5] = received < count ? count - received : 0;
}}
"""


def harness_source(unit: FunctionalUnit) -> str:
    """C++ that drives the Verilated `unit`: `unit_open`, `unit_run`, `unit_close`."""
    rule = unit.rule
    inputs, outputs = rule.arrays_in, rule.arrays_out
    parameters = [
        *(f"const std::uint32_t* in_{name}" for name in inputs),
        *(f"std::uint32_t* out_{name}" for name in outputs),
    ]
    indented = " " * 16
    return _HARNESS.format(
        prefix=_PREFIX,
        parameters=", ".join(parameters),
        set_registers="\n".join(
            f"        unit.s_{name} = registers[{index}];"
            for index, name in enumerate(rule.registers())
        ),
        save="\n".join(f"{indented}const auto o_{name} = unit.o_{name};" for name in outputs),
        changed="".join(f" || unit.o_{name} != o_{name}" for name in outputs),
        noise="\n".join(
            f"{indented}unit.i_{name} = std::uint32_t(random.next());" for name in inputs
        ),
        drive="\n".join(f"{indented}unit.i_{name} = in_{name}[i];" for name in inputs),
        collect="\n".join(f"{indented}    out_{name}[o] = unit.o_{name};" for name in outputs),
    )


@dataclass(frozen=True)
class UnitRun:
    """Results of one pass of arrays through functional units.

    Attributes
    ----------
    arrays : the outputs.
    enabled_cycles, idle_cycles : clock cycles with `i_en` at 1 and at 0.
    latency : enabled cycles from the first element to its result; exact without bubbles.
    changes_while_idle : outputs that changed although `i_en` was 0.
    extra, missing : results beyond the number of elements, and elements without a result.
    """

    arrays: dict[str, NDArray[np.float32]]
    enabled_cycles: int
    idle_cycles: int
    latency: int
    changes_while_idle: int
    extra: int
    missing: int


class VerilatedUnit:
    """`lanes` objects of one Verilated functional unit, in this process.

    Parameters
    ----------
    lanes : objects; element i of an array goes to object i mod lanes.
    synthesis : converts Verilog and the name of its top to a netlist, which is simulated instead.
    cxxflags : appended to the flags of every model, such as `-O1` for short runs.
    """

    def __init__(
        self,
        unit: FunctionalUnit,
        *,
        lanes: int = 1,
        synthesis: Callable[[Path, str], Path] | None = None,
        cxxflags: Sequence[str] = (),
    ) -> None:
        self.unit = unit
        self._synthesis = synthesis
        self._cxxflags = tuple(cxxflags)
        self.lanes = lanes
        self._library = load(self.library, self.harness)
        self._handle: int | None = self._library.unit_open(lanes)

    @cached_property
    def harness(self) -> Path:
        """The C++ around the units."""
        return stored("rule", {"harness.cpp": harness_source(self.unit)}) / "harness.cpp"

    @cached_property
    def library(self) -> Path:
        """Return the shared library, built unless cached."""
        name = f"unit_{self.unit.rule.name}"
        verilog = verilog_of(self.unit.key, lambda: to_verilog(self.unit, name))
        if self._synthesis is not None:
            verilog = self._synthesis(verilog, name)
        model = Model(top=name, verilog=verilog, prefix=_PREFIX)
        return verilate_library(name, [model], [self.harness], cxxflags=self._cxxflags)

    def close(self) -> None:
        """Free the units, which cannot be used afterwards."""
        if self._handle is not None:
            self._library.unit_close(self._handle)
            self._handle = None

    def run(
        self,
        arrays: Mapping[str, NDArray[Any]],
        scalars: Mapping[str, float],
        *,
        stall: float = 0.0,
        bubble: float = 0.0,
        seed: int = 0,
    ) -> UnitRun:
        """Pass arrays through the units.

        Parameters
        ----------
        arrays : float32, one for each of `rule.arrays_in`, of one length.
        stall, bubble : chance that a cycle has `i_en` at 0, and that an enabled one has `i_valid`
            at 0; from 0 to 0.99. Inputs are random in bubbles.

        Raises
        ------
        ArrayMismatchError
        """
        rule = self.unit.rule
        words = register_words(rule, scalars)
        given = [np.ascontiguousarray(arrays[name], np.float32) for name in rule.arrays_in]
        count = given[0].size
        if any(array.shape != (count,) for array in given):
            raise ArrayMismatchError(f"Arrays must all have {count} elements and one dimension")
        written = {name: np.zeros(count, np.float32) for name in rule.arrays_out}
        report = np.zeros(6, np.uint64)
        beats = -(-count // self.lanes) + self.unit.latency
        share = (1.0 - min(stall, 0.99)) * (1.0 - min(bubble, 0.99))
        self._library.unit_run(
            self._handle,
            count,
            words.ctypes.data,
            int(4 * beats / share) + 1000,
            int(256 * stall),
            int(256 * bubble),
            seed,
            report.ctypes.data,
            *(array.ctypes.data for array in given),
            *(array.ctypes.data for array in written.values()),
        )
        return UnitRun(written, *(int(number) for number in report))
