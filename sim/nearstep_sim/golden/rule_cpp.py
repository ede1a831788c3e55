"""C++ model of an update rule: the numpy model's results, bit for bit, at memory speed."""

import ctypes
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearstep_sim.golden.blockwise_cpp import dequantize, quantize
from nearstep_sim.golden.formats_cpp import narrow32, widen32
from nearstep_sim.golden.rounding_cpp import round_stochastically
from nearstep_sim.golden.rule import ArrayMismatchError, SparseGradient
from nearstep_sim.verilate.build import compile_library, stored
from nearstep_spec.rule.expr import float32_bits
from nearstep_spec.rule.program import ARITHMETIC, Program
from nearstep_spec.rule.rule import Rule
from nearstep_spec.rule.scale import GRADIENT

__all__ = [
    "CXX_FLAGS",
    "Kernel",
    "function_name",
    "kernel",
    "register_words",
    "source",
    "source_of_blocks",
    "source_of_pairs",
]

Array = NDArray[Any]

#: Beside the flags of every build. They change no result: they say that nobody reads `errno` or
#: the exception flags, without which the loop cannot be vectorised. Contraction stays off.
CXX_FLAGS = ("-fno-math-errno", "-fno-trapping-math", "-mprefer-vector-width=512")

_PRELUDE = """\
#include <bit>
#include <cfenv>
#include <cstddef>
#include <cstdint>

namespace {

inline float as_float(std::uint32_t bits) { return std::bit_cast<float>(bits); }
inline std::uint32_t as_bits(float value) { return std::bit_cast<std::uint32_t>(value); }
inline float canonical(float value) { return value == value ? value : as_float(0x7FC00000u); }
inline float maximum(float a, float b) {
    const float equal = as_float(as_bits(a) & as_bits(b));
    const float larger = a == b ? equal : (a > b ? a : b);
    return (a != a) | (b != b) ? as_float(0x7FC00000u) : larger;
}
inline float minimum(float a, float b) {
    const float equal = as_float(as_bits(a) | as_bits(b));
    const float smaller = a == b ? equal : (a < b ? a : b);
    return (a != a) | (b != b) ? as_float(0x7FC00000u) : smaller;
}
inline float sign(float a) { return (a > 0.0f ? 1.0f : 0.0f) - (a < 0.0f ? 1.0f : 0.0f); }

// Nobody's flush-to-zero or rounding mode reaches the loop, and the caller's come back after it.
class DefaultEnvironment {
    std::fenv_t saved_;

  public:
    DefaultEnvironment() {
        std::fegetenv(&saved_);
        std::fesetenv(FE_DFL_ENV);
    }
    ~DefaultEnvironment() { std::fesetenv(&saved_); }
    DefaultEnvironment(const DefaultEnvironment&) = delete;
    DefaultEnvironment& operator=(const DefaultEnvironment&) = delete;
};

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
    """C++20 source of one function that runs `rule`, in place, over arrays::

        extern "C" void nearstep_rule_<name>(
            std::size_t count, const std::uint32_t* registers, <arrays>);

    `registers` holds one word for each of `rule.registers()`, in that order (see
    `register_words`). The arrays are `float*`, in the order of `rule.arrays_in`, then
    `rule.outputs`; those only read are `const`. None may overlap another.
    """
    program = rule.program
    visible = _visible(program)
    before: list[str] = []
    body: list[str] = []
    words = {name: index for index, name in enumerate(rule.registers())}
    for index, each in enumerate(program.operations):
        kind = "bool" if each.op in _CONDITIONS else "float"
        if each.op == "array":
            body.append(f"const float x{index} = a_{each.name}[i];")
        elif each.op == "scalar":
            before.append(f"const float x{index} = as_float(registers[{words[each.name]}]);")
        elif each.op == "switch":
            before.append(f"const bool x{index} = registers[{words[each.name]}] != 0u;")
        elif each.op == "constant":
            before.append(f"const float x{index} = as_float({each.bits:#010x}u);")
        else:
            form = _FORMS[each.op].format(*(f"x{operand}" for operand in each.operands))
            if each.op in ARITHMETIC and index in visible:
                form = f"canonical({form})"
            body.append(f"const {kind} x{index} = {form};")
    body += [f"a_{name}[i] = x{index};" for name, index in program.results.items()]
    arrays = [
        f"{'' if name in rule.arrays_out else 'const '}float* __restrict a_{name}"
        for name in (*rule.arrays_in, *rule.outputs)
    ]
    lines = [
        "#ifdef __FAST_MATH__",
        '#error "fast-math changes results"',
        "#endif",
        _PRELUDE,
        f'extern "C" void {function_name(rule)}(',
        "    std::size_t count, const std::uint32_t* registers,",
        f"    {', '.join(arrays)}) {{",
        "    const DefaultEnvironment environment;",
        *(f"    {line}" for line in before),
        "    for (std::size_t i = 0; i < count; ++i) {",
        *(f"        {line}" for line in body),
        "    }",
        "}",
    ]
    return "\n".join(lines) + "\n"


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
    """C++20 source of one function that runs the function of `source` on a gradient that
    comes as pairs, and returns how many it took: all, if they ascend and are below `count`::

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
#include <cstddef>
#include <cstdint>

extern "C" void {function}(std::size_t, const std::uint32_t*{types});

extern "C" void {function}_of_blocks(
    std::size_t begin, std::size_t end, const std::uint32_t* registers,
    const std::uint64_t* ends, float* const* rows) {{
    for (std::size_t first = 0; begin < end; first = *ends++, rows += {arrays}) {{
        if (begin < *ends) {{
            const std::size_t at = begin - first, size = (end < *ends ? end : *ends) - begin;
            {function}(size, registers{arguments});
            begin += size;
        }}
    }}
}}
"""


def source_of_blocks(rule: Rule) -> str:
    """C++20 source of one function that runs the function of `source` on elements `begin` to
    `end` of blocks that are counted through::

        extern "C" void nearstep_rule_<name>_of_blocks(
            std::size_t begin, std::size_t end, const std::uint32_t* registers,
            const std::uint64_t* ends, float* const* rows);

    `ends` holds, of each block, the number of the element behind its last one. `rows` holds, of
    each block, the addresses of its arrays, in the order of `source`.
    """
    arrays = [*rule.arrays_in, *rule.outputs]
    return _BLOCKS.format(
        function=function_name(rule),
        types="".join(
            ", float*" if name in rule.arrays_out else ", const float*" for name in arrays
        ),
        arrays=len(arrays),
        arguments="".join(f", rows[{index}] + at" for index in range(len(arrays))),
    )


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
        self._of_blocks: Callable[..., None] = getattr(loaded, f"{function_name(rule)}_of_blocks")
        self._of_blocks.argtypes = [  # type: ignore[attr-defined]
            *[ctypes.c_size_t] * 2,
            *[pointer] * 3,
        ]
        self._of_blocks.restype = None  # type: ignore[attr-defined]
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
        arrays : float32, one for each state, input and output, all of
            one shape, contiguous, without overlap. States and outputs are overwritten.
        scalars : one for each register.

        Raises
        ------
        ArrayMismatchError
        nearstep_spec.rule.errors.MissingScalarError
        nearstep_spec.rule.errors.UnknownNameError
        """
        words = register_words(self.rule, scalars)
        ordered = self.ordered(arrays)
        self._function(
            ordered[0].size, words.ctypes.data, *(array.ctypes.data for array in ordered)
        )

    def of_blocks(
        self,
        words: NDArray[np.uint32],
        ends: NDArray[np.uint64],
        rows: NDArray[np.uint64],
        begin: int,
        end: int,
    ) -> Callable[[], None]:
        """Return the call that runs the rule on elements `begin` to `end` of consecutively numbered
        blocks.

        Arguments are not checked. The call runs no Python code, so Ctrl-C cannot interrupt it.

        Parameters
        ----------
        words : result of `register_words`.
        ends : of each block, the number of the element behind its last one.
        rows : addresses of its arrays, of shape (blocks, arrays): states and inputs, then outputs.
            No two elements that are written may share memory.
        """
        pointers = [each.ctypes.data_as(ctypes.c_void_p) for each in (words, ends, rows)]
        return partial(self._of_blocks, begin, end, *pointers)  # a pointer keeps its array

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
        ArrayMismatchError : where it is of the pairs, elements before the first wrong one have been
            updated.
        nearstep_spec.rule.errors.MissingScalarError
        nearstep_spec.rule.errors.UnknownNameError
        """
        if not takes_pairs(self.rule):
            raise ArrayMismatchError(f"{self.rule!r} reads no gradient {GRADIENT!r}")
        words = register_words(self.rule, scalars)
        ordered = self._checked(self._others, arrays)
        for name, pairs in gradient._asdict().items():
            if pairs.dtype != np.uint32 or pairs.shape != gradient.index.shape or pairs.ndim != 1:
                raise ArrayMismatchError(
                    f"{name} must be uint32 of shape ({gradient.index.size},), "
                    f"not {pairs.dtype} {pairs.shape}"
                )
        index, value = map(np.ascontiguousarray, gradient)
        taken = self._of_pairs(
            ordered[0].size,
            words.ctypes.data,
            index.ctypes.data,
            value.ctypes.data,
            index.size,
            *(array.ctypes.data for array in ordered),
        )
        if taken < index.size:
            raise ArrayMismatchError(
                f"index {taken} must be below {ordered[0].size} and not below the one before, "
                f"not {index[taken]}"
            )

    def ordered(self, arrays: Mapping[str, Array]) -> list[Array]:
        """The arrays of a call, in the order of the rule.

        Raises
        ------
        ArrayMismatchError
        """
        return self._checked(self._names, arrays)

    def _checked(self, names: Sequence[str], arrays: Mapping[str, Array]) -> list[Array]:
        """Return the arrays of these names, in order; check that the rule accepts them."""
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
        _check_overlap(names, ordered)
        return ordered


def takes_pairs(rule: Rule) -> bool:
    """Whether a rule has a gradient that may come as pairs, and something to update by it."""
    return GRADIENT in rule.inputs and len(rule.arrays_in) > 1


def _check_overlap(names: Sequence[str], ordered: Sequence[Array]) -> None:
    extents = sorted(
        (array.ctypes.data, array.nbytes, name) for name, array in zip(names, ordered, strict=True)
    )
    for (start, size, name), (following, _, other) in pairwise(extents):
        if start + size > following:
            raise ArrayMismatchError(f"Arrays {name!r} and {other!r} overlap in memory")


def _library(rule: Rule) -> Path:
    files = {
        f"{rule.name}.cpp": source(rule),
        f"{rule.name}_of_blocks.cpp": source_of_blocks(rule),
    }
    if takes_pairs(rule):
        files[f"{rule.name}_of_pairs.cpp"] = source_of_pairs(rule)
    folder = stored("rule", files)
    return compile_library(
        function_name(rule), [folder / name for name in files], cxxflags=CXX_FLAGS
    )


@cache
def kernel(rule: Rule) -> Kernel:
    """The compiled kernel of `rule`; built on first use, then taken from the build cache."""
    return Kernel(rule, _library(rule))
