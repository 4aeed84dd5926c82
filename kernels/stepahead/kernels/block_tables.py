"""Block tables of layers that do not all keep the same positions of a sequence.

Such layers form groups; a group has its own blocks, and each row of a step one block table per group.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

NULL_BLOCK = -1
"""In the block table of a group with a window: no query of the row sees these positions; nothing is read there."""

NO_SLOT = -1
"""In a slot mapping: the token's key and value are not kept. What its block holds at the position stands."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerGroups:
    """Which layers share block tables, where a model's layers do not all keep the same positions."""

    of_layer: tuple[int, ...]
    """[num_layers], the group of each layer, 0 and up."""
    more_blocks: tuple[int, ...]
    """Blocks of the groups 1 and up."""


@dataclass(frozen=True, slots=True)
class GroupLayout:
    """Where the layers of one more group keep the tokens of a step."""

    slot_mapping: NDArray[np.int64]  # [num_tokens], block_id * block_size + offset, or NO_SLOT
    block_tables: NDArray[np.int32]  # [num_rows, width]; entries past a row's need are not read
    floors: NDArray[np.int32] | None = None  # [num_rows], see `ops.StepLayout.floors`
