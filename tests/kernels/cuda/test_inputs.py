"""Cells and holes on the device: a row whose cell is at another position writes nothing (C2, J1)."""

import numpy as np
import torch

from stepahead.kernels.cuda.cache import write_kv
from stepahead.kernels.cuda.host.backend import HostBackend
from stepahead.kernels.cuda.inputs import Cells, FedTokens, gather_rows, invalidate_cells, resolve_inputs

# Rows: a chunk of slot 2; slot 0 feeds its cell; slot 1's cell is elsewhere; slot 3 feeds a token the host knows.
FED = FedTokens(
    token_ids=torch.tensor([11, 12, 13, -1, -1, 14]),
    positions=torch.tensor([0, 1, 2, 7, 5, 9]),
    slot_mapping=torch.tensor([0, 1, 2, 23, 33, 41]),
    rows=torch.tensor([0, 0, 0, 1, 2, 3], dtype=torch.int32),
    slots=torch.tensor([2, 0, 1, 3], dtype=torch.int32),
    seq_lens=torch.tensor([3, 8, 6, 10], dtype=torch.int32),
)


def cells():
    return Cells(torch.tensor([100, 101, 102, 103]), torch.tensor([7, 4, 7, -1]))


def test_cells_are_looked_up_and_holes_found():
    resolved = resolve_inputs(HostBackend(), FED, cells())
    assert resolved.token_ids.tolist() == [11, 12, 13, 100, -1, 14]
    assert resolved.slot_mapping.tolist() == [0, 1, 2, 23, -1, 41]
    assert resolved.visible_lens.tolist() == [1, 2, 3, 8, 0, 10]
    assert resolved.seq_lens.tolist() == [3, 8, 0, 10]
    assert resolved.row_status.tolist() == [0, 0, 2, 0]


def test_an_invalidated_cell_is_a_hole():
    stored = cells()
    invalidate_cells(HostBackend(), stored, torch.tensor([0, 3], dtype=torch.int32))
    assert stored.positions.tolist() == [-1, 4, 7, -1]
    assert resolve_inputs(HostBackend(), FED, stored).row_status.tolist() == [0, 2, 2, 0]


def test_a_hole_embeds_zeros_and_stores_nothing():
    resolved = resolve_inputs(HostBackend(), FED, cells())
    table = torch.arange(128 * 8, dtype=torch.float32).view(128, 8)
    embedded = gather_rows(HostBackend(), table, resolved.token_ids)
    wanted = table[resolved.token_ids.clamp(min=0)] * (resolved.token_ids >= 0)[:, None]
    assert torch.equal(embedded, wanted)
    cache = torch.zeros(11, 2, 1, 4, 8)
    write_kv(HostBackend(), cache, torch.ones(6, 2, 8), resolved.slot_mapping)
    written = np.flatnonzero(cache[:, 0, 0].reshape(-1, 8).any(1).numpy())
    assert written.tolist() == [0, 1, 2, 23, 41]
