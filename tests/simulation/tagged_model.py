"""The "model" of the simulation: every token is a hash of every KV slot the row may read.

A KV slot holds, per layer, a tag of the layer's input at that position, and where the layer sees everything, of all
tags before it. The layer makes of the tag, and of those of every earlier position that it sees, the input of the
layer above. So with several layers a tag depends on more than one window: on one more for each layer with a window
below it, as in a transformer. The next token depends on all of it. A stale, foreign, missing or overwritten slot
therefore changes tokens: a cache fault becomes a wrong token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

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
        self,
        token: int,
        position: int,
        read: Callable[[int, int], tuple[int, ...]],
        replay_start: int | None = None,
    ) -> tuple[list[tuple[int, ...]], int]:
        """What one position leaves in the slot of each group, and what a next token follows from.

        `read(group, position)` is what an earlier position has left. In a replay layers that see everything have
        the position's own tag already, and attend to that one.
        """
        state = token
        tags: list[list[int]] = [[] for _ in self.windows]
        for layer in range(self.num_layers):
            for group, window in enumerate(self.windows):
                first = max(replay_start or 0, position - window + 1) if window else 0
                context = fold([read(group, earlier)[layer] for earlier in range(first, position)])
                tag = mix(state if window else mix(context, state), position)
                tags[group].append(tag)
                state = mix(context, tag)
                held = tag if window or replay_start is None else read(group, position)[layer]
                if held != tag:
                    state = mix(state, held)
        return [tuple(each) for each in tags], state


def next_token(
    context: int,
    *,
    seed: int,
    choice_index: int,
    output_index: int,
    vocab: int,
    suppressed: tuple[int, ...],
    min_tokens: int,
    allowed: frozenset[int] | None = None,
) -> int | None:
    """The token sampled after a context (the newest position's tag included); None if none is allowed (rule I7)."""
    first = mix(mix(context, seed + (choice_index << 32)), output_index) % vocab
    banned = suppressed if output_index < min_tokens else ()
    for offset in range(vocab):
        token = (first + offset) % vocab
        if token not in banned and (allowed is None or token in allowed):
            return token
    return None


@dataclass(frozen=True, slots=True)
class Grammar:
    """A constraint that a hash makes up. What may follow depends on every token before, as in a real one."""

    seed: int
    vocab: int

    def _state(self, outputs: Sequence[int]) -> int:
        return mix(fold([self.seed, *outputs]), len(outputs))

    def is_complete(self, outputs: Sequence[int]) -> bool:
        """Whether nothing may follow because the text is whole."""
        return len(outputs) > 0 and mix(self._state(outputs), 1) % 24 == 0

    def allowed(self, outputs: Sequence[int]) -> frozenset[int]:
        """What may follow: about a third of the vocabulary, now and then nothing."""
        state = self._state(outputs)
        if self.is_complete(outputs) or mix(state, 2) % 60 == 0:
            return frozenset()
        tokens = [token for token in range(self.vocab) if mix(state, 3 + token) % 3 == 0]
        return frozenset(tokens or [state % self.vocab])


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
    approximate_replay_tokens: int = 0
    grammar: Grammar | None = None
    choice_index: int = 0

    def matches_stop_text(self, token: int, output_index: int) -> bool:
        """Stands for a stop string found by the shell."""
        return self.stop_text_modulus > 0 and mix(token, output_index) % self.stop_text_modulus == 0


Stretch = tuple[int, tuple[int, int] | None]
"""An admission: the outputs there were, and (start, end) of its replay if that was approximate."""


@dataclass(slots=True)
class Contexts:
    """What next tokens follow from, alone and with an infinite cache."""

    model: TaggedModel
    exact: list[list[tuple[int, ...]]] = field(default_factory=list[list[tuple[int, ...]]])
    states: list[int] = field(default_factory=list[int])

    def after(self, history: list[int], replay: tuple[int, int] | None) -> int:
        """The context after a history, in a stay that began with an approximate replay or with none."""
        for position in range(len(self.exact), len(history)):
            tags, state = self.model.feed(history[position], position, lambda group, at: self.exact[at][group])
            self.exact.append(tags)
            self.states.append(state)
        if replay is None:
            return self.states[len(history) - 1]
        start, end = replay
        own: list[list[tuple[int, ...]]] = []

        def read(group: int, position: int) -> tuple[int, ...]:
            known = not self.model.windows[group] and position < end
            return self.exact[position][group] if known else own[position - start][group]

        state = 0
        for position in range(start, len(history)):
            tags, state = self.model.feed(history[position], position, read, start if position < end else None)
            own.append(tags)
        return state


def oracle(
    request: SimRequest,
    model: TaggedModel,
    *,
    vocab: int,
    max_model_len: int,
    suppressing: bool,
    stretches: Sequence[Stretch] = (),
) -> tuple[list[int], str]:
    """The answer of the same request alone, synchronously, with an infinite cache.

    Where it was admitted with an approximate replay, what that must make of the outputs after it.
    """
    contexts = Contexts(model)
    history = list(request.prompt)
    outputs: list[int] = []
    limit = min(len(request.prompt) + request.max_tokens, max_model_len)
    while True:
        replay = next((replay for count, replay in reversed(stretches) if count <= len(outputs)), None)
        token = next_token(
            contexts.after(history, replay),
            seed=request.seed,
            choice_index=request.choice_index,
            output_index=len(outputs),
            vocab=vocab,
            suppressed=tuple(sorted(request.stop_ids)) if suppressing else (),
            min_tokens=request.min_tokens,
            allowed=None if request.grammar is None else request.grammar.allowed(outputs),
        )
        if token is None:
            return outputs, "error"
        outputs.append(token)
        history.append(token)
        index = len(outputs) - 1
        if token in request.stop_ids and index >= request.min_tokens:
            return outputs, "stop"
        if request.matches_stop_text(token, index):
            return outputs, "stop"
        if len(history) >= limit:
            return outputs, "length"
        whole = request.grammar is not None and request.grammar.is_complete(outputs)
        if whole and len(outputs) >= request.min_tokens:
            return outputs, "stop"
