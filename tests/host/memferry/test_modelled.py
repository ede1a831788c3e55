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
    ("reads", "forward"),
    # 32 x 24 tiles of outputs in forward, 108 at once
    [("once", 1), ("wave", 8), ("tile", 32)],
)
def test_a_matrix_is_read_in_forward_as_often_as_said_and_once_in_backward(
    reads: Reads, forward: int
) -> None:
    layer = of(reads=reads)["block0.up"]
    size = 4 * (768 * 3072 + 3072)
    assert layer.parameter_bytes == size
    assert layer.forward_s == pytest.approx(2 * 4096 * 768 * 3072 / FLOPS)
    assert layer.backward_s == pytest.approx(2 * layer.forward_s)
    assert layer.forward_dha_s == pytest.approx(max(forward * size / LINK, layer.forward_s))
    assert size / LINK > layer.forward_s  # that of the gradient of the input, and of the weight
    assert layer.backward_dha_s == pytest.approx(layer.forward_s + size / LINK)


def test_gradients_are_written_after_backward_or_beside_it() -> None:
    after, beside = (of(writes=each)["block0.up"] for each in ("after", "beside"))
    size = after.gradient_bytes / LINK
    assert after.backward_write_s == pytest.approx(after.backward_s + size)
    assert after.backward_dha_write_s == pytest.approx(after.backward_dha_s + size)
    assert beside.backward_write_s == pytest.approx(max(beside.backward_s, size))
    assert beside.backward_dha_write_s == pytest.approx(max(beside.backward_dha_s, size))


def test_blocks_are_computed_again_before_their_backward() -> None:
    made, again = of("gpt2-medium"), of("gpt2-medium", recompute=True)
    one, two = made["block3.up"], again["block3.up"]
    assert two.forward_s == one.forward_s
    assert two.backward_s == pytest.approx(one.backward_s + one.forward_s)
    assert two.backward_dha_s == pytest.approx(one.backward_dha_s + one.forward_dha_s)
    assert two.between_backward_s == pytest.approx(one.between_backward_s + one.between_forward_s)
    for name in ("embedding.word", "head.tied"):
        assert again[name] == made[name]


def test_a_parameter_that_is_sent_on_passes_the_link_again() -> None:
    one, two = of()["block0.up"], of(copies=2)["block0.up"]
    assert two.load_s == pytest.approx(2 * one.load_s)
    assert two.forward_dha_s == pytest.approx(2 * one.forward_dha_s)
    assert two.backward_dha_s - two.backward_s / 2 == pytest.approx(2 * one.load_s)
    assert two.send_s == one.send_s


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
    base = of("gpt2-medium", batch=1, tied="embedding")
    assert base["embedding.word"] == word
    assert (base["head.tied"].parameter_bytes, base["head.tied"].load_s) == (0, 0.0)
    assert base["head.tied"].forward_s == tied.forward_s


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
