"""Completions and status as JSON objects: durations in milliseconds, counts as integers."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from stepahead.client import Choice, Completion, ServerStatus, StepaheadError, Timings, TokenLogprob

Json: TypeAlias = "Mapping[str, Json] | list[Json] | str | int | float | bool | None"


def completion_object(completion: Completion) -> dict[str, Json]:
    """One finished request: its first choice at the top, and all of them under `choices`.

    Log probabilities are there only if they were asked for, replays of sliding windows only if there were any.
    """
    rendered: dict[str, Json] = {
        "request_id": completion.request_id,
        "model": completion.model,
        **_choice_object(completion.choices[0]),
        "usage": dict(dataclasses.asdict(completion.usage)),
        "timings": timings_object(completion.timings),
        "choices": [_choice_object(choice) for choice in completion.choices],
    }
    if completion.prompt_logprobs:
        rendered["prompt_logprobs"] = [
            None if each is None else _logprob_object(each) for each in completion.prompt_logprobs
        ]
    return rendered


def error_object(request_id: str, error: StepaheadError) -> dict[str, Json]:
    """One failed request."""
    return {
        "request_id": request_id,
        "error": {
            "status": error.code or type(error).__name__,
            "reason": error.reason,
            "message": error.message,
            "fields": [each.field for each in error.violations],
            "metadata": dict(error.metadata),
            "retry_delay_ms": None if error.retry_delay_s is None else error.retry_delay_s * 1000,
        },
    }


def timings_object(timings: Timings) -> dict[str, Json]:
    """Durations in milliseconds."""
    return {
        "queue_ms": timings.queue_ns / 1e6,
        "first_token_ms": timings.first_token_ns / 1e6,
        "decode_ms": timings.decode_ns / 1e6,
        "total_ms": timings.total_ns / 1e6,
        "preemptions": timings.preemptions,
    }


def status_object(status: ServerStatus) -> dict[str, Json]:
    """Everything at a glance, with the derived shares beside the counts they come from."""
    rendered: dict[str, Json] = dataclasses.asdict(status)
    rendered["workers"] = [
        {
            **dataclasses.asdict(worker),
            "overlap_share": worker.steps.overlap_share,
            "idle_fraction": worker.steps.idle_fraction,
        }
        for worker in status.workers
    ]
    return rendered


def decode_rate(completion: Completion) -> float | None:
    """Tokens per second after the first one; None for fewer than two tokens."""
    num_intervals = completion.usage.output_tokens - 1
    if num_intervals < 1 or completion.timings.decode_ns == 0:
        return None
    return num_intervals / (completion.timings.decode_ns / 1e9)


def answer_lines(completion: Completion, *, shows_ids: bool, place: str = "") -> list[str]:
    """Choices for a terminal, each with its log probabilities; several are labelled, `place` before their number.

    `shows_ids` prints token ids where a model without a tokenizer has no text.
    """
    several = len(completion.choices) > 1
    lines: list[str] = []
    for choice in completion.choices:
        if several:
            lines.append(f"--- {place}choice {choice.index} ({choice.finish_reason.value})")
        lines.append(",".join(map(str, choice.token_ids)) if shows_ids else choice.text)
        lines += logprob_lines(choice.logprobs)
    return lines


def approximate_lines(completion: Completion, *, place: str = "") -> list[str]:
    """What a terminal is told of answers that are not exact; nothing if all are."""
    lines: list[str] = []
    for choice in completion.choices:
        if choice.approximate_replays:
            where = f"{place}choice {choice.index}" if len(completion.choices) > 1 else f"{place}the answer"
            lines.append(
                f"{where} is approximate from token {choice.first_approximate_token_index} on: "
                f"{choice.approximate_replays} of {choice.window_replays} window replays were cut short"
            )
    return lines


def logprob_lines(logprobs: Sequence[TokenLogprob | None]) -> list[str]:
    """Log probabilities for a terminal: one line per token, with the likeliest ones behind it.

    Nothing comes before a prompt's first token: its entry is None.
    """
    return [_logprob_line(each) for each in logprobs]


def prompt_logprob_lines(completion: Completion) -> list[str]:
    """Log probabilities of the prompt for a terminal, under a heading; nothing if they were not asked for."""
    entries = completion.prompt_logprobs
    return ["--- prompt", *logprob_lines(entries)] if entries else []


def _logprob_line(entry: TokenLogprob | None) -> str:
    if entry is None:
        return f"{'-':>8} {'-':>9}"
    return (
        f"{'-' if entry.token_id is None else entry.token_id:>8} {entry.logprob:9.4f}  rank {entry.rank:<6}"
        + "".join(f"  {token_id}: {logprob:.4f}" for token_id, logprob in entry.top)
    ).rstrip()


def _choice_object(choice: Choice) -> dict[str, Json]:
    rendered: dict[str, Json] = {
        "text": choice.text,
        "token_ids": list(choice.token_ids),
        "finish_reason": choice.finish_reason.value,
        "matched": choice.matched,
    }
    if choice.logprobs:
        rendered["logprobs"] = [_logprob_object(each) for each in choice.logprobs]
    if choice.window_replays:
        rendered["window_replays"] = choice.window_replays
        rendered["approximate_replays"] = choice.approximate_replays
        rendered["first_approximate_token_index"] = choice.first_approximate_token_index
    return rendered


def _logprob_object(logprob: TokenLogprob) -> dict[str, Json]:
    return {
        "token_id": logprob.token_id,
        "logprob": _finite(logprob.logprob),
        "rank": logprob.rank,
        "top": [{"token_id": token_id, "logprob": _finite(value)} for token_id, value in logprob.top],
    }


def _finite(number: float) -> float | None:
    """JSON has no infinity; a token that cannot be drawn has no log probability either."""
    return number if math.isfinite(number) else None
