"""Which rank the environment says a process is."""

from __future__ import annotations

import pytest

from stepahead.worker.errors import ModelError
from stepahead.worker.ranks.place import LIFELINE, RankPlace, place_from_environment

TORCHRUN = {
    "RANK": "3",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.7",
    "MASTER_PORT": "29500",
}


def test_an_orchestrator_says_it() -> None:
    place = RankPlace(rank=3, size=4, local_size=2, local_rank=1, address="10.0.0.7", port=29500)
    assert place_from_environment(4, TORCHRUN) == place
    alone = {name: value for name, value in TORCHRUN.items() if name != "LOCAL_WORLD_SIZE"}
    found = place_from_environment(4, alone)
    assert found is not None
    assert (found.local_size, found.local_rank) == (1, 1)


@pytest.mark.parametrize(("local_size", "local_rank"), [("4", 3), ("2", 1), (None, 0)])
def test_without_a_local_rank_machines_are_filled_one_after_the_other(
    local_size: str | None, local_rank: int
) -> None:
    variables = {name: value for name, value in TORCHRUN.items() if not name.startswith("LOCAL")}
    found = place_from_environment(4, variables | ({"LOCAL_WORLD_SIZE": local_size} if local_size else {}))
    assert found is not None
    assert found.local_rank == local_rank


def test_nobody_says_it() -> None:
    assert place_from_environment(4, {"MASTER_ADDR": "10.0.0.7", "WORLD_SIZE": "4"}) is None


def test_rank_0_says_it_to_the_ranks_it_starts() -> None:
    place = place_from_environment(4, TORCHRUN | {LIFELINE: "11"})
    assert place is not None
    assert place.lifeline_fd == 11


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"WORLD_SIZE": "8"}, "--tensor-parallel-size is 4, but WORLD_SIZE is 8: they must be equal"),
        ({"RANK": "4"}, r"RANK is 4, it must be in 0 \.\. 3"),
        ({"RANK": "-1"}, "RANK is -1"),
        ({"LOCAL_RANK": "-1"}, "LOCAL_RANK is -1 and LOCAL_WORLD_SIZE 2"),
        ({"LOCAL_WORLD_SIZE": "0"}, "LOCAL_RANK is 1 and LOCAL_WORLD_SIZE 0"),
        ({"MASTER_PORT": "http"}, "MASTER_PORT must be too, the numbers in decimal digits: .*'http'"),
        ({"MASTER_ADDR": None}, "RANK is set, so WORLD_SIZE, MASTER_ADDR and MASTER_PORT must be too.*MASTER_ADDR"),
    ],
)
def test_what_contradicts_itself_is_refused(changed: dict[str, str | None], message: str) -> None:
    environment = {name: value for name, value in (TORCHRUN | changed).items() if value is not None}
    with pytest.raises(ModelError, match=message):
        place_from_environment(4, environment)
