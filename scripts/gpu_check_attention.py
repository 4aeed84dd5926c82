"""Part of the GPU check: attention against its floors, torch's own, and FlashInfer where it is installed."""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - the name everyone reads
from gpu_check_kernels import copy_gb_per_s
from gpu_check_rig import Rig, Row

from stepahead.kernels.cuda.attention import AttentionOptions, chunk_tiles, paged_chunk, paged_decode

BLOCK = 16
TARGET_OF_COPY = 0.85
"""Of the copy's bandwidth, for a decode of 64 rows of 4096 positions."""


@dataclass(frozen=True, slots=True)
class _Case:
    """Sequences of one length in a shuffled paged cache; heads as Llama 8B's."""

    queries: torch.Tensor  # [num_tokens, num_heads, head_dim]
    cache: torch.Tensor
    tables: torch.Tensor  # [num_rows, width]
    num_rows: int
    context: int

    def dense(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values as [num_rows, num_kv_heads, context, head_dim]."""
        blocks = self.cache[self.tables.long()]  # [rows, width, 2, kv_heads, block, head_dim]
        parts = blocks.permute(2, 0, 3, 1, 4, 5).flatten(3, 4)[:, :, :, : self.context]
        return parts[0].contiguous(), parts[1].contiguous()


def _case(rig: Rig, num_rows: int, context: int, tokens_per_row: int) -> _Case:
    heads, kv_heads, head_dim = rig.pick(32, 4), rig.pick(8, 2), rig.pick(128, 16)
    width = -(-context // BLOCK)
    order = np.random.default_rng(0).permutation(num_rows * width).astype(np.int32).reshape(num_rows, width)
    return _Case(
        queries=rig.normal(num_rows * tokens_per_row, heads, head_dim),
        cache=rig.normal(num_rows * width, 2, kv_heads, BLOCK, head_dim),
        tables=torch.from_numpy(order).to(rig.backend.device),
        num_rows=num_rows,
        context=context,
    )


def attention(rig: Rig) -> list[Row]:
    """Decode by bytes, prompt chunks by arithmetic."""
    bandwidth = copy_gb_per_s(rig)
    shapes = ((1, 2), (3, 40)) if rig.small else ((1, 8192), (64, 4096), (256, 1024))
    rows = [_decode(rig, num_rows, context, bandwidth) for num_rows, context in shapes]
    rows += [_chunk(rig, rig.pick(4, 2), rig.pick(2048, 20)), _chunk(rig, 1, rig.pick(8192, 33))]
    return rows


def _decode(rig: Rig, num_rows: int, context: int, bandwidth: float) -> Row:
    case, backend = _case(rig, num_rows, context, 1), rig.backend
    lens = torch.full((num_rows,), context, dtype=torch.int32, device=backend.device)
    places = (rig.integers(range(num_rows)), lens, case.tables)
    options = AttentionOptions(scale=case.queries.shape[2] ** -0.5)
    out = torch.empty_like(case.queries)
    us = rig.microseconds(lambda: paged_decode(backend, out, case.queries, case.cache, places, options, context))
    keys, values = case.dense()
    queries = case.queries.unsqueeze(2)
    theirs = rig.microseconds(lambda: F.scaled_dot_product_attention(queries, keys, values, enable_gqa=True))
    wanted = F.scaled_dot_product_attention(queries, keys, values, enable_gqa=True).squeeze(2)
    speed = 2 * keys.numel() * keys.element_size() / us / 1e3
    row: Row = {
        "attention": f"decode, {num_rows} x {context}",
        "us": round(us, 1),
        "rate": f"{speed:.0f} GB/s",
        "of peak": round(speed / bandwidth, 2),
        "torch us": round(theirs, 1),
        "error": _error(out, wanted),
    }
    if not rig.small and (num_rows, context) == (64, 4096):
        row["target"] = f"{TARGET_OF_COPY} of copy"
    if not rig.small and importlib.util.find_spec("flashinfer") is not None:
        row["flashinfer us"] = round(rig.microseconds(_flashinfer_decode(case)), 1)
    return row


def _chunk(rig: Rig, num_rows: int, context: int) -> Row:
    """Whole prompts; a query sees half of them on average."""
    case, backend = _case(rig, num_rows, context, context), rig.backend
    starts = np.arange(num_rows + 1, dtype=np.int32) * context
    _, heads, head_dim = case.queries.shape
    tiles = torch.from_numpy(chunk_tiles(starts, heads // case.cache.shape[2])).to(backend.device)
    lens = torch.full((num_rows,), context, dtype=torch.int32, device=backend.device)
    places = (tiles, torch.from_numpy(starts).to(backend.device), lens, case.tables)
    options = AttentionOptions(scale=head_dim**-0.5)
    out = torch.empty_like(case.queries)
    us = rig.microseconds(lambda: paged_chunk(backend, out, case.queries, case.cache, places, options), calls=2)
    keys, values = case.dense()
    queries = case.queries.view(num_rows, context, heads, head_dim).transpose(1, 2)

    def theirs() -> torch.Tensor:
        return F.scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=True)

    flops = 2 * 2 * num_rows * heads * head_dim * context * (context + 1) / 2
    return {
        "attention": f"chunk, {num_rows} x {context}",
        "us": round(us, 1),
        "rate": f"{flops / us / 1e6:.0f} TFLOP/s",
        "of peak": round(flops / us / 1e6 / _matmul_tflops(rig), 2),
        "torch us": round(rig.microseconds(theirs, calls=2), 1),
        "error": _error(out, theirs().transpose(1, 2).reshape(out.shape)),
    }


def _matmul_tflops(rig: Rig) -> float:
    """What a large matrix product of torch's reaches."""
    size = rig.pick(8192, 32)
    one, other = rig.normal(size, size), rig.normal(size, size)
    return 2 * size**3 / rig.microseconds(lambda: one @ other, calls=2) / 1e6


def _error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    distance = (found.double() - wanted.double()).norm() / wanted.double().norm()
    return round(float(distance), 5)


def _flashinfer_decode(case: _Case) -> Any:  # noqa: ANN401 - a library that may not be there
    library: Any = importlib.import_module("flashinfer")
    device = case.queries.device
    workspace = torch.empty(128 << 20, dtype=torch.uint8, device=device)
    wrapper = library.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND")
    width = case.tables.shape[1]
    wrapper.plan(
        torch.arange(case.num_rows + 1, dtype=torch.int32, device=device) * width,
        case.tables.flatten(),
        torch.full((case.num_rows,), (case.context - 1) % BLOCK + 1, dtype=torch.int32, device=device),
        case.queries.shape[1], case.cache.shape[2], case.queries.shape[2], BLOCK, data_type=case.cache.dtype,
    )  # fmt: skip
    return lambda: wrapper.run(case.queries, case.cache)
