"""A random decoder, in the compiled step and in the NumPy reference, for tests of the step library."""

from __future__ import annotations

from functools import cache
from unittest.mock import patch

import numpy as np
import torch

from stepahead.kernels.cpu.step import decoder_step
from stepahead.kernels.cpu.step.build import BuildUnavailable, emulated_library
from stepahead.kernels.cpu.step.decoder_step import DecoderStep
from stepahead.kernels.cpu.step.library import InstructionSet, TensorKind, instruction_sets, open_library
from stepahead.kernels.cpu.step.step_shape import StepShape, tensor_shape
from stepahead.kernels.ops import StepLayout
from stepahead.kernels.reference.attention import paged_attention, write_kv
from stepahead.kernels.reference.elementwise import gelu_tanh_mul, rms_norm, silu_mul, softcap
from stepahead.kernels.reference.mixture import choose_experts
from stepahead.kernels.reference.rope import RopeConfig, apply_rope, rope_tables

MAX_POSITIONS = 400
MLP = (TensorKind.GATE, TensorKind.UP, TensorKind.DOWN)
MLP_BIASES = (TensorKind.GATE_BIAS, TensorKind.UP_BIAS, TensorKind.DOWN_BIAS)
EMULATED = "AMX_BF16 emulated"
"""In place of an instruction set: the AMX path on tile instructions in software."""


def available_sets():
    """Names of the instruction sets that run here; empty (tests are skipped) where nothing can be compiled."""
    try:
        return [isa.name for isa in instruction_sets()]
    except BuildUnavailable:
        return []


@cache
def emulation():
    """The library of `EMULATED`."""
    return open_library(emulated_library())


def bf16_sets():
    """What bfloat16 models run on here: `available_sets`, and the emulation of AMX where there is AVX512-BF16."""
    sets = available_sets()
    return [*sets, EMULATED] if "AVX512_BF16" in sets else sets


def cases():
    """(instruction set, dtype) of all that runs here."""
    return [(isa, torch.float32) for isa in available_sets()] + [(isa, torch.bfloat16) for isa in bf16_sets()]


def shape_of(**sizes):
    """A small decoder whose sizes fit no tile, changed by `sizes`."""
    fields = {
        "num_layers": 2,
        "hidden_size": 40,
        "intermediate_size": 72,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 32,
        "vocab_size": 99,
        "norm_eps": 1e-5,
        "tied_head": True,
        **sizes,
    }
    head_dim = fields["head_dim"]
    rope = RopeConfig(head_dim=head_dim, theta=10_000.0)
    return StepShape(**{"rope": rope, "attention_scale": head_dim**-0.5, **fields})


def random_weights(shape, *, biases, qk_norm, seed=0):
    """(kind, layer) -> float32 array, for every weight the shape has; experts are the array's first dimension."""
    rng = np.random.default_rng(seed)
    weights = {}
    for kind in TensorKind:
        if (kind.name.endswith("BIAS") and not biases) or (kind.name in ("QUERY_NORM", "KEY_NORM") and not qk_norm):
            continue
        if kind == TensorKind.EMBEDDING and shape.tied_head:
            continue
        if kind.name.startswith("POST") and not shape.post_norms:
            continue
        if kind == TensorKind.ROUTER and shape.mixture is None:
            continue
        once = kind in (TensorKind.EMBEDDING, TensorKind.HEAD, TensorKind.FINAL_NORM)
        for layer in range(1 if once else shape.num_layers):
            mixture = shape.is_mixture(layer)
            if (kind == TensorKind.ROUTER and not mixture) or (mixture and kind in MLP_BIASES):
                continue
            size = tensor_shape(shape, kind, layer)
            if mixture and kind in MLP:
                size = (shape.mixture.num_experts, *size)
            scale = 0.3 if len(size) == 1 else size[-1] ** -0.5 * (5 if kind == TensorKind.ROUTER else 1)
            array = rng.normal(scale=scale, size=size) + (1 if kind.name.endswith("NORM") else 0)
            weights[kind, layer] = array.astype(np.float32)
    return weights


def make_step(shape, weights, isa, *, dtype=torch.float32, num_threads=2, num_blocks=40, block_size=16, **options):
    """A step with weights and cache."""
    if isa == EMULATED:
        with patch.object(decoder_step, "step_library", emulation):
            step = DecoderStep(shape, dtype, InstructionSet.AMX_BF16, num_threads, **options)
    else:
        step = DecoderStep(shape, dtype, InstructionSet[isa], num_threads, **options)
    for (kind, layer), array in weights.items():
        experts = array if array.ndim == 3 else [array]
        for expert, matrix in enumerate(experts):
            step.set_tensor(kind, layer, torch.from_numpy(matrix), expert=expert)
    step.allocate(num_blocks=num_blocks, block_size=block_size, max_tokens=300, max_positions=MAX_POSITIONS)
    return step


def layout_of(rows, block_tables, block_size=16, padding=10**6):
    """rows: (first position, tokens) for each block table.

    `padding` fills what lies past a row's need. It must not be read: unless told, a block that does not exist.
    """
    positions, slots = [], []
    for (start, count), blocks in zip(rows, block_tables, strict=True):
        for position in range(start, start + count):
            positions.append(position)
            slots.append(blocks[position // block_size] * block_size + position % block_size)
    width = max(len(blocks) for blocks in block_tables)
    return StepLayout(
        positions=np.array(positions, np.int64),
        slot_mapping=np.array(slots, np.int64),
        query_start_loc=np.cumsum([0, *(count for _, count in rows)]).astype(np.int32),
        seq_lens=np.array([start + count for start, count in rows], np.int32),
        block_tables=np.array([[*blocks, *[padding] * (width - len(blocks))] for blocks in block_tables], np.int32),
    )


class ReferenceDecoder:
    """The decoder out of the reference operations, in float32 and float64."""

    def __init__(self, shape, weights, num_blocks=40, block_size=16):
        self.shape = shape
        self.weights = weights
        cache = (num_blocks, 2, shape.num_kv_heads, block_size, shape.head_dim)
        self.caches = [np.zeros(cache, np.float32) for _ in range(shape.num_layers)]
        self.tables = {rope: rope_tables(rope, MAX_POSITIONS) for rope in shape.ropes}

    def linear(self, x, kind, layer=0, expert=None):
        weight = self.weights[kind, layer] if expert is None else self.weights[kind, layer][expert]
        result = x.astype(np.float64) @ weight.astype(np.float64).T
        biased = kind not in (TensorKind.HEAD, TensorKind.ROUTER)
        bias = self.weights.get((TensorKind[f"{kind.name}_BIAS"], layer)) if biased else None
        return (result if bias is None else result + bias).astype(np.float32)

    def norm(self, x, kind, layer=0):
        weight = self.weights.get((kind, layer))
        return x if weight is None else rms_norm(x, weight, self.shape.norm_eps)

    def attention(self, x, layer, layout):
        shape, parts = self.shape, {}
        for kind in (TensorKind.QUERY, TensorKind.KEY, TensorKind.VALUE):
            parts[kind] = self.linear(x, kind, layer).reshape(len(x), -1, shape.head_dim)
        queries = self.norm(parts[TensorKind.QUERY], TensorKind.QUERY_NORM, layer)
        keys = self.norm(parts[TensorKind.KEY], TensorKind.KEY_NORM, layer)
        attends = shape.all_layers[layer]
        if attends.rope is not None:
            tables = self.tables[attends.rope]
            queries, keys = (apply_rope(heads, layout.positions, *tables) for heads in (queries, keys))
        write_kv(self.caches[layer], keys, parts[TensorKind.VALUE], layout.slot_mapping)
        starts = layout.query_start_loc
        mixed = [
            paged_attention(
                queries[starts[row] : starts[row + 1]],
                self.caches[layer],
                layout.block_tables[row],
                int(layout.seq_lens[row]),
                shape.attention_scale,
                window=attends.window,
                floor=0 if layout.floors is None else int(layout.floors[row]),
                cap=shape.attention_cap,
            )
            for row in range(len(starts) - 1)
        ]
        return np.concatenate(mixed).reshape(len(x), -1)

    def mlp(self, x, layer, expert=None):
        gated = gelu_tanh_mul if self.shape.gelu else silu_mul
        gate_up = [self.linear(x, kind, layer, expert) for kind in (TensorKind.GATE, TensorKind.UP)]
        return self.linear(gated(np.concatenate(gate_up, axis=-1)), TensorKind.DOWN, layer, expert)

    def mixture(self, x, layer):
        mixture = self.shape.mixture
        logits = self.linear(x, TensorKind.ROUTER, layer)
        weights, chosen = choose_experts(logits, mixture.experts_per_token, normalized=mixture.normalized)
        answers = np.stack([self.mlp(x, layer, expert) for expert in range(mixture.num_experts)], axis=1)
        picked = np.take_along_axis(answers, chosen[:, :, None], axis=1)
        return (picked * weights[:, :, None]).sum(axis=1, dtype=np.float32)

    def forward(self, token_ids, layout):
        """Logits of all tokens."""
        table = TensorKind.HEAD if self.shape.tied_head else TensorKind.EMBEDDING
        x = self.weights[table, 0][token_ids] * np.float32(self.shape.embedding_scale)
        for layer in range(self.shape.num_layers):
            mixed = self.attention(self.norm(x, TensorKind.ATTENTION_NORM, layer), layer, layout)
            x = x + self.norm(self.linear(mixed, TensorKind.OUTPUT, layer), TensorKind.POST_ATTENTION_NORM, layer)
            normed = self.norm(x, TensorKind.MLP_NORM, layer)
            answer = self.mixture(normed, layer) if self.shape.is_mixture(layer) else self.mlp(normed, layer)
            x = x + self.norm(answer, TensorKind.POST_MLP_NORM, layer)
        logits = self.linear(self.norm(x, TensorKind.FINAL_NORM), TensorKind.HEAD)
        return logits if self.shape.logit_cap is None else softcap(logits, self.shape.logit_cap)
