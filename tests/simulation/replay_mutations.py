"""Deliberate breakages of replays, of the core's part and of the fake worker's; see mutations.py."""

# pyright: reportPrivateUsage=false
# A mutation replaces private functions; that is its purpose.

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from stepahead.scheduler.core import placement
from stepahead.scheduler.core.config import LaneConfig
from stepahead.scheduler.core.request import Request
from stepahead.scheduler.core.sequence import Stay
from stepahead.scheduler.core.window_replay import Replay
from tests.scheduler.core import test_window_replay as units
from tests.simulation.fake_worker import FakeWorker
from tests.simulation.tagged_model import TaggedModel


def _choose(patch: pytest.MonkeyPatch, changed: Callable[[Replay | None], Replay | None]) -> None:
    choose = placement.choose_replay

    def mutant(request: Request, config: LaneConfig, *, end: int, num_unfed: int) -> Replay | None:
        return changed(choose(request, config, end=end, num_unfed=num_unfed))

    patch.setattr(placement, "choose_replay", mutant)


def call_a_short_replay_exact(patch: pytest.MonkeyPatch) -> None:
    """One window less than it takes is said to be exact (N8). The answers tell, not what is said."""
    exact = LaneConfig.exact_replay_tokens

    def mutant(config: LaneConfig) -> int:
        assert exact.fget is not None
        return max(1, exact.fget(config) - config.largest_window + 1)

    patch.setattr(LaneConfig, "exact_replay_tokens", property(mutant))


def approximate_without_being_asked(patch: pytest.MonkeyPatch) -> None:
    """Every request is taken for one that asks for a window (N8)."""
    choose = placement.choose_replay

    def mutant(request: Request, config: LaneConfig, *, end: int, num_unfed: int) -> Replay | None:
        asking = replace(request, approximate_replay_tokens=config.largest_window)
        return choose(asking, config, end=end, num_unfed=num_unfed)

    patch.setattr(placement, "choose_replay", mutant)


def go_on_too_late(patch: pytest.MonkeyPatch) -> None:
    """A replay ends a position behind what the layers that see everything have (N6)."""
    _choose(patch, lambda replay: replay and replace(replay, end=replay.end + 1))


def do_not_end_with_a_row(patch: pytest.MonkeyPatch) -> None:
    """A chunk goes on behind the replay (N5)."""
    patch.setattr(Stay, "num_to_replay", property(lambda stay: 0))


def write_all_groups(patch: pytest.MonkeyPatch) -> None:
    """The worker overwrites what layers that see everything have (N6)."""
    patch.setattr(FakeWorker, "_keeps", lambda worker, row, group: True)


def look_past_the_floor(patch: pytest.MonkeyPatch) -> None:
    """The worker's rows of a replay see what their window holds, as if it had been there (N7)."""
    feed = TaggedModel.feed
    patch.setattr(TaggedModel, "feed", lambda model, token, at, read, start=None: feed(model, token, at, read))


def publish_approximate_states(patch: pytest.MonkeyPatch) -> None:
    """Whatever a stay writes may be shared (N9)."""
    patch.setattr(Stay, "may_publish", property(lambda stay: True))


def publish_all_replayed_blocks(patch: pytest.MonkeyPatch) -> None:
    """Also those that are exact in some layers only (N9)."""
    patch.setattr(Replay, "first_exact", lambda replay, window: replay.start)


def take_every_replay(patch: pytest.MonkeyPatch) -> None:
    """Also one that feeds more than it spares (N10)."""
    choose = placement.choose_replay
    patch.setattr(
        placement,
        "choose_replay",
        lambda request, config, *, end, num_unfed: choose(request, config, end=end, num_unfed=0),
    )


TABLE: list[tuple[str, Callable[[pytest.MonkeyPatch], None], tuple[str, ...], Callable[[], None] | None]] = [
    ("N8: a short replay is called exact", call_a_short_replay_exact, ("N8", "D4"), None),
    ("N8: nobody asked", approximate_without_being_asked, ("N8",), None),
    ("N6: it goes on too late", go_on_too_late, ("D4", "N5", "H2", "H5"), None),
    ("N5: a replay does not end with a row", do_not_end_with_a_row, ("N5",), None),
    ("N6: all groups are written", write_all_groups, ("H2", "H5", "D4"), None),
    ("N7: the floor is ignored", look_past_the_floor, ("N3",), None),
    (
        "N9: approximate states are shared",
        publish_approximate_states,
        ("test_n9_behind_an_approximate_replay_nothing_is_published",),
        units.test_n9_behind_an_approximate_replay_nothing_is_published,
    ),
    (
        "N9: states of some layers are shared",
        publish_all_replayed_blocks,
        ("test_n9_behind_an_exact_replay_of_three_layers",),
        units.test_n9_behind_an_exact_replay_of_three_layers,
    ),
    (
        "N10: a replay is longer than a hit",
        take_every_replay,
        ("test_n10_a_hit_that_finds_its_windows_is_better_than_a_replay",),
        units.test_n10_a_hit_that_finds_its_windows_is_better_than_a_replay,
    ),
]
"""(the rule and how it is broken, the mutation, rules that may notice, a unit test that notices instead)."""
