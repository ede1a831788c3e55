"""Registers of an update kernel, as a function of its configuration."""

from functools import cache
from typing import Any, cast

from nearstep_spec.csr.block import Row, block_map, register, value_register, value_registers
from nearstep_spec.csr.model import (
    BLOCK_BYTES,
    Access,
    Kind,
    NamedValue,
    Register,
    RegisterMap,
    RegisterMapError,
)
from nearstep_spec.rounding import INDEX_BITS, alignment
from nearstep_spec.rule.expr import float32_bits
from nearstep_spec.rule.rule import Rule
from nearstep_spec.rule.rules import ARRAYS as ARRAYS
from nearstep_spec.rule.scale import GRADIENT_SCALE
from nearstep_spec.updater.config import COPY_OUT, ConfigError, UpdateKernelConfig
from nearstep_spec.updater.pair_registers import Compression as Compression
from nearstep_spec.updater.pair_registers import decompressor_registers, pair_registers

IDENT = int.from_bytes(b"UPDT", "big")
VERSION = (2, 0)

COUNTERS = {
    "cycles": "Cycles in which the kernel was busy.",
    "committed": "Elements whose states are all acknowledged; whole blocks but the last.",
    "read_beats": "Memory beats read.",
    "write_beats": "Memory beats written.",
    "stall_read_address": "Cycles in which a read burst waited for its address to be taken.",
    "stall_read_data": "Cycles in which the functional units waited for input.",
    "stall_write_space": "Cycles in which the functional units waited for output space.",
    "stall_write_data": "Cycles in which a write beat waited to be taken.",
}


def counters(config: UpdateKernelConfig) -> dict[str, str]:
    """Return the counters of a kernel, and their meaning."""
    duplicates = {"duplicates": "Pairs of index and value overridden by a later one."}
    return {**COUNTERS, **(duplicates if config.compression else {})}


SCALARS = {
    "decay": "Weight decay; with mode.decoupled, 1 minus learning rate times weight decay.",
    "m_weight": "1 - beta1; with mode.m_from_g, (1 - beta1) - 1. Of SGD, 1 - dampening.",
    "m_decay": "beta1; of SGD, momentum.",
    "v_weight": "1 - beta2.",
    "v_decay": "beta2.",
    "m_correction": "1 - beta1**t.",
    "v_correction": "Square root of 1 - beta2**t; in the paper's order, 1 - beta2**t.",
    "eps": "Term added to the denominator.",
    "step_size": "Minus the learning rate; of Adam, divided by 1 - beta1**t.",
    "lr": "Learning rate.",
}
SWITCHES = {
    "decoupled": "AdamW: weight decay acts on the parameter instead of the gradient.",
    "m_from_g": "First moment interpolated from the gradient's side, for 1 - beta1 >= 0.5.",
    "decays": "Weight decay is not 0.",
    "first": "First step of a momentum buffer, which is set to the gradient.",
    "nesterov": "Nesterov momentum.",
}


class ErrorCause(NamedValue):
    """`error.cause`: reason of an early end of a run."""

    NONE = 0, "No error."
    READ_RESPONSE = 1, "A read was answered other than OKAY."
    WRITE_RESPONSE = 2, "A write was answered other than OKAY."
    WINDOW = 3, "A burst is outside the granted windows; it was not issued."
    ALIGNMENT = 4, "An array does not start on a memory beat."
    ADDRESS_RANGE = 5, "An array wraps, or ends beyond the memory address space."
    UNSUPPORTED = 6, "A rule, format, scale or copy-out that this kernel does not have."
    OVERLAP = 7, "Two arrays share bytes."
    ABORTED = 8, "The run was ended by control.abort."
    PAIR_RANGE = 9, "An index is not below count; nothing was written."
    PAIR_ORDER = 10, "An index is out of order for its form of compression; nothing was written."


class Stream(NamedValue):
    """`error.stream`: of Adam, AXI read IDs 0 to 3 are 1 to 4 here, write IDs 0 to 2 are 5 to 7."""

    NONE = 0, "No stream."
    P_READ = 1, "Parameters in."
    G_READ = 2, "Gradients in."
    M_READ = 3, "First moments in."
    V_READ = 4, "Second moments in."
    P_WRITE = 5, "Parameters out."
    M_WRITE = 6, "First moments out."
    V_WRITE = 7, "Second moments out."
    COPY_OUT = 8, "16-bit copy of the parameters."
    INDEX_READ = 9, "Indices of compressed gradients."
    V_MAX_READ = 10, "Maxima of the second moments in."
    V_MAX_WRITE = 11, "Maxima of the second moments out."


STREAMS = 16
"""Number of stream numbers, including 0."""

STOCHASTIC_BIT = 31
"""Bit of `stochastic` in the register `state_formats`."""

FIVE_ARRAYS = frozenset({Stream.V_MAX_READ, Stream.V_MAX_WRITE})
"""Streams listed only in the map of a kernel with a fifth array."""


class Order(NamedValue):
    """`capabilities.order`: order of the arithmetic, named as in the configuration."""

    DEFAULT = 0, "Order of torch.optim's fused Adam."
    PAPER = 1, "Algorithm 1 of the paper."


class GradientFormat(NamedValue):
    """`formats.gradient`."""

    FP32 = 0, "binary32."
    FP16 = 1, "binary16."
    BF16 = 2, "bfloat16."


class StateFormat(NamedValue):
    """Fields of `state_formats`."""

    FP32 = 0, "binary32."
    FP16 = 1, "binary16."
    BF16 = 2, "bfloat16."
    DYNAMIC8 = 3, "8 bits of a signed map, and a scale for each 256 elements."
    DYNAMIC8U = 4, "8 bits of an unsigned map, and a scale for each 256 elements."


class CopyOutFormat(NamedValue):
    """`formats.copy_out`."""

    NONE = 0, "No copy."
    FP16 = 1, "binary16."
    BF16 = 2, "bfloat16."


class RunKind(NamedValue):
    """`operation.kind`."""

    UPDATE = 0, "The update rule."
    SCAN = 1, "Reads the gradients alone, with results in scan and sum_of_squares."


@cache
def streams(config: UpdateKernelConfig) -> type[NamedValue]:
    """Named values of `error.stream` of a kernel: `Stream`, and states with other names."""
    own = [name for name in config.states if f"{name.upper()}_READ" not in Stream.__members__]
    listed = {each.name: (int(each), each.doc) for each in Stream}
    if "v_max" not in config.arrays:
        for each in FIVE_ARRAYS:
            del listed[each.name]
    if own:  # own states use the numbers of arrays that the kernel lacks
        for name in {"m", "v"}.difference(config.states):
            del listed[f"{name.upper()}_READ"], listed[f"{name.upper()}_WRITE"]
    elif "v_max" in config.arrays:
        return Stream
    taken = {number for number, _ in listed.values()}
    free = (number for number in range(1, STREAMS) if number not in taken)
    for name in own:
        listed[f"{name.upper()}_READ"] = next(free), f"Array {name} in."
        listed[f"{name.upper()}_WRITE"] = next(free), f"Array {name} out."
    made: type[NamedValue] = cast(Any, NamedValue)(Stream.__name__, list(listed.items()))
    return made


def update_rule(config: UpdateKernelConfig) -> Rule:
    """The update rule of the functional units: of one rule, or of all of them."""
    return config.rule_set.whole


def adam_kernel_map(config: UpdateKernelConfig) -> RegisterMap:
    """Return the register map of an update kernel.

    The scalar registers and the bits of `mode` are those of the update rule. The map is called
    `adam`, or `updater` if the kernel has another rule, so that exports of both can be used
    together.

    Raises
    ------
    ConfigError : a rule of a file has scalars or switches with names of other registers.
    """
    try:
        return _kernel_map(config)
    except RegisterMapError as error:
        raise ConfigError(f"rules cannot be {','.join(config.rules)}: {error}") from error


def _kernel_map(config: UpdateKernelConfig) -> RegisterMap:
    return block_map(
        "adam" if config.rules == ("adam",) else "updater",
        doc=_doc(config),
        ident=IDENT,
        version=VERSION,
        capabilities=_capabilities(config),
        configuration=_configuration(config),
        constants=[*_state_formats(config), *decompressor_registers(config)],
        causes=ErrorCause,
        streams=streams(config),
        lines=[
            _arrays(config),
            _rule_registers(config),
            *([_rounding(config)] if config.stochastic_rounding else []),
            *([_operation()] if config.scan else []),
            *([pair_registers(config)] if config.compression else []),
            *(_window(index) for index in range(config.window_count)),
            value_registers(Access.COUNTER, counters(config), at=("counter",)),
        ],
    )


def _doc(config: UpdateKernelConfig) -> str:
    """Describe a kernel."""
    if config.rules == ("adam",):
        return "An Adam/AdamW kernel near the memory (AXDIMM paper, section 3.3)."
    rules = ", ".join(config.rule_set.names)
    return f"An update kernel near the memory; rules: {rules}."


def device_maps(config: UpdateKernelConfig) -> dict[str, tuple[int, RegisterMap]]:
    """Blocks of an AXDIMM device: name to base address in bytes and register map."""
    kernels = [adam_kernel_map(config)]
    return {f"adam{i}": (i * BLOCK_BYTES, kernel) for i, kernel in enumerate(kernels)}


def _capabilities(config: UpdateKernelConfig) -> list[Row]:
    gradients = sum(1 << GradientFormat[name.upper()] for name in config.gradient_formats)
    copies = sum(1 << CopyOutFormat[name.upper()] for name in ("none", *config.copy_out_formats))
    supported = "A bit for each value of {} that is supported."
    return [
        ("lanes", 0, 8, "FP32 elements in a memory beat.", config.lanes),
        ("functional_units", 8, 8, "Functional units.", config.units),
        ("order", 16, 4, "Order of arithmetic.", Order[config.order.upper()]),
        ("windows", 20, 4, "Address windows.", config.window_count),
        ("gradient_formats", 24, 4, supported.format("formats.gradient"), gradients),
        ("copy_out_formats", 28, 4, supported.format("formats.copy_out"), copies),
    ]


def _configuration(config: UpdateKernelConfig) -> list[Row]:
    return [
        ("block_log2", 0, 8, "log2 of bytes in a block.", config.block_bytes.bit_length() - 1),
        ("burst_log2", 8, 8, "log2 of bytes in a burst.", config.burst_bytes.bit_length() - 1),
        ("address_width", 16, 8, "Bits of a memory address.", config.address_width),
        ("rules", 24, 4, "Update rules.", len(config.programs)),
        ("gradient_scale", 28, 1, "Gradients can be scaled.", config.gradient_scale),
        ("scan", 29, 1, "Gradients can be read alone.", config.scan),
        ("fused", 30, 1, "Sorted pairs can be read.", "fused" in config.compression),
        ("scatter", 31, 1, "Grouped pairs can be read.", "scatter" in config.compression),
    ]


_ARRAYS = {
    "p": "parameters",
    "g": "gradients",
    "m": "first moments",
    "v": "second moments",
    "v_max": "maxima of the second moments",
}


def _arrays(config: UpdateKernelConfig) -> list[Register]:
    def address(name: str, key: str, doc: str) -> Register:
        path = ("address", key)
        return value_register(name, Access.CONFIG, doc, width=64, locked=True, path=path)

    what = "Byte address of the {}; a multiple of a memory beat."
    copy = "Byte address of a 16-bit copy of the parameters; a multiple of a memory beat."
    reserved = "Reserved for a 16-bit copy of the parameters; must be 0."
    count = {"count": "Elements to update; with 0 a run ends at once."}
    return [
        *(
            address(f"{name}_address", name, what.format(_ARRAYS.get(name, f"array {name}")))
            for name in config.arrays
        ),
        *value_registers(Access.CONFIG, count, locked=True),
        address("copy_out_address", COPY_OUT, copy if config.copy_out_formats else reserved),
    ]


def _state_formats(config: UpdateKernelConfig) -> list[Register]:
    """Return the register of state formats, if some are not binary32."""
    formats = update_rule(config).formats
    if not formats:
        return []
    rows: list[Row] = [
        (name, 4 * index, 4, f"Format of {name}.", StateFormat[formats.get(name, "fp32").upper()])
        for index, name in enumerate(config.states)
    ]
    can = "States in bfloat16 can be rounded stochastically."
    rows.append(("stochastic", STOCHASTIC_BIT, 1, can, int(config.stochastic_rounding)))
    return [register("state_formats", Access.CONSTANT, "Number formats of the states.", *rows)]


def _rule_registers(config: UpdateKernelConfig) -> list[Register]:
    rules = config.rule_set
    switches: list[Row] = [
        (name, i, 1, SWITCHES.get(name, "")) for i, name in enumerate(rules.switches)
    ]
    mode = register("mode", Access.CONFIG, "Switches of the update rule.", *switches, locked=True)
    formats = register(
        "formats",
        Access.CONFIG,
        "Number formats in memory; START refuses those that this kernel does not have.",
        ("gradient", 0, 4, "Format of the gradients.", GradientFormat),
        ("copy_out", 4, 4, "Format of the copy of the parameters.", CopyOutFormat),
        locked=True,
    )
    scale = value_register(
        "gradient_scale",
        Access.CONFIG,
        "Factor of every gradient, after its conversion; rounded once. 1 changes no number."
        if config.gradient_scale
        else "Reserved for the factor of scaled gradients; must be 0.",
        kind=Kind.FLOAT32,
        reset=float32_bits(1.0) if config.gradient_scale else 0,
        locked=True,
        path=("scalar", GRADIENT_SCALE),
    )
    scalars = {
        name: SCALARS.get(name, "Scalar of the update rule.")
        for name in rules.whole.scalars
        if name != GRADIENT_SCALE
    }
    choice = value_register(
        "rule",
        Access.CONFIG,
        f"Update rule of the run: {', '.join(f'{i} {n}' for i, n in enumerate(rules.names))}.",
        locked=True,
    )
    return [
        *([mode] if switches else []),
        formats,
        scale,
        *([choice] if len(rules.rules) > 1 else []),
        *value_registers(
            Access.CONFIG, scalars, at=("scalar",), width=32, kind=Kind.FLOAT32, locked=True
        ),
    ]


def _rounding(config: UpdateKernelConfig) -> list[Register]:
    """Return registers for rounding states in bfloat16, see `nearstep_spec.rounding`."""
    begins = alignment(config.lanes)
    stream = "Stream of random bits of {}; 0 rounds to nearest even."
    rows: list[Row] = [
        (name, 4 * config.states.index(name), 4, stream.format(name)) for name in config.stochastic
    ]
    what = "Rounding of states in bfloat16: to nearest even, or stochastically."
    key = {
        "rounding_seed": "First word of the generator's key.",
        "rounding_step": "Second word of the generator's key: number of the step.",
    }
    index = f"Index of the run's first element; a multiple of {begins} below 2**{INDEX_BITS}."
    place = {
        "element_within": f"Position of the first element in its block; a multiple of {begins}.",
        "element_skip": "Elements on other channels between two blocks of this one.",
    }
    return [
        register("rounding", Access.CONFIG, what, *rows, locked=True),
        *value_registers(Access.CONFIG, key, width=32, locked=True),
        *value_registers(Access.CONFIG, {"element_index": index}, locked=True),
        *value_registers(Access.CONFIG, place, width=32, locked=True),
    ]


def _operation() -> list[Register]:
    kind: Row = ("kind", 0, 4, "Kind of run that START begins.", RunKind)
    found: Row = ("found_inf", 0, 1, "A gradient is infinite or NaN.")
    squares = "Sum over the gradients of the last run, if it was a scan: binary64."
    return [
        register("operation", Access.CONFIG, "Kind of run.", kind, locked=True),
        register("scan", Access.STATUS, "Outcome of the last run, if it was a scan.", found),
        value_register("sum_of_squares", Access.STATUS, squares, width=64),
    ]


def _window(index: int) -> list[Register]:
    name, path = f"window{index}", ("window", index)
    ends = {"base": "First byte granted.", "limit": "First byte behind those granted."}
    return [
        *value_registers(Access.CONFIG, ends, prefix=f"{name}_", at=path, locked=True),
        register(
            f"{name}_permissions",
            Access.CONFIG,
            "What the window grants.",
            ("read", 0, 1, "The kernel may read here."),
            ("write", 1, 1, "The kernel may write here."),
            ("valid", 2, 1, "The window is valid."),
            locked=True,
            path=(*path, "permissions"),
        ),
    ]
