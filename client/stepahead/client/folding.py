"""Folds the events of one request into a Completion, checking order and token indexes on the way.

The sync stream, the asyncio stream and Multiplex all feed this one class, so that they cannot differ. The
rules it holds the server to: Started comes first (only keepalives may precede it), each choice's tokens are
contiguous and only grow, each choice ends once, and nothing follows the end. A stream that is continued by Attach
may say again what came before the wanted indexes; it is dropped here.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from stepahead.client import convert
from stepahead.client.errors import DeadlineError, ProtocolError, StepaheadError
from stepahead.client.reattaching import ConnectionChange, OnConnectionChange, Reattachment
from stepahead.client.requests import GenerationRequest, prompt_token_ids
from stepahead.client.values import Choice, Completion, Delta, Phase, Started, Timings, TokenLogprob, Usage
from stepahead.v1 import generation_pb2


@dataclass(slots=True)
class _ChoiceFold:
    """What one choice has delivered so far; `finished` once it has ended."""

    texts: list[str] = field(default_factory=list[str])
    token_ids: list[int] = field(default_factory=list[int])
    logprobs: list[TokenLogprob] = field(default_factory=list[TokenLogprob])
    finished: Choice | None = None
    # Where the newest delta began, and what has come from there on.
    newest_index: int = 0
    num_newest_characters: int = 0
    num_newest_logprobs: int = 0
    # Of what a continued stream says next: what came already.
    num_characters_to_drop: int = 0
    num_logprobs_to_drop: int = 0


class CompletionFold:
    """The state of one request on the client's side."""

    def __init__(self, request: GenerationRequest) -> None:
        self._num_choices = 1 if request.num_choices is None else request.num_choices
        self._counts_tokens = request.token_ids is not False
        self._prompt_token_ids = prompt_token_ids(request.prompt)
        # Filled as choices speak: the server has yet to accept their number.
        self._choices: defaultdict[int, _ChoiceFold] = defaultdict(_ChoiceFold)
        self._prompt_logprobs: list[TokenLogprob | None] = [None]
        self._is_continued = False
        self._usage_timings: tuple[Usage, Timings] | None = None
        self.started: Started | None = None
        self.phase = Phase.QUEUED

    @property
    def finished(self) -> bool:
        """Whether GenerationFinished has come."""
        return self._usage_timings is not None

    def text(self, choice_index: int = 0) -> str:
        """Text of a choice so far."""
        return "".join(self._choices[choice_index].texts)

    def token_ids(self, choice_index: int = 0) -> tuple[int, ...]:
        """Token ids of a choice so far."""
        return tuple(self._choices[choice_index].token_ids)

    def continue_from(self) -> list[int]:
        """The token index per choice at which another stream of the request must go on; it is fed from now on.

        Without token ids nobody but the server knows how many tokens the newest delta stands for: it comes again,
        and is dropped.
        """
        self._is_continued = True
        indexes: list[int] = []
        for index in range(self._num_choices):
            choice = self._choices[index]
            if self._counts_tokens:
                indexes.append(len(choice.token_ids))
                continue
            indexes.append(choice.newest_index)
            choice.num_characters_to_drop = choice.num_newest_characters
            choice.num_logprobs_to_drop = choice.num_newest_logprobs
        return indexes

    def feed(self, events: Iterable[generation_pb2.GenerationEvent]) -> list[Delta]:
        """Takes events in order; returns the new output among them. Raises ProtocolError."""
        deltas: list[Delta] = []
        for event in events:
            if self.finished:
                raise ProtocolError("an event came after the end of the request")
            kind = event.WhichOneof("kind")
            if kind == "delta":
                delta = self._take_message(event.delta)
                if delta is not None:
                    deltas.append(delta)
            elif kind == "started":
                self._start(event.started)
            elif kind == "keepalive":
                self.phase = convert.phase(event.keepalive.phase)
            elif kind == "prompt_logprobs":
                self._take_prompt_logprobs(event.prompt_logprobs)
            elif kind == "choice_finished":
                self._finish_choice(event.choice_finished)
            elif kind == "finished":
                self._finish(event.finished)
            # Other kinds are additions of a newer server, which may not change the meaning of these.
        return deltas

    def feed_tokens(self, first_token_index: int, token_ids: Sequence[int]) -> Delta:
        """Takes tokens of choice 0 that came as columns. Raises ProtocolError."""
        if self.finished:
            raise ProtocolError("tokens came after the end of the request")
        return self._take(self._live_choice(0), Delta(0, first_token_index, tuple(token_ids), ""))

    def completion(self) -> Completion:
        """The finished request. Raises ProtocolError if its end has not come."""
        if self._usage_timings is None or self.started is None:
            raise ProtocolError("the stream ended without the end of the request")
        usage, timings = self._usage_timings
        return Completion(
            request_id=self.started.request_id,
            model=self.started.model,
            choices=tuple(
                choice.finished for _, choice in sorted(self._choices.items()) if choice.finished is not None
            ),
            usage=usage,
            timings=timings,
            started=self.started,
            prompt_logprobs=tuple(self._prompt_logprobs) if len(self._prompt_logprobs) > 1 else (),
        )

    def _start(self, message: generation_pb2.Started) -> None:
        if self.started is None:
            self.started = convert.started(message)
            self.phase = Phase.PREFILL
        elif not self._is_continued:
            raise ProtocolError("the request was started twice")

    def _choice(self, choice_index: int) -> _ChoiceFold:
        if self.started is None:
            raise ProtocolError("output came before the request was started")
        if choice_index >= self._num_choices:
            raise ProtocolError(f"choice {choice_index} was not asked for")
        return self._choices[choice_index]

    def _live_choice(self, choice_index: int) -> _ChoiceFold:
        choice = self._choice(choice_index)
        if choice.finished is not None:
            raise ProtocolError(f"choice {choice_index} went on after its end")
        return choice

    def _is_repeat(self, choice_index: int) -> bool:
        """Whether this choice had ended before the stream was continued: its end, and its last text, come again."""
        return self._is_continued and self._choice(choice_index).finished is not None

    def _take_message(self, message: generation_pb2.TokenDelta) -> Delta | None:
        if self._is_repeat(message.choice_index):
            return None
        choice = self._live_choice(message.choice_index)
        token_ids, text = tuple(message.token_ids), message.text
        logprobs: tuple[TokenLogprob, ...] = ()
        if message.HasField("logprobs"):
            columns = message.logprobs
            known = token_ids if self._counts_tokens else (None,) * len(columns.token_logprobs)
            logprobs = convert.token_logprobs(columns, known)
        if choice.num_characters_to_drop or choice.num_logprobs_to_drop:
            text, dropped = text[choice.num_characters_to_drop :], len(text)
            choice.num_characters_to_drop = max(0, choice.num_characters_to_drop - dropped)
            logprobs, dropped = logprobs[choice.num_logprobs_to_drop :], len(logprobs)
            choice.num_logprobs_to_drop = max(0, choice.num_logprobs_to_drop - dropped)
            if not text and not logprobs:
                return None
        return self._take(choice, Delta(message.choice_index, message.first_token_index, token_ids, text, logprobs))

    def _take(self, choice: _ChoiceFold, delta: Delta) -> Delta:
        # Without token ids in the stream only the server knows how many tokens a delta stands for.
        if self._counts_tokens and delta.first_token_index != len(choice.token_ids):
            raise ProtocolError(
                f"choice {delta.choice_index} continued at token {delta.first_token_index}, "
                f"expected {len(choice.token_ids)}"
            )
        choice.token_ids += delta.token_ids
        choice.logprobs += delta.logprobs
        if delta.text:
            choice.texts.append(delta.text)
        if delta.first_token_index != choice.newest_index:
            choice.newest_index = delta.first_token_index
            choice.num_newest_characters = choice.num_newest_logprobs = 0
        choice.num_newest_characters += len(delta.text)
        choice.num_newest_logprobs += len(delta.logprobs)
        self.phase = Phase.DECODE
        return delta

    def _take_prompt_logprobs(self, message: generation_pb2.PromptLogprobs) -> None:
        first, known = message.first_position, self._prompt_logprobs
        if first > len(known) or (first < len(known) and not self._is_continued):
            raise ProtocolError(
                f"log probabilities of the prompt continued at position {first}, expected {len(known)}"
            )
        positions = range(first, first + len(message.logprobs.token_logprobs))
        ids = self._prompt_token_ids
        token_ids = [int(ids[position]) if position < len(ids) else None for position in positions]
        known += convert.token_logprobs(message.logprobs, token_ids)[len(known) - first :]

    def _finish_choice(self, message: generation_pb2.ChoiceFinished) -> None:
        if self._is_repeat(message.choice_index):
            return
        choice = self._live_choice(message.choice_index)
        if self._counts_tokens and message.output_tokens != len(choice.token_ids):
            raise ProtocolError(
                f"choice {message.choice_index} ended after {message.output_tokens} tokens, "
                f"but {len(choice.token_ids)} came"
            )
        matched: int | str | None = None
        if message.HasField("token_id"):
            matched = message.token_id
        elif message.HasField("stop_string"):
            matched = message.stop_string
        choice.finished = Choice(
            index=message.choice_index,
            text="".join(choice.texts),
            token_ids=tuple(choice.token_ids),
            finish_reason=convert.finish_reason(message.reason),
            matched=matched,
            output_tokens=message.output_tokens,
            logprobs=tuple(choice.logprobs),
            window_replays=message.window_replays,
            approximate_replays=message.approximate_replays,
            first_approximate_token_index=(
                message.first_approximate_token_index if message.HasField("first_approximate_token_index") else None
            ),
        )

    def _finish(self, message: generation_pb2.GenerationFinished) -> None:
        num_finished = sum(choice.finished is not None for choice in self._choices.values())
        if num_finished != self._num_choices:
            raise ProtocolError(f"the request ended after {num_finished} of {self._num_choices} choices")
        self._usage_timings = (convert.usage(message.usage), convert.timings(message.timings))


_LAST_WORDS_S = 1.0
"""How much longer than a request's timeout its call waits for the server to say what has become of it."""


class FoldedStream:
    """What can be read of a request at any moment; the blocking and the asyncio stream add how it is read."""

    def __init__(
        self,
        request: GenerationRequest,
        message: generation_pb2.GenerateRequest,
        on_connection_change: OnConnectionChange | None,
    ) -> None:
        self._fold = CompletionFold(request)
        self._message = message
        self._on_connection_change = on_connection_change
        self._timeout_s = request.timeout
        self._deadline_s: float | None = None
        window_ms = message.scheduling.reattach_window_ms
        self._outlives_stream = window_ms > 0
        self._reattachment = Reattachment(window_ms / 1000)

    @property
    def request_id(self) -> str:
        """Id of the request; "" while only the server knows it (`reattach_window` 0)."""
        return self._message.request_id or (self.started.request_id if self.started is not None else "")

    @property
    def started(self) -> Started | None:
        """The admission event, once it has come."""
        return self._fold.started

    @property
    def phase(self) -> Phase:
        """Where the request is, as far as the server has said."""
        return self._fold.phase

    @property
    def text(self) -> str:
        """Text of choice 0 so far."""
        return self._fold.text()

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Token ids of choice 0 so far."""
        return self._fold.token_ids()

    def _start_clock(self, now_s: float) -> None:
        """The call starts: its timeout runs, also over later calls."""
        if self._timeout_s is not None:
            self._deadline_s = now_s + self._timeout_s

    def _call_timeout_s(self, now_s: float) -> float | None:
        """The call's deadline, seconds from now: the server ends the request before, and says where it was."""
        return None if self._deadline_s is None else max(0.0, self._deadline_s - now_s) + _LAST_WORDS_S

    def _note_answer(self, events: Iterable[generation_pb2.GenerationEvent]) -> None:
        """A message came. Started alone is no news: it opens every call."""
        self._reattachment.note_answer(is_news=any(not event.HasField("started") for event in events))
        if self._reattachment.is_back() and self._on_connection_change is not None:
            self._on_connection_change(ConnectionChange(self._message.request_id))

    def _delay_after(self, error: StepaheadError, now_s: float) -> float:
        """How long to wait before the next call. Raises the error that ends the stream."""
        left_s = math.inf if self._deadline_s is None else self._deadline_s - now_s
        if isinstance(error, DeadlineError) and not error.reason and left_s <= 0:  # the call's, not the server's
            text = f"the {self._timeout_s:g} s passed and the server did not answer; phase {self.phase.value}"
            raise DeadlineError(text, code=error.code) from error
        delay_s = self._reattachment.delay_after(error, now_s)
        if left_s <= 0:
            raise DeadlineError(f"the {self._timeout_s:g} s passed without a connection", code="DEADLINE_EXCEEDED")
        news = self._reattachment.news_after_break(now_s)
        if news is not None and self._on_connection_change is not None:
            broken, window_s = news
            change = ConnectionChange(self._message.request_id, broken, min(window_s, left_s))
            self._on_connection_change(change)
        return min(delay_s, left_s)

    def _attach_message(self) -> generation_pb2.AttachRequest:
        """Asks for the rest of the stream."""
        indexes = self._fold.continue_from()
        return generation_pb2.AttachRequest(request_id=self._message.request_id, next_token_indexes=indexes)

    def _cancel_message(self) -> generation_pb2.CancelRequest:
        """Asks for the request's end."""
        return generation_pb2.CancelRequest(request_ids=[self._message.request_id])
