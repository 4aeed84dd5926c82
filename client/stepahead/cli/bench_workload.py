"""What the benchmarks send: requests with their times, as plain values that a peer's script can read too."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from stepahead.cli.bench_drive import PlannedRequest
from stepahead.cli.bench_load import token_request


@dataclass(frozen=True, slots=True)
class WorkItem:
    """One request: greedy, and end-of-sequence is ignored, so that every system makes the same number of tokens."""

    at_s: float
    """Seconds after the load's start."""
    prompt: tuple[int, ...]
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests in order of their times."""

    name: str
    items: tuple[WorkItem, ...]

    @property
    def num_output_tokens(self) -> int:
        """Over all requests."""
        return sum(item.output_tokens for item in self.items)

    @property
    def is_closed(self) -> bool:
        """Whether all requests are there from the start."""
        return all(item.at_s == 0 for item in self.items)

    @property
    def mean_context(self) -> float:
        """Positions that an output token attends to, on average; the same for all if the shapes are."""
        total = sum(item.output_tokens * (len(item.prompt) + (item.output_tokens - 1) / 2) for item in self.items)
        return total / max(1, self.num_output_tokens)

    def requests(self) -> list[PlannedRequest]:
        """As this project's own messages."""
        return [
            PlannedRequest(message=token_request(item.prompt, item.output_tokens), start_s=item.at_s)
            for item in self.items
        ]


@dataclass(frozen=True, slots=True)
class Shape:
    """Lengths in tokens."""

    name: str
    prompt_tokens: int
    output_tokens: int


SHAPES = {"S1": Shape("S1", 128, 128), "S2": Shape("S2", 512, 64)}
"""S1 answers as long as its prompt, S2 reads more than it writes."""


def parse_shape(text: str) -> Shape:
    """`S1`, `S2`, or PROMPT/OUTPUT in tokens. Raises ValueError for anything else."""
    if text in SHAPES:
        return SHAPES[text]
    prompt, _, output = text.partition("/")
    if not (prompt.isdecimal() and output.isdecimal() and int(prompt) >= 1 and int(output) >= 2):
        raise ValueError(f"{text!r} is not {', '.join(SHAPES)} or PROMPT/OUTPUT with an output of 2 or more")
    return Shape(text, int(prompt), int(output))


class PromptSource:
    """Random token ids from a seed: no two prompts share a prefix but by chance.

    Args:
        vocab_size: of the model. The lowest ids, where special tokens are, are left out as far as there is room.
        seed: equal seeds give equal prompts.
    """

    def __init__(self, vocab_size: int, seed: str) -> None:
        self._low = min(1000, vocab_size // 4)
        self._high = min(40_000, vocab_size)
        self._random = random.Random(seed)

    def prompt(self, num_tokens: int) -> tuple[int, ...]:
        """The next prompt."""
        return tuple(self._random.randrange(self._low, self._high) for _ in range(num_tokens))


def closed_batch(shape: Shape, num_requests: int, vocab_size: int, seed: str) -> Workload:
    """All requests at once."""
    prompts = PromptSource(vocab_size, f"{shape.name}-{num_requests}-{seed}")
    items = [WorkItem(0.0, prompts.prompt(shape.prompt_tokens), shape.output_tokens) for _ in range(num_requests)]
    return Workload(f"{shape.name} x{num_requests}", tuple(items))


def poisson_arrivals(shape: Shape, num_requests: int, rate: float, vocab_size: int, seed: str) -> Workload:
    """Requests at exponentially distributed distances, the first one at once.

    Args:
        shape: lengths of every request.
        num_requests: how many.
        rate: requests per second on average, above 0.
        vocab_size: of the model.
        seed: of prompts and times.
    """
    prompts = PromptSource(vocab_size, f"{shape.name}-{num_requests}-{seed}")
    clock = random.Random(f"times-{rate}-{seed}")
    items: list[WorkItem] = []
    at_s = 0.0
    for _ in range(num_requests):
        items.append(WorkItem(at_s, prompts.prompt(shape.prompt_tokens), shape.output_tokens))
        at_s += clock.expovariate(rate)
    return Workload(f"{shape.name} {rate:g}/s", tuple(items))


def shortened(workload: Workload, output_tokens: int) -> Workload:
    """The same requests all at once with answers of at most `output_tokens`: a warm-up."""
    items = [WorkItem(0.0, item.prompt, min(item.output_tokens, output_tokens)) for item in workload.items]
    return Workload(workload.name, tuple(items))


def as_json(workload: Workload) -> dict[str, Sequence[object]]:
    """As the line that a peer's script reads; scripts/peers/peer.py describes it."""
    return {
        "requests": [
            {"at_s": item.at_s, "prompt": item.prompt, "output_tokens": item.output_tokens}
            for item in workload.items
        ]
    }
