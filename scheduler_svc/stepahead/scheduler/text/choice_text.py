"""The text of one choice: decoding and stop strings together.

Stop strings are looked for after every single token, whatever the grouping of tokens into calls, so that the
same tokens always give the same text and the same end (rules K1, K6).

`min_tokens` follows one policy for end-of-sequence ids, stop ids and stop strings (rule J6, scenario
BL-17): the first token that may end the choice is output number `min_tokens` counted from 0. A stop string
may begin earlier, but it has to be completed by such a token; one that is complete before is ordinary text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stepahead.scheduler.text.codec import TextCodec
from stepahead.scheduler.text.detokenizer import IncrementalDetokenizer
from stepahead.scheduler.text.stop_strings import StopStringMatcher, StopStrings


@dataclass(frozen=True, slots=True)
class TextStep:
    """What a group of tokens did to the text."""

    # Text that became final.
    text: str
    # The stop string that ended the choice, if one did.
    matched_stop: str | None
    # How many of the tokens belong to the output: all, or those up to the one that completed the match.
    tokens_used: int


class ChoiceText:
    """Text of one choice. The results only ever add to it (rule K4)."""

    __slots__ = ("_detokenizer", "_matcher", "_min_tokens", "_num_tokens")

    def __init__(
        self,
        codec: TextCodec,
        *,
        skip_special_tokens: bool = True,
        stop_strings: Sequence[str] | StopStrings = (),
        include_stop: bool = False,
        min_tokens: int = 0,
    ) -> None:
        """Starts an empty choice.

        Args:
            codec: The model's tokenizer.
            skip_special_tokens: Whether special tokens are left out of the text.
            stop_strings: In order of preference, none of them empty; compile once to share between choices.
            include_stop: Whether the stop string that matched stays in the text.
            min_tokens: Outputs before a stop string may end the choice.

        Raises:
            ValueError: A stop string is empty.
        """
        stops = stop_strings if isinstance(stop_strings, StopStrings) else StopStrings(stop_strings)
        self._detokenizer = IncrementalDetokenizer(codec, skip_special_tokens=skip_special_tokens)
        self._matcher = StopStringMatcher(stops, include_stop=include_stop) if stops.strings else None
        self._min_tokens = min_tokens
        self._num_tokens = 0

    def push(self, token_ids: Sequence[int]) -> TextStep:
        """Adds output tokens. A stop or end-of-sequence id that ended the choice is not among them.

        Nothing may be pushed after a step with `matched_stop`.

        Raises:
            DetokenizeError: An id is no token id of any vocabulary; the choice cannot go on (rule K8).
        """
        matcher = self._matcher
        if matcher is None:
            return TextStep(self._detokenizer.push(token_ids), None, len(token_ids))
        texts: list[str] = []
        for tokens_used, token_id in enumerate(token_ids, 1):
            text = self._detokenizer.push((token_id,))
            self._num_tokens += 1
            if self._num_tokens <= self._min_tokens:
                texts.append(matcher.pass_over(text))
                continue
            scan = matcher.push(text)
            texts.append(scan.text)
            if scan.matched is not None:
                return TextStep("".join(texts), scan.matched, tokens_used)
        return TextStep("".join(texts), None, len(token_ids))

    def finish(self) -> str:
        """Ends the choice for any reason but a stop string, and returns the rest of its text.

        Held back text is released, then an unfinished character becomes one U+FFFD (rules K2, K5). After a
        match there is no rest.
        """
        if self._matcher is None:
            return self._detokenizer.finish()
        if self._matcher.has_matched:
            return ""
        return self._matcher.finish() + self._detokenizer.finish()
