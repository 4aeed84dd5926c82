"""Sampling options that must be refused, whole, with the field named (J9, J11)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from stepahead.worker.errors import PlanInvalid
from stepahead.worker.runner import NO_LOGPROBS
from tests.worker.fakes import VOCAB_SIZE
from tests.worker.plans import TableDriver, admission, plan, sampling

BAD_OPTIONS: list[tuple[str, dict[str, Any]]] = [
    ("suppressed_token_ids[1]: 40 is not in 0 .. 39", {"suppressed_token_ids": [0, 40]}),
    ("allowed_token_ids[0]: 40 is not in 0 .. 39", {"allowed_token_ids": [VOCAB_SIZE, 3]}),
    ("bias_token_ids[1]: 41 is not in 0 .. 39", {"bias_token_ids": [0, 41], "biases": [1, 1]}),
    ("bias_token_ids: names an id twice", {"bias_token_ids": [2, 2], "biases": [1, 1]}),
    ("biases: has 1 entries, bias_token_ids asks for 2", {"bias_token_ids": [1, 2], "biases": [1]}),
    ("biases: has 1 entries, bias_token_ids asks for 0", {"biases": [1]}),
    ("biases[1]: nan is not a finite number", {"bias_token_ids": [1, 2], "biases": [1, math.nan]}),
    ("biases[0]: -inf is not a finite number", {"bias_token_ids": [1], "biases": [-math.inf]}),
    ("bad_word_token_ids[2]: 99 is", {"bad_word_lengths": [1, 2], "bad_word_token_ids": [1, 2, 99]}),
    ("bad_word_lengths[1]: must be at least 1", {"bad_word_lengths": [1, 0], "bad_word_token_ids": [1]}),
    ("bad_word_token_ids: has 1 entries, sum of bad_word_lengths asks for 2", {"bad_word_lengths": [2],
                                                                               "bad_word_token_ids": [1]}),
    ("bad_word_token_ids: has 1 entries, sum of bad_word_lengths asks for 0", {"bad_word_token_ids": [1]}),
    ("repetition_penalty: -1.0 is not", {"repetition_penalty": -1}),
    ("repetition_penalty: inf is not", {"repetition_penalty": math.inf}),
    ("frequency_penalty: nan is not", {"frequency_penalty": math.nan}),
    ("presence_penalty: inf is not", {"presence_penalty": math.inf}),
    ("logprobs_top_k: 21 is not in 0 .. 20", {"logprobs_top_k": 21}),
    ("prompt_logprobs_top_k: 4294967295 is not in 0 .. 20", {"prompt_logprobs_top_k": 2**32 - 1}),
]  # fmt: skip


def admit(num_settled_tokens: int = 0, **fields: Any) -> TableDriver:
    """A driver after the admission of slot 1 with these sampling options."""
    driver = TableDriver()
    message = admission(1, [4, 5, 6], sampling=sampling(**fields), num_settled_tokens=num_settled_tokens)
    driver.run(plan(1, rows=[(1, num_settled_tokens, 3 - num_settled_tokens, True)], admissions=[message]))
    return driver


@pytest.mark.parametrize(("fault", "fields"), BAD_OPTIONS, ids=[fault for fault, _ in BAD_OPTIONS])
def test_j11_bad_options_are_named(fault: str, fields: dict[str, Any]) -> None:
    driver = TableDriver()
    before = driver.snapshot()
    message = plan(1, rows=[(1, 0, 1, True)], admissions=[admission(1, [4], sampling=sampling(**fields))])
    with pytest.raises(PlanInvalid) as caught:
        driver.run(message)
    assert any(line.startswith(f"admissions[0].sampling.{fault}") for line in caught.value.violations)
    assert driver.snapshot() == before


def test_prompt_log_probabilities_need_the_whole_prompt_fed() -> None:
    with pytest.raises(PlanInvalid) as caught:
        admit(num_settled_tokens=2, prompt_logprobs_top_k=0)
    assert caught.value.violations == [
        "admissions[0].num_settled_tokens: is 2, prompt_logprobs_top_k asks for every prompt position to be fed"
    ]
    admit(num_settled_tokens=2, logprobs_top_k=0)


@pytest.mark.parametrize("penalty", [0.0, 1.0])
def test_options_that_are_off_leave_no_rules(penalty: float) -> None:
    """J9; a slot without rules costs nothing at all."""
    driver = admit(repetition_penalty=penalty, temperature=0.5)
    assert driver.table.rule_states[1] is None
    assert not driver.table.has_rules.any()
    assert driver.table.logprobs_top_k[1] == driver.table.prompt_logprobs_top_k[1] == NO_LOGPROBS


def test_every_option_arrives() -> None:
    driver = admit(
        repetition_penalty=2.0,
        frequency_penalty=0.5,
        presence_penalty=-0.25,
        bias_token_ids=[7],
        biases=[1.5],
        bad_word_lengths=[2, 1],
        bad_word_token_ids=[1, 2, 3],
        allowed_token_ids=[39, 0],
        logprobs_top_k=20,
        prompt_logprobs_top_k=0,
        processed_logprobs=True,
    )
    state = driver.table.rule_states[1]
    assert state is not None
    penalties, banned, allowed = state.penalties(), state.banned_ids(), state.allowed_ids
    assert penalties is not None
    assert banned is not None
    assert allowed is not None
    assert (penalties.repetition_penalty, penalties.frequency_penalty) == (2.0, 0.5)
    assert penalties.presence_penalty == -0.25
    assert penalties.seen_ids.tolist() == [4, 5, 6]
    assert penalties.output_counts.tolist() == [0, 0, 0]
    assert (penalties.bias_ids.tolist(), penalties.biases.tolist()) == ([7], [1.5])
    assert banned.tolist() == [3]
    assert allowed.tolist() == [39, 0]
    assert driver.table.logprobs_top_k[1] == 20
    assert driver.table.prompt_logprobs_top_k[1] == 0
    assert driver.table.processed_logprobs[1]


def test_a_released_slot_leaves_nothing_to_the_next_one() -> None:
    driver = admit(presence_penalty=1.0, logprobs_top_k=3, prompt_logprobs_top_k=1, processed_logprobs=True)
    driver.run(
        plan(
            2,
            rows=[(1, 0, 1, True)],
            released_slots=[1],
            released_incarnations=[101],
            admissions=[admission(1, [7], incarnation=8)],
        )
    )
    assert driver.table.rule_states[1] is None
    assert not driver.table.has_rules[1]
    assert driver.table.logprobs_top_k[1] == driver.table.prompt_logprobs_top_k[1] == NO_LOGPROBS
    assert not driver.table.processed_logprobs[1]


def test_prompt_targets_follow_the_chunks() -> None:
    """A chunk feeding [a, b) is asked about positions a + 1 .. min(b, num_prompt - 1); outputs never."""
    driver = TableDriver()
    asks = admission(0, [10, 11, 12, 13, 14, 15], num_prompt_tokens=4, sampling=sampling(prompt_logprobs_top_k=2))
    batches = [
        driver.run(plan(1, rows=[(1, 0, 2, True), (0, 0, 2, False)], admissions=[asks, admission(1, [1, 2])]))[0],
        driver.run(plan(2, rows=[(0, 2, 1, False)]))[0],
        driver.run(plan(3, rows=[(0, 3, 3, True)]))[0],
    ]
    targets = [[(t.row, t.top_k, t.token_ids.tolist()) for t in batch.prompt_targets] for batch in batches]
    assert targets == [[(1, 2, [11, 12])], [(0, 2, [13])], []]


def test_steady_decode_without_options_carries_none() -> None:
    driver = TableDriver()
    driver.run(plan(1, decode=1, admissions=[admission(0, [1])], joined_slots=[0]))
    batch, _ = driver.run(plan(2, decode=1))
    assert (batch.sampling.rule_states, batch.sampling.logprobs, batch.prompt_targets) == ((), None, ())


def test_steady_decode_with_options_makes_no_objects_per_step() -> None:
    """The columns are those of the decode set, made once."""
    driver = TableDriver()
    message = admission(0, [1], sampling=sampling(presence_penalty=1.0, logprobs_top_k=2, processed_logprobs=True))
    driver.run(plan(1, decode=2, admissions=[message, admission(1, [2])], joined_slots=[0, 1]))
    (first, _), (second, _) = (driver.run(plan(step_id, decode=2)) for step_id in (2, 3))
    assert first.sampling.rule_states is second.sampling.rule_states
    assert first.sampling.rule_states[1] is None
    assert first.sampling.logprobs is second.sampling.logprobs is not None
    assert first.sampling.logprobs.top_k.tolist() == [2, NO_LOGPROBS]
    assert np.array_equal(first.sampling.logprobs.processed, [True, False])
