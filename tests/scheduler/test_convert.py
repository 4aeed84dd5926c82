"""Plans and results on the wire: nothing is lost, nothing impossible is believed."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepahead.scheduler.convert import WireError, lane_config_from_proto, plan_to_proto, result_from_proto
from stepahead.scheduler.core import (
    Admission,
    BlockId,
    Incarnation,
    RowFault,
    SamplingSpec,
    SettleMode,
    SlotId,
    StepId,
    StepPlan,
    WindowPool,
)
from stepahead.v1 import worker_pb2

ids = st.integers(0, 2**31 - 1)
big_ids = st.integers(1, 2**63)


def columns(*parts: Any) -> Any:
    """Lists of equal length, drawn together."""
    return st.lists(st.tuples(*parts), max_size=5).map(
        lambda rows: tuple(tuple(row[index] for row in rows) for index in range(len(parts)))
    )


@st.composite
def admissions(draw: st.DrawFn) -> Admission:
    sampling = SamplingSpec(
        temperature=draw(st.floats(0, 100, width=32)),
        top_p=draw(st.floats(0.125, 1, width=32)),
        top_k=draw(ids),
        min_p=draw(st.floats(0, 1, width=32)),
        seed=draw(st.integers(0, 2**64 - 1)),
        choice_index=draw(ids),
        suppressed_token_ids=tuple(draw(st.lists(ids, max_size=3))),
    )
    return Admission(
        slot=draw(ids),
        incarnation=draw(big_ids),
        token_ids=tuple(draw(st.lists(ids, min_size=1, max_size=5))),
        num_prompt_tokens=draw(ids),
        num_settled_tokens=draw(ids),
        replay_start=draw(st.none() | ids),
        block_ids=tuple(draw(st.lists(ids, max_size=4))),
        sampling=sampling,
        min_tokens=draw(ids),
    )


@st.composite
def plans(draw: st.DrawFn) -> StepPlan:
    released = draw(columns(ids, big_ids))
    appends = draw(columns(ids, ids))
    rows = draw(columns(ids, ids, ids, st.booleans()))
    slots = st.lists(ids, max_size=4).map(tuple)
    return StepPlan(
        step_id=draw(big_ids),
        committed_through=draw(st.integers(0, 2**63)),
        settle=draw(st.sampled_from(SettleMode)),
        released_slots=released[0],
        released_incarnations=released[1],
        append_slots=appends[0],
        append_block_ids=appends[1],
        admissions=tuple(draw(st.lists(admissions(), max_size=3))),
        joined_slots=draw(slots),
        sit_out_slots=draw(slots),
        left_slots=draw(slots),
        row_slots=rows[0],
        row_starts=rows[1],
        row_counts=rows[2],
        row_samples=rows[3],
        total_tokens=draw(ids),
        total_rows=draw(ids),
    )


SAME = (
    "step_id", "committed_through", "released_slots", "released_incarnations", "append_slots", "append_block_ids",
    "joined_slots", "sit_out_slots", "left_slots", "row_slots", "row_starts", "row_counts", "row_samples",
    "total_tokens", "total_rows",
)  # fmt: skip
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "seed", "choice_index", "suppressed_token_ids")


def values(holder: Any, names: tuple[str, ...]) -> list[Any]:
    found = [getattr(holder, name) for name in names]
    return [value if isinstance(value, int | float) else tuple(value) for value in found]


@given(plans())
def test_a_plan_survives_the_wire(plan: StepPlan) -> None:
    message = worker_pb2.StepPlan.FromString(plan_to_proto(plan).SerializeToString())
    assert values(message, SAME) == values(plan, SAME)
    assert message.previous_step_id == plan.step_id - 1
    assert worker_pb2.SettleMode.Name(message.settle).removeprefix("SETTLE_MODE_") == plan.settle.name
    assert list(message.append_counts) == [1] * len(plan.append_slots)
    for admission, sent in zip(plan.admissions, message.admissions, strict=True):
        names = ("slot", "incarnation", "token_ids", "num_prompt_tokens", "num_settled_tokens", "block_ids")
        assert values(sent, names) == values(admission, names)
        told = sent.replay_start if sent.HasField("replay_start") else None
        assert told == admission.replay_start, "position 0 is one, nothing at all is none"
        assert values(sent.sampling, SAMPLING) == values(admission.sampling, SAMPLING)
        assert (sent.sampling.min_tokens, sent.constrained) == (admission.min_tokens, False)


def test_steady_decode_is_a_few_bytes() -> None:
    """The width of the batch is not in the plan."""
    plan = StepPlan(
        step_id=10**6, committed_through=10**6 - 2, settle=SettleMode.RETAIN, total_tokens=256, total_rows=256
    )  # type: ignore[arg-type]
    assert plan_to_proto(plan).ByteSize() < 32


def boundary(**completion: Any) -> worker_pb2.StepBoundary:
    return worker_pb2.StepBoundary(
        worker_epoch=3, completed_step_id=9, completion=worker_pb2.StepCompletion(**completion)
    )


def test_a_result_keeps_its_columns() -> None:
    error = worker_pb2.RowError(slot=1, incarnation=12, code=worker_pb2.RowError.CODE_NON_FINITE)
    result = result_from_proto(
        boundary(incarnations=[11, 12], token_counts=[1, 0], token_ids=[7], row_errors=[error])
    )
    assert (result.epoch, result.step_id, result.incarnations) == (3, 9, [11, 12])
    assert (result.token_counts, result.token_ids) == ([1, 0], [7])
    assert result.faults == {12: RowFault.NON_FINITE}
    assert result_from_proto(boundary(incarnations=[11], token_ids=[7])).token_counts is None


@pytest.mark.parametrize("code", [code for code in worker_pb2.RowError.Code.values() if code])
def test_every_row_error_has_a_fault(code: int) -> None:
    error = worker_pb2.RowError(incarnation=1, code=code)  # pyright: ignore[reportArgumentType]
    (fault,) = result_from_proto(boundary(incarnations=[1], token_counts=[0], row_errors=[error])).faults.values()
    assert worker_pb2.RowError.Code.Name(code).removeprefix("CODE_") == fault.name


@pytest.mark.parametrize(
    "completion",
    [
        {"incarnations": [1, 2], "token_counts": [1], "token_ids": [5]},
        {"incarnations": [1], "token_counts": [1, 0], "token_ids": [5]},
        {"incarnations": [1, 2], "token_counts": [2, 0], "token_ids": [5, 6]},
        {"incarnations": [1], "token_counts": [0], "row_errors": [{"incarnation": 1}]},
        {"incarnations": [1], "token_counts": [0], "row_errors": [{"incarnation": 1, "code": 77}]},
    ],
)
def test_what_cannot_be_is_refused(completion: dict[str, Any]) -> None:
    with pytest.raises(WireError):
        result_from_proto(boundary(**completion))


def test_limits_become_a_lane() -> None:
    limits = {
        "num_slots": 12,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 16,
        "max_model_len": 64,
        "num_blocks": 9,
        "block_size": 4,
    }
    config = lane_config_from_proto(worker_pb2.WorkerLimits(**limits))
    assert {name: getattr(config, name) for name in limits} == limits
    for name in limits:
        with pytest.raises(ValueError, match=name):
            lane_config_from_proto(worker_pb2.WorkerLimits(**(limits | {name: 0})))


KV_GROUPS = {
    "both": ([(0, 9), (5, 3)], 9, [WindowPool(window=5, num_blocks=3, num_layers=2)]),
    "windows only": (
        [(5, 3), (7, 4)],
        0,
        [WindowPool(window=5, num_blocks=3, num_layers=2), WindowPool(window=7, num_blocks=4, num_layers=2)],
    ),
    "no window": ([(0, 9)], 9, []),
}


@pytest.mark.parametrize("name", KV_GROUPS)
def test_kv_groups_become_pools(name: str) -> None:
    groups, num_blocks, windows = KV_GROUPS[name]
    config = lane_config_from_proto(limits_of(groups))
    assert (config.num_blocks, list(config.windows), config.replays_windows) == (num_blocks, windows, False)


def test_a_worker_that_replays_windows_says_so() -> None:
    limits = limits_of([(0, 9), (5, 3)])
    limits.replays_windows = True
    assert lane_config_from_proto(limits).replays_windows


@pytest.mark.parametrize(
    ("groups", "fault"),
    [
        ([(5, 3), (0, 9)], "only the first may be without a window"),
        ([(0, 9), (0, 9)], "only the first may be without a window"),
        ([(0, 9), (5, 0)], "num_blocks of a window group must be at least 1"),
        ([(0, 0), (5, 3)], r"num_blocks of kv_groups\[0\]"),
    ],
)
def test_kv_groups_that_make_no_sense_are_refused(groups: list[tuple[int, int]], fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        lane_config_from_proto(limits_of(groups))


def limits_of(groups: list[tuple[int, int]]) -> worker_pb2.WorkerLimits:
    """Limits of a worker with KV groups (window, blocks)."""
    return worker_pb2.WorkerLimits(
        num_slots=12,
        max_num_seqs=4,
        max_num_batched_tokens=16,
        max_model_len=64,
        num_blocks=sum(num_blocks for _, num_blocks in groups),
        block_size=4,
        kv_groups=[
            worker_pb2.KvGroup(window_tokens=window, num_blocks=blocks, num_layers=2) for window, blocks in groups
        ],
    )


def test_a_plan_with_groups_names_them() -> None:
    """Group numbers, and null entries in front of a table."""
    admission = Admission(
        slot=SlotId(1),
        incarnation=Incarnation(7),
        token_ids=(5, 6, 7, 8, 9),
        num_prompt_tokens=5,
        num_settled_tokens=4,
        block_ids=(BlockId(3), BlockId(4), BlockId(2)),
        block_counts=(2, 1),
        null_counts=(0, 1),
        sampling=SamplingSpec(),
        min_tokens=0,
    )
    plan = StepPlan(
        step_id=StepId(2),
        committed_through=StepId(1),
        settle=SettleMode.RETAIN,
        append_slots=(SlotId(0), SlotId(0)),
        append_block_ids=(BlockId(5), BlockId(6)),
        append_groups=(0, 1),
        admissions=(admission,),
        total_tokens=1,
        total_rows=1,
    )
    message = plan_to_proto(plan)
    assert (list(message.append_block_ids), list(message.append_groups)) == ([5, 6], [0, 1])
    (sent,) = message.admissions
    assert (list(sent.block_ids), list(sent.block_counts), list(sent.null_counts)) == ([3, 4, 2], [2, 1], [0, 1])
