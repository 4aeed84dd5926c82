"""A whole decoder on `CudaOps`, its kernels run on this CPU, against the reference decoder (F2, G7, H7)."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from stepahead.kernels.cpu.step.library import TensorKind
from stepahead.kernels.cuda.host.backend import HostBackend
from stepahead.kernels.cuda.ops import CudaOps
from stepahead.kernels.ops import AttentionShape
from tests.kernels.step_model import MAX_POSITIONS, ReferenceDecoder, layout_of, random_weights, shape_of

NUM_BLOCKS, BLOCK_SIZE = 40, 16


class OpsDecoder:
    """The decoder of `worker.model.decoder` in a few lines, over any `Ops`."""

    def __init__(self, shape, weights, dtype, backend):
        self.shape, self.weights, self.dtype = shape, weights, dtype
        sizes = {
            name: getattr(shape, name) for name in ("num_layers", "num_heads", "num_kv_heads", "head_dim", "rope")
        }
        self.ops = CudaOps(AttentionShape(**sizes, scale=shape.attention_scale), dtype, backend)
        self.num_bytes = self.ops.allocate_cache(NUM_BLOCKS, BLOCK_SIZE, MAX_POSITIONS)

    def linear(self, x, layer, *kinds):
        stacked = np.concatenate([self.weights[kind, layer] for kind in kinds])
        return self.ops.linear(x, self.ops.pack_linear(torch.from_numpy(stacked), None))

    def norm(self, x, kind, layer=0):
        weight = torch.from_numpy(self.weights[kind, layer]).to(self.dtype)
        return self.ops.rms_norm(x, weight, self.shape.norm_eps)

    def normalize_heads(self, qkv, layer):
        heads = qkv.view(len(qkv), -1, self.shape.head_dim)
        queries, keys = heads.split([self.shape.num_heads, self.shape.num_kv_heads, self.shape.num_kv_heads], 1)[:2]
        queries.copy_(self.norm(queries, TensorKind.QUERY_NORM, layer))
        keys.copy_(self.norm(keys, TensorKind.KEY_NORM, layer))

    def forward(self, token_ids, layout):
        """Logits of all tokens, in the layout's order."""
        step = self.ops.prepare(layout)
        table = torch.from_numpy(self.weights[TensorKind.HEAD, 0]).to(self.dtype)
        x = self.ops.take_rows(table, token_ids[step.token_order])
        for layer in range(self.shape.num_layers):
            normed = self.norm(x, TensorKind.ATTENTION_NORM, layer)
            qkv = self.linear(normed, layer, TensorKind.QUERY, TensorKind.KEY, TensorKind.VALUE)
            self.normalize_heads(qkv, layer)
            x = x + self.linear(self.ops.attend(layer, qkv, step), layer, TensorKind.OUTPUT)
            gate_up = self.linear(self.norm(x, TensorKind.MLP_NORM, layer), layer, TensorKind.GATE, TensorKind.UP)
            x = x + self.linear(self.ops.silu_mul(gate_up), layer, TensorKind.DOWN)
        logits = self.linear(self.norm(x, TensorKind.FINAL_NORM), 0, TensorKind.HEAD).float().numpy()
        placed = np.empty_like(logits)
        placed[step.token_order] = logits
        return placed


@pytest.mark.parametrize(
    ("dtype", "allowed"), [(torch.float32, 1e-5), (torch.bfloat16, 0.03), (torch.float16, 0.005)]
)
def test_mixed_steps_of_a_decoder(dtype, allowed):
    shape = shape_of()
    weights = random_weights(shape, biases=False, qk_norm=True)
    decoder, reference = OpsDecoder(shape, weights, dtype, HostBackend()), ReferenceDecoder(shape, weights)
    assert decoder.num_bytes == shape.num_layers * NUM_BLOCKS * 2 * 2 * BLOCK_SIZE * 32 * dtype.itemsize
    random = np.random.default_rng(3)
    blocks = random.permutation(NUM_BLOCKS).reshape(4, 10).tolist()
    fed = [0, 0, 0, 0]
    for counts in ([20, 1, 33, 7], [1, 5, 1, 1], [1, 1, 1, 40], [1, 1, 1, 1]):
        layout = layout_of(list(zip(fed, counts, strict=True)), blocks, BLOCK_SIZE)
        tokens = random.integers(0, shape.vocab_size, sum(counts))
        wanted = reference.forward(tokens, layout)
        error = np.linalg.norm(decoder.forward(tokens, layout) - wanted) / np.linalg.norm(wanted)
        assert error < allowed
        fed = [start + count for start, count in zip(fed, counts, strict=True)]


def test_f2_block_copies_reach_every_layer():
    shape = shape_of()
    ops = OpsDecoder(shape, random_weights(shape, biases=False, qk_norm=True), torch.bfloat16, HostBackend()).ops
    for block in range(NUM_BLOCKS):
        ops._cache[:, block] = block
    ops.change_blocks(((1, 2), (2, 3)), (4,))
    assert ops._cache[:, :6].float().mean((2, 3, 4, 5)).tolist() == [[0, 1, 1, 2, 0, 5]] * shape.num_layers
