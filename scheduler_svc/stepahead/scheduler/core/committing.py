"""Applies the completion of a step: P, H and U move here and nowhere else (rule A3)."""

from __future__ import annotations

from collections.abc import Callable

from stepahead.scheduler.core.errors import StepMismatch
from stepahead.scheduler.core.events import CommitOutcome, Finished
from stepahead.scheduler.core.ids import StepId
from stepahead.scheduler.core.lane import Lane
from stepahead.scheduler.core.plan import RowFault, StepResult
from stepahead.scheduler.core.request import FinishReason, RequestStatus
from stepahead.scheduler.core.sequence import Sequence, Stay
from stepahead.scheduler.core.step_in_flight import StepInFlight

Finish = Callable[[Sequence, Finished], None]
"""Ends a sequence: status, queue, and the stay's retirement are the scheduler's."""


def commit_step(lane: Lane, result: StepResult, finish: Finish) -> CommitOutcome:
    """Applies the result of the oldest step in flight.

    Raises:
        StepMismatch: the result is not that of the oldest step in flight, row for row; nothing changed.
    """
    step = lane.in_flight[0] if lane.in_flight else None
    if step is None or step.step_id != result.step_id:
        expected = step.step_id if step else "none"
        raise StepMismatch(f"result of step {result.step_id}, oldest in flight is {expected}")
    if step.incarnations != result.incarnations:
        raise StepMismatch(f"result of step {result.step_id} names other rows than the plan")
    _check_counts(step, result)

    outcome = CommitOutcome(step.step_id, num_rows=len(step.incarnations), num_tokens=step.num_tokens)
    lane.in_flight.popleft()
    lane.committed_through = step.step_id
    lane.doomed = lane.doomed and bool(lane.in_flight)
    if step.members:
        lane.clock.settled += 1
    _commit_explicit_rows(lane, step, result, outcome, finish)
    _commit_members(lane, step, result, outcome, finish)
    if result.logprobs or result.prompt_logprobs:
        _hand_over_logprobs(step, result, outcome)
    _close_fenced(lane, step)
    lane.num_overrun_rows += outcome.num_overrun_rows
    return outcome


def _hand_over_logprobs(step: StepInFlight, result: StepResult, outcome: CommitOutcome) -> None:
    """Those of delivered tokens, trimmed like them (rule J7), and of the prompts of live requests (rule J8)."""
    stays = [stay for stay, _, _ in step.explicit_rows] + step.decode_rows
    incarnations = {stay.sequence.request.key: stay.incarnation for stay in stays}
    for key in outcome.keys:
        logprobs = result.logprobs.get(incarnations[key])
        if logprobs is not None:
            outcome.logprobs[key] = logprobs
    for stay, _, _ in step.explicit_rows:
        logprobs = result.prompt_logprobs.get(stay.incarnation)
        if logprobs is not None:
            outcome.prompt_logprobs[stay.sequence.request.key] = logprobs


def _check_counts(step: StepInFlight, result: StepResult) -> None:
    """Raises StepMismatch unless the tokens fit the rows (rules M1, C4); reads only."""
    counts = result.token_counts
    if counts is None:
        if len(result.token_ids) != len(step.incarnations):
            raise StepMismatch(f"result of step {result.step_id} has {len(result.token_ids)} tokens")
        may_sample = all(samples for _, _, samples in step.explicit_rows)
    else:
        if len(counts) != len(step.incarnations) or sum(counts) != len(result.token_ids):
            raise StepMismatch(f"result of step {result.step_id} has counts that do not fit its rows and tokens")
        limits = [int(samples) for _, _, samples in step.explicit_rows] + [1] * len(step.decode_rows)
        may_sample = all(0 <= count <= limit for count, limit in zip(counts, limits, strict=True))
    if not may_sample:
        raise StepMismatch(f"result of step {result.step_id} has tokens for rows that do not sample")


def fail_step(lane: Lane, step_id: StepId) -> None:
    """The oldest step in flight failed as a whole: its deltas stand, none of its rows is committed.

    S and U roll back; rows of later steps already sent are holes and come back the same way.

    Raises:
        StepMismatch: the step is not the oldest in flight.
    """
    if not lane.in_flight or lane.in_flight[0].step_id != step_id:
        raise StepMismatch(f"step {step_id} failed, but it is not the oldest in flight")
    step = lane.in_flight.popleft()
    lane.committed_through = step.step_id
    lane.doomed = bool(lane.in_flight)
    for stay, count, samples in step.explicit_rows:
        stay.num_dispatched -= count
        if samples:
            stay.num_placeholders -= 1
        lane.rewind(stay)
    if step.members:
        lane.clock.settled += 1
    for stay in step.members.stays:
        stay.num_settled -= 1  # the clock counted it
        stay.num_dispatched -= 1
        lane.rewind(stay)
    _close_fenced(lane, step)


def _commit_members(
    lane: Lane, step: StepInFlight, result: StepResult, outcome: CommitOutcome, finish: Finish
) -> None:
    """Decode rows. The clock has moved P and U of every one; what is left are tokens, ends and empty rows."""
    members = step.members
    if not members:
        return
    num_members = len(members)
    counts = result.token_counts
    whole = counts is None or sum(counts[-num_members:]) == num_members
    if not whole or step.has_dead_rows:
        _commit_mixed_members(lane, step, result, outcome, finish)
        return
    tokens = result.token_ids if len(result.token_ids) == num_members else result.token_ids[-num_members:]
    lane.clock.backlog.push(members.histories, tokens)
    if outcome.keys:
        outcome.keys = outcome.keys + members.keys
        outcome.token_ids = outcome.token_ids + tokens
    else:
        outcome.keys, outcome.token_ids = members.keys, tokens
    if not members.stop_token_ids.isdisjoint(tokens):
        for stay, token in zip(members.stays, tokens, strict=True):
            if token in stay.sequence.request.stop_token_ids:
                _check_end(stay.sequence, token, outcome, finish)
    for stay in step.last_outputs:
        if stay.sequence.status is not RequestStatus.FINISHED:
            _check_end(stay.sequence, stay.sequence.history[-1], outcome, finish)


def _commit_mixed_members(
    lane: Lane, step: StepInFlight, result: StepResult, outcome: CommitOutcome, finish: Finish
) -> None:
    """Decode rows of which some are overrun or came back empty."""
    counts = result.token_counts
    first = len(step.explicit_rows)
    num_explicit_tokens = first if counts is None else sum(counts[:first])
    tokens = iter(result.token_ids[num_explicit_tokens:])
    keys, token_ids = list(outcome.keys), list(outcome.token_ids)
    lane.clock.backlog.flush()
    for index, stay in enumerate(step.members.stays, first):
        if counts is not None and not counts[index]:
            stay.num_settled -= 1  # the clock counted it
            stay.num_placeholders += 1
            _commit_empty_row(lane, stay, 1, result, outcome, finish)
            continue
        token = next(tokens)
        sequence = stay.sequence
        if sequence.status is RequestStatus.FINISHED:
            outcome.num_overrun_rows += 1
            continue
        sequence.unflushed_history.append(token)
        keys.append(sequence.request.key)
        token_ids.append(token)
        _check_end(sequence, token, outcome, finish)
    outcome.keys, outcome.token_ids = keys, token_ids


def _commit_explicit_rows(
    lane: Lane, step: StepInFlight, result: StepResult, outcome: CommitOutcome, finish: Finish
) -> None:
    """Chunks with or without a sample, and rows fed again."""
    tokens = iter(result.token_ids)
    counts = result.token_counts
    for index, (stay, count, samples) in enumerate(step.explicit_rows):
        sequence = stay.sequence
        live = sequence.status is not RequestStatus.FINISHED
        if not samples:
            stay.num_settled += count
            outcome.num_overrun_rows += not live
            if not stay.retired:
                lane.publish_settled(stay)
            continue
        if counts is not None and not counts[index]:
            _commit_empty_row(lane, stay, count, result, outcome, finish)
            continue
        token = next(tokens)
        stay.num_placeholders -= 1
        stay.num_settled += count
        if not live:
            outcome.num_overrun_rows += 1
            continue
        if not stay.retired:
            lane.publish_settled(stay)
        sequence.history.append(token)
        outcome.keys.append(sequence.request.key)
        outcome.token_ids.append(token)
        _check_end(sequence, token, outcome, finish)


def _commit_empty_row(
    lane: Lane, stay: Stay, count: int, result: StepResult, outcome: CommitOutcome, finish: Finish
) -> None:
    """A sampling row without a token: its last position is to be fed again, or the request ends (rule J10)."""
    stay.num_placeholders -= 1
    stay.num_settled += count - 1
    stay.num_dispatched -= 1
    sequence = stay.sequence
    if sequence.status is RequestStatus.FINISHED:
        outcome.num_overrun_rows += 1
        return
    fault = result.faults.get(stay.incarnation)
    if fault is None or fault is RowFault.GATE_MISSING or stay.rewinding:
        # A skipped row, one whose mask came too late, or a hole behind one.
        lane.rewind(stay)
        return
    lane.distrust(stay)
    finished = Finished(sequence.request.key, FinishReason.ERROR, sequence.num_output_tokens, fault=fault)
    finish(sequence, finished)
    outcome.finished.append(finished)


def _check_end(sequence: Sequence, token: int, outcome: CommitOutcome, finish: Finish) -> None:
    """Stop and end-of-sequence win over length (rule D5); the hard limits win over min_tokens (rule D7)."""
    request = sequence.request
    num_outputs = sequence.num_output_tokens
    if token in request.stop_token_ids and num_outputs > request.min_tokens:
        finished = Finished(request.key, FinishReason.STOP, num_outputs, matched_token_id=token)
    elif len(sequence.history) >= sequence.max_total_tokens:
        finished = Finished(request.key, FinishReason.LENGTH, num_outputs)
    else:
        return
    finish(sequence, finished)
    outcome.finished.append(finished)


def _close_fenced(lane: Lane, step: StepInFlight) -> None:
    for stay in step.fenced:
        lane.close(stay)
    if step.borrowed:
        lane.return_borrowed(step.borrowed)
