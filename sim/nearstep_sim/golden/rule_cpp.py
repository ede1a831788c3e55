"""C++ model of an update rule: the numpy model's results, bit for bit, at memory speed."""

import ctypes
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearstep_sim.golden.blockwise import dynamic_map
from nearstep_sim.golden.blockwise_cpp import dequantize, quantize, steps
from nearstep_sim.golden.formats_cpp import narrow32, widen32
from nearstep_sim.golden.rounding_cpp import round_stochastically
from nearstep_sim.golden.rule import ArrayMismatchError, SparseGradient
from nearstep_sim.verilate.build import Library, stored
from nearstep_spec.blockwise import SIGNED, SMALLEST_SCALE
from nearstep_spec.rule.columns import HALVES, Columns
from nearstep_spec.rule.expr import float32_bits
from nearstep_spec.rule.program import ARITHMETIC, Program
from nearstep_spec.rule.rule import Rule
from nearstep_spec.rule.scale import GRADIENT

__all__ = [
    "CXX_FLAGS",
    "Kernel",
    "function_name",
    "kernel",
    "library",
    "library_of_blocks",
    "register_words",
    "source",
    "source_of_blocks",
    "source_of_pairs",
]

Array = NDArray[Any]

#: Added to the flags of every build; no result changes. Without them the loop is not vectorised,
#: because of `errno` and the exception flags, which are not read. Contraction remains off. No loop
#: throws, and a library without the code for it is small.
CXX_FLAGS = (
    "-fno-math-errno",
    "-fno-trapping-math",
    "-mprefer-vector-width=512",
    "-fno-exceptions",
)

#: Added for blocks, with GCC: loops are compiled for each value of the switches.
_UNSWITCHED = ("--param=max-unswitch-insns=2000", "--param=max-unswitch-level=6")

_HEAD = 3  # words of a row before addresses

VECTOR_BYTES = 32
"""Bytes of a vector of torch's fused steps on a CPU, on AVX-512 as well: the elements of a tensor
behind the last whole vector are computed by other code."""

_PRELUDE = """\
#include <algorithm>

#include "golden/blockwise.hpp"
#include "golden/formats.hpp"
#include "golden/rounding.hpp"

namespace {

using namespace nearstep::golden;

inline float maximum(float a, float b) {
    const float equal = as_float(as_bits(a) & as_bits(b));
    const float larger = a == b ? equal : (a > b ? a : b);
    return (a != a) | (b != b) ? as_float(quiet_nan) : larger;
}
inline float minimum(float a, float b) {
    const float equal = as_float(as_bits(a) | as_bits(b));
    const float smaller = a == b ? equal : (a < b ? a : b);
    return (a != a) | (b != b) ? as_float(quiet_nan) : smaller;
}
inline float sign(float a) { return (a > 0.0f ? 1.0f : 0.0f) - (a < 0.0f ? 1.0f : 0.0f); }

// Elements of 16 bits, and two of them, wherever they begin.
typedef std::uint16_t half __attribute__((may_alias));
typedef std::uint32_t halves __attribute__((aligned(2), may_alias));

}  // namespace
"""

_FORMS: Mapping[str, str] = MappingProxyType(
    {
        "add": "{0} + {1}",
        "sub": "{0} - {1}",
        "mul": "{0} * {1}",
        "div": "{0} / {1}",
        "fma": "__builtin_fmaf({0}, {1}, {2})",
        "sqrt": "__builtin_sqrtf({0})",
        "neg": "as_float(as_bits({0}) ^ 0x80000000u)",
        "abs": "as_float(as_bits({0}) & 0x7FFFFFFFu)",
        "max": "maximum({0}, {1})",
        "min": "minimum({0}, {1})",
        "sign": "sign({0})",
        "select": "{0} ? {1} : {2}",
        "lt": "{0} < {1}",
        "le": "{0} <= {1}",
        "eq": "{0} == {1}",
        "not": "!{0}",
        "and": "{0} & {1}",
        "or": "{0} | {1}",
        "xor": "{0} ^ {1}",
    }
)
_CONDITIONS = frozenset({"switch", "lt", "le", "eq", "not", "and", "or", "xor"})
_BIT_MOVES = frozenset({"neg", "abs", "select"})


def function_name(rule: Rule) -> str:
    """Name of the `extern "C"` function in `source`."""
    return f"nearstep_rule_{rule.name}"


def _visible(program: Program) -> set[int]:
    """Operations whose bits can be seen in a result: only there does the pattern of a NaN matter.

    Other operations feed arithmetic or comparisons, where the pattern of a NaN has no effect.
    """
    seen: set[int] = set()
    pending = list(program.results.values())
    while pending:
        index = pending.pop()
        if index not in seen:
            seen.add(index)
            if program.operations[index].op in _BIT_MOVES:
                pending.extend(program.operations[index].operands)
    return seen


def source(rule: Rule) -> str:
    """C++20 source of one function that runs `rule`, in place, over arrays of binary32::

        extern "C" void nearstep_rule_<name>(
            std::size_t count, const std::uint32_t* registers, <arrays>);

    `registers` holds one word for each of `rule.registers()`, in that order (see
    `register_words`). The arrays are `float*`, in the order of `rule.arrays_in`, then
    `rule.outputs`; those only read are `const`. None may overlap another.
    """
    arrays = [*rule.arrays_in, *rule.outputs]
    declared = ", ".join(_parameter(rule, name, Columns()) for name in arrays)
    return f"""{_PRELUDE}
{_loops(rule, Columns(), "body")}
extern "C" void {function_name(rule)}(
    std::size_t count, const std::uint32_t* registers,
    {declared}) {{
    const DefaultEnvironment environment;
    body::run(count, body::Registers(registers), {", ".join(f"a_{name}" for name in arrays)});
}}
"""


def _loops(rule: Rule, columns: Columns, name: str) -> str:
    """Return a namespace with the registers of a rule, and its arithmetic as `element` and, on all
    elements of arrays, as `run`; arrays in 8 bits are passed as binary32."""
    program = rule.program
    visible = _visible(program)
    members, made, body = [], [], []
    words = {each: index for index, each in enumerate(rule.registers())}
    arrays = [*rule.arrays_in, *rule.outputs]
    wide = {each for each in arrays if columns.format_of(each) not in HALVES}
    shown: set[int] = set()  # have a y, too, whose NaN has any pattern: arithmetic need not wait
    for index, each in enumerate(program.operations):
        kind = "bool" if each.op in _CONDITIONS else "float"
        if each.op in ("scalar", "switch", "constant"):
            members.append((kind, f"x{index}"))
            word = f"registers[{words[each.name]}]" if each.name else f"{each.bits:#010x}u"
            made.append(f"x{index}({f'{word} != 0u' if kind == 'bool' else f'as_float({word})'})")
            continue
        raw = set() if each.op in _BIT_MOVES else shown
        names = (f"{'y' if operand in raw else 'x'}{operand}" for operand in each.operands)
        if each.op == "array":
            form, settles = f"a_{each.name}", each.name not in wide
        else:
            form, settles = _FORMS[each.op].format(*names), each.op in ARITHMETIC
        if settles and index in visible:
            shown.add(index)
            body.append(f"const float y{index} = {form};")
            form = f"canonical(y{index})"
        body.append(f"const {kind} x{index} = {form};")
    known = [f"const {kind} {each} = registers.{each};" for kind, each in members]
    for each, index in program.results.items():
        settled = each in wide or program.operations[index].op in ARITHMETIC
        body.append(f"a_{each} = {f'x{index}' if settled else f'canonical(x{index})'};")
    numbers = ", ".join(
        f"float{'&' if each in rule.arrays_out else ''} a_{each}" for each in arrays
    )
    randoms = "".join(f", const std::uint32_t* __restrict r_{each}" for each, _ in columns.streams)
    return f"""namespace {name} {{

struct Registers {{
    {" ".join(f"{kind} {each};" for kind, each in members)}
    explicit Registers([[maybe_unused]] const std::uint32_t* registers)
        : {", ".join(made)} {{}}
}};

inline __attribute__((always_inline)) void element(
    [[maybe_unused]] const Registers& registers, {numbers}) {{
    {_lines(known)}
    {_lines(body)}
}}

inline void run(
    std::size_t count, const Registers given,
    {", ".join(_parameter(rule, each, columns) for each in arrays)}{randoms}) {{
    const Registers registers = given;
    {_loop(rule, columns, arrays, wide)}
}}

}}  // namespace {name}
"""


def _loop(rule: Rule, columns: Columns, arrays: Sequence[str], wide: Set[str]) -> str:
    """Statements of `run`: elements one after the other; two at a time if some have 16 bits, which
    are the halves of a word, so that none has to be moved to another lane of a vector."""
    streams = dict(columns.streams)

    def on(place: int, index: str, word: Callable[[str], str], random: str) -> list[str]:
        """Statements for one of the elements."""
        lines = []
        for each in arrays:
            if each in rule.outputs:
                lines.append(f"float v{place}_{each};")
            elif each in wide:
                lines.append(f"float v{place}_{each} = a_{each}[{index}];")
            else:
                form = columns.format_of(each)
                lines.append(f"float v{place}_{each} = widen_{form}({word(each)});")
        values = ", ".join(f"v{place}_{each}" for each in arrays)
        lines.append(f"element(registers, {values});")
        for each in rule.arrays_out:
            if each in wide:
                lines.append(f"a_{each}[{index}] = v{place}_{each};")
            else:
                drawn = f", {random.format(each)}" if each in streams else ""
                value = f"narrow_{columns.format_of(each)}(v{place}_{each}{drawn})"
                lines.append(f"const std::uint32_t n{place}_{each} = {value};")
        return lines

    if len(wide) == len(arrays):
        lines = on(0, "i", str, "")
        return f"""for (std::size_t i = 0; i < count; ++i) {{
        {_lines(lines, 8)}
    }}"""
    halves = [each for each in arrays if each not in wide]
    stored = [each for each in rule.arrays_out if each not in wide]
    words = [
        f"const std::uint32_t w_{each} = a_{each}[k];" for each in halves if each in rule.arrays_in
    ]
    pair = [
        *words,
        *on(0, "2 * k", "w_{} & 0xFFFFu".format, "r_{}[k] & 0xFFFFu"),
        *on(1, "2 * k + 1", "w_{} >> 16".format, "r_{}[k] >> 16"),
        *(f"a_{each}[k] = n0_{each} | n1_{each} << 16;" for each in stored),
    ]
    last = [
        *on(0, "i", "reinterpret_cast<const half*>(a_{})[i]".format, "r_{}[i / 2] & 0xFFFFu"),
        *(
            f"reinterpret_cast<half*>(a_{each})[i] = static_cast<std::uint16_t>(n0_{each});"
            for each in stored
        ),
    ]
    return f"""for (std::size_t k = 0; k < count / 2; ++k) {{
        {_lines(pair, 8)}
    }}
    if (count % 2) {{
        const std::size_t i = count - 1;
        {_lines(last, 8)}
    }}"""


def _parameter(rule: Rule, name: str, columns: Columns) -> str:
    """Declaration of an array, of which two elements of 16 bits are a word."""
    kind = "halves" if columns.format_of(name) in HALVES else "float"
    return f"{'' if name in rule.arrays_out else 'const '}{kind}* __restrict a_{name}"


def _lines(statements: Iterable[str], indent: int = 4) -> str:
    return f"\n{' ' * indent}".join(statements)


_CACHED = 8192  # elements whose dense gradient fits the first cache

_PAIRS = """\
#include <cstddef>
#include <cstdint>

extern "C" void {function}(std::size_t, const std::uint32_t*{types});

extern "C" std::size_t {function}_of_pairs(
    std::size_t count, const std::uint32_t* registers, const std::uint32_t* index,
    const float* value, std::size_t pairs{parameters}) {{
    alignas(64) float a_{gradient}[{cached}] = {{}};
    std::size_t taken = 0;
    for (std::size_t at = 0; at < count; at += {cached}) {{
        const std::size_t size = count - at < {cached} ? count - at : {cached};
        const std::size_t first = taken;
        for (; taken < pairs && index[taken] - at < size; ++taken) {{
            a_{gradient}[index[taken] - at] = value[taken];
        }}
        {function}(size, registers{arguments});
        for (std::size_t i = first; i < taken; ++i) {{
            a_{gradient}[index[i] - at] = 0.0f;
        }}
    }}
    return taken;
}}
"""


def source_of_pairs(rule: Rule) -> str:
    """C++20 source of one function that runs the function of `source` on a gradient given as
    pairs, and returns how many were applied: all, if indices ascend and are below `count`::

        extern "C" std::size_t nearstep_rule_<name>_of_pairs(
            std::size_t count, const std::uint32_t* registers, const std::uint32_t* index,
            const float* value, std::size_t pairs, <arrays without the gradient>);
    """
    arrays = [*rule.arrays_in, *rule.outputs]
    others = [name for name in arrays if name != GRADIENT]
    kinds = {name: "float*" if name in rule.arrays_out else "const float*" for name in arrays}
    return _PAIRS.format(
        function=function_name(rule),
        types="".join(f", {kinds[name]}" for name in arrays),
        parameters="".join(f", {kinds[name]} a_{name}" for name in others),
        arguments="".join(
            f", a_{name}" if name == GRADIENT else f", a_{name} + at" for name in arrays
        ),
        gradient=GRADIENT,
        cached=_CACHED,
    )


_BLOCKS = """\
extern "C" void {function}_of_blocks(
    std::size_t begin, std::size_t end, const std::uint32_t* registers,
    const std::uint64_t* row, [[maybe_unused]] const std::uint64_t* tables) {{
    const DefaultEnvironment environment;
    const body::Registers words(registers);
    for (std::size_t first = 0; begin < end; first = row[0], row += {width}) {{
        if (begin >= row[0]) continue;
        std::size_t at = begin - first;
        begin = std::min<std::size_t>(end, row[0]);
        const std::size_t stop = std::min<std::size_t>(begin - first, row[1]);
        {run}
    }}
}}
"""

_TILES = """\
for (; at < stop; at += group) {{
            const std::size_t size = std::min(group, stop - at);
            {before}
            body::run(size, words, {arguments});
            {after}
        }}"""

_WHOLE = """\
const std::size_t last = stop == row[1] ? stop - stop % {vector} : stop;
        body::run(last - at, words, {arguments});
        if (last < stop) {{
            at = last;
            rest::run(stop - last, rest::Registers(registers), {arguments});
        }}"""


def source_of_blocks(rule: Rule, columns: Columns, remainder: Rule | None) -> str:
    """C++20 source of one function that runs `rule` on elements `begin` to `end`, numbered through
    all blocks as if each had a multiple of 256::

        extern "C" void nearstep_rule_<name>_of_blocks(
            std::size_t begin, std::size_t end, const std::uint32_t* registers,
            const std::uint64_t* row, const std::uint64_t* tables);

    `begin` and `end` are multiples of 256. `registers` holds the words of the rule, then, with
    streams, seed and step of their random bits. A `row` of a block is the number of the element
    behind it, its elements, the index of its first one for random bits, and the addresses of its
    arrays, in the order of `source`: of one in 8 bits those of codes and scales. `tables` holds
    addresses of `steps` and the map of `dynamic8`, then of `dynamic8u`.

    Parameters
    ----------
    remainder : a rule with the same registers and arrays, which are all of one format: it runs on
        the elements of a block behind the last multiple of `VECTOR_BYTES`.
    """
    arrays = [*rule.arrays_in, *rule.outputs]
    parts = columns.parts(arrays)
    places = {part: _HEAD + number for number, part in enumerate(parts)}
    before, after, arguments = [], [], []

    def address(name: str, kind: str, offset: str, scales: bool = False) -> str:
        const = "" if name in rule.arrays_out else "const "
        return f"reinterpret_cast<{const}{kind}*>(row[{places[name, scales]}]) + {offset}"

    for name in arrays:
        form = columns.format_of(name)
        if form not in SIGNED:
            # Two elements are a word, where `at` is even.
            kind, offset = ("halves", "at / 2") if form in HALVES else ("float", "at")
            arguments.append(address(name, kind, offset))
            continue
        table, number = f"tables[{0 if SIGNED[form] else 2}", f"t_{name}"
        arguments.append(number)
        before += [
            f"alignas(64) float {number}[group];",
            f"auto* const c_{name} = {address(name, 'std::uint8_t', 'at')};",
            f"auto* const s_{name} = {address(name, 'float', 'at / group', True)};",
            f"dequantize_group(c_{name}, {number}, size, *s_{name}, "
            f"reinterpret_cast<const float*>({table} + 1]));",
        ]
        after += [
            f"*s_{name} = as_float(scale_of({number}, size, {SMALLEST_SCALE:#x}u));",
            f"quantize_group({number}, c_{name}, size, *s_{name}, "
            f"reinterpret_cast<const std::uint32_t*>({table}]));",
        ]
    words, streams = len(rule.registers()), [str(stream) for _, stream in columns.streams]
    if streams:
        arguments += [f"random[{number}]" for number in range(len(streams))]
        before += [
            f"const DrawKey key(registers[{words}], registers[{words + 1}]);",
            f"alignas(64) std::uint32_t random[{len(streams)}][group / 2];",
            f"draw((row[2] + at) / call_elements, {{{', '.join(streams)}}}, key, "
            "random[0], group / 2, group / call_elements);",
        ]
    joined = ", ".join(arguments)
    if columns.in_order:
        run = _TILES.format(before=_lines(before, 12), after=_lines(after, 12), arguments=joined)
    elif remainder is not None:
        vector = VECTOR_BYTES // (2 if columns.formats else 4)
        run = _WHOLE.format(vector=vector, arguments=joined)
    else:
        run = f"body::run(stop - at, words, {joined});"
    width = _HEAD + len(parts)
    texts = [_PRELUDE, _loops(rule, columns, "body")]
    if remainder is not None:
        texts.append(_loops(remainder, columns, "rest"))
    texts.append(_BLOCKS.format(function=function_name(rule), width=width, run=run))
    return "\n".join(texts)


def register_words(rule: Rule, scalars: Mapping[str, float]) -> NDArray[np.uint32]:
    """The register words of a run: binary32 patterns of scalars, then 0 or 1 for switches.

    Raises
    ------
    nearstep_spec.rule.errors.MissingScalarError
    nearstep_spec.rule.errors.UnknownNameError
    """
    rule.check_scalars(scalars)
    words = [
        float32_bits(float(scalars[name])) if width == 32 else int(bool(scalars[name]))
        for name, width in rule.registers().items()
    ]
    return np.array(words, np.uint32)


class Kernel:
    """A compiled rule. Calls release the interpreter's lock and use one thread.

    Parameters
    ----------
    library : shared library of `source`.
    """

    widen = staticmethod(widen32)
    narrow = staticmethod(narrow32)
    round = staticmethod(round_stochastically)
    quantize = staticmethod(quantize)
    dequantize = staticmethod(dequantize)

    def __init__(self, rule: Rule, library: Path) -> None:
        self.rule = rule
        self._names = (*rule.arrays_in, *rule.outputs)
        self._others = tuple(name for name in self._names if name != GRADIENT)
        loaded, pointer = ctypes.CDLL(str(library)), ctypes.c_void_p
        self._function: Callable[..., None] = getattr(loaded, function_name(rule))
        self._function.argtypes = [  # type: ignore[attr-defined]
            ctypes.c_size_t,
            pointer,
            *[pointer] * len(self._names),
        ]
        self._function.restype = None  # type: ignore[attr-defined]
        if not takes_pairs(rule):
            return
        self._of_pairs: Callable[..., int] = getattr(loaded, f"{function_name(rule)}_of_pairs")
        self._of_pairs.argtypes = [  # type: ignore[attr-defined]
            ctypes.c_size_t,
            *[pointer] * 3,
            ctypes.c_size_t,
            *[pointer] * len(self._others),
        ]
        self._of_pairs.restype = ctypes.c_size_t  # type: ignore[attr-defined]

    def __call__(self, arrays: Mapping[str, Array], scalars: Mapping[str, float]) -> None:
        """Run the rule once, in place.

        Parameters
        ----------
        arrays : float32, one for each state, input and output, all of one shape, contiguous,
            without overlap. States and outputs are overwritten.
        scalars : one for each register.

        Raises
        ------
        ArrayMismatchError
        nearstep_spec.rule.errors.MissingScalarError
        nearstep_spec.rule.errors.UnknownNameError
        """
        words = register_words(self.rule, scalars)
        size, places = self._checked(self._names, arrays)
        self._function(size, words.ctypes.data, *places)

    def in_place(self, parts: NDArray[np.int64], scalars: Mapping[str, float]) -> None:
        """Run the rule once on each part of its arrays; the memory is not checked.

        Parameters
        ----------
        parts : of shape (parts, 1 + arrays): the elements of a part, and its address in each array,
            in the order of the rule's `arrays_in`, then `outputs`. Aligned, without overlap.
        scalars : one for each register.

        Raises
        ------
        nearstep_spec.rule.errors.MissingScalarError
        nearstep_spec.rule.errors.UnknownNameError
        """
        words = register_words(self.rule, scalars)
        registers = words.ctypes.data
        for size, *places in parts.tolist():
            self._function(size, registers, *places)

    def of_pairs(
        self,
        arrays: Mapping[str, Array],
        scalars: Mapping[str, float],
        gradient: SparseGradient,
    ) -> None:
        """Run the rule once, in place.

        Parameters
        ----------
        arrays, scalars : as of a call, without the gradient.

        Raises
        ------
        ArrayMismatchError : if it is of an index, all elements have been updated, without the
            pairs from this index on.
        nearstep_spec.rule.errors.MissingScalarError
        nearstep_spec.rule.errors.UnknownNameError
        """
        if not takes_pairs(self.rule):
            raise ArrayMismatchError(f"{self.rule!r} reads no gradient {GRADIENT!r}")
        words = register_words(self.rule, scalars)
        size, places = self._checked(self._others, arrays)
        for name, pairs in gradient._asdict().items():
            if pairs.dtype != np.uint32 or pairs.shape != gradient.index.shape or pairs.ndim != 1:
                raise ArrayMismatchError(
                    f"{name} must be uint32 of shape ({gradient.index.size},), "
                    f"not {pairs.dtype} {pairs.shape}"
                )
        index, value = map(np.ascontiguousarray, gradient)
        taken = self._of_pairs(
            size, words.ctypes.data, index.ctypes.data, value.ctypes.data, index.size, *places
        )
        if taken < index.size:
            raise ArrayMismatchError(
                f"index {taken} must be below {size} and not below the one before, "
                f"not {index[taken]}"
            )

    def _checked(self, names: Sequence[str], arrays: Mapping[str, Array]) -> tuple[int, list[int]]:
        """Return the number of elements and the addresses of the arrays of these names, in order;
        check that the rule accepts them."""
        if set(arrays) != set(names):
            raise ArrayMismatchError(
                f"{self.rule!r} works on {', '.join(names)}, not {', '.join(arrays) or 'nothing'}"
            )
        ordered = [arrays[name] for name in names]
        for name, array in zip(names, ordered, strict=True):
            if array.dtype != np.float32 or array.shape != ordered[0].shape:
                raise ArrayMismatchError(
                    f"Array {name!r} must be float32 of shape {ordered[0].shape}, "
                    f"not {array.dtype} {array.shape}"
                )
            if not (array.flags.c_contiguous and array.flags.aligned):
                raise ArrayMismatchError(f"Array {name!r} must be contiguous and aligned")
            if name in self.rule.arrays_out and not array.flags.writeable:
                raise ArrayMismatchError(f"Array {name!r} is written but is read-only")
        places = [array.ctypes.data for array in ordered]
        extents = sorted(zip(places, (array.nbytes for array in ordered), names, strict=True))
        for (start, size, name), (following, _, other) in pairwise(extents):
            if start + size > following:
                raise ArrayMismatchError(f"Arrays {name!r} and {other!r} overlap in memory")
        return ordered[0].size, places


def takes_pairs(rule: Rule) -> bool:
    """Whether a rule reads a gradient, which may be given as pairs, and another array."""
    return GRADIENT in rule.inputs and len(rule.arrays_in) > 1


def library(rule: Rule) -> Library:
    """The library of a rule, for `Kernel`."""
    files = {f"{rule.name}.cpp": source(rule)}
    if takes_pairs(rule):
        files[f"{rule.name}_of_pairs.cpp"] = source_of_pairs(rule)
    folder = stored("rule", files)
    return Library(function_name(rule), [folder / name for name in files], CXX_FLAGS)


def library_of_blocks(rule: Rule, columns: Columns, remainder: Rule | None = None) -> Library:
    """The library of `source_of_blocks`, for `BlockKernel`."""
    name = f"{function_name(rule)}_of_blocks"
    folder = stored("rule", {f"{name}.cpp": source_of_blocks(rule, columns, remainder)})
    return Library(name, [folder / f"{name}.cpp"], (*CXX_FLAGS, *_UNSWITCHED))


@cache
def kernel(rule: Rule) -> Kernel:
    """The compiled kernel of `rule`; built on first use, then taken from the build cache."""
    return Kernel(rule, library(rule).compiled())


class BlockKernel:
    """A compiled rule on blocks of arrays in the formats of `columns`."""

    def __init__(self, rule: Rule, columns: Columns, remainder: Rule | None = None) -> None:
        self.rule = rule
        library = library_of_blocks(rule, columns, remainder)
        loaded = ctypes.CDLL(str(library.compiled()))
        self._function: Callable[..., None] = getattr(loaded, library.name)
        pointer = ctypes.c_void_p
        self._function.argtypes = [  # type: ignore[attr-defined]
            *[ctypes.c_size_t] * 2,
            *[pointer] * 3,
        ]
        self._function.restype = None  # type: ignore[attr-defined]
        kept = (each(signed) for signed in (True, False) for each in (steps, dynamic_map))
        self._kept = list(kept) if any(form in SIGNED for _, form in columns.formats) else []
        self._tables = np.array([each.ctypes.data for each in self._kept], np.uint64)

    def on(
        self, words: NDArray[np.uint32], rows: NDArray[np.uint64]
    ) -> Callable[[int, int], Callable[[], None]]:
        """Return a function of `begin` and `end`, see `source_of_blocks`, that returns a call which
        runs the rule on these elements.

        Nothing is checked. The call runs no Python code, which Ctrl-C could interrupt.

        Parameters
        ----------
        words : those of `register_words`; with streams followed by seed and step.
        rows : contiguous, a row for each block. No two elements that are written may share memory.
        """
        given = (words, rows, self._tables)
        pointers = [each.ctypes.data_as(ctypes.c_void_p) for each in given]
        # A pointer keeps its array.
        return lambda begin, end: partial(self._function, begin, end, *pointers)
