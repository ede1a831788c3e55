"""Shapes of transformers: blocks of attention and a perceptron of four times the width."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from nearstep_spec.platform.layer import Layer, check

BACKWARD = 2
"""Products in backward for one in forward: the gradients of the input and of the weight."""


@dataclass(frozen=True, kw_only=True)
class Transformer:
    """GPT, BERT, BLOOM or ViT.

    Attributes
    ----------
    source : of the shape.
    stated : number of parameters according to the source.
    blocks, hidden, heads : of the source; `hidden` is a multiple of `heads`.
    vocabulary : rows of the word embedding, or 0 for images.
    positions : rows of the position embedding, or 0 if there is none. A longer sequence is refused.
    types : rows of BERT's embedding of segments.
    embedding_norm, final_norm : a normalisation after the embeddings, and one after the blocks.
    head : `tied` multiplies by the word embedding, `pooler` is a matrix on the first token,
        `classes` a matrix from the first token to the classes.
    patch, image, classes : pixels on a side of a patch and of the image, and classes, of a ViT.
    batch, sequence : of the source's training, or 0.

    Raises
    ------
    ValueError : numbers contradict each other.

    Ref: Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models, section
    4.1, for the activations of a block.
    """

    name: str
    source: str
    stated: float
    blocks: int
    hidden: int
    heads: int
    vocabulary: int = 0
    positions: int = 0
    types: int = 0
    embedding_norm: bool = False
    final_norm: bool = True
    head: Literal["tied", "pooler", "classes"] = "tied"
    patch: int = 0
    image: int = 0
    classes: int = 0
    batch: int = 0
    sequence: int = 0

    def __post_init__(self) -> None:
        for name in ("blocks", "hidden", "heads"):
            check(name, getattr(self, name), 1)
        if self.hidden % self.heads:
            raise ValueError(f"hidden must be a multiple of heads, not {self.hidden}, {self.heads}")
        if bool(self.vocabulary) == bool(self.patch):
            raise ValueError("a vocabulary or a patch must be given, and not both")
        if self.patch and self.image % self.patch:
            raise ValueError(f"image must be a multiple of patch, not {self.image}, {self.patch}")

    @property
    def tokens(self) -> int:
        """Tokens of an image, including the class token; 0 for text."""
        return (self.image // self.patch) ** 2 + 1 if self.patch else 0

    def layers(self, batch: int, sequence: int, element_bytes: int = 2) -> Sequence[Layer]:
        """List embedding, blocks and head, for a pass over `batch` sequences.

        Parameters
        ----------
        sequence : tokens of each; of a ViT 0 or `tokens`.
        element_bytes : of an element of an activation: 2 in half precision.

        Raises
        ------
        ValueError : a number is invalid for the model.
        """
        check("batch", batch, 1)
        check("element_bytes", element_bytes, 1)
        if self.patch and sequence == 0:
            sequence = self.tokens
        most = self.tokens or self.positions or None
        check("sequence", sequence, self.tokens or 1, most)
        size = _Pass(self.hidden, batch, sequence, element_bytes)
        blocks = [size.block(f"block{i}", self.heads) for i in range(self.blocks)]
        return [self._embedding(size), *blocks, self._head(size)]

    def _embedding(self, size: "_Pass") -> Layer:
        hidden = self.hidden
        parameters: dict[str, tuple[int, ...]] = {}
        flops = kept = 0
        if self.patch:
            parameters["patch.weight"] = (hidden, 3, self.patch, self.patch)
            parameters["patch.bias"] = (hidden,)
            parameters["class"] = (hidden,)
            parameters["position"] = (self.tokens, hidden)
            pixels = 3 * self.image**2 * size.batch
            flops, kept = 2 * pixels * hidden, pixels * size.element_bytes
        else:
            parameters["word"] = (self.vocabulary, hidden)
            if self.positions:
                parameters["position"] = (self.positions, hidden)
            if self.types:
                parameters["type"] = (self.types, hidden)
        if self.embedding_norm:
            parameters |= _norm("norm", hidden)
            kept += size.output_bytes
        return Layer(
            name="embedding",
            parameters=parameters,
            forward_flops=flops,
            backward_flops=flops,  # an image needs no gradient
            activation_bytes=kept,
            output_bytes=size.output_bytes,
        )

    def _head(self, size: "_Pass") -> Layer:
        hidden, batch = self.hidden, size.batch
        parameters: dict[str, tuple[int, ...]] = _norm("norm", hidden) if self.final_norm else {}
        kept = size.output_bytes if self.final_norm else 0
        if self.head == "tied":
            rows, out = batch * size.sequence, self.vocabulary
        elif self.head == "pooler":
            rows, out = batch, hidden
            parameters |= {"pooler.weight": (hidden, hidden), "pooler.bias": (hidden,)}
        else:
            rows, out = batch, self.classes
            parameters |= {
                "classes.weight": (self.classes, hidden),
                "classes.bias": (self.classes,),
            }
        flops = 2 * rows * hidden * out
        return Layer(
            name="head",
            parameters=parameters,
            tied=("embedding.word",) if self.head == "tied" else (),
            forward_flops=flops,
            backward_flops=BACKWARD * flops,
            activation_bytes=kept + rows * hidden * size.element_bytes,
            output_bytes=rows * out * size.element_bytes,
        )


@dataclass(frozen=True)
class _Pass:
    """Sizes of one pass over a batch."""

    hidden: int
    batch: int
    sequence: int
    element_bytes: int

    @property
    def output_bytes(self) -> int:
        return self.batch * self.sequence * self.hidden * self.element_bytes

    def block(self, name: str, heads: int) -> Layer:
        """Make one block; its activations are the inputs of each product, of both normalisations,
        of GELU and of softmax's gradient, and the masks of three dropouts, a byte an element.
        """
        hidden, tokens = self.hidden, self.batch * self.sequence
        scores = self.batch * heads * self.sequence**2
        flops = 24 * tokens * hidden**2 + 4 * tokens * self.sequence * hidden
        width = tokens * hidden
        return Layer(
            name=name,
            parameters={
                **_norm("norm1", hidden),
                "qkv.weight": (3 * hidden, hidden),
                "qkv.bias": (3 * hidden,),
                "projection.weight": (hidden, hidden),
                "projection.bias": (hidden,),
                **_norm("norm2", hidden),
                "up.weight": (4 * hidden, hidden),
                "up.bias": (4 * hidden,),
                "down.weight": (hidden, 4 * hidden),
                "down.bias": (hidden,),
            },
            forward_flops=flops,
            backward_flops=BACKWARD * flops,
            activation_bytes=(16 * self.element_bytes + 2) * width
            + (2 * self.element_bytes + 1) * scores,
            output_bytes=self.output_bytes,
        )


def _norm(name: str, hidden: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (hidden,), f"{name}.bias": (hidden,)}
