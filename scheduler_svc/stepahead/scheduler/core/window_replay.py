"""Replays: the states of window layers computed again alone, where only they are gone.

Theory of operation. A sequence whose layers that see everything still have their blocks up to E, or one that has
settled E positions before on a lane without such layers, feeds some positions in front of E again and then goes
on at E. Rows of a replay write window groups and nothing else (rule N6: the other blocks are shared, and exact),
see nothing in front of its start (rule N7) and sample nothing (rule N5).

How many. What enters a window layer at a position depends on a window more of positions for each window layer below
it, so the states that rows from E on need are exact (rule N8) if

    E - start >= sum over the window layers of (W - 1)          start > 0

    start             start + sum - (W - 1)         E
      |  states of some  |  a group's states exact  |
      |  layers are off  |  in every layer          |

This is what happens unless the request asks for less, and only where it leaves fewer positions to feed than a hit
that finds its windows (rule N10). With less, whatever follows is approximate: it is told, and never published
(rule N9). The start is the first position of a block: nothing stale stands in front of it there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stepahead.scheduler.core.config import LaneConfig
    from stepahead.scheduler.core.request import Request


@dataclass(frozen=True, slots=True)
class Replay:
    """Positions `start` .. `end` - 1 are fed again, for window groups only."""

    start: int
    """The first of a block, above 0."""
    end: int
    exact_tokens: int
    """Positions that exact states take."""

    @property
    def is_exact(self) -> bool:
        """Whether what follows is what it would have been (rule N8)."""
        return self.end - self.start >= self.exact_tokens

    def first_exact(self, window: int) -> int:
        """The first position whose states are exact in every layer of this window."""
        return self.start + self.exact_tokens - (window - 1)


def choose_replay(request: Request, config: LaneConfig, *, end: int, num_unfed: int) -> Replay | None:
    """The replay that the request allows, or None if it saves nothing.

    Args:
        request: whose sequence enters a lane.
        config: of the lane.
        end: where it would go on.
        num_unfed: positions it need not feed without a replay.
    """
    if not config.replays_windows or request.recompute_prompt:
        return None
    count = exact_tokens = config.exact_replay_tokens
    if config.largest_window - 1 <= request.approximate_replay_tokens < exact_tokens:
        count = request.approximate_replay_tokens
    start = (end - max(1, count)) // config.block_size * config.block_size
    return Replay(start, end, exact_tokens) if start > num_unfed else None
