"""The bytes of every token: the table that all decoding reads.

The table fills itself on use, because vocabularies have up to 260,000 entries and a server meets a fraction
of them. It is shared by all requests of a process; filling an entry twice from two threads is harmless.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from tokenizers import Tokenizer

from stepahead.scheduler.text.decoder_plan import DecoderPlan
from stepahead.scheduler.text.errors import DetokenizeError
from stepahead.scheduler.text.native import panics_as

_MAX_TOKEN_ID: Final = 2**32 - 1


class _LaterPieces(dict[int, bytes]):
    """Token id to its bytes behind at least one other token; ids without text give b""."""

    __slots__ = ("_compute",)

    def __init__(self, compute: Callable[[int], bytes | None]) -> None:
        super().__init__()
        self._compute = compute

    def __missing__(self, token_id: int) -> bytes:
        piece = self._compute(token_id)
        if piece is None:
            # Not remembered: ids outside the vocabulary have no bound.
            return b""
        self[token_id] = piece
        return piece


class PieceTable:
    """Token id to bytes, for one setting of `skip_special_tokens`.

    Ids that the tokenizer does not know have no text: the logits of many models are wider than their
    vocabulary.
    """

    __slots__ = ("_hidden", "_tokenizer", "later", "plan")

    def __init__(self, tokenizer: Tokenizer, plan: DecoderPlan, hidden_ids: frozenset[int]) -> None:
        """Makes an empty table.

        Args:
            tokenizer: Names the tokens.
            plan: Turns a token into bytes.
            hidden_ids: Ids left out of the text: the special tokens, or none.
        """
        self._tokenizer = tokenizer
        self._hidden = hidden_ids
        self.plan: Final = plan
        self.later: Final = _LaterPieces(lambda token_id: self._piece(token_id, first=False))

    def first(self, token_id: int) -> bytes | None:
        """The bytes of a token that opens a text; None if it has no text, so that the next token opens it.

        Raises:
            DetokenizeError: `token_id` is no token id of any vocabulary.
        """
        return self._piece(token_id, first=True)

    def open(self, token_ids: Iterable[int]) -> tuple[bytes, bool]:
        """The bytes of tokens that open a text, and whether one of them did.

        Raises:
            DetokenizeError: An id is no token id of any vocabulary.
        """
        rest = iter(token_ids)
        for token_id in rest:
            head = self.first(token_id)
            if head is not None:
                return head + b"".join([self.later[later_id] for later_id in rest]), True
        return b"", False

    def decode(self, token_ids: Iterable[int]) -> str:
        """The whole text of `token_ids`. Invalid UTF-8 becomes U+FFFD, one per maximal subpart (Unicode 3.9).

        Raises:
            DetokenizeError: An id is no token id of any vocabulary.
        """
        data, _ = self.open(token_ids)
        text, _ = self.plan.strip_lead(data.decode("utf-8", "replace"), self.plan.num_lead_strip)
        return text

    def _piece(self, token_id: object, *, first: bool) -> bytes | None:
        # Ids come from another process: what is no id must not reach the tokenizer's native code.
        if not isinstance(token_id, int) or not 0 <= token_id <= _MAX_TOKEN_ID:
            raise DetokenizeError(f"{token_id!r} is not a token id")
        if token_id in self._hidden:
            return None
        with panics_as(DetokenizeError, f"token {token_id}"):
            token = self._tokenizer.id_to_token(token_id)
            return None if token is None else self.plan.piece(token, first=first)
