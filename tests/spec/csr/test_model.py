"""Register maps: what a declaration means, and which declarations are refused."""

from dataclasses import replace

import pytest

from nearstep_spec.csr.model import (
    LINE_BYTES,
    Access,
    Field,
    Kind,
    NamedValue,
    Register,
    RegisterMap,
    RegisterMapError,
    nested,
    place,
    port_name,
)


def register(name: str, *fields: Field, **kwargs: object) -> Register:
    return Register(name=name, fields=fields, **kwargs)


def config(name: str = "value", **kwargs: object) -> Field:
    return Field(name=name, access=Access.CONFIG, **kwargs)


def test_place_starts_each_sequence_on_a_line_and_aligns_pairs() -> None:
    registers = place(
        [
            [register("a", config()), register("b", config(width=64), width=64)],
            [register("c", config())],
            [register(f"d{i}", config()) for i in range(17)],
            [register("e", config())],
        ]
    )
    offsets = {each.name: each.offset for each in registers}
    assert offsets["a"] == 0
    assert offsets["b"] == 8
    assert offsets["c"] == LINE_BYTES
    assert offsets["d16"] == 3 * LINE_BYTES
    assert offsets["e"] == 4 * LINE_BYTES


def test_pair_of_words_is_named_low_then_high() -> None:
    assert register("count", config(width=64), width=64).word_names() == ("count_lo", "count_hi")


def test_port_is_named_after_register_and_field() -> None:
    status = Field(name="busy", access=Access.STATUS)
    assert port_name(register("status", status), status) == "i_status_busy"
    assert port_name(register("count", config()), config()) == "o_count"
    fixed = Field(name="value", access=Access.CONSTANT)
    assert port_name(register("id", fixed), fixed) is None


class Letter(NamedValue):
    A = 0
    E = 4


BAD_REGISTERS = {
    "lower snake case": register("Bad", config()),
    "32 or 64": register("r", config(), width=16),
    "not aligned": register("r", config(), offset=2),
    "no fields": register("r"),
    "declared twice": register("r", config("a"), config("a", lsb=1)),
    "overlaps": register("r", config("a", width=4), config("b", lsb=3)),
    "exceeds 32 bits": register("r", config(lsb=31, width=2)),
    "reset 0x2": register("r", config(reset=2)),
    "is binary32": register("r", config(width=16, kind=Kind.FLOAT32)),
    "one bit wide": register("r", Field(name="go", access=Access.PULSE, width=2)),
    "named value": register("r", config(width=2, values=Letter)),
    "mixes": register("r", config("a"), Field(name="b", access=Access.STATUS, lsb=1)),
    "beside 'value'": register("r", config(), config("b", lsb=1)),
}


@pytest.mark.parametrize("message", BAD_REGISTERS)
def test_contradictory_register_is_refused(message: str) -> None:
    with pytest.raises(RegisterMapError, match=message):
        RegisterMap(name="block", registers=(BAD_REGISTERS[message],))


BAD_MAPS = {
    "overlaps or precedes": {
        "registers": (register("a", config(width=64), width=64), register("b", config(), offset=4))
    },
    "is declared twice": {
        "registers": (register("a", config()), register("a", config(), offset=4))
    },
    "more than 4096": {"registers": (register("a", config(), offset=4096),)},
    "both want the port": {
        "registers": (register("a_b", config()), register("a", config("b"), offset=4))
    },
    "word a_lo": {
        "registers": (
            register("a_lo", config()),
            register("a", config(width=64), width=64, offset=8),
        )
    },
    "needs the role 'busy'": {"registers": (register("a", config(), locked=True),)},
    "needs the role 'latch'": {
        "registers": (
            register("s", Field(name="busy", access=Access.STATUS)),
            register("c", Field(name="value", access=Access.COUNTER, width=32), offset=4),
        ),
        "busy": "s.busy",
    },
    "needs the role 'clear'": {
        "registers": (register("s", Field(name="refused", access=Access.REFUSED)),)
    },
    "has no register 'x'": {"registers": (register("a", config()),), "busy": "x.y"},
    "is not one bit of status": {"registers": (register("a", config()),), "busy": "a.value"},
}


@pytest.mark.parametrize("message", BAD_MAPS)
def test_contradictory_map_is_refused(message: str) -> None:
    with pytest.raises(RegisterMapError, match=message):
        RegisterMap(name="block", **BAD_MAPS[message])


def test_hash_changes_with_structure_and_not_with_prose() -> None:
    field = config(doc="old", width=3, reset=1)
    base = RegisterMap(name="block", registers=(register("a", field, doc="old"),))

    def changed(**kwargs: object) -> int:
        return RegisterMap(
            name="block", registers=(register("a", replace(field, **kwargs)),)
        ).hash()

    assert changed(doc="new") == base.hash()
    variants = [
        changed(width=4),
        changed(lsb=1),
        changed(reset=2),
        changed(name="b"),
        changed(values=NamedValue("N", {"ONE": 1})),
        changed(values=NamedValue("N", {"TWO": 1})),
        RegisterMap(name="block", registers=(register("a", field, offset=4),)).hash(),
        RegisterMap(name="other", registers=(register("a", field),)).hash(),
    ]
    assert len({base.hash(), *variants}) == 1 + len(variants)


def test_lookup_of_an_unknown_name_says_which_part_is_unknown() -> None:
    block = RegisterMap(name="block", registers=(register("a", config()),))
    assert block.lookup("a.value")[1].name == "value"
    with pytest.raises(KeyError, match="no register 'b'"):
        block.lookup("b.value")
    with pytest.raises(KeyError, match="no field 'x'"):
        block.lookup("a.x")


def test_registers_stand_at_paths() -> None:
    leaves = [(("window", i, name), f"{i} {name}") for i in range(2) for name in ("base", "limit")]
    found = nested([*leaves, (("count",), "count")])
    assert found == {
        "window": {i: {"base": f"{i} base", "limit": f"{i} limit"} for i in range(2)},
        "count": "count",
    }
    assert register("count", config()).path == ("count",)
    assert replace(register("x0", config(), path=("x", 0)), offset=4).path == ("x", 0)


@pytest.mark.parametrize("second", [("x", 0), ("x",), ("x", 0, "base")])
def test_two_registers_at_one_path_are_refused(second: tuple[str | int, ...]) -> None:
    first = register("x0", config(), path=("x", 0))
    other = register("other", config(), path=second)
    with pytest.raises(RegisterMapError, match="path"):
        RegisterMap(name="block", registers=place([[first, other]]))
