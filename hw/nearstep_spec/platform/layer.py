"""A layer of a model for a planner: parameters, work and activations."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Protocol


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One layer in the order of the forward pass.

    Attributes
    ----------
    parameters : shape of each tensor.
    tied : tensors shared with an earlier layer, such as `embedding.word`; their gradient is
        complete after that layer's backward.
    forward_flops, backward_flops : of matrix products and convolutions, a multiplication and an
        addition being two; without recomputation.
    activation_bytes : kept from forward for backward.
    output_bytes : of the next layer's input: the only activations that are kept with recomputation
        in backward.
    """

    name: str
    parameters: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    tied: tuple[str, ...] = ()
    forward_flops: int = 0
    backward_flops: int = 0
    activation_bytes: int = 0
    output_bytes: int = 0

    @property
    def elements(self) -> Mapping[str, int]:
        """Elements of each tensor."""
        return {name: prod(shape) for name, shape in self.parameters.items()}

    @property
    def parameter_count(self) -> int:
        """Elements of all tensors, without those of `tied`."""
        return sum(self.elements.values())


class Model(Protocol):
    """A shape that gives layers for any batch."""

    @property
    def name(self) -> str:
        """Name in `nearstep_spec.platform.models`."""

    @property
    def source(self) -> str:
        """Source of the shape."""

    @property
    def stated(self) -> float:
        """Parameters according to the source, with its rounding."""

    def layers(self, batch: int, sequence: int, element_bytes: int = 2) -> Sequence[Layer]:
        """The layers of one pass.

        Parameters
        ----------
        batch : sequences or images.
        sequence : tokens of each; of a model for images the only one that it takes, or 0.
        element_bytes : of an element of an activation.

        Raises
        ------
        ValueError : a number is invalid for the model.
        """


def parameter_count(layers: Sequence[Layer]) -> int:
    """Parameters of all layers."""
    return sum(layer.parameter_count for layer in layers)


def check(name: str, value: int, least: int, most: int | None = None) -> None:
    """Refuse an invalid count.

    Raises
    ------
    ValueError : the count is not an integer, or out of bounds.
    """
    bad = isinstance(value, bool) or not isinstance(value, int)
    if bad or value < least or (most is not None and value > most):
        to = f" to {most}" if most is not None else ""
        raise ValueError(f"{name} must be an integer from {least}{to}, not {value!r}")
