"""Configuration of an update kernel: plain data, shared by generators, devices and host."""

from dataclasses import dataclass, field
from functools import cache
from typing import Annotated, Literal

from nearstep_spec.blockwise import DYNAMIC8, GROUP, SIGNED, BlockLayout
from nearstep_spec.codec import Option
from nearstep_spec.errors import NearstepError
from nearstep_spec.rule.adam import ORDERS
from nearstep_spec.rule.errors import RuleError
from nearstep_spec.rule.file import RuleFileError, is_in_file
from nearstep_spec.rule.rule import STATE_FORMATS as RULE_FORMATS
from nearstep_spec.rule.rule import Rule
from nearstep_spec.rule.rules import BY_RULE, RuleSet, UnknownRuleError
from nearstep_spec.rule.scale import GRADIENT
from nearstep_spec.technology import TECHNOLOGIES
from nearstep_spec.updater.decompressor import Decompressor
from nearstep_spec.updater.decompressor import load as load_decompressor

ELEMENT_BYTES = 4  # an FP32 parameter, gradient or moment
HALF_BYTES = 2  # a gradient of 16 bits
CODE_BYTES = 1  # a state of 8 bits, its scale aside
AXI_PAGE_BYTES = 4096  # an AXI burst never crosses this boundary
AXI_MAX_BEATS = 256  # longest INCR burst of AXI4
LANES = (1, 2, 4, 8, 16)
GRADIENT_FORMATS = ("fp32", "fp16", "bf16")
COPY_OUT_FORMATS = ("fp16", "bf16")
PARAMETER_FORMATS = ("fp32", *(form for form in RULE_FORMATS if form not in SIGNED))
STATE_FORMATS = (*PARAMETER_FORMATS, DYNAMIC8)
COMPRESSIONS = ("fused", "scatter")
MOST_ARRAYS = 7  # each has a stream number for reads and one for writes, of 15
INDEX, COPY_OUT = "index", "copy_out"  # arrays of a run beside those of its rule
_LOADED, _DECOMPRESSOR = "_rule_set", "_decompressor"


class ConfigError(NearstepError, ValueError):
    """A configuration value, or a combination of values, that the hardware does not support."""


@dataclass(frozen=True, kw_only=True)
class UpdateKernelConfig:
    """Shape of an update kernel.

    Parameters
    ----------
    lanes : FP32 elements in a memory beat: 1, 2, 4, 8 or 16.
    functional_units : update units; divides `lanes`, and a beat takes `lanes / functional_units`
        cycles. None means one for each lane.
    block_bytes : bytes loaded from one array before those of the next array; a power of two.
    address_width : bits of a memory address; 34 is 16 GiB.
    order : order of the arithmetic: `default` agrees with torch bit for bit, `paper` is
        Algorithm 1.
    rules : update rules of the kernel: of the package (`adam`, `sgd_momentum`), or of an optimizer
        in a file (`FILE.py:NAME`). A register selects the rule of a run; rules share arithmetic
        units. `adam_amsgrad` has a fifth array, and only the default order.
    gradient_formats : formats of gradients in memory, `fp32` and any of `fp16` and `bf16`. A
        register selects the format of a run.
    gradient_scale : every gradient is first multiplied by a register.
    parameter_format, state_format : formats in memory of parameters, and of the other states of the
        rules: `fp32`, `fp16` or `bf16`. Elements are widened before the arithmetic and rounded once
        after it. Other states can be `dynamic8`, too: 8 bits and a scale for each 256 elements, see
        `nearstep_spec.blockwise`; a block has at most 256 elements a lane. A rule of a file with
        its own formats keeps those.
    stochastic_rounding : a run can round its states in bfloat16 stochastically, see
        `nearstep_spec.rounding`; registers select states, seed and step.
    copy_out_formats : formats of a copy of the updated parameters that a run can write beside
        them, of `fp16` and `bf16`.
    scan : runs can read gradients alone, to check that they are finite and sum their squares.
    compression : forms of gradients as pairs of index and value: `fused` has sorted indices,
        `scatter` groups them by block, in any order within a block. Or a decompressor in a file
        (`FILE.py:NAME`), alone.
    windows : address windows that the host can grant; 1 to 8. None: one for each array of a run, at
        least 4.
    bursts_ahead : read bursts that may be outstanding; the landing space of two blocks an array
        bounds it as well.
    technology : FPGAs that determine the pipeline stages of the functional units; results are the
        same, some cycles later.

    Raises
    ------
    ConfigError : with the value and what is allowed.

    Ref: AXDIMM paper, sections 3.3 and 3.4.
    """

    lanes: Annotated[
        int,
        Option(meaning="fp32 elements of a memory beat", choices=LANES, allowed="16 on DDR4 DIMMs"),
    ] = 16
    functional_units: Annotated[
        int | None,
        Option(
            meaning="update units; a beat takes lanes / units cycles",
            allowed="a divisor of lanes",
            unset="lanes",
        ),
    ] = None
    block_bytes: Annotated[
        int,
        Option(
            meaning="bytes loaded from one array before those of the next",
            allowed="a power of two from eight beats (512 with 16 lanes) to 1MiB",
        ),
    ] = 16384
    address_width: Annotated[
        int,
        Option(
            meaning="bits of a memory address; a channel of DDR4 needs all its address bits",
            low=16,
            high=64,
        ),
    ] = 34
    order: Annotated[
        Literal["default", "paper"],
        Option(
            meaning="order of Adam's arithmetic: torch's bits, or Algorithm 1 of the AXDIMM paper"
        ),
    ] = "default"
    rules: Annotated[
        tuple[str, ...],
        Option(
            meaning="update rules of the kernel", choices=tuple(BY_RULE), allowed="or FILE.py:NAME"
        ),
    ] = ("adam",)
    programs: tuple[str, ...] = field(init=False, repr=False)
    """Digest of each rule's arithmetic, which distinguishes configurations and builds."""

    gradient_formats: Annotated[
        tuple[str, ...],
        Option(
            meaning="formats of gradients",
            choices=GRADIENT_FORMATS,
            allowed="fp32 among them",
        ),
    ] = ("fp32",)
    gradient_scale: Annotated[
        bool, Option(meaning="whether the kernel can multiply gradients by a factor")
    ] = False
    parameter_format: Annotated[
        str, Option(meaning="format of the parameters in memory", choices=PARAMETER_FORMATS)
    ] = "fp32"
    state_format: Annotated[
        str,
        Option(
            meaning="format of the rules' other states in memory, such as moments",
            choices=STATE_FORMATS,
        ),
    ] = "fp32"
    stochastic_rounding: Annotated[
        bool,
        Option(
            meaning="whether the kernel can round states in bfloat16 stochastically",
            allowed="needs a state in bf16",
        ),
    ] = False
    copy_out_formats: Annotated[
        tuple[str, ...],
        Option(
            meaning="formats of a copy of the updated parameters",
            choices=COPY_OUT_FORMATS,
            unset="none",
        ),
    ] = ()
    scan: Annotated[
        bool, Option(meaning="whether the kernel can check gradients, and sum their squares")
    ] = False
    compression: Annotated[
        tuple[str, ...],
        Option(
            meaning="forms of gradients as pairs of index and value; needs two lanes",
            choices=COMPRESSIONS,
            allowed="or FILE.py:NAME alone",
            unset="none",
        ),
    ] = ()
    decompressors: tuple[str, ...] = field(init=False, repr=False)
    """Digest of the file of each decompressor, which distinguishes configurations and builds."""

    windows: Annotated[
        int | None,
        Option(
            meaning="address windows that the host can grant",
            low=1,
            high=8,
            unset="one for each array of a run, at least 4",
        ),
    ] = None
    bursts_ahead: Annotated[
        int, Option(meaning="read bursts that may be outstanding", low=8, high=255)
    ] = 16

    technology: Annotated[
        str,
        Option(
            meaning="FPGAs that determine the pipeline stages of the functional units",
            choices=TECHNOLOGIES,
        ),
    ] = TECHNOLOGIES[0]

    def __post_init__(self) -> None:
        _check(self.lanes in LANES, f"lanes must be one of {LANES}, not {self.lanes!r}")
        units = self.units
        _check(
            1 <= units <= self.lanes and self.lanes % units == 0,
            f"functional_units must divide lanes={self.lanes}, which {units!r} does not",
        )
        block = self.block_bytes
        _check(
            block > 0 and block & (block - 1) == 0 and 8 * self.beat_bytes <= block <= 1 << 20,
            f"block_bytes must be a power of two from {8 * self.beat_bytes} (eight beats) "
            f"to {1 << 20}, not {block!r}",
        )
        _check(
            16 <= self.address_width <= 64,
            f"address_width must be 16 to 64 bits, not {self.address_width!r}",
        )
        _check(self.order in ORDERS, f"order must be one of {tuple(ORDERS)}, not {self.order!r}")
        _check(
            self.technology in TECHNOLOGIES,
            f"technology must be one of {TECHNOLOGIES}, not {self.technology!r}",
        )
        rules = self.rules
        _check(
            isinstance(rules, tuple) and len(rules) > 0,
            f"rules must be different names, at least one, not {rules!r}",
        )
        _check_different("rules", rules)
        known = {"parameter_format": PARAMETER_FORMATS, "state_format": STATE_FORMATS}
        for option, forms in known.items():
            form = getattr(self, option)
            _check(form in forms, f"{option} must be one of {forms}, not {form!r}")
        self._load_rules()
        _check(
            not self.blockwise or GROUP <= self.block_elements <= GROUP * self.lanes,
            f"block_bytes must be {GROUP * ELEMENT_BYTES} to {GROUP * self.beat_bytes} with "
            f"lanes={self.lanes} and states in dynamic8 ({', '.join(self.blockwise)}), whose "
            f"scales have one beat, not {block}",
        )
        _check(
            not self.stochastic_rounding or bool(self.stochastic),
            "stochastic_rounding needs a state in bf16, by state_format, parameter_format or a "
            f"rule of a file; rules={','.join(self.rules)} have none",
        )
        formats = self.gradient_formats
        _check(
            isinstance(formats, tuple) and "fp32" in formats,
            f"gradient_formats must be different names, fp32 among them, not {formats!r}",
        )
        _check_names("gradient_formats", formats, GRADIENT_FORMATS)
        _check_names("copy_out_formats", self.copy_out_formats, COPY_OUT_FORMATS)
        self._load_decompressor()
        _check(
            not self.compression or self.lanes > 1,
            "compression needs an even number of lanes: a beat of pairs has as many",
        )
        _check(
            len(self.arrays) <= MOST_ARRAYS,
            f"rules must have at most {MOST_ARRAYS} arrays together, gradients among them, "
            f"not {len(self.arrays)}: {', '.join(self.arrays)}",
        )
        if self.windows is None:
            arrays = len(self.arrays) + bool(self.compression) + bool(self.copy_out_formats)
            object.__setattr__(self, "windows", max(4, arrays))
        _check(self.window_count in range(1, 9), f"windows must be 1 to 8, not {self.windows!r}")
        _check(
            8 <= self.bursts_ahead <= 255, f"bursts_ahead must be 8 to 255, not {self.bursts_ahead}"
        )

    def _load_rules(self) -> None:
        """Find the rules, and check that a kernel supports them."""
        try:
            rules = self.rule_set
            for name, rule in zip(rules.names, rules.rules, strict=True):
                _check_rule(name, rule)
            _check_different("rules", rules.names)
            if any(map(is_in_file, self.rules)):
                assert rules.whole.arrays_in  # checks that the rules can be combined
        except UnknownRuleError as error:
            raise ConfigError(str(error)) from None
        except (RuleError, RuleFileError) as error:
            raise ConfigError(f"rules cannot be {','.join(self.rules)}: {error}") from error
        for name in rules.unordered:
            raise ConfigError(f"order must be 'default' for the rule {name!r}, not {self.order!r}")
        object.__setattr__(self, "programs", rules.digests)

    def _load_decompressor(self) -> None:
        """Check the forms of compression, and find the user's decompressor."""
        forms = self.compression
        given = forms[0] if isinstance(forms, tuple) and len(forms) == 1 else ""
        found = None
        if isinstance(given, str) and is_in_file(given):
            try:
                found = load_decompressor(given)
            except RuleFileError as error:
                raise ConfigError(f"compression cannot be {given}: {error}") from error
            object.__setattr__(self, _DECOMPRESSOR, found)
        else:
            _check_names("compression", forms, COMPRESSIONS, "FILE.py:NAME alone")
        object.__setattr__(self, "decompressors", () if found is None else (found.digest,))

    @property
    def decompressor(self) -> Decompressor | None:
        """The user's decompressor, from the file's contents when this configuration was made."""
        if not self.decompressors:
            return None
        known: Decompressor | None = vars(self).get(_DECOMPRESSOR)
        if known is None:  # unpickled
            known = load_decompressor(self.compression[0])
            if known.digest != self.decompressors[0]:
                raise ConfigError(
                    f"compression cannot be {self.compression[0]}: the file has changed "
                    f"(digest {known.digest[:16]}, expected {self.decompressors[0][:16]})"
                )
            object.__setattr__(self, _DECOMPRESSOR, known)
        return known

    @property
    def cut(self) -> bool:
        """Whether registers cut the long paths around the units: for FPGAs slower than the
        first.
        """
        return self.technology != TECHNOLOGIES[0]

    @property
    def rule_set(self) -> RuleSet:
        """The rules. Those of a file are loaded once, and again after unpickling."""
        formats = (self.parameter_format, self.state_format)
        if not any(map(is_in_file, self.rules)):
            return _rule_set(self.rules, self.order, self.gradient_scale, *formats)
        known: RuleSet | None = vars(self).get(_LOADED)
        if known is None:
            known = RuleSet(
                self.rules,
                self.order,
                scaled=self.gradient_scale,
                parameter_format=formats[0],
                state_format=formats[1],
            )
            object.__setattr__(self, _LOADED, known)
        return known

    @property
    def stochastic(self) -> tuple[str, ...]:
        """States that a run can round stochastically, if the kernel supports it: those in
        bfloat16.
        """
        formats = self.rule_set.whole.formats
        return tuple(name for name in self.states if formats.get(name) == "bf16")

    @property
    def blockwise(self) -> tuple[str, ...]:
        """States in 8 bits."""
        formats = self.rule_set.whole.formats
        return tuple(name for name in self.states if formats.get(name) in SIGNED)

    @property
    def block_layout(self) -> BlockLayout:
        """Layout of states in 8 bits, if there are any."""
        return BlockLayout(self.block_elements, self.beat_bytes)

    def __getstate__(self) -> dict[str, object]:
        return {
            name: value
            for name, value in vars(self).items()
            if name not in (_LOADED, _DECOMPRESSOR)
        }

    @property
    def mixed(self) -> bool:
        """Whether gradients may have 16 bits."""
        return len(self.gradient_formats) > 1

    @property
    def selective(self) -> bool:
        """Whether there are runs without one of the arrays."""
        return len(self.programs) > 1 or self.scan or bool(self.compression)

    @property
    def arrays(self) -> tuple[str, ...]:
        """Arrays that the rules read, in the order of their memory streams: p, g, m, v of Adam."""
        return self.rule_set.whole.arrays_in

    @property
    def states(self) -> tuple[str, ...]:
        """Arrays of the rules that are written."""
        return self.rule_set.whole.arrays_out

    @property
    def window_count(self) -> int:
        """Windows, as a number."""
        assert self.windows is not None  # `__post_init__`
        return self.windows

    @property
    def units(self) -> int:
        """Functional units, as a number."""
        return self.lanes if self.functional_units is None else self.functional_units

    @property
    def data_width(self) -> int:
        """Bits of a memory beat."""
        return 8 * self.beat_bytes

    @property
    def beat_bytes(self) -> int:
        return ELEMENT_BYTES * self.lanes

    @property
    def cycles_per_beat(self) -> int:
        """Cycles in which the functional units take one beat of each array."""
        return self.lanes // self.units

    @property
    def block_beats(self) -> int:
        return self.block_bytes // self.beat_bytes

    @property
    def block_elements(self) -> int:
        return self.block_bytes // ELEMENT_BYTES

    @property
    def burst_beats(self) -> int:
        """Beats of the longest burst."""
        return self.burst_bytes // self.beat_bytes

    @property
    def burst_bytes(self) -> int:
        """Bytes of the longest burst: a page, a block or 256 beats, whichever is least."""
        return min(AXI_PAGE_BYTES, AXI_MAX_BEATS * self.beat_bytes, self.block_bytes)

    @property
    def fifo_beats(self) -> int:
        """Beats in the FIFO of each stream: two blocks, for double buffering."""
        return 2 * self.block_beats


@cache
def _rule_set(
    names: tuple[str, ...], order: str, scaled: bool, parameter_format: str, state_format: str
) -> RuleSet:
    return RuleSet(
        names,
        order,
        scaled=scaled,
        parameter_format=parameter_format,
        state_format=state_format,
    )


def _check_rule(name: str, rule: Rule) -> None:
    """Raise an error unless a kernel has registers and streams for a rule."""
    where = f"{rule.location}: rule {name!r}"
    if "p" not in rule.states or rule.inputs != (GRADIENT,) or rule.outputs:
        raise ConfigError(
            f"rules must have the state 'p', the input {GRADIENT!r} alone and no outputs, unlike "
            f"{where} of {', '.join((*rule.states, *rule.inputs, *rule.outputs))}"
        )
    for each in rule.states:
        if each in (INDEX, COPY_OUT):
            raise ConfigError(f"no state may be called {each!r}, as in {where}: a kernel has one")


def _check_different(option: str, names: object) -> None:
    _check(
        isinstance(names, tuple) and len(names) == len(set(names)),
        f"{option} must be different names, not {names!r}",
    )


def _check_names(option: str, names: object, known: tuple[str, ...], more: str = "") -> None:
    _check_different(option, names)
    allowed = f"{known}, or {more}" if more else f"{known}"
    for name in names if isinstance(names, tuple) else ():
        _check(name in known, f"{option} must be some of {allowed}, not {name!r}")


def _check(holds: bool, message: str) -> None:
    if not holds:
        raise ConfigError(message)
