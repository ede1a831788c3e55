"""An update rule: named arrays and scalars, and the arithmetic between them."""

import hashlib
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from nearstep_spec.blockwise import SIGNED
from nearstep_spec.rule.errors import (
    Location,
    MissingParameterError,
    MissingScalarError,
    RuleError,
    RuleTypeError,
    UnassignedOutputError,
    UnknownNameError,
    UnusedNameError,
)
from nearstep_spec.rule.expr import Condition, Value
from nearstep_spec.rule.program import Program

__all__ = ["STATE_FORMATS", "Rule"]

STATE_FORMATS = ("fp16", "bf16", *SIGNED)
"""Formats that states may have in memory, beside binary32."""

_RESERVED = ("en", "valid")  # i_en, i_valid and o_valid are ports of the functional unit


class Rule:
    """One definition of an optimizer's arithmetic.

    The function `definition` is called once, with a symbolic value for each name, and returns the
    new value of every state and output. RTL, golden models and registers are made from the returned
    expressions::

        def _sgd(p, g, *, step_size):
            return {"p": fma(step_size, g, p)}

        SGD = Rule("sgd", _sgd, states=("p",), inputs=("g",), scalars=("step_size",))

    Parameters
    ----------
    name : a Python identifier; names modules and generated files.
    definition : a function. Its parameters are the names of states, inputs, scalars and switches,
        in any order. The order of states and inputs there is the order of the ports.
    states : arrays read and written.
    inputs : arrays only read.
    outputs : arrays only written.
    scalars : binary32 registers, constant during a run.
    switches : one-bit registers, constant during a run.
    formats : formats in memory of states other than binary32. `fp16` and `bf16` are widened before
        the binary32 arithmetic and rounded once after it: to nearest even, or `bf16`
        stochastically. `dynamic8`, and `dynamic8u` of a state that is never negative, have 8 bits
        and a scale for each 256 elements, see `nearstep_spec.blockwise`; not for `p`.

    Attributes
    ----------
    arrays_in, arrays_out : ports in order: states and inputs as `definition` lists them; states in
        that order, then outputs.
    program : the arithmetic of `definition`.
    location : line of `definition`.

    Raises
    ------
    RuleError : one of its subclasses, naming the line at fault.
    """

    def __init__(
        self,
        name: str,
        definition: Callable[..., Mapping[str, Value]],
        *,
        states: Sequence[str],
        inputs: Sequence[str] = (),
        outputs: Sequence[str] = (),
        scalars: Sequence[str] = (),
        switches: Sequence[str] = (),
        formats: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.definition = definition
        code = getattr(definition, "__code__", None)
        if code is None:
            caller = sys._getframe(1)
            raise RuleTypeError(
                f"The definition must be a function, not {definition!r}",
                Location(caller.f_code.co_filename, caller.f_lineno),
            )
        self.location = Location(code.co_filename, code.co_firstlineno)
        self.name = name
        self.states = tuple(states)
        self.inputs = tuple(inputs)
        self.outputs = tuple(outputs)
        self.scalars = tuple(scalars)
        self.switches = tuple(switches)
        self.formats = MappingProxyType(dict(formats))
        self._check_names()

        parameters = tuple(inspect.signature(definition).parameters)
        readable = (*self.states, *self.inputs, *self.scalars, *self.switches)
        for parameter in parameters:
            if parameter not in readable:
                raise UnknownNameError(
                    "state, input, scalar or switch", parameter, readable, self.location
                )
        for each in readable:
            if each not in parameters:
                raise MissingParameterError(each, parameters, self.location)
        self.arrays_in = tuple(
            each for each in parameters if each in self.states or each in self.inputs
        )
        self.arrays_out = (
            *(each for each in self.arrays_in if each in self.states),
            *self.outputs,
        )
        returned = definition(**{each: self._leaf(each) for each in parameters})
        self.program = Program(self._checked(returned))

        for kind, declared in (("scalar", self.scalars), ("switch", self.switches)):
            for each in declared:
                if each not in self.program.names(kind):
                    raise UnusedNameError(kind.capitalize(), each, self.location)
        for each in self.inputs:
            if each not in self.program.names("array"):
                raise UnusedNameError("Input", each, self.location)

    def redefined(self, definition: Callable[..., Mapping[str, Value]], *scalars: str) -> "Rule":
        """Return a rule of the same name and arrays with another definition.

        Parameters
        ----------
        definition : a function that takes the names as keywords.
        scalars : names to append to the rule's scalars.
        """
        names = (*inspect.signature(self.definition).parameters, *scalars)
        keyword = inspect.Parameter.KEYWORD_ONLY
        definition.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [inspect.Parameter(each, keyword) for each in names]
        )
        return Rule(
            self.name,
            definition,
            states=self.states,
            inputs=self.inputs,
            outputs=self.outputs,
            scalars=(*self.scalars, *scalars),
            switches=self.switches,
            formats=self.formats,
        )

    def _check_names(self) -> None:
        seen: set[str] = set()
        declared = (
            *self.states, *self.inputs, *self.outputs, *self.scalars, *self.switches
        )  # fmt: skip
        for each in (self.name, *declared):
            if not (isinstance(each, str) and each.isidentifier() and each.isascii()):
                raise RuleError(f"Name must be an ASCII identifier, not {each!r}", self.location)
            if each in _RESERVED:
                raise RuleError(f"Name {each!r} is that of a control port", self.location)
        for each in declared:
            if each in seen:
                raise RuleError(f"Name {each!r} is declared twice", self.location)
            seen.add(each)
        for each, form in self.formats.items():
            if each not in self.states:
                raise UnknownNameError("state", each, self.states, self.location)
            if form not in STATE_FORMATS:
                raise RuleError(
                    f"Format of {each!r} must be {' or '.join(STATE_FORMATS)}, not {form!r}",
                    self.location,
                )
            if each == "p" and form in SIGNED:
                raise RuleError(
                    f"Format of 'p' cannot be {form!r}, which is for moments", self.location
                )
        if not self.states and not self.outputs:
            raise RuleError(f"Rule {self.name!r} writes nothing", self.location)

    def _leaf(self, name: str) -> Value | Condition:
        leaf: Value | Condition
        if name in self.switches:
            leaf = Condition("switch", name=name)
        else:
            leaf = Value("scalar" if name in self.scalars else "array", name=name)
        leaf.location = self.location
        return leaf

    def _checked(self, returned: object) -> dict[str, Value]:
        if not isinstance(returned, Mapping):
            raise RuleTypeError(
                f"The definition must return a mapping of names to values, not {returned!r}",
                self.location,
            )
        results: dict[str, Value] = {}
        for name, value in returned.items():
            if name not in self.arrays_out:
                at = value.location if isinstance(value, Value) else self.location
                raise UnknownNameError("state or output", name, self.arrays_out, at)
            if not isinstance(value, Value):
                raise RuleTypeError(
                    f"{name!r} must be a symbolic value, not {value!r}", self.location
                )
            results[name] = value
        missing = [each for each in self.arrays_out if each not in results]
        if missing:
            raise UnassignedOutputError(missing, results, self.location)
        return {each: results[each] for each in self.arrays_out}

    def __repr__(self) -> str:
        return f"Rule({self.name!r}, {', '.join(self.arrays_in)} -> {', '.join(self.arrays_out)})"

    @property
    def digest(self) -> str:
        """Digest of the arithmetic, and of the formats of the states."""
        arithmetic = self.program.digest()
        if not self.formats:
            return arithmetic
        text = " ".join([arithmetic, *(f"{k}:{v}" for k, v in sorted(self.formats.items()))])
        return hashlib.sha256(text.encode()).hexdigest()[: len(arithmetic)]

    def units(self) -> Mapping[str, int]:
        """Units of each kind that one functional unit needs, such as `{"add": 2, "fma": 3}`."""
        return self.program.units()

    def registers(self) -> Mapping[str, int]:
        """Width in bits of each register, scalars first: 32 for a scalar, 1 for a switch."""
        return {**dict.fromkeys(self.scalars, 32), **dict.fromkeys(self.switches, 1)}

    def check_scalars(self, values: Mapping[str, float]) -> None:
        """Check that `values` has exactly the scalars and switches.

        Raises
        ------
        MissingScalarError, UnknownNameError
        """
        known = self.registers()
        missing = [each for each in known if each not in values]
        if missing:
            raise MissingScalarError(missing, values, self.location)
        for each in values:
            if each not in known:
                raise UnknownNameError("scalar or switch", each, known, self.location)
