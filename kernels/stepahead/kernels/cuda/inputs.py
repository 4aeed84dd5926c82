"""What a step feeds: tokens from slot cells, and rows of a table, without the host knowing the tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from stepahead.kernels.cuda.backend import Backend, Launch
from stepahead.kernels.cuda.checks import VECTOR_BYTES, check_tensor, check_vectors
from stepahead.kernels.cuda.sources import Module

_THREADS = 128


@dataclass(frozen=True, slots=True)
class Cells:
    """Per slot, the token sampled last and the position it will be fed at; -1 is none. On the device."""

    tokens: torch.Tensor  # [num_slots] int64
    positions: torch.Tensor  # [num_slots] int64


@dataclass(frozen=True, slots=True, kw_only=True)
class FedTokens:
    """What the host knows of a step's tokens, copied to the device."""

    token_ids: torch.Tensor  # [num_tokens] int64, -1 where the row feeds its slot's cell
    positions: torch.Tensor  # [num_tokens] int64
    slot_mapping: torch.Tensor  # [num_tokens] int64
    rows: torch.Tensor  # [num_tokens] int32, the row of each token
    slots: torch.Tensor  # [num_rows] int32
    seq_lens: torch.Tensor  # [num_rows] int32


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedTokens:
    """The step's tokens with every cell looked up."""

    token_ids: torch.Tensor  # [num_tokens] int64, -1 for a hole
    slot_mapping: torch.Tensor  # [num_tokens] int64, -1 for a hole
    visible_lens: torch.Tensor  # [num_tokens] int32, position + 1, 0 for a hole
    seq_lens: torch.Tensor  # [num_rows] int32, 0 for a hole
    row_status: torch.Tensor  # [num_rows] uint8, 0, or POSITION_MISMATCH for a hole


def invalidate_cells(backend: Backend, cells: Cells, slots: torch.Tensor) -> None:
    """Empties the cells of `slots` ([num_invalid] int32)."""
    check_tensor(cells.positions, "cells.positions", torch.int64, (None,))
    check_tensor(slots, "slots", torch.int32, (None,))
    backend.launch(
        Launch(
            module=Module("resolve_inputs"),
            kernel="invalidate_cells",
            grid=(-(-len(slots) // _THREADS), 1, 1),
            num_threads=_THREADS,
            arguments=(cells.positions, slots, np.int32(len(slots))),
        )
    )


def resolve_inputs(backend: Backend, fed: FedTokens, cells: Cells) -> ResolvedTokens:
    """Looks up the cells of rows that feed what they sampled last, and finds the holes.

    Args:
        backend: where the tensors are.
        fed: the step's tokens.
        cells: read only.

    Raises:
        KernelArgumentError: a tensor is not as its class says.
    """
    num_tokens, num_rows = len(fed.token_ids), len(fed.slots)
    for name in ("token_ids", "positions", "slot_mapping"):
        check_tensor(getattr(fed, name), name, torch.int64, (num_tokens,))
    check_tensor(fed.rows, "rows", torch.int32, (num_tokens,))
    check_tensor(fed.slots, "slots", torch.int32, (num_rows,))
    check_tensor(fed.seq_lens, "seq_lens", torch.int32, (num_rows,))
    check_tensor(cells.tokens, "cells.tokens", torch.int64, (len(cells.positions),))
    check_tensor(cells.positions, "cells.positions", torch.int64, (len(cells.tokens),))
    resolved = ResolvedTokens(
        token_ids=backend.allocate((num_tokens,), torch.int64),
        slot_mapping=backend.allocate((num_tokens,), torch.int64),
        visible_lens=backend.allocate((num_tokens,), torch.int32),
        seq_lens=backend.allocate((num_rows,), torch.int32),
        row_status=backend.allocate((num_rows,), torch.uint8),
    )
    backend.copy(resolved.seq_lens, fed.seq_lens)
    resolved.row_status.zero_()
    backend.launch(
        Launch(
            module=Module("resolve_inputs"),
            kernel="resolve_inputs",
            grid=(-(-num_tokens // _THREADS), 1, 1),
            num_threads=_THREADS,
            arguments=(
                *(resolved.token_ids, resolved.slot_mapping, resolved.visible_lens, resolved.seq_lens),
                *(resolved.row_status, fed.token_ids, fed.positions, fed.slot_mapping, fed.rows, fed.slots),
                *(cells.tokens, cells.positions, np.int32(num_tokens)),
            ),
        )
    )
    return resolved


def gather_rows(backend: Backend, table: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Returns [num_ids, features]: rows of a table, zeros for a negative id.

    Args:
        backend: where the tensors are.
        table: [table_rows, features], any dtype, rows of a multiple of 16 bytes.
        ids: [num_ids] int64; an id is below table_rows (checked where it came from, rule J11).

    Raises:
        KernelArgumentError: a tensor is not as said here.
    """
    check_tensor(table, "table", table.dtype, (None, None))
    check_vectors(table, "table")
    check_tensor(ids, "ids", torch.int64, (None,))
    out = backend.allocate((len(ids), table.shape[1]), table.dtype)
    backend.launch(
        Launch(
            module=Module("gather_rows"),
            kernel="gather_rows",
            grid=(len(ids), 1, 1),
            num_threads=256,
            arguments=(out, table, ids, np.int32(table.shape[1] * table.element_size() // VECTOR_BYTES)),
        )
    )
    return out
