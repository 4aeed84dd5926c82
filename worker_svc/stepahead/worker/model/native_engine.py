"""`NativeEngine`: the decoder in the compiled step library (`stepahead.kernels.cpu.step`)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from stepahead.kernels.cpu.step.build import BuildUnavailable
from stepahead.kernels.cpu.step.decoder_step import DecoderStep
from stepahead.kernels.cpu.step.library import InstructionSet, TensorKind, instruction_sets
from stepahead.kernels.cpu.step.step_shape import StepShape, tensor_shape
from stepahead.kernels.ops import StepLayout
from stepahead.worker.errors import ModelError
from stepahead.worker.model.config import ModelConfig, layer_norms
from stepahead.worker.model.sampler import LargestLogits
from stepahead.worker.model.step_engine import StepLogits
from stepahead.worker.model.tensor_reader import TensorReader
from stepahead.worker.model.weights import WeightSource
from stepahead.worker.runner import CacheShape

_ATTENTION = {
    TensorKind.QUERY: "q_proj",
    TensorKind.KEY: "k_proj",
    TensorKind.VALUE: "v_proj",
    TensorKind.OUTPUT: "o_proj",
}
_MLP = {TensorKind.GATE: "gate_proj", TensorKind.UP: "up_proj", TensorKind.DOWN: "down_proj"}
_BIASES = {kind: TensorKind[f"{kind.name}_BIAS"] for kind in (*_ATTENTION, *_MLP)}
_HEAD_ALIGNMENT = 32
"""The library pads heads to a multiple of this (`csrc/model.h`)."""


def native_instruction_set() -> tuple[InstructionSet | None, str]:
    """Returns the best instruction set the library has for this CPU, or None and the reason why there is none."""
    try:
        found = instruction_sets()
    except BuildUnavailable as error:
        return None, str(error)
    return (found[0], "") if found else (None, "this CPU has no AVX2")


def declined(config: ModelConfig, num_ranks: int) -> str | None:
    """Returns what the library does not compute of a model on so many ranks, None if it computes all of it."""
    if num_ranks > 1:
        return f"the step library computes on one rank, not on {num_ranks} (tensor parallel)"
    if config.mixture is not None:
        return f"the step library computes no mixtures of experts ({config.model_type})"
    return None


def step_shape(config: ModelConfig, dtype: torch.dtype) -> StepShape:
    """Returns what the library needs to know."""
    return StepShape(
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        vocab_size=config.vocab_size,
        norm_eps=config.norm_eps,
        attention_scale=config.attention_scale,
        rope=config.rope,
        tied_head=config.tied_embeddings,
        layers=config.layers,
        attention_cap=config.attention_cap,
        logit_cap=config.logit_cap,
        # rounded like the embeddings, as transformers does
        embedding_scale=float(torch.tensor(config.embedding_scale, dtype=dtype)),
        gelu=config.gelu,
        post_norms=config.post_norms,
    )


def tensor_names(config: ModelConfig) -> list[tuple[TensorKind, int, str]]:
    """Returns (kind, layer, checkpoint name) of every tensor of a model, in checkpoint order."""
    embedding = "model.embed_tokens.weight"
    names = [(TensorKind.HEAD if config.tied_embeddings else TensorKind.EMBEDDING, 0, embedding)]
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        names.append((TensorKind.ATTENTION_NORM, layer, prefix + "input_layernorm.weight"))
        norms = layer_norms(config)
        names.append((TensorKind.MLP_NORM, layer, f"{prefix}{norms.before_mlp}.weight"))
        if norms.after_attention is not None and norms.after_mlp is not None:
            names.append((TensorKind.POST_ATTENTION_NORM, layer, f"{prefix}{norms.after_attention}.weight"))
            names.append((TensorKind.POST_MLP_NORM, layer, f"{prefix}{norms.after_mlp}.weight"))
        if config.qk_norm:
            names.append((TensorKind.QUERY_NORM, layer, prefix + "self_attn.q_norm.weight"))
            names.append((TensorKind.KEY_NORM, layer, prefix + "self_attn.k_norm.weight"))
        linears = {kind: f"{prefix}self_attn.{name}" for kind, name in _ATTENTION.items()}
        linears |= {kind: f"{prefix}mlp.{name}" for kind, name in _MLP.items()}
        for kind, name in linears.items():
            names.append((kind, layer, f"{name}.weight"))
            if _has_bias(config, kind):
                names.append((_BIASES[kind], layer, f"{name}.bias"))
    names.append((TensorKind.FINAL_NORM, 0, "model.norm.weight"))
    if not config.tied_embeddings:
        names.append((TensorKind.HEAD, 0, "lm_head.weight"))
    return names


def _has_bias(config: ModelConfig, kind: TensorKind) -> bool:
    if kind in _MLP:
        return config.mlp_bias
    return config.output_bias if kind == TensorKind.OUTPUT else config.qkv_bias


class NativeEngine:
    """Implements `StepEngine`."""

    def __init__(
        self,
        config: ModelConfig,
        source: WeightSource,
        dtype: torch.dtype,
        isa: InstructionSet,
        num_threads: int,
        progress: Callable[[int, int], None],
    ) -> None:
        """Reads and packs the weights, one tensor at a time.

        Raises:
            ModelError: a tensor is missing or has a wrong shape, or memory or threads do not suffice.
        """
        # Torch only converts tensors here: its workers would spin on the cores that the library's threads need.
        torch.set_num_threads(1)
        self.name = f"native {isa.name.lower()}"
        shape = step_shape(config, dtype)
        try:
            self.step = DecoderStep(shape, dtype, isa, num_threads)
            reader = TensorReader(source, progress)
            for kind, layer, name in tensor_names(config):
                self.step.set_tensor(kind, layer, reader.read(name, tensor_shape(shape, kind)))
        except MemoryError as error:
            raise ModelError(f"the model does not fit into memory: {error}") from error
        reader.finish()
        padded_head = -(-config.head_dim // _HEAD_ALIGNMENT) * _HEAD_ALIGNMENT
        self.weight_bytes = reader.num_parameters * dtype.itemsize
        self.kv_bytes_per_token = 2 * config.num_layers * config.num_kv_heads * padded_head * dtype.itemsize

    def allocate(self, shape: CacheShape) -> None:
        """See `StepEngine.allocate`."""
        try:
            self.step.allocate(
                num_blocks=shape.num_blocks,
                block_size=shape.block_size,
                max_tokens=max(shape.max_num_batched_tokens, shape.max_num_seqs),
                max_positions=shape.max_model_len,
            )
        except MemoryError as error:
            raise ModelError(str(error)) from error

    def change_blocks(self, copies: tuple[tuple[int, int], ...], zeroed: tuple[int, ...]) -> None:
        """See `StepEngine.change_blocks`."""
        self.step.change_blocks(copies, zeroed)

    def forward(
        self, token_ids: NDArray[np.int64], layout: StepLayout, logit_tokens: NDArray[np.int64]
    ) -> StepLogits:
        """See `StepEngine.forward`."""
        outputs = self.step.forward(token_ids, layout, logit_tokens)
        return StepLogits(outputs.logits, LargestLogits(outputs.best_ids, outputs.best_logits))
