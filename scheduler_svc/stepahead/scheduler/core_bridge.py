"""Between the shell's requests and the core's: what goes in, and what an end means to a client."""

from __future__ import annotations

from dataclasses import replace

from stepahead.scheduler.core import Finished, FinishReason, Request, RowFault
from stepahead.scheduler.errors import ApiError, DeadlineExceeded, NothingAllowed, RequestCancelled, RowFailed
from stepahead.scheduler.live_request import Choice, LiveRequest


def is_stop_id(finished: Finished | None) -> bool:
    """Whether a stop or end-of-sequence id ended it; that id is one of the tokens and no part of the text."""
    return finished is not None and finished.matched_token_id is not None


def core_requests(live: LiveRequest) -> list[Request]:
    """What the core must know of a request: a sequence per choice, all but the first forks of that one."""
    return [_core_request(live, choice) for choice in live.choices]


def _core_request(live: LiveRequest, choice: Choice) -> Request:
    accepted = live.accepted
    start_ns = live.times.accepted_ns
    sampling, wants_prompt = accepted.sampling, accepted.sampling.prompt_logprobs_top_k is not None
    if choice.index:
        # The prompt's log probabilities are the first choice's business: the others share its blocks.
        sampling = replace(sampling, choice_index=choice.index, prompt_logprobs_top_k=None)

    def deadline(milliseconds: int | None) -> int | None:
        return None if milliseconds is None else start_ns + milliseconds * 1_000_000

    return Request(
        key=choice.key,
        prompt_token_ids=accepted.prompt_token_ids,
        max_tokens=accepted.max_tokens,
        min_tokens=accepted.min_tokens,
        stop_token_ids=accepted.stop_token_ids,
        sampling=sampling,
        constrained=accepted.constraint is not None,
        recompute_prompt=wants_prompt and not choice.index,
        approximate_replay_tokens=accepted.approximate_replay_tokens,
        fork_of=live.key if choice.index else None,
        priority=accepted.priority,
        tenant=live.tenant,
        # A tenant's cache is its own: what others have asked must not be told by how fast an answer comes.
        cache_salt=f"{live.tenant}\0{accepted.cache_salt}",
        deadline_ns=deadline(accepted.timeout_ms),
        queue_deadline_ns=deadline(accepted.queue_timeout_ms),
    )


def deadline_passed(phase: str, num_output_tokens: int, no_worker: str | None) -> DeadlineExceeded:
    """What a request ends with whose time is over.

    Args:
        phase: "queue" or "run".
        num_output_tokens: what it has got.
        no_worker: why no lane is open, as far as it is known; None: one is.
    """
    tokens = "1 token" if num_output_tokens == 1 else f"{num_output_tokens} tokens"
    metadata = {"phase": phase, "output_tokens": str(num_output_tokens)}
    text = f"the deadline passed in phase {phase} after {tokens}"
    if no_worker is not None:
        text, metadata["worker"] = f"{text}: no worker is ready", "none"
        if no_worker:
            text = f"{text}: {no_worker}"
    return DeadlineExceeded(text, metadata=metadata)


def error_of(finished: Finished, no_worker: str | None = None) -> ApiError | None:
    """What the stream ends with; None for a normal end. `no_worker` as of `deadline_passed`."""
    if finished.reason in (FinishReason.STOP, FinishReason.LENGTH):
        return None
    if finished.deadline_phase is not None:
        return deadline_passed(finished.deadline_phase, finished.num_output_tokens, no_worker)
    if finished.fault is RowFault.NOTHING_ALLOWED:
        return NothingAllowed(finished.num_output_tokens)
    if finished.fault is not None:
        return RowFailed(
            f"the model gave no usable distribution ({finished.fault.value}) "
            f"after {finished.num_output_tokens} tokens",
            metadata={"fault": finished.fault.value},
        )
    return RequestCancelled("the request was cancelled")
