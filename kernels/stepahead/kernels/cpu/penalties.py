"""Penalties and bad words on the host: `reference.penalties`, number for number, at the cost of the ids concerned.

A `TokenRuleState` belongs to one sequence in one slot. It is made from the history at admission and told of every
sampled token where tokens are sampled, so that it is right for step N + 1 before the host knows step N's tokens.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from stepahead.kernels.reference.penalties import MAX_SCORE, RowPenalties, TokenRules

_NO_IDS = np.zeros(0, np.int64)
_NO_BIASES = np.zeros(0, np.float32)


class TokenRuleState:
    """What the rules of a sequence must know of its history, kept up to date.

    Args:
        rules: of the sequence; must concern logits or ids.
        token_ids: [history length] int64: prompt, then outputs.
        num_prompt_tokens: how much of the history is the prompt.
    """

    def __init__(self, rules: TokenRules, token_ids: NDArray[np.int64], num_prompt_tokens: int) -> None:
        self._rules = rules
        self._has_penalties = (
            rules.repetition_penalty != 1.0 or rules.frequency_penalty != 0.0 or rules.presence_penalty != 0.0
        )
        # Prompt ids matter to the repetition penalty only.
        relevant = token_ids if rules.repetition_penalty != 1.0 else token_ids[num_prompt_tokens:]
        seen = np.unique(relevant) if self._has_penalties else _NO_IDS
        self._place = {token_id: place for place, token_id in enumerate(seen.tolist())}
        self._seen_ids = seen
        self._output_counts = np.zeros(len(seen), np.int64)
        self._always_banned = [word[0] for word in rules.bad_words if len(word) == 1]
        self._completions: dict[tuple[int, ...], list[int]] = {}
        for *prefix, last in rules.bad_words:
            if prefix:
                self._completions.setdefault(tuple(prefix), []).append(last)
        self._prefix_lengths = sorted({len(prefix) for prefix in self._completions})
        self._newest: list[int] = []
        for token_id in token_ids[num_prompt_tokens:].tolist():
            self.append(token_id)

    @property
    def allowed_ids(self) -> NDArray[np.int64] | None:
        """The only ids that may be sampled; None: every id."""
        return self._rules.allowed_ids

    def append(self, token_id: int) -> None:
        """Counts an output."""
        if self._has_penalties:
            place = self._place.get(token_id)
            if place is None:
                place = self._add_seen(token_id)
            self._output_counts[place] += 1
        if self._prefix_lengths:
            self._newest.append(token_id)
            del self._newest[: -self._prefix_lengths[-1]]

    def penalties(self) -> RowPenalties | None:
        """What the history means for the next token; None: no logit changes. Views: use it before `append`."""
        rules = self._rules
        if not self._has_penalties and rules.bias_ids is None:
            return None
        num_seen = len(self._place)
        return RowPenalties(
            repetition_penalty=rules.repetition_penalty,
            frequency_penalty=rules.frequency_penalty,
            presence_penalty=rules.presence_penalty,
            seen_ids=self._seen_ids[:num_seen],
            output_counts=self._output_counts[:num_seen],
            bias_ids=_NO_IDS if rules.bias_ids is None else rules.bias_ids,
            biases=_NO_BIASES if rules.biases is None else rules.biases,
        )

    def banned_ids(self) -> NDArray[np.int64] | None:
        """The ids that would complete a bad word now; None: there are none."""
        banned = list(self._always_banned)
        for length in self._prefix_lengths:
            if length <= len(self._newest):
                banned += self._completions.get(tuple(self._newest[-length:]), ())
        return np.array(banned, np.int64) if banned else None

    def _add_seen(self, token_id: int) -> int:
        place = len(self._place)
        if place == len(self._seen_ids):
            room = np.zeros(max(16, place), np.int64)
            self._seen_ids = np.concatenate([self._seen_ids, room])
            self._output_counts = np.concatenate([self._output_counts, room])
        self._seen_ids[place] = token_id
        self._place[token_id] = place
        return place


def penalised(logits: NDArray[np.float32], penalties: RowPenalties) -> NDArray[np.float32]:
    """Returns the logits after steps 3 to 5, as `reference.penalties.penalised` does, in a new array."""
    scores = logits.copy()
    ids, counts = penalties.seen_ids, penalties.output_counts
    if len(ids):
        values = logits[ids].astype(np.float64)
        repetition = penalties.repetition_penalty
        values = np.where(values > 0, values / repetition, values * repetition)
        values = values - penalties.frequency_penalty * counts - penalties.presence_penalty * (counts > 0)
        scores[ids] = np.clip(values, -MAX_SCORE, MAX_SCORE)
    if len(penalties.bias_ids):
        values = scores[penalties.bias_ids].astype(np.float64) + penalties.biases
        scores[penalties.bias_ids] = np.clip(values, -MAX_SCORE, MAX_SCORE)
    # A legal "never" stays one: clipping has made a number of it.
    for ids in (penalties.seen_ids, penalties.bias_ids):
        scores[ids] = np.where(np.isneginf(logits[ids]), logits[ids], scores[ids])
    return scores
