"""Decompressors in files: what is found, what is refused, and what tells configurations apart."""

import pickle
from pathlib import Path

import numpy as np
import pytest

from nearstep_spec.codec import CodecError, digest, from_text, to_text
from nearstep_spec.rule.file import RuleFileError
from nearstep_spec.smartssd.config import SmartssdConfig
from nearstep_spec.updater.config import ConfigError, UpdateKernelConfig
from nearstep_spec.updater.decompressor import Decompressor, DecompressorError, load
from nearstep_spec.updater.pair_registers import form_value
from nearstep_spec.updater.registers import adam_kernel_map

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "ternary.py"
TERNARY = f"{EXAMPLE}:TERNARY"


def _kept(gradient, share):
    return np.arange(gradient.size, dtype=np.uint32), gradient


def _meant(words, values, count):
    return np.zeros(count, np.uint32)


def _made(**options: object) -> Decompressor:
    functions = {"compress": _kept, "decompress": _meant, "unit": object}
    return Decompressor(**{**functions, **options})


def test_the_example_is_found_and_named() -> None:
    found = load(TERNARY)
    assert (found.name, found.elements_per_record) == (TERNARY, 16)
    assert [found.most(n) for n in (1, 16, 17)] == [1, 1, 2]
    assert found.mark == int(found.digest[:8], 16)


def test_what_is_no_decompressor_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(RuleFileError, match=r"TERNAR must be a Decompressor.*: TERNARY"):
        load(f"{EXAMPLE}:TERNAR")
    with pytest.raises(RuleFileError, match=r"GROUP must be a Decompressor, and is a int"):
        load(f"{EXAMPLE}:GROUP")
    with pytest.raises(RuleFileError, match=r"a decompressor in a file is named FILE\.py:NAME"):
        load(str(EXAMPLE))
    with pytest.raises(RuleFileError, match="there is no such file"):
        load(f"{tmp_path / 'none.py'}:NONE")
    broken = tmp_path / "broken.py"
    broken.write_text("x = 1\ny = x / 0\n")
    with pytest.raises(RuleFileError, match=r"broken\.py:2: ZeroDivisionError"):
        load(f"{broken}:Y")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"elements_per_record": 0}, "positive integer, not 0"),
        ({"elements_per_record": 1.5}, r"positive integer, not 1\.5"),
        ({"compress": 3}, "compress must be a function, not int"),
    ],
)
def test_a_declaration_that_cannot_be_is_refused(options, message) -> None:
    with pytest.raises(DecompressorError, match=message):
        _made(**options)


def test_functions_that_break_their_contract_are_told() -> None:
    gradient = np.ones(10, np.float32)
    with pytest.raises(DecompressorError, match=r"at most 1 records of 10 .* not 10"):
        _made(elements_per_record=16).records(gradient, 1.0)
    narrow = _made(compress=lambda g, share: (np.zeros(3, np.uint16), g[:3]))
    with pytest.raises(DecompressorError, match=r"not uint16 \(3,\) and float32 \(3,\)"):
        narrow.records(gradient, 1.0)
    uneven = _made(compress=lambda g, share: (np.zeros(3, np.uint32), g[:2]))
    with pytest.raises(DecompressorError, match=r"\(3,\) and float32 \(2,\)"):
        uneven.records(gradient, 1.0)
    short = _made(decompress=lambda words, values, count: np.zeros(count - 1, np.uint32))
    with pytest.raises(DecompressorError, match=r"uint32 of shape \(5,\), not uint32 \(4,\)"):
        short.dense(np.zeros(0, np.uint32), np.zeros(0, np.uint32), 5)


def test_the_first_wrong_record_is_found() -> None:
    found = load(TERNARY)
    words = np.array([1, 3, 0x5555_5555, 0xFFFF_FFFF, 2, 8], np.uint32)
    assert found.first_wrong(words, 100) == 4  # negative, and not sent
    assert found.first_wrong(words[:4], 64) is None
    assert found.first_wrong(words[:4], 48) == 3  # behind the last element
    assert found.first_wrong(words[:0], 1) is None
    assert _made().first_wrong(words, 1) is None


def test_a_kernel_has_it_alone() -> None:
    config = UpdateKernelConfig(compression=(TERNARY,))
    assert config.decompressor is not None
    assert config.decompressors == (config.decompressor.digest,)
    assert UpdateKernelConfig(compression=("fused", "scatter")).decompressors == ()
    with pytest.raises(ConfigError, match=r"compression must be some of .*FILE\.py:NAME alone"):
        UpdateKernelConfig(compression=("fused", TERNARY))
    with pytest.raises(ConfigError, match=r"compression cannot be .*must be a Decompressor"):
        UpdateKernelConfig(compression=(f"{EXAMPLE}:wrong",))
    with pytest.raises(ConfigError, match="even number of lanes"):
        UpdateKernelConfig(compression=(TERNARY,), lanes=1)


def test_a_card_takes_it_as_text() -> None:
    card = from_text(SmartssdConfig, {"compression": TERNARY})
    assert card.kernel.decompressors
    assert to_text(card)["compression"] == TERNARY
    with pytest.raises(CodecError, match="there is no such file"):
        from_text(SmartssdConfig, {"compression": "none.py:NONE"})


def test_registers_tell_which_one_it_is() -> None:
    config = UpdateKernelConfig(compression=(TERNARY,))
    known, plain = (
        adam_kernel_map(config),
        adam_kernel_map(UpdateKernelConfig(compression=("fused",))),
    )
    names = {each.name: each for each in known.registers}
    assert names["decompressor"].fields[0].reset == load(TERNARY).mark
    assert "decompressor" not in {each.name for each in plain.registers}
    assert [form_value(form) for form in ("none", "fused", "scatter", TERNARY)] == [0, 1, 2, 3]


def test_another_file_is_another_configuration(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_bytes(EXAMPLE.read_bytes())
    name = f"{path}:TERNARY"
    first = UpdateKernelConfig(compression=(name,))
    again = pickle.loads(pickle.dumps(first))
    assert again == first
    assert again.decompressor.digest == first.decompressor.digest
    asleep = pickle.dumps(first)
    path.write_text(EXAMPLE.read_text().replace("GROUP = 16  #", "GROUP = 16  # of"))
    second = UpdateKernelConfig(compression=(name,))
    assert (first != second, digest(first) != digest(second)) == (True, True)
    # A configuration keeps what the file was when it was made; one that comes back has to find it.
    assert first.decompressor.digest != second.decompressor.digest
    with pytest.raises(ConfigError, match="the file has changed"):
        _ = pickle.loads(asleep).decompressor
