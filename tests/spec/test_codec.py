"""One codec: text and JSON to configurations and back, whatever the configuration."""

import json
from dataclasses import dataclass, field
from typing import Annotated, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nearstep_hw.generate import GENERATORS
from nearstep_sim.backends import families
from nearstep_spec.axdimm.config import DimmConfig
from nearstep_spec.coarse.config import CoarseConfig
from nearstep_spec.codec import (
    CodecError,
    Nested,
    Option,
    choices,
    describe,
    digest,
    entries,
    from_arguments,
    from_json,
    from_text,
    make,
    to_json,
    to_text,
)
from nearstep_spec.smartssd.config import SmartssdConfig
from nearstep_spec.updater.config import UpdateKernelConfig

KINDS = sorted(
    {each.config for each in GENERATORS.values()}
    | {
        variant.options
        for backend in ("GOLDEN", "SIM")
        for family in families(backend).values()
        for variant in family.variants
    },
    key=lambda kind: kind.__name__,
)
"""Everything that is configured: generators and devices."""


@dataclass(frozen=True, kw_only=True)
class Inner:
    depth: Annotated[int, Option(meaning="a depth", low=1, high=9)] = 3
    hidden: Annotated[int, Option(meaning="not to be given outside")] = 7
    parts: Annotated[tuple[str, ...], Option(meaning="some", choices=("a", "b"))] = ()

    def __post_init__(self) -> None:
        if self.depth == 5:
            raise ValueError("depth must not be 5")


@dataclass(frozen=True, kw_only=True)
class Outer:
    inner: Annotated[
        Inner, Nested(rename={"depth": "height"}, omit=("hidden",), defaults={"hidden": 8})
    ] = field(default_factory=lambda: Inner(hidden=8))
    ratio: Annotated[float, Option(meaning="a ratio", low=0, high=1)] = 0.5
    flag: Annotated[bool, Option(meaning="a flag")] = False
    name: Annotated[str, Option(meaning="a name")] = ""
    size: Annotated[int | None, Option(meaning="a size", unset="as it comes")] = None
    kind: Annotated[Literal["x", "y"], Option(meaning="a kind")] = "x"
    plain: int = 1


def test_there_is_something_to_configure() -> None:
    assert len(KINDS) >= 13
    assert sum(len(entries(kind)) for kind in KINDS) > 120


@pytest.mark.parametrize("kind", KINDS)
def test_every_option_says_what_it_is_for(kind: type) -> None:
    rows = describe(kind)
    assert len({row.name for row in rows}) == len(rows) == len(entries(kind))
    for row in rows:
        assert row.meaning
        assert not row.meaning.endswith(".")


@pytest.mark.parametrize("kind", KINDS)
def test_defaults_are_those_of_the_dataclass(kind: type) -> None:
    config = from_text(kind, {})
    assert config == kind() == from_json(kind, {}) == from_arguments(kind, [])
    assert from_json(kind, json.loads(json.dumps(to_json(config)))) == config
    assert from_text(kind, to_text(config)) == config


@given(
    height=st.integers(1, 9).filter(lambda each: each != 5),
    parts=st.lists(st.sampled_from(["a", "b"]), unique=True),
    ratio=st.floats(0, 1),
    flag=st.booleans(),
    name=st.text("abc/.", max_size=5),
    size=st.none() | st.integers(-(1 << 70), 1 << 70),
    kind=st.sampled_from(["x", "y"]),
)
def test_text_and_json_give_the_configuration_back(**values: object) -> None:
    values["parts"] = tuple(values["parts"])
    config = make(Outer, values)
    assert config.inner.hidden == 8
    assert (config.inner.depth, config.ratio) == (values["height"], values["ratio"])
    assert from_text(Outer, to_text(config)) == config
    assert from_json(Outer, json.loads(json.dumps(to_json(config)))) == config
    arguments = [word for k, text in to_text(config).items() for word in (f"--{k}={text}",)]
    assert from_arguments(Outer, arguments) == config
    assert (digest(config) == digest(Outer())) == (config == Outer())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--height 5", r"option height='5': height must not be 5"),
        ("--height 5 --flag", r"option height='5': height must not be 5"),
        ("--depth 5", r"option depth='5': there is no such option; valid: height, parts, ratio"),
        ("--hidden 5", r"option hidden='5': there is no such option"),
        ("--plain 5", r"option plain='5': there is no such option"),
        ("--kind z", r"option kind='z': there is no such choice; valid: x, y"),
        ("--flag=perhaps", r"option flag='perhaps': must be a boolean; valid: 0, 1"),
        ("--size 3Gi", r"option size='3Gi': must be a whole number"),
        ("--ratio much", r"option ratio='much': must be a number"),
        ("--ratio", r"option ratio='': a value must follow"),
        ("--ratio 1 --ratio 0", r"option ratio='0': is given twice"),
        ("ratio 1", r"option ratio='': an option reads --name value"),
    ],
)
def test_what_is_wrong_is_named_as_it_was_given(words: str, message: str) -> None:
    with pytest.raises(CodecError, match=message):
        from_arguments(Outer, words.split())


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"height": "5"}, "option height='5': must be of type int"),
        ({"height": True}, "option height='yes': must be of type int"),
        ({"height": None}, "option height='None': must be of type int"),
        ({"flag": 1}, "option flag='1': must be of type bool"),
        ({"parts": "a"}, "option parts='a': must be a list of names"),
        ({"kind": "z"}, "option kind='z': there is no such choice"),
        ({"depth": 1}, "option depth='1': there is no such option"),
    ],
)
def test_json_is_strict(values: dict[str, object], message: str) -> None:
    with pytest.raises(CodecError, match=message):
        from_json(Outer, values)


def test_numbers_may_have_a_suffix_and_flags_a_no() -> None:
    config = from_arguments(Outer, ["--size", "2KiB", "--no-flag", "--height", "0x4"])
    assert (config.size, config.flag, config.inner.depth) == (2048, False, 4)
    assert from_arguments(Outer, ["--flag"]).flag is True
    assert to_text(from_text(Outer, {"size": "0"})) == {"size": "0"}
    assert choices(Outer, "kind") == ("x", "y")


def test_configurations_nest_and_keep_their_own_checks() -> None:
    dimm = from_text(DimmConfig, {"rules": "adam,sgd", "density": "16Gb", "block_bytes": "4KiB"})
    kernel = UpdateKernelConfig(rules=("adam", "sgd"), block_bytes=4096)
    assert dimm == DimmConfig(kernel=kernel, density="16Gb")
    card = from_text(SmartssdConfig, {"chunk_bytes": "4KiB", "memory_bytes": "1MiB"})
    assert (card.kernel.block_bytes, card.kernel.windows, card.memory_bytes) == (4096, 8, 1 << 20)
    with pytest.raises(CodecError, match=r"option lanes='8': lanes must be 16"):
        from_text(DimmConfig, {"lanes": "8"})
    with pytest.raises(CodecError, match=r"option alus='3': alus must be a power of two"):
        from_text(CoarseConfig, {"alus": "3"})
