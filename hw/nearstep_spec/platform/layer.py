"""What a layer of a model is to a planner: parameters, work, and what it keeps."""

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
    tied : tensors of an earlier layer that it uses, too, as `embedding.word`; their gradient is
        complete when that layer's backward is.
    forward_flops, backward_flops : of matrix products and convolutions, a multiplication and an
        addition being two; nothing is computed again.
    activation_bytes : kept from forward for backward.
    output_bytes : of what the next layer takes: all that is kept where activations are computed
        again in backward.
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
        """Elements of all tensors; those of `tied` are not among them."""
        return sum(self.elements.values())


class Model(Protocol):
    """A shape, of which there are layers for any batch."""

    @property
    def name(self) -> str:
        """As `nearstep_spec.platform.models` has it."""

    @property
    def source(self) -> str:
        """Where the shape stands."""

    @property
    def stated(self) -> float:
        """Parameters as the source says, rounded as it does."""

    def layers(self, batch: int, sequence: int, element_bytes: int = 2) -> Sequence[Layer]:
        """The layers of one pass.

        Parameters
        ----------
        batch : sequences or images.
        sequence : tokens of each; of a model for images the only one that it takes, or 0.
        element_bytes : of an element of an activation.

        Raises
        ------
        ValueError : a number is none that the model takes.
        """


def parameter_count(layers: Sequence[Layer]) -> int:
    """Parameters of all layers."""
    return sum(layer.parameter_count for layer in layers)


def check(name: str, value: int, least: int, most: int | None = None) -> None:
    """Refuse what is no number of something.

    Raises
    ------
    ValueError : it is not whole or out of bounds.
    """
    bad = isinstance(value, bool) or not isinstance(value, int)
    if bad or value < least or (most is not None and value > most):
        to = f" to {most}" if most is not None else ""
        raise ValueError(f"{name} must be an integer from {least}{to}, not {value!r}")
