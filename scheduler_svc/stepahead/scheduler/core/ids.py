"""Names for the integers of the core, so that one cannot be passed for another."""

from __future__ import annotations

from typing import NewType

RequestKey = NewType("RequestKey", int)
"""Minted by the shell, unique per scheduler process; a public request id is only an echo."""

LaneId = NewType("LaneId", int)
"""One worker, as the core sees it."""

StepId = NewType("StepId", int)
"""Dense per lane and epoch, from 1. 0 means "none"."""

SlotId = NewType("SlotId", int)
"""A row of a lane's persistent batch."""

BlockId = NewType("BlockId", int)
"""A KV block of a lane."""

BlockKey = NewType("BlockKey", bytes)
"""Names the content of a full block and of everything before it."""

Incarnation = NewType("Incarnation", int)
"""One stay of a sequence in a slot; new at every admission, never reused by a scheduler; from 1."""

NO_STEP = StepId(0)
