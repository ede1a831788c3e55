"""Verilated components with stream ports, driven from and into arrays, stalled at will."""

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from amaranth.lib import wiring
from numpy.typing import NDArray

from nearstep_hw.verilog import flat_ports, to_verilog
from nearstep_sim.verilate.abi import load
from nearstep_sim.verilate.build import Model, stored, verilate_library, verilog_of

__all__ = ["STALLS", "StreamBench", "StreamProtocolError", "StreamRun"]

Words = NDArray[np.uint32]

#: Chance that a source offers nothing and that a sink takes nothing in a cycle, by mode.
STALLS: Mapping[str, tuple[float, float]] = {
    "free": (0.0, 0.0),
    "source": (0.6, 0.0),
    "sink": (0.0, 0.6),
    "both": (0.5, 0.5),
}

_PREFIX = "VStreamBench"

_HARNESS = """\
// Streams of one Verilated component: sources and sinks that stall at random, and the rule that
// valid and payload hold until the transfer.
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>

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

template <typename Port> void put(Port& port, const std::uint32_t* words, int count) {{
    if constexpr (sizeof(Port) > 8) {{
        for (int i = 0; i < count; ++i) port[i] = words[i];
    }} else {{
        std::uint64_t value = words[0];
        if (count > 1) value |= std::uint64_t(words[1]) << 32;
        port = static_cast<Port>(value);
    }}
}}
template <typename Port> void get(const Port& port, std::uint32_t* words, int count) {{
    if constexpr (sizeof(Port) > 8) {{
        for (int i = 0; i < count; ++i) words[i] = port[i];
    }} else {{
        words[0] = std::uint32_t(port);
        if (count > 1) words[1] = std::uint32_t(std::uint64_t(port) >> 32);
    }}
}}

constexpr int SOURCES = {sources}, SINKS = {sinks}, WIDEST = {widest};

class Bench {{
    VerilatedContext context_;

  public:
    std::unique_ptr<{prefix}> top = std::make_unique<{prefix}>(&context_, "top");
    Bench() {{
        top->rst = 1;
        tick();
        tick();
        top->rst = 0;
        top->eval();
    }}
    ~Bench() {{ top->final(); }}
    void tick() {{
        top->clk = 1;
        top->eval();
        top->clk = 0;
        top->eval();
    }}
}};

}}  // namespace

extern "C" void* bench_open() {{ return new Bench; }}
extern "C" void bench_close(void* bench) {{ delete static_cast<Bench*>(bench); }}

// report: cycles to the last transfer, all cycles, violations of the protocol, then for each source
// and each sink the transfers, the first and the last cycle of one.
extern "C" void bench_run(
    void* handle, const std::uint32_t* const* given, const std::uint64_t* counts,
    std::uint32_t* const* taken, const std::uint64_t* space, const std::uint32_t* inputs,
    std::uint32_t* outputs, std::uint64_t max_cycles, std::uint64_t quiet, std::uint32_t source,
    std::uint32_t sink, std::uint64_t seed, std::uint64_t* report) {{
    Bench& bench = *static_cast<Bench*>(handle);
    {prefix}& top = *bench.top;
    Random random{{seed}};
    std::uint64_t sent[SOURCES + 1] = {{}}, got[SINKS + 1] = {{}};
    std::uint64_t first[SOURCES + SINKS + 1] = {{}}, last[SOURCES + SINKS + 1] = {{}};
    bool offers[SOURCES + 1] = {{}}, was[SINKS + 1] = {{}};
    std::uint32_t held[SINKS + 1][WIDEST] = {{}}, now[WIDEST] = {{}}, noise[WIDEST] = {{}};
    std::uint64_t cycle = 0, ended = 0, faults = 0;
{set_inputs}
{start}
    for (; cycle < max_cycles && cycle - ended < quiet; ++cycle) {{
{drive}
        top.eval();
        bool fires[SOURCES + SINKS + 1] = {{}};
{sample}
        bench.tick();
        for (int i = 0; i < SOURCES + SINKS; ++i)
            if (fires[i]) {{
                if (i < SOURCES) {{
                    offers[i] = false;
                    ++sent[i];
                }} else {{
                    ++got[i - SOURCES];
                }}
                if (first[i] == 0) first[i] = cycle + 1;
                last[i] = cycle + 1;
                ended = cycle + 1;
            }}
{stop}
    }}
{idle}
    top.eval();
{get_outputs}
    report[0] = ended;
    report[1] = cycle;
    report[2] = faults;
    for (int i = 0; i < SOURCES + SINKS; ++i) {{
        report[3 + 3 * i] = i < SOURCES ? sent[i] : got[i - SOURCES];
        report[4 + 3 * i] = first[i];
        report[5 + 3 * i] = last[i];
    }}
}}
"""

_DRIVE = """\
        if (!offers[{i}]) {{
            offers[{i}] = sent[{i}] < counts[{i}] && !random.chance(source);
            if (offers[{i}]) {{
                put(top.{port}___05Fpayload, given[{i}] + sent[{i}] * {words}, {words});
            }} else {{
                for (int k = 0; k < {words}; ++k) noise[k] = std::uint32_t(random.next());
                if ({words} * 32 > {width}) noise[{words} - 1] &= (1ull << ({width} % 32)) - 1;
                put(top.{port}___05Fpayload, noise, {words});
            }}
        }}
        top.{port}___05Fvalid = offers[{i}];"""

_SAMPLE_SOURCE = "        fires[{i}] = offers[{i}] && top.{port}___05Fready;"

_SAMPLE_SINK = """\
        get(top.{port}___05Fpayload, now, {words});
        if (was[{k}] && (!top.{port}___05Fvalid || std::memcmp(held[{k}], now, 4 * {words})))
            ++faults;
        fires[{i}] = top.{port}___05Fvalid && top.{port}___05Fready;
        was[{k}] = top.{port}___05Fvalid && !top.{port}___05Fready;
        std::memcpy(held[{k}], now, 4 * {words});
        if (fires[{i}]) {{
            if (got[{k}] < space[{k}])
                std::memcpy(taken[{k}] + got[{k}] * {words}, now, 4 * {words});
            else
                ++faults;
        }}"""


class StreamProtocolError(AssertionError):
    """Valid or payload changed before the transfer, or more payloads than `space` were output."""


@dataclass(frozen=True)
class StreamRun:
    """Results of one run.

    Attributes
    ----------
    streams : uint32, the payloads of each output stream, one a row of 32-bit words.
    outputs : values of the other outputs at the end.
    cycles : from the start to the last transfer of any stream.
    transfers, first, last : of each stream: how many, and the cycles (from 1) of the first and the
        last; 0 for none.
    """

    streams: dict[str, Words]
    outputs: dict[str, int]
    cycles: int
    transfers: dict[str, int]
    first: dict[str, int]
    last: dict[str, int]


class StreamBench:
    """One Verilated component, in this process, whose streams are arrays.

    Parameters
    ----------
    component : ports of stream signatures at the top, and plain inputs and outputs.
    name : of the Verilog module.
    key : all parameters of the component, for the cache.
    start : a one-bit input that is 1 in the first cycle of a run; empty for none.
    """

    def __init__(
        self, component: wiring.Component, *, name: str, key: str, start: str = ""
    ) -> None:
        self.component = component
        self.name = name
        self.key = key
        self.start = start
        ports = {port: (way, width) for port, way, width in flat_ports(component)[2:]}
        widths = {
            port[: -len("__payload")]: width
            for port, (_, width) in ports.items()
            if port.endswith("__payload")
        }
        self.sources = {s: w for s, w in widths.items() if ports[f"{s}__valid"][0] == "input"}
        self.sinks = {s: w for s, w in widths.items() if s not in self.sources}
        inside = {f"{s}__{part}" for s in widths for part in ("valid", "ready", "payload")}
        plain = {port: both for port, both in ports.items() if port not in inside}
        self.inputs = {p: w for p, (way, w) in plain.items() if way == "input" and p != start}
        self.outputs = {p: w for p, (way, w) in plain.items() if way == "output"}
        self._library = load(self.library, self.harness)
        self._handle: int | None = self._library.bench_open()

    @cached_property
    def harness(self) -> Path:
        """The C++ around the model."""
        return stored("stream", {"harness.cpp": self._source()}) / "harness.cpp"

    @cached_property
    def library(self) -> Path:
        """Return the shared library, built unless cached."""
        verilog = verilog_of(
            f"{self.name} {self.key}", lambda: to_verilog(self.component, self.name)
        )
        model = Model(top=self.name, verilog=verilog, prefix=_PREFIX)
        return verilate_library(self.name, [model], [self.harness], cxxflags=["-O1"])

    def _source(self) -> str:
        drive, sample = [], []
        for i, (port, width) in enumerate(self.sources.items()):
            drive.append(_DRIVE.format(i=i, port=port, words=_words(width), width=width))
            sample.append(_SAMPLE_SOURCE.format(i=i, port=port))
        for k, (port, width) in enumerate(self.sinks.items()):
            drive.append(f"        top.{port}___05Fready = !random.chance(sink);")
            sample.append(
                _SAMPLE_SINK.format(i=len(self.sources) + k, k=k, port=port, words=_words(width))
            )
        return _HARNESS.format(
            prefix=_PREFIX,
            sources=len(self.sources),
            sinks=len(self.sinks),
            widest=max(_words(width) for width in (*self.sources.values(), *self.sinks.values())),
            set_inputs="\n".join(self._moves("put", "inputs", self.inputs)),
            get_outputs="\n".join(self._moves("get", "outputs", self.outputs)),
            start=f"    top.{self.start} = 1;" if self.start else "",
            stop=f"        top.{self.start} = 0;" if self.start else "",
            drive="\n".join(drive),
            sample="\n".join(sample),
            idle="\n".join(
                [
                    *(f"    top.{port}___05Fvalid = 0;" for port in self.sources),
                    *(f"    top.{port}___05Fready = 0;" for port in self.sinks),
                ]
            ),
        )

    @staticmethod
    def _moves(function: str, array: str, ports: Mapping[str, int]) -> list[str]:
        lines, offset = [], 0
        for port, width in ports.items():
            mangled = port.replace("__", "___05F")
            lines.append(f"    {function}(top.{mangled}, {array} + {offset}, {_words(width)});")
            offset += _words(width)
        return lines

    def close(self) -> None:
        """Free the model, which cannot be used afterwards."""
        if self._handle is not None:
            self._library.bench_close(self._handle)
            self._handle = None

    def run(
        self,
        streams: Mapping[str, NDArray[Any]],
        inputs: Mapping[str, int] | None = None,
        *,
        space: int,
        stalls: tuple[float, float] = (0.0, 0.0),
        seed: int = 0,
        quiet: int = 200,
        max_cycles: int = 10_000_000,
    ) -> StreamRun:
        """Send the rows of each array, until no stream transfers for `quiet` cycles.

        The component continues from the state after the previous run.

        Parameters
        ----------
        streams : uint32, for each input stream the payloads, one a row of 32-bit words.
        inputs : for each plain input.
        space : most payloads of an output stream.
        stalls : chance that a source, and that a sink, stalls in a cycle.

        Raises
        ------
        StreamProtocolError
        """
        given = [
            np.ascontiguousarray(streams[name], np.uint32).reshape(-1, _words(width))
            for name, width in self.sources.items()
        ]
        taken = [np.zeros((space, _words(width)), np.uint32) for width in self.sinks.values()]
        values = dict(inputs or {})
        if set(values) != set(self.inputs):
            raise ValueError(f"Inputs must be {', '.join(self.inputs)}, not {', '.join(values)}")
        words = _pack([values[name] for name in self.inputs], list(self.inputs.values()))
        out = np.zeros(sum(map(_words, self.outputs.values())) + 1, np.uint32)
        ports = [*self.sources, *self.sinks]
        report = np.zeros(3 + 3 * len(ports), np.uint64)
        counts = np.array([len(each) for each in given] or [0], np.uint64)
        spaces = np.array([space] * max(1, len(taken)), np.uint64)
        self._library.bench_run(
            self._handle, _pointers(given), counts.ctypes.data, _pointers(taken),
            spaces.ctypes.data, words.ctypes.data, out.ctypes.data, max_cycles, quiet,
            int(256 * stalls[0]), int(256 * stalls[1]), seed, report.ctypes.data,
        )  # fmt: skip
        numbers = [int(each) for each in report]
        if numbers[2]:
            raise StreamProtocolError(f"{self.name}: {numbers[2]} violations of the stream rules")
        per_port = [dict(zip(ports, numbers[3 + k :: 3], strict=True)) for k in range(3)]
        return StreamRun(
            {
                name: array[: per_port[0][name]]
                for name, array in zip(self.sinks, taken, strict=True)
            },
            _unpack(out, self.outputs),
            numbers[0],
            *per_port,
        )


def _words(width: int) -> int:
    return -(-width // 32)


def _pointers(arrays: Sequence[NDArray[Any]]) -> Any:
    return (ctypes.c_void_p * max(1, len(arrays)))(*(array.ctypes.data for array in arrays))


def _pack(values: Sequence[int], widths: Sequence[int]) -> Words:
    words: list[int] = []
    for value, width in zip(values, widths, strict=True):
        if not 0 <= value < 1 << width:
            raise ValueError(f"Input must fit {width} bits, not {value!r}")
        words += [(value >> 32 * k) & 0xFFFF_FFFF for k in range(_words(width))]
    return np.array(words or [0], np.uint32)


def _unpack(words: Words, ports: Mapping[str, int]) -> dict[str, int]:
    values, offset = {}, 0
    for name, width in ports.items():
        count = _words(width)
        values[name] = sum(int(words[offset + k]) << 32 * k for k in range(count))
        offset += count
    return values
