"""The loads under which a step is timed, as plain numbers that another scheduler can be put under as well.

Prompts are distinct unless a workload shares prefixes. Where requests end, a backlog waits for their places, and
the first requests are of staggered lengths, so that every timed step admits and ends about as many as any other.
"""

from __future__ import annotations

from dataclasses import dataclass

BLOCK_SIZE = 16
"""Tokens per KV block, for every scheduler under test."""
_FIRST_ID = 1000
"""Below it are tokens that no prompt holds, such as the one every sampler returns here."""
SAMPLED_TOKEN_ID = 7
"""What every row samples; no stop id."""
NUM_WARM_UP_STEPS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A load that goes on for as long as it is asked to."""

    name: str
    num_rows: int
    """Requests that run at once."""
    prompt_tokens: int
    """Tokens per prompt, the shared prefix included."""
    prompt_spread: int = 1
    """Prompts are 0 to prompt_spread - 1 tokens longer, in turn: block boundaries then do not coincide."""
    shared_tokens: int = 0
    """Length of the prefix that the requests of a group share."""
    num_groups: int = 1
    output_tokens: int | None = None
    """Tokens per answer; None: no request ends."""
    max_num_batched_tokens: int
    num_warm_up_steps: int = NUM_WARM_UP_STEPS
    """Steps until every step is like the next."""

    @property
    def backlog(self) -> int:
        """Requests to keep waiting."""
        return 0 if self.output_tokens is None else self.num_rows

    @property
    def num_blocks(self) -> int:
        """Blocks enough that nobody is preempted, even with a step's worth of them in quarantine."""
        prompt_tokens = self.prompt_tokens + self.prompt_spread
        if self.output_tokens is None:
            return self.num_rows * (prompt_tokens + self.max_model_len // 2) // BLOCK_SIZE
        return 2 * self.num_rows * ((prompt_tokens + self.output_tokens) // BLOCK_SIZE + 2)

    @property
    def max_model_len(self) -> int:
        """Positions per request."""
        return 8192

    def prompt_of(self, index: int) -> list[int]:
        """The prompt of request number `index`: token ids below 2**31."""
        group = _FIRST_ID + index % self.num_groups
        length = self.prompt_tokens + index % self.prompt_spread
        # A prefix of one repeated id is as good as any, as long as groups and requests differ.
        return [group] * self.shared_tokens + [_FIRST_ID + self.num_groups + index] * (length - self.shared_tokens)

    def max_tokens_of(self, index: int) -> int:
        """The length of the answer to request number `index`."""
        if self.output_tokens is None:
            return self.max_model_len - self.prompt_tokens - self.prompt_spread
        if index < self.num_rows:
            return 1 + index * self.output_tokens // self.num_rows
        return self.output_tokens


def steady(num_rows: int) -> Workload:
    """Nobody comes, nobody goes: one token per request and step. A sixteenth of the rows needs a block."""
    return Workload(
        name="steady",
        num_rows=num_rows,
        prompt_tokens=100,
        prompt_spread=BLOCK_SIZE,
        max_num_batched_tokens=max(8192, num_rows),
    )


def churn(num_rows: int) -> Workload:
    """Each step a tenth of the requests ends and as many begin."""
    return Workload(
        name="churn 10 %",
        num_rows=num_rows,
        prompt_tokens=100,
        prompt_spread=BLOCK_SIZE,
        output_tokens=10,
        max_num_batched_tokens=max(8192, 32 * num_rows),
    )


def prefill_mix(num_rows: int) -> Workload:
    """Three quarters of the requests decode while a quarter is being read in chunks.

    With 512 tokens per prompt and 8 prompt tokens per row and step, num_rows / 64 prompts are done per step; 48
    outputs each then keep 3/4 of the requests decoding.
    """
    return Workload(
        name="prefill mix",
        num_rows=num_rows,
        prompt_tokens=512,
        output_tokens=48,
        max_num_batched_tokens=num_rows * 3 // 4 + 8 * num_rows,
        num_warm_up_steps=3 * NUM_WARM_UP_STEPS,
    )


def shared_prefixes(num_rows: int) -> Workload:
    """Four long system prompts, short questions, short answers: a sixteenth of the requests changes per step."""
    return Workload(
        name="prefixes",
        num_rows=num_rows,
        prompt_tokens=1088,
        shared_tokens=1024,
        num_groups=4,
        output_tokens=16,
        max_num_batched_tokens=max(8192, 128 * num_rows),
    )


WORKLOADS = {"steady": steady, "churn": churn, "prefill": prefill_mix, "prefixes": shared_prefixes}
"""By the name that --scenario takes."""
