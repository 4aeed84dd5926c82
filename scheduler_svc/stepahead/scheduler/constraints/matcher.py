"""One choice's place in its grammar: which tokens may come next, and does this one.

The mask of output index k follows from the tokens delivered before it, and nothing else (rule I1). So a matcher
belongs to its choice and not to a lane: a preemption or another lane changes nothing.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Final

from llguidance import LLExecutor, LLMatcher

from stepahead.scheduler.constraints.errors import MatcherError, MatcherFailed, NothingAllowed, TokenRejected
from stepahead.scheduler.constraints.token_table import TokenTable

# How the engine's message begins when no token of this tokenizer continues the text; else a limit was reached.
_DEAD_END: Final = "NoExtension"


class Matcher:
    """A position in a grammar. For one thread at a time; every method but `fork` costs microseconds.

    The ends of text are not the engine's business: they are allowed where the grammar accepts what is there, and
    the first one terminates the matcher (rule I4).
    """

    __slots__ = ("_ended", "_engine", "_num_accepted", "_table")

    def __init__(self, engine: LLMatcher, table: TokenTable) -> None:
        """Wraps an engine's matcher, which nobody else may use."""
        self._engine: Final = engine
        self._table: Final = table
        self._num_accepted = 0
        self._ended = False

    @property
    def has_ended(self) -> bool:
        """Whether an end of text was accepted: nothing may follow."""
        return self._ended

    @property
    def allows_end(self) -> bool:
        """Whether what was accepted so far is a complete text."""
        return not self._ended and not self._engine.is_error() and self._engine.is_accepting()

    @property
    def is_finished(self) -> bool:
        """Whether nothing can follow but an end of text, or not even that."""
        return self._ended or self._engine.is_stopped()

    def mask(self) -> bytes:
        """The tokens that may come next.

        Returns:
            ceil(vocab_size / 8) bytes; bit `i % 8` of byte `i // 8` allows token `i`. At least one bit is set.

        Raises:
            NothingAllowed: No token is left, or the text has ended (rule I7).
            MatcherFailed: A limit was reached. The matcher cannot be used any more (rule I2).
        """
        return _finish(self, None if self.is_finished else self._engine.compute_bitmask())

    def accept(self, token_id: int) -> bool:
        """Advances by one committed token.

        Returns:
            False if the grammar does not allow it here; the choice must end with an error (rule I5). After an end
            of text nothing is allowed and nothing changes.
        """
        if self._ended or not 0 <= token_id < self._table.vocab_size:
            return False
        if token_id in self._table.eos_ids:
            self._ended = self.allows_end
            return self._ended
        # A refused token leaves the engine's matcher in an error state, which is final.
        if not self._table.pieces[token_id] or not self._engine.consume_token(token_id):
            return False
        self._num_accepted += 1
        return True

    def replay(self, token_ids: Sequence[int]) -> None:
        """Accepts the tokens that were delivered before a preemption or on another lane.

        Raises:
            TokenRejected: They do not fit.
        """
        for token_id in token_ids:
            index = self._num_accepted
            if not self.accept(token_id):
                raise TokenRejected(index, token_id)

    def fork(self) -> Matcher:
        """An independent matcher at the same place (n > 1)."""
        copy = Matcher(self._engine.deep_copy(), self._table)
        copy._num_accepted = self._num_accepted
        copy._ended = self._ended
        return copy


class MaskPool:
    """Computes the masks of a step on several threads, without the interpreter lock."""

    __slots__ = ("_executor",)

    def __init__(self, num_threads: int) -> None:
        """Starts `num_threads` threads (1 or more), which end with the pool."""
        self._executor = LLExecutor(num_threads)

    def fill_masks(self, matchers: Sequence[Matcher]) -> list[bytes | MatcherError]:
        """`Matcher.mask` of each matcher, in order; a matcher must not occur twice.

        Returns:
            A mask, or the error that ends that choice and no other.
        """
        if not matchers:
            return []
        table = matchers[0]._table  # pyright: ignore[reportPrivateUsage] - one module, one secret
        stride = (table.vocab_size + 31) // 32 * 4
        buffer = ctypes.create_string_buffer(stride * len(matchers))
        active = [
            (matcher._engine, row)  # pyright: ignore[reportPrivateUsage] - as above
            for row, matcher in enumerate(matchers)
            if not matcher.is_finished
        ]
        if active:
            self._executor.unsafe_compute_mask_ptr(active, ctypes.addressof(buffer), stride, len(matchers))
        filled = {row for _, row in active}
        packed = memoryview(buffer)
        masks: list[bytes | MatcherError] = []
        for row, matcher in enumerate(matchers):
            raw = bytes(packed[row * stride : (row + 1) * stride]) if row in filled else None
            try:
                masks.append(_finish(matcher, raw))
            except MatcherError as error:
                masks.append(error)
        return masks


def _finish(matcher: Matcher, raw: bytes | None) -> bytes:
    """Checks what the engine wrote (None: it was not asked), and sets the ends of text."""
    engine, table = matcher._engine, matcher._table  # pyright: ignore[reportPrivateUsage] - one module, one secret
    if matcher.has_ended:
        raise NothingAllowed("constraint: the text has ended")
    # In an error state the engine "allows" an end of text, so that callers without checks stop.
    if engine.is_error():
        if engine.get_error().startswith(_DEAD_END):
            raise NothingAllowed("constraint: no token can follow")
        raise MatcherFailed("constraint: the grammar is too complex at this place")
    mask = bytearray(table.mask_bytes) if raw is None else bytearray(raw[: table.mask_bytes])
    may_end = engine.is_accepting()
    for eos_id in table.eos_ids:
        if may_end:
            mask[eos_id >> 3] |= 1 << (eos_id & 7)
        else:
            mask[eos_id >> 3] &= ~(1 << (eos_id & 7)) & 0xFF
    if not any(mask):
        raise NothingAllowed("constraint: no token can follow")
    return bytes(mask)
