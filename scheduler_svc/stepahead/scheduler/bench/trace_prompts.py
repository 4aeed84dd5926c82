"""Prompts for a trace that has none: equal block hashes give equal tokens, different ones differ at once."""

from __future__ import annotations

from dataclasses import replace

from stepahead.scheduler.bench.trace_files import Trace, TraceRequest

_NUM_IDS = 1 << 15
_FIRST_ID = 1000
MIN_BLOCK_TOKENS = 2
"""A block starts with its hash in two digits."""


class PromptMaker:
    """Makes prompts from block hashes; the ids are shared objects, so a prompt costs 8 bytes per token."""

    def __init__(self, block_tokens: int) -> None:
        if block_tokens < MIN_BLOCK_TOKENS:
            raise ValueError(f"block_tokens must be at least {MIN_BLOCK_TOKENS}, not {block_tokens}")
        self._block_tokens = block_tokens
        ids = list(range(_FIRST_ID, _FIRST_ID + _NUM_IDS))
        # Long enough that a block may begin at any id.
        self._ids = ids * (1 + -(-block_tokens // _NUM_IDS))

    def prompt_of(self, index: int, request: TraceRequest) -> tuple[int, ...]:
        """The prompt of the trace's request number `index`.

        Without block hashes nothing is known to be shared, so its first block is like no other.
        """
        hashes = request.block_hashes
        if not hashes:
            hashes = (index,) * -(-request.num_prompt_tokens // self._block_tokens)
        prompt: list[int] = []
        for block_hash in hashes:
            prompt += self._block(block_hash)
        return tuple(prompt[: request.num_prompt_tokens])

    def _block(self, block_hash: int) -> list[int]:
        ids = self._ids
        low, high = block_hash % _NUM_IDS, block_hash // _NUM_IDS % _NUM_IDS
        # Any start will do for the rest; neighbours should not look alike.
        start = block_hash * 7919 % _NUM_IDS
        return [ids[low], ids[high], *ids[start : start + self._block_tokens - 2]]


def scaled(trace: Trace, *, length_scale: float, speed: float) -> Trace:
    """The same trace with shorter (or longer) prompts, blocks and answers, and with faster arrivals.

    Which blocks are shared stays as it was: their number per prompt does not change.
    """
    block_tokens = max(MIN_BLOCK_TOKENS, round(trace.block_tokens * length_scale))

    def scale(request: TraceRequest) -> TraceRequest:
        num_prompt_tokens = max(1, round(request.num_prompt_tokens * length_scale))
        if request.block_hashes:
            num_full = len(request.block_hashes) - 1
            tail = request.num_prompt_tokens - num_full * trace.block_tokens
            num_prompt_tokens = num_full * block_tokens + max(1, tail * block_tokens // trace.block_tokens)
        return replace(
            request,
            arrival_ns=round(request.arrival_ns / speed),
            num_prompt_tokens=num_prompt_tokens,
            num_output_tokens=max(1, round(request.num_output_tokens * length_scale)),
        )

    return Trace(trace.name, tuple(scale(request) for request in trace.requests), block_tokens)


def reuse_of(trace: Trace) -> tuple[float, float] | None:
    """How much of the prompts an unbounded cache could have had ready: (share of blocks, share of tokens).

    A block counts if a request that arrived earlier has the same hash. None if the trace has no hashes.
    """
    seen: set[int] = set()
    num_blocks = num_blocks_seen = num_tokens_seen = 0
    for request in trace.requests:
        left = request.num_prompt_tokens
        for block_hash in request.block_hashes:
            num_tokens = min(trace.block_tokens, left)
            left -= num_tokens
            num_blocks += 1
            if block_hash in seen:
                num_blocks_seen += 1
                num_tokens_seen += num_tokens
        seen.update(request.block_hashes)
    if not num_blocks:
        return None
    return num_blocks_seen / num_blocks, num_tokens_seen / sum(r.num_prompt_tokens for r in trace.requests)
