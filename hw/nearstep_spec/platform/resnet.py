"""The shape of ResNet-50."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from nearstep_spec.platform.layer import Layer, check

STAGES = ((3, 64), (4, 128), (6, 256), (3, 512))
"""Blocks of each stage, and channels of their convolution of 3 x 3; the output has four times as
many.
"""

EXPANSION = 4


@dataclass(frozen=True)
class _Convolution:
    """A convolution without bias, and the batch normalisation behind it."""

    name: str
    channels: int
    filters: int
    kernel: int
    side: int  # of the output

    @property
    def parameters(self) -> dict[str, tuple[int, ...]]:
        return {
            f"{self.name}.weight": (self.filters, self.channels, self.kernel, self.kernel),
            f"{self.name}.norm.weight": (self.filters,),
            f"{self.name}.norm.bias": (self.filters,),
        }

    @property
    def made(self) -> int:
        return self.filters * self.side**2

    @property
    def flops(self) -> int:
        return 2 * self.made * self.channels * self.kernel**2


@dataclass(frozen=True, kw_only=True)
class ResNet50:
    """ResNet-50 for 1000 classes, with the stride in the convolution of 3 x 3.

    Attributes
    ----------
    source : of the shape.
    stated : published number of parameters.
    image : pixels on a side, a multiple of 32.
    batch : of the source's training, or 0.
    """

    name: str
    source: str
    stated: float
    image: int = 224
    batch: int = 0

    def layers(self, batch: int, sequence: int = 0, element_bytes: int = 4) -> Sequence[Layer]:
        """List stem, blocks and classifier, for a pass over `batch` images.

        Activations are the inputs of convolutions, normalisations and the pooling, and the indices
        of the pooling's maxima (8 bytes each in torch).

        Parameters
        ----------
        sequence : 0.
        element_bytes : of an element of an activation.

        Raises
        ------
        ValueError : a number is invalid for the model.
        """
        check("batch", batch, 1)
        check("sequence", sequence, 0, 0)
        check("element_bytes", element_bytes, 1)
        return [self._stem(batch, element_bytes), *self._blocks(batch, element_bytes)]

    def _stem(self, batch: int, element_bytes: int) -> Layer:
        stem = _Convolution("conv", 3, 64, 7, self.image // 2)
        pooled = 64 * (self.image // 4) ** 2
        kept = 3 * self.image**2 + 2 * stem.made  # input, normalisation's, and ReLU's result
        return Layer(
            name="stem",
            parameters=stem.parameters,
            forward_flops=batch * stem.flops,
            backward_flops=batch * stem.flops,  # an image needs no gradient
            activation_bytes=batch * (kept * element_bytes + 8 * pooled),
            output_bytes=batch * pooled * element_bytes,
        )

    def _blocks(self, batch: int, element_bytes: int) -> Iterator[Layer]:
        side, channels = self.image // 4, 64
        for stage, (count, width) in enumerate(STAGES):
            for i in range(count):
                out = side // 2 if stage and not i else side
                name = f"stage{stage + 1}.{i}"
                block = self._block(name, (channels, side), (width, out), batch)
                yield block.layer(element_bytes)
                side, channels = out, EXPANSION * width
        weights = {"classes.weight": (1000, channels), "classes.bias": (1000,)}
        flops = 2 * batch * 1000 * channels
        yield Layer(
            name="classifier",
            parameters=weights,
            forward_flops=flops,
            backward_flops=2 * flops,
            activation_bytes=batch * channels * element_bytes,
            output_bytes=batch * 1000 * element_bytes,
        )

    def _block(
        self, name: str, taken: tuple[int, int], made: tuple[int, int], batch: int
    ) -> "_Block":
        (channels, side), (width, out) = taken, made
        convolutions = [
            _Convolution("conv1", channels, width, 1, side),
            _Convolution("conv2", width, width, 3, out),
            _Convolution("conv3", width, EXPANSION * width, 1, out),
        ]
        if channels != EXPANSION * width:
            convolutions.append(_Convolution("shortcut", channels, EXPANSION * width, 1, out))
        return _Block(name, convolutions, channels * side**2, batch)


@dataclass(frozen=True)
class _Block:
    """Three convolutions, and a parallel one if input and output differ in channels."""

    name: str
    convolutions: Sequence[_Convolution]
    taken: int
    batch: int

    def layer(self, element_bytes: int) -> Layer:
        first, second, third = self.convolutions[:3]
        flops = self.batch * sum(each.flops for each in self.convolutions)
        # the block's input, the output of each convolution, and those of two ReLUs
        kept = self.taken + sum(each.made for each in self.convolutions) + first.made + second.made
        return Layer(
            name=self.name,
            parameters={k: v for each in self.convolutions for k, v in each.parameters.items()},
            forward_flops=flops,
            backward_flops=2 * flops,
            activation_bytes=self.batch * kept * element_bytes,
            output_bytes=self.batch * third.made * element_bytes,
        )
