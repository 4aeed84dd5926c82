"""The "model" of the simulation: every token is a hash of every KV slot the row may read.

A KV slot holds, per layer, a tag that depends on the layer's input at that position and on the tags of every
earlier position that the layer sees. A layer's input is what the layer below makes of the same position, so with
several layers a tag depends on far more than one window. The next token depends on all of it. A stale, foreign,
missing or overwritten slot therefore changes tokens, so a cache fault becomes a wrong token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

MASK = (1 << 61) - 1
POISON = 0x5EED_BAD
"""What an unwritten KV slot reads as."""


def mix(left: int, right: int) -> int:
    """A cheap, deterministic, order-sensitive hash of two integers."""
    value = (left * 6364136223846793005 + right * 1442695040888963407 + 0x9E3779B97F4A7C15) & ((1 << 64) - 1)
    value ^= value >> 29
    value = (value * 0xBF58476D1CE4E5B9) & ((1 << 64) - 1)
    return (value ^ (value >> 32)) & MASK


def fold(tags: list[int]) -> int:
    """Hash of a context."""
    accumulated = 0
    for tag in tags:
        accumulated = mix(accumulated, tag)
    return accumulated


@dataclass(frozen=True, slots=True)
class TaggedModel:
    """Layers in KV groups."""

    windows: tuple[int, ...] = (0,)
    """Of each group: positions a query sees, its own included; 0: all."""
    num_layers: int = 1
    """Of each group; layers of the groups take turns."""

    def feed(
        self, token: int, position: int, read: Callable[[int, int], tuple[int, ...]]
    ) -> tuple[list[tuple[int, ...]], int]:
        """What one position leaves in the slot of each group, and what a next token follows from.

        `read(group, position)` is what an earlier position has left.
        """
        state = token
        tags: list[list[int]] = [[] for _ in self.windows]
        for layer in range(self.num_layers):
            for group, window in enumerate(self.windows):
                first = max(0, position - window + 1) if window else 0
                context = fold([read(group, earlier)[layer] for earlier in range(first, position)])
                tags[group].append(tag_of(context, state, position))
                state = mix(context, tags[group][-1])
        return [tuple(each) for each in tags], state


def tag_of(context: int, token: int, position: int) -> int:
    """What the KV slot of `position` holds."""
    return mix(mix(context, token), position)


def next_token(
    context: int, *, seed: int, output_index: int, vocab: int, suppressed: tuple[int, ...], min_tokens: int
) -> int:
    """The token sampled after a context (the newest position's tag included)."""
    token = mix(mix(context, seed), output_index) % vocab
    if output_index < min_tokens:
        while token in suppressed:
            token = (token + 1) % vocab
    return token


@dataclass(frozen=True, slots=True, kw_only=True)
class SimRequest:
    """A request of the simulation and everything that decides its answer."""

    prompt: tuple[int, ...]
    max_tokens: int
    min_tokens: int
    stop_ids: frozenset[int]
    seed: int
    stop_text_modulus: int
    """A stop string "matches" at output i if mix(token, i) % modulus == 0; 0: never."""

    def matches_stop_text(self, token: int, output_index: int) -> bool:
        """Stands for a stop string found by the shell."""
        return self.stop_text_modulus > 0 and mix(token, output_index) % self.stop_text_modulus == 0


def oracle(
    request: SimRequest, model: TaggedModel, *, vocab: int, max_model_len: int, suppressing: bool
) -> tuple[list[int], str]:
    """The answer of the same request alone, synchronously, with an infinite cache."""
    slots: list[list[tuple[int, ...]]] = []
    history = list(request.prompt)
    context = 0

    def feed(position: int) -> int:
        tags, state = model.feed(history[position], position, lambda group, earlier: slots[earlier][group])
        slots.append(tags)
        return state

    for position in range(len(history)):
        context = feed(position)
    outputs: list[int] = []
    limit = min(len(request.prompt) + request.max_tokens, max_model_len)
    while True:
        token = next_token(
            context,
            seed=request.seed,
            output_index=len(outputs),
            vocab=vocab,
            suppressed=tuple(sorted(request.stop_ids)) if suppressing else (),
            min_tokens=request.min_tokens,
        )
        outputs.append(token)
        history.append(token)
        index = len(outputs) - 1
        if token in request.stop_ids and index >= request.min_tokens:
            return outputs, "stop"
        if request.matches_stop_text(token, index):
            return outputs, "stop"
        if len(history) >= limit:
            return outputs, "length"
        context = feed(len(history) - 1)
