"""Profiles of a model on a machine that are *modelled*, by a roofline for each layer.

A layer of the planner is an embedding, a normalisation or a matrix, as in the paper's figure 3;
blocks of a transformer are cut into these, and operations without parameters (attention, GELU) are
between.

- *On the GPU*: the larger of FLOPs at the datasheet's rate and bytes at that of GPU memory: inputs,
  outputs and the parameters of a matrix. Backward takes twice the time of forward; that of an
  embedding reads the gradient of its output and writes the whole gradient.
- *By direct host access*: the larger of that and the bytes over the link. An embedding reads the
  rows of its tokens, at most all. A normalisation reads its vectors once. A matrix is read in
  forward once by each wave of tiles (`nearstep.memferry.access`). In backward only the half for
  the gradient of the input reads, the matrix once; an embedding and a normalisation's bias read
  nothing.
- *Gradients written to the host*: backward, and then their bytes over the link (`Setup.writes`).
- A tied matrix is a separate layer in its product; its gradient belongs to the embedding, where it
  is complete.

No source gives the rate of the optimizer on the host (`host_params_per_s`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal

from nearstep.errors import ArgumentError
from nearstep.memferry.access import Access, Reads
from nearstep.memferry.profile import LayerProfile, Profile, fingerprint
from nearstep_spec.platform.layer import Layer
from nearstep_spec.platform.machine import Platform
from nearstep_spec.platform.transformer import Transformer

Dtype = Literal["fp32", "tf32", "fp16", "bf16"]
DTYPE_BYTES: Mapping[Dtype, int] = {"fp32": 4, "tf32": 4, "fp16": 2, "bf16": 2}


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A training setup on a machine.

    Attributes
    ----------
    batch, sequence : of one pass.
    dtype : of parameters, activations and gradients on the GPU.
    gpu, host : names of processors.
    reads : of matrices in forward by direct host access.
    writes : of gradients to the host: after a layer's backward, or beside it.
    tied : loads of a tied matrix: by its product, or by its embedding alone, so that it is in GPU
        memory for the product.
    recompute : the forward of a block is computed again before its backward.
    copies : times that a parameter passes the link to the GPU: more if it is sent on to others.
    host_params_per_s : rate of the optimizer on the host.
    frozen : names of planner layers without gradients.
    """

    batch: int
    sequence: int
    dtype: Dtype = "fp32"
    gpu: str = "gpu"
    host: str = "cpu"
    reads: Reads = "wave"
    writes: Literal["after", "beside"] = "after"
    tied: Literal["product", "embedding"] = "product"
    recompute: bool = False
    copies: int = 1
    host_params_per_s: float = 1e9
    frozen: frozenset[str] = frozenset()


@dataclass(frozen=True)
class _Part:
    """A layer of the planner, or the computation between two if `kind` is `between`."""

    name: str
    kind: Literal["embedding", "norm", "matrix", "between"]
    elements: int = 0
    flops: int = 0
    moved: int = 0
    """Elements of inputs and outputs."""
    columns: int = 0
    """Outputs of a matrix."""
    inner: int = 0
    rows: int = 0
    tied: bool = False


def profile(platform: Platform, model: Transformer, setup: Setup) -> Profile:
    """Model the profile of a model on a machine.

    Raises
    ------
    ArgumentError : the machine lacks a figure that is needed, or the host updates nothing.
    """
    rate = setup.host_params_per_s
    if not rate > 0:
        raise ArgumentError(f"host_params_per_s must be above 0, not {rate!r}")
    width = DTYPE_BYTES[setup.dtype]
    layers = model.layers(setup.batch, setup.sequence, width)
    roof = _Roof(platform, setup)
    parts = [part for layer in layers for part in _parts(model, layer, setup)]
    known = {part.name for part in parts}
    for name in setup.frozen:
        if name not in known:
            raise ArgumentError(f"frozen must be of {', '.join(sorted(known))}, not {name!r}")
    tensors = [
        (f"{layer.name}.{name}", shape, setup.dtype)
        for layer in layers
        for name, shape in layer.parameters.items()
    ]
    return Profile(
        source="modelled",
        description=(
            f"{model.name}, batch {setup.batch}, sequence {setup.sequence}, {setup.dtype}, on "
            f"{platform.name}: roofline, matrices read by {setup.reads}"
        ),
        fingerprint=fingerprint(tensors),
        layers=tuple(roof.layers(parts)),
        activation_bytes=sum(layer.activation_bytes for layer in layers),
    )


def _parts(model: Transformer, layer: Layer, setup: Setup) -> Iterator[_Part]:
    """Cut a layer into layers of the planner, in the order of forward."""
    tokens, hidden = setup.batch * (setup.sequence or model.tokens), model.hidden
    width = tokens * hidden
    groups: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, shape in layer.parameters.items():
        group = name.rpartition(".")[0] or name
        groups.setdefault(group, {})[name] = shape
    for group, tensors in groups.items():
        elements = sum(prod(shape) for shape in tensors.values())
        name = f"{layer.name}.{group}"
        weight = tensors.get(f"{group}.weight")
        if weight is not None and len(weight) > 1:
            rows = setup.batch if layer.name == "head" else tokens
            inner, columns = prod(weight[1:]), weight[0]
            yield _matrix(name, elements, rows, inner, columns)
        elif weight is not None or group.startswith("norm"):
            yield _Part(name, "norm", elements, moved=2 * width)
        else:
            yield _Part(name, "embedding", elements, moved=2 * width, inner=hidden, rows=tokens)
        if group == "qkv":
            scores = setup.batch * model.heads * (setup.sequence or model.tokens) ** 2
            flops = 4 * tokens * (setup.sequence or model.tokens) * hidden
            yield _Part(f"{layer.name}.attention", "between", 0, flops, 4 * width + 4 * scores)
        elif group == "up":
            yield _Part(f"{layer.name}.gelu", "between", 0, 0, 8 * width)
        elif group in ("projection", "down"):
            yield _Part(f"{layer.name}.{group} residual", "between", 0, 0, 3 * width)
    if layer.tied:
        elements = model.vocabulary * hidden
        name = f"{layer.name}.tied"
        yield _matrix(name, elements, tokens, hidden, model.vocabulary, tied=True)


def _matrix(
    name: str, elements: int, rows: int, inner: int, columns: int, *, tied: bool = False
) -> _Part:
    flops, moved = 2 * rows * inner * columns, rows * (inner + columns)
    return _Part(name, "matrix", elements, flops, moved, columns, inner, rows, tied)


class _Roof:
    """Rates of a machine."""

    def __init__(self, platform: Platform, setup: Setup) -> None:
        gpu = platform.processors.get(setup.gpu)
        if gpu is None:
            raise ArgumentError(f"{platform.name}: there is no processor {setup.gpu!r}")
        if setup.dtype not in gpu.flops or gpu.memory_bytes_per_s is None:
            raise ArgumentError(
                f"{platform.name}: {setup.gpu} must have flops.{setup.dtype} and memory_bytes_per_s"
            )
        self.setup = setup
        self.flops = float(gpu.flops[setup.dtype])
        self.memory = float(gpu.memory_bytes_per_s)
        self.access = Access.of(platform, setup.host, setup.gpu, setup.reads)
        self.down, self.up = self.access.down / setup.copies, self.access.up
        self.width = DTYPE_BYTES[setup.dtype]

    def layers(self, parts: Sequence[_Part]) -> Iterator[LayerProfile]:
        for place, part in enumerate(parts):
            if part.kind == "between":
                continue
            after = parts[place + 1] if place + 1 < len(parts) else None
            gap = after is not None and after.kind == "between"
            times = self._computed(after) if gap and after is not None else (0.0, 0.0)
            yield self._layer(part, times)

    def _computed(self, part: _Part) -> tuple[float, float]:
        """Seconds of forward and backward with all data in GPU memory."""
        moved = (part.moved + (part.elements if part.kind == "matrix" else 0)) * self.width
        forward = max(part.flops / self.flops, moved / self.memory)
        if part.kind == "embedding":  # backward writes the whole gradient
            return forward, (part.moved / 2 + part.elements) * self.width / self.memory
        return forward, 2 * forward

    def _layer(self, part: _Part, between: tuple[float, float]) -> LayerProfile:
        setup = self.setup
        loaded = not part.tied or setup.tied == "product"
        nbytes = part.elements * self.width if loaded else 0
        trained = not part.tied and part.name not in setup.frozen
        gradient = nbytes if trained else 0
        forward, backward = self._computed(part)
        ahead, back = (each / self.down for each in self._reads(part))
        written = gradient / self.up
        dha = max(forward, ahead), backward / 2 + max(backward / 2, back)
        if setup.recompute and part.name.startswith("block"):
            backward, dha = backward + forward, (dha[0], sum(dha))
            between = between[0], sum(between)

        def writes(seconds: float) -> float | None:
            beside = setup.writes == "beside"
            return (max(seconds, written) if beside else seconds + written) if trained else None

        return LayerProfile(
            name=part.name,
            parameter_bytes=nbytes,
            gradient_bytes=gradient,
            load_s=nbytes / self.down,
            send_s=gradient / self.up,
            forward_s=forward,
            backward_s=backward,
            forward_dha_s=dha[0],
            backward_dha_s=dha[1],
            backward_write_s=writes(backward),
            backward_dha_write_s=writes(dha[1]),
            between_forward_s=between[0],
            between_backward_s=between[1],
            update_s=part.elements / setup.host_params_per_s if trained else 0.0,
        )

    def _reads(self, part: _Part) -> tuple[float, float]:
        """Bytes over the link in forward and in backward by direct host access."""
        nbytes = part.elements * self.width
        if part.kind == "embedding":
            return min(part.rows * part.inner, part.elements) * self.width, 0
        if part.kind == "norm":
            return nbytes, nbytes / 2
        return nbytes * self.access.matrix_reads(part.rows, part.columns), nbytes
