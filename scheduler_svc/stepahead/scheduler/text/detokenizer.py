"""Turns token ids into text while they arrive.

Theory of operation. `PieceTable` gives every token's bytes without looking at its neighbours, so the text
of an output is the UTF-8 decoding of the joined bytes, and the only thing that can be unfinished is a
character: at most three bytes are kept between calls, however long the output is. Two details need state:
the first token may be written differently, and some tokenizers drop a leading space of the whole text.

Only output tokens are ever pushed, so no byte of a prompt can surface (rule K5). Where `tokenizers` decodes
byte tokens (`<0xE2>`) it replaces a whole run of them if its end is incomplete, good characters included;
here only the bytes that are no character are replaced, so that nothing before them is lost and nothing has
to be held back for it.
"""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Sequence

from stepahead.scheduler.text.codec import TextCodec


class IncrementalDetokenizer:
    """Decodes one output.

    Joined, what it returns equals `codec.decode(all ids)`, for every chunking (rules K1, K4).
    """

    __slots__ = ("_later", "_num_lead_strip", "_opened", "_pieces", "_tail")

    def __init__(self, codec: TextCodec, *, skip_special_tokens: bool) -> None:
        """Starts an empty output.

        Args:
            codec: The model's tokenizer.
            skip_special_tokens: Whether special tokens are left out of the text.
        """
        self._pieces = codec.pieces(skip_special_tokens=skip_special_tokens)
        self._later = self._pieces.later
        self._num_lead_strip = self._pieces.plan.num_lead_strip
        self._opened = False
        self._tail = b""

    def push(self, token_ids: Sequence[int]) -> str:
        """Adds output tokens and returns the text that became final, perhaps none.

        Raises:
            DetokenizeError: An id is no token id of any vocabulary. Nothing of `token_ids` was added.
        """
        if self._opened:
            later = self._later
            data = b"".join([later[token_id] for token_id in token_ids])
        else:
            data, self._opened = self._pieces.open(token_ids)
        if self._tail:
            data = self._tail + data
        text, num_used = utf_8_decode(data, "replace")
        self._tail = data[num_used:]
        return self._strip(text) if self._num_lead_strip else text

    def finish(self) -> str:
        """Ends the output. An unfinished character becomes one U+FFFD."""
        text = self._tail.decode("utf-8", "replace")
        self._tail = b""
        return self._strip(text)

    def _strip(self, text: str) -> str:
        text, self._num_lead_strip = self._pieces.plan.strip_lead(text, self._num_lead_strip)
        return text
