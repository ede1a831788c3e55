"""Rooflines: closed forms on a machine whose numbers are small."""

import pytest

from nearstep.errors import ArgumentError
from nearstep.memferry.access import Reads
from nearstep.memferry.modelled import Setup, profile
from nearstep_spec.platform.load import load
from nearstep_spec.platform.models import MODELS
from nearstep_spec.platform.transformer import Transformer

MACHINE = load("memferry-a100")
LINK, MEMORY, FLOPS = 12.5e9, 1.935e12, 156e12


def of(name: str = "bert-base", **changes: object) -> dict[str, object]:
    model = MODELS[name]
    assert isinstance(model, Transformer)
    values: dict[str, object] = {"batch": 8, "sequence": 512, "gpu": "gpu0", "dtype": "tf32"}
    made = profile(MACHINE, model, Setup(**{**values, **changes}))  # type: ignore[arg-type]
    return {**{each.name: each for each in made.layers}, "profile": made}


@pytest.mark.parametrize("name", ["bert-base", "roberta-base", "gpt2-medium", "bloom-560m"])
def test_every_parameter_is_trained_once(name: str) -> None:
    made = of(name)["profile"]
    assert made.source == "modelled"
    assert made.gradient_bytes == 4 * MODELS[name].stated
    model = MODELS[name]
    tied = 0 if model.head != "tied" else 4 * model.vocabulary * model.hidden
    assert made.parameter_bytes == made.gradient_bytes + tied


def test_an_embedding_reads_the_rows_of_its_tokens() -> None:
    layer = of()["embedding.word"]
    tokens, width = 8 * 512, 768
    assert layer.forward_dha_s == pytest.approx(tokens * width * 4 / LINK)
    assert layer.backward_dha_s == layer.backward_s
    assert layer.load_s == pytest.approx(30522 * width * 4 / LINK)
    position = of()["embedding.position"]
    assert position.forward_dha_s == pytest.approx(512 * width * 4 / LINK)


@pytest.mark.parametrize(
    ("reads", "forward", "backward"),
    # 32 x 24 tiles of outputs forward, 32 x 6 of gradients of the input, 108 at once
    [("once", 1, 1), ("wave", 8, 2), ("tile", 32, 32)],
)
def test_a_matrix_is_read_as_often_as_said(reads: Reads, forward: int, backward: int) -> None:
    layer = of(reads=reads)["block0.up"]
    size = 4 * (768 * 3072 + 3072)
    assert layer.parameter_bytes == size
    assert layer.forward_s == pytest.approx(2 * 4096 * 768 * 3072 / FLOPS)
    assert layer.backward_s == pytest.approx(2 * layer.forward_s)
    assert layer.forward_dha_s == pytest.approx(max(forward * size / LINK, layer.forward_s))
    assert layer.backward_dha_s == pytest.approx(max(backward * size / LINK, layer.backward_s))
    assert layer.backward_write_s == pytest.approx(max(size / LINK, layer.backward_s))


def test_attention_is_between_layers() -> None:
    layer = of()["block0.qkv"]
    moved = 4 * (4 * 4096 * 768 + 4 * 8 * 12 * 512**2)
    assert layer.between_forward_s == pytest.approx(
        max(4 * 4096 * 512 * 768 / FLOPS, moved / MEMORY)
    )


def test_a_tied_matrix_is_loaded_where_it_is_used_and_has_its_gradient_elsewhere() -> None:
    made = of("gpt2-medium", batch=1)
    tied, word = made["head.tied"], made["embedding.word"]
    assert tied.parameter_bytes == word.parameter_bytes
    assert (tied.gradient_bytes, tied.backward_write_s, tied.update_s) == (0, None, 0.0)
    assert word.gradient_bytes == word.parameter_bytes


def test_frozen_layers_have_no_gradients() -> None:
    made = of(frozen=frozenset({"embedding.word"}))["embedding.word"]
    assert (made.gradient_bytes, made.send_s, made.backward_write_s) == (0, 0.0, None)
    with pytest.raises(ArgumentError, match="frozen"):
        of(frozen=frozenset({"nothing"}))


def test_a_fingerprint_tells_models_and_dtypes_apart() -> None:
    prints = {
        of(*name, **changes)["profile"].fingerprint
        for name, changes in [
            ((), {}),
            ((), {"batch": 4}),
            ((), {"dtype": "fp16"}),
            (("bert-large",), {}),
        ]
    }
    assert len(prints) == 3


def test_a_machine_without_the_figures_is_refused() -> None:
    with pytest.raises(ArgumentError, match="no processor"):
        of(gpu="gpu9")
    with pytest.raises(ArgumentError, match="memory_bytes_per_s"):
        of(gpu="cpu")


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan")])
def test_a_host_that_updates_nothing_is_refused(rate: float) -> None:
    with pytest.raises(ArgumentError, match="host_params_per_s must be above 0, not"):
        of(host_params_per_s=rate)
