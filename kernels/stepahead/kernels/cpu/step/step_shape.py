"""What the step library must know of a decoder: its sizes, and the shapes that follow from them."""

from __future__ import annotations

from dataclasses import dataclass

from stepahead.kernels.cpu.step.library import Dims, LayerDims, TensorKind
from stepahead.kernels.reference.attention import LayerAttention
from stepahead.kernels.reference.rope import RopeConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureShape:
    """Experts in place of the MLP, silu inside and without biases; see `reference.mixture`."""

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    normalized: bool
    layers: tuple[bool, ...]
    """[num_layers], which layers are mixtures."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShape:
    """Sizes of a decoder, and what its family adds to Llama's."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    norm_eps: float
    attention_scale: float
    rope: RopeConfig
    tied_head: bool
    layers: tuple[LayerAttention, ...] = ()
    """[num_layers], or empty: every layer turns by `rope` and sees all."""
    attention_cap: float | None = None
    logit_cap: float | None = None
    """Bounds, see `reference.elementwise.softcap`."""
    embedding_scale: float = 1.0
    gelu: bool = False
    """The MLP's activation: gelu in its tanh form instead of silu."""
    post_norms: bool = False
    """A norm after attention and after the MLP, before the result joins the residual."""
    mixture: MixtureShape | None = None

    @property
    def ropes(self) -> tuple[RopeConfig, ...]:
        """The different ways to turn."""
        return tuple(dict.fromkeys(layer.rope for layer in self.all_layers if layer.rope is not None))

    def is_mixture(self, layer: int) -> bool:
        """Whether a layer has experts in place of its MLP."""
        return self.mixture is not None and self.mixture.layers[layer]

    @property
    def all_layers(self) -> tuple[LayerAttention, ...]:
        """[num_layers]."""
        return self.layers or (LayerAttention(rope=self.rope),) * self.num_layers


def library_dims(shape: StepShape) -> Dims:
    """Returns what the library is told of a decoder; how it is to compute is left out."""
    layers = [
        LayerDims(
            window=layer.window or 0,
            rope=-1 if layer.rope is None else shape.ropes.index(layer.rope),
            mixture=int(shape.is_mixture(index)),
        )
        for index, layer in enumerate(shape.all_layers)
    ]
    experts = shape.mixture
    return Dims(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        vocab_size=shape.vocab_size,
        tied_head=int(shape.tied_head),
        num_ropes=len(shape.ropes),
        post_norms=int(shape.post_norms),
        gelu=int(shape.gelu),
        num_experts=experts.num_experts if experts else 0,
        experts_per_token=experts.experts_per_token if experts else 0,
        expert_size=experts.intermediate_size if experts else 0,
        normalized=int(experts.normalized) if experts else 0,
        norm_eps=shape.norm_eps,
        attention_scale=shape.attention_scale,
        embedding_scale=shape.embedding_scale,
        attention_cap=shape.attention_cap or 0.0,
        logit_cap=shape.logit_cap or 0.0,
        layers=(LayerDims * shape.num_layers)(*layers),
    )


def tensor_shape(shape: StepShape, kind: TensorKind, layer: int) -> tuple[int, ...]:
    """Returns the shape a weight must have; of GATE, UP and DOWN in a mixture, that of one expert."""
    hidden, inner = shape.hidden_size, shape.intermediate_size
    if shape.mixture is not None and shape.mixture.layers[layer]:
        inner = shape.mixture.intermediate_size
    queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    outputs = {"QUERY": queries, "KEY": keys, "VALUE": keys, "OUTPUT": hidden, "GATE": inner, "UP": inner}
    inputs = {"OUTPUT": queries, "DOWN": inner}
    name = kind.name
    if kind in (TensorKind.EMBEDDING, TensorKind.HEAD):
        return shape.vocab_size, hidden
    if kind == TensorKind.ROUTER and shape.mixture is not None:
        return shape.mixture.num_experts, hidden
    if name in ("QUERY_NORM", "KEY_NORM"):
        return (shape.head_dim,)
    if name.endswith("_BIAS"):
        return (outputs.get(name.removesuffix("_BIAS"), hidden),)
    if name.endswith("_NORM"):
        return (hidden,)
    return outputs.get(name, hidden), inputs.get(name, hidden)


def check_shape(shape: StepShape) -> None:
    """Raises ValueError unless the library can compute the shape."""
    for name in ("num_layers", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "vocab_size"):
        if getattr(shape, name) < 1:
            raise ValueError(f"{name} must be positive, not {getattr(shape, name)}")
    if shape.num_heads % shape.num_kv_heads:
        raise ValueError(f"num_heads {shape.num_heads} is no multiple of num_kv_heads {shape.num_kv_heads}")
    if shape.head_dim < 2 or shape.head_dim % 2:
        raise ValueError(f"head_dim must be even and positive, not {shape.head_dim}")
    if len(shape.all_layers) != shape.num_layers:
        raise ValueError(f"layers: {len(shape.layers)} entries for {shape.num_layers} layers")
    for rope in (shape.rope, *shape.ropes):
        if rope.head_dim != shape.head_dim:
            raise ValueError(f"rope.head_dim {rope.head_dim} is not head_dim {shape.head_dim}")
    _check_mixture(shape)
    for name in ("attention_cap", "logit_cap"):
        cap = getattr(shape, name)
        if cap is not None and not cap > 0:
            raise ValueError(f"{name} must be positive, not {cap}")
    for layer in shape.all_layers:
        if layer.window is not None and not 0 < layer.window < 2**31:
            raise ValueError(f"window must be positive, not {layer.window}")


def _check_mixture(shape: StepShape) -> None:
    mixture = shape.mixture
    if mixture is None:
        return
    if len(mixture.layers) != shape.num_layers:
        raise ValueError(f"mixture.layers: {len(mixture.layers)} entries for {shape.num_layers} layers")
    if mixture.intermediate_size < 1:
        raise ValueError(f"mixture.intermediate_size must be positive, not {mixture.intermediate_size}")
    if not 0 < mixture.experts_per_token <= mixture.num_experts:
        raise ValueError(
            f"experts_per_token must be in 1..num_experts {mixture.num_experts}, not {mixture.experts_per_token}"
        )
    if shape.gelu:
        raise ValueError("the experts of a mixture use silu, not gelu")
