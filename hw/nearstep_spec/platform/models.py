"""Models that the four papers train, by name.

For some a paper prints only the size (Smart-Infinity's GPT-2 of 1.16, 4.0, 16.6 and 33.0 billion
parameters, BLOOM and ViT; MemFerry's Transformer-XL): these are included only if a shape of the
family is published, under its published name.
"""

from collections.abc import Mapping
from dataclasses import replace

from nearstep_spec.platform.layer import Model
from nearstep_spec.platform.resnet import ResNet50
from nearstep_spec.platform.transformer import Transformer

PADDED_VOCABULARY = 50304
"""GPT-2's 50257 tokens, as Megatron pads them: to a multiple of 128."""

TABLE_4 = "AXDIMM paper, Table 4; GPT-2's vocabulary as Megatron pads it"
MEGATRON = "Shoeybi et al., Megatron-LM, Table 1"
HUB = "configuration and size of the model on the Hugging Face hub"

_GPT2 = Transformer(
    name="gpt2-medium",
    source=f"MemFerry paper, section V-A; {HUB}",
    stated=354_823_168,
    blocks=24,
    hidden=1024,
    heads=16,
    vocabulary=50257,
    positions=1024,
)
_BERT = Transformer(
    name="bert-base",
    source=f"MemFerry paper, section V-A; {HUB}",
    stated=109_482_240,
    blocks=12,
    hidden=768,
    heads=12,
    vocabulary=30522,
    positions=512,
    types=2,
    embedding_norm=True,
    final_norm=False,
    head="pooler",
)
_BLOOM = Transformer(
    name="bloom-560m",
    source=f"Smart-Infinity paper, figure 13, without the size; {HUB}",
    stated=559_214_592,
    blocks=24,
    hidden=1024,
    heads=16,
    vocabulary=250880,
    embedding_norm=True,
)
_VIT = Transformer(
    name="vit-base-16",
    source="Smart-Infinity paper, figure 13, without the size; torchvision's model of that name",
    stated=86_567_656,
    blocks=12,
    hidden=768,
    heads=12,
    head="classes",
    patch=16,
    image=224,
    classes=1000,
)


def _table_4(
    name: str, stated: float, blocks: int, hidden: int, heads: int, batch: int, sequence: int
) -> Transformer:
    return Transformer(
        name=name,
        source=TABLE_4,
        stated=stated,
        blocks=blocks,
        hidden=hidden,
        heads=heads,
        vocabulary=PADDED_VOCABULARY,
        positions=sequence,
        batch=batch,
        sequence=sequence,
    )


def _megatron(name: str, stated: float, blocks: int, hidden: int, heads: int) -> Transformer:
    return replace(
        _GPT2,
        name=name,
        source=MEGATRON,
        stated=stated,
        blocks=blocks,
        hidden=hidden,
        heads=heads,
        vocabulary=PADDED_VOCABULARY,
    )


AXDIMM = (
    _table_4("gpt3-large", 760e6, 24, 1536, 16, 3, 1152),
    _table_4("gpt3-xl", 1.3e9, 24, 2064, 24, 2, 1024),
    _table_4("gpt3-2.7b", 2.7e9, 32, 2560, 32, 1, 1024),
    _table_4("gpt3-6.7b", 6.7e9, 32, 4096, 32, 1, 1024),
    _table_4("gpt3-13b", 13.0e9, 40, 5120, 40, 1, 512),
)
"""Table 4 of the AXDIMM paper, with its batches and contexts."""

_OTHERS: tuple[Model, ...] = (
    _GPT2,
    replace(
        _GPT2,
        name="gpt2-large",
        source=f"Smart-Infinity paper, Table IV (GPT2-0.77B); {HUB}",
        stated=774_030_080,
        blocks=36,
        hidden=1280,
        heads=20,
    ),
    replace(
        _GPT2,
        name="gpt2-xl",
        source=f"Smart-Infinity paper, Table IV (GPT2-1.6B); {HUB}",
        stated=1_557_611_200,
        blocks=48,
        hidden=1600,
        heads=25,
    ),
    _megatron("gpt2-4.2b", 4.2e9, 64, 2304, 24),
    _megatron("gpt2-8.3b", 8.3e9, 72, 3072, 32),
    _BERT,
    replace(
        _BERT,
        name="bert-large",
        source=f"COARSE paper, section V-D; MemFerry paper, section V-A; {HUB}",
        stated=335_141_888,
        blocks=24,
        hidden=1024,
        heads=16,
    ),
    replace(
        _BERT,
        name="roberta-base",
        stated=124_645_632,
        vocabulary=50265,
        positions=514,
        types=1,
    ),
    _BLOOM,
    replace(_BLOOM, name="bloom-1b7", stated=1_722_408_960, hidden=2048),
    replace(_BLOOM, name="bloom-7b1", stated=7_069_016_064, blocks=30, hidden=4096, heads=32),
    _VIT,
    replace(_VIT, name="vit-large-16", stated=304_326_632, blocks=24, hidden=1024, heads=16),
    ResNet50(
        name="resnet50",
        source="COARSE paper, section V-D; torchvision's model of that name",
        stated=25_557_032,
        batch=64,
    ),
)

MODELS: Mapping[str, Model] = {model.name: model for model in (*AXDIMM, *_OTHERS)}
"""Every model, by name."""
