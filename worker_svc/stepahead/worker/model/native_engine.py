"""`NativeEngine`: the decoder in the compiled step library (`stepahead.kernels.cpu.step`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from stepahead.kernels.cpu.step.build import BuildUnavailable
from stepahead.kernels.cpu.step.decoder_step import DecoderStep
from stepahead.kernels.cpu.step.draw_columns import DrawColumns
from stepahead.kernels.cpu.step.library import InstructionSet, TensorKind, instruction_sets, left_out_sets
from stepahead.kernels.cpu.step.step_chain import Cells
from stepahead.kernels.cpu.step.step_shape import MixtureShape, StepShape, tensor_shape
from stepahead.kernels.ops import StepLayout
from stepahead.worker.errors import ModelError
from stepahead.worker.model.cells import SlotCells
from stepahead.worker.model.chained_steps import ChainedSteps
from stepahead.worker.model.config import ModelConfig, layer_norms
from stepahead.worker.model.memory import refused_without_memory, weight_bytes_of, weight_remedy
from stepahead.worker.model.sampler import DrawRows, LargestLogits
from stepahead.worker.model.step_engine import StepLogits
from stepahead.worker.model.tensor_reader import TensorReader
from stepahead.worker.model.weights import WeightSource
from stepahead.worker.runner import CacheShape, SamplingColumns

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


def native_instruction_set(wanted: InstructionSet | None = None) -> tuple[InstructionSet | None, str]:
    """Returns the wanted or the best instruction set, or None and the reason why there is none."""
    try:
        found = instruction_sets()
    except BuildUnavailable as error:
        return None, str(error)
    if wanted is not None:
        return (wanted, "") if wanted in found else (None, f"this CPU or the compiled library has no {wanted.name}")
    return (found[0], "") if found else (None, "this CPU has no AVX2")


def left_out_paths() -> list[str]:
    """Returns what this CPU has and the built library does not."""
    return [isa.name.lower() for isa in left_out_sets()]


def declined(num_ranks: int) -> str | None:
    """Returns why the library does not compute on so many ranks, None if it does."""
    if num_ranks > 1:
        return f"the step library computes on one rank, not on {num_ranks} (tensor parallel)"
    return None


def step_shape(config: ModelConfig, dtype: torch.dtype) -> StepShape:
    """Returns what the library needs to know."""
    experts = config.mixture
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
        mixture=experts
        and MixtureShape(
            num_experts=experts.num_experts,
            experts_per_token=experts.experts_per_token,
            intermediate_size=experts.intermediate_size,
            normalized=experts.normalized,
            layers=experts.layers,
        ),
    )


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """Where a tensor of a checkpoint goes."""

    kind: TensorKind
    layer: int
    name: str
    expert: int = 0


def tensor_places(config: ModelConfig) -> list[TensorPlace]:
    """Returns every tensor of a model, in checkpoint order."""
    embedding = "model.embed_tokens.weight"
    places = [TensorPlace(TensorKind.HEAD if config.tied_embeddings else TensorKind.EMBEDDING, 0, embedding)]
    for layer in range(config.num_layers):
        places += _layer_places(config, layer)
    places.append(TensorPlace(TensorKind.FINAL_NORM, 0, "model.norm.weight"))
    if not config.tied_embeddings:
        places.append(TensorPlace(TensorKind.HEAD, 0, "lm_head.weight"))
    return places


def _layer_places(config: ModelConfig, layer: int) -> list[TensorPlace]:
    prefix, norms = f"model.layers.{layer}.", layer_norms(config)
    vectors = {TensorKind.ATTENTION_NORM: "input_layernorm", TensorKind.MLP_NORM: norms.before_mlp}
    if norms.after_attention is not None and norms.after_mlp is not None:
        vectors |= {
            TensorKind.POST_ATTENTION_NORM: norms.after_attention,
            TensorKind.POST_MLP_NORM: norms.after_mlp,
        }
    if config.qk_norm:
        vectors |= {TensorKind.QUERY_NORM: "self_attn.q_norm", TensorKind.KEY_NORM: "self_attn.k_norm"}
    linears = {kind: f"self_attn.{name}" for kind, name in _ATTENTION.items()}
    mixture = config.mixture
    if mixture is None or not mixture.layers[layer]:
        linears |= {kind: f"mlp.{name}" for kind, name in _MLP.items()}
        mixture = None
    places = [TensorPlace(kind, layer, f"{prefix}{name}.weight") for kind, name in (vectors | linears).items()]
    for kind, name in linears.items():
        if _has_bias(config, kind):
            places.append(TensorPlace(_BIASES[kind], layer, f"{prefix}{name}.bias"))
    if mixture is not None:
        places.append(TensorPlace(TensorKind.ROUTER, layer, f"{prefix}mlp.gate.weight"))
        for expert in range(mixture.num_experts):
            names = {kind: f"{prefix}mlp.experts.{expert}.{name}.weight" for kind, name in _MLP.items()}
            places += [TensorPlace(kind, layer, name, expert) for kind, name in names.items()]
    return places


def _has_bias(config: ModelConfig, kind: TensorKind) -> bool:
    if kind in _MLP:
        return config.mlp_bias
    return config.output_bias if kind == TensorKind.OUTPUT else config.qkv_bias


def _open_step(
    shape: StepShape, dtype: torch.dtype, isa: InstructionSet, num_threads: int, *, pin_threads: bool
) -> DecoderStep:
    """Raises ModelError for sizes or threads that the library does not compute with, MemoryError without memory."""
    try:
        return DecoderStep(shape, dtype, isa, num_threads, pin_threads=pin_threads)
    except ValueError as error:
        raise ModelError(f"the model cannot be computed: {error}") from error


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
        *,
        pin_threads: bool = False,
    ) -> None:
        """Reads and packs the weights, one tensor at a time.

        Raises:
            ModelError: a tensor is missing or has a wrong shape, or memory or threads do not suffice.
        """
        # Torch only converts tensors here: its workers would spin on the cores that the library's threads need.
        torch.set_num_threads(1)
        self.name = f"native {isa.name.lower()}"
        shape = step_shape(config, dtype)
        with refused_without_memory("the model", weight_bytes_of(source, dtype), weight_remedy(dtype)):
            self.step = _open_step(shape, dtype, isa, num_threads, pin_threads=pin_threads)
            reader = TensorReader(source, progress)
            for place in tensor_places(config):
                tensor = reader.read(place.name, tensor_shape(shape, place.kind, place.layer))
                self.step.set_tensor(place.kind, place.layer, tensor, expert=place.expert)
        reader.finish()
        self._vocab_size = shape.vocab_size
        self._logits = np.zeros((0, shape.vocab_size), np.float32)
        padded_head = -(-config.head_dim // _HEAD_ALIGNMENT) * _HEAD_ALIGNMENT
        self.weight_bytes = reader.num_parameters * dtype.itemsize
        self.stored_bytes = self.step.stored_bytes
        self.kv_bytes_per_token = 2 * config.num_layers * config.num_kv_heads * padded_head * dtype.itemsize

    @property
    def draw_rows(self) -> DrawRows:
        """See `StepEngine.draw_rows`."""
        return self._draw

    def _draw(
        self,
        logits: NDArray[np.float32],
        rows: NDArray[np.int64],
        largest: NDArray[np.float32],
        sampling: SamplingColumns,
        uniform: NDArray[np.float64],
    ) -> NDArray[np.int64]:
        columns = DrawColumns(
            rows=rows,
            largest=largest[rows],
            temperature=sampling.temperature[rows],
            top_p=sampling.top_p[rows],
            top_k=sampling.top_k[rows],
            min_p=sampling.min_p[rows],
            uniform=uniform[rows],
        )
        return self.step.draw(logits, columns)

    def allocate(self, shape: CacheShape) -> None:
        """See `StepEngine.allocate`."""
        try:
            self.step.allocate(
                num_blocks=shape.num_blocks,
                block_size=shape.block_size,
                max_tokens=max(shape.max_num_batched_tokens, shape.max_num_seqs),
                max_positions=shape.max_model_len,
                groups=shape.layer_groups,
            )
        except ValueError as error:
            raise ModelError(f"the model cannot be computed in such steps: {error}") from error
        except MemoryError as error:
            raise ModelError(
                f"{error}: lower --max-num-batched-tokens (the step), or --max-model-len, --num-kv-blocks or "
                "--kv-cache-bytes (the cache)"
            ) from error
        self._logits = np.zeros((shape.max_num_seqs, self._vocab_size), np.float32)

    def chain(self, cells: SlotCells) -> ChainedSteps:
        """See `StepEngine.chain`."""
        return ChainedSteps(self.step.chain(Cells(cells.token_ids, cells.positions)), self._logits)

    def change_blocks(self, copies: tuple[tuple[int, int], ...], zeroed: tuple[int, ...]) -> None:
        """See `StepEngine.change_blocks`."""
        self.step.change_blocks(copies, zeroed)

    def forward(
        self, token_ids: NDArray[np.int64], layout: StepLayout, logit_tokens: NDArray[np.int64]
    ) -> StepLogits:
        """See `StepEngine.forward`. The logits of a step lie where those of the step before it lay."""
        # more rows than sequences: prompts ask for theirs, which is rare, and too much memory to keep
        logits = self._logits[: len(logit_tokens)] if len(logit_tokens) <= len(self._logits) else None
        outputs = self.step.forward(token_ids, layout, logit_tokens, logits=logits)
        return StepLogits(outputs.logits, LargestLogits(outputs.best_ids, outputs.best_logits))
