"""Folds the events of one request into a Completion, checking order and token indexes on the way.

The sync stream, the asyncio stream and Multiplex all feed this one class, so that they cannot differ. The
rules it holds the server to: Started comes first (only keepalives may precede it), each choice's tokens are
contiguous and only grow, each choice ends once, and nothing follows the end.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from stepahead.client import convert
from stepahead.client.errors import ProtocolError
from stepahead.client.requests import GenerationRequest
from stepahead.client.values import Choice, Completion, Delta, Phase, Started, Timings, Usage
from stepahead.v1 import generation_pb2


@dataclass(slots=True)
class _ChoiceFold:
    """What one choice has delivered so far; `finished` once it has ended."""

    texts: list[str] = field(default_factory=list[str])
    token_ids: list[int] = field(default_factory=list[int])
    finished: Choice | None = None


class CompletionFold:
    """The state of one request on the client's side."""

    def __init__(self, request: GenerationRequest) -> None:
        self._num_choices = 1 if request.num_choices is None else request.num_choices
        self._counts_tokens = request.token_ids is not False
        # Filled as choices speak: the server has yet to accept their number.
        self._choices: defaultdict[int, _ChoiceFold] = defaultdict(_ChoiceFold)
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

    def feed(self, events: Iterable[generation_pb2.GenerationEvent]) -> list[Delta]:
        """Takes events in order; returns the new output among them. Raises ProtocolError."""
        deltas: list[Delta] = []
        for event in events:
            if self.finished:
                raise ProtocolError("an event came after the end of the request")
            kind = event.WhichOneof("kind")
            if kind == "delta":
                delta = event.delta
                deltas.append(
                    self._take(delta.choice_index, delta.first_token_index, tuple(delta.token_ids), delta.text)
                )
            elif kind == "started":
                if self.started is not None:
                    raise ProtocolError("the request was started twice")
                self.started = convert.started(event.started)
                self.phase = Phase.PREFILL
            elif kind == "keepalive":
                self.phase = convert.phase(event.keepalive.phase)
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
        return self._take(0, first_token_index, tuple(token_ids), "")

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
        )

    def _live_choice(self, choice_index: int) -> _ChoiceFold:
        if self.started is None:
            raise ProtocolError("output came before the request was started")
        if choice_index >= self._num_choices:
            raise ProtocolError(f"choice {choice_index} was not asked for")
        choice = self._choices[choice_index]
        if choice.finished is not None:
            raise ProtocolError(f"choice {choice_index} went on after its end")
        return choice

    def _take(self, choice_index: int, first_token_index: int, token_ids: tuple[int, ...], text: str) -> Delta:
        choice = self._live_choice(choice_index)
        # Without token ids in the stream only the server knows how many tokens a delta stands for.
        if self._counts_tokens and first_token_index != len(choice.token_ids):
            raise ProtocolError(
                f"choice {choice_index} continued at token {first_token_index}, expected {len(choice.token_ids)}"
            )
        choice.token_ids += token_ids
        if text:
            choice.texts.append(text)
        self.phase = Phase.DECODE
        return Delta(choice_index, first_token_index, token_ids, text)

    def _finish_choice(self, message: generation_pb2.ChoiceFinished) -> None:
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
        )

    def _finish(self, message: generation_pb2.GenerationFinished) -> None:
        num_finished = sum(choice.finished is not None for choice in self._choices.values())
        if num_finished != self._num_choices:
            raise ProtocolError(f"the request ended after {num_finished} of {self._num_choices} choices")
        self._usage_timings = (convert.usage(message.usage), convert.timings(message.timings))


class FoldedStream:
    """What can be read of a request at any moment; the blocking and the asyncio stream add how it is read."""

    def __init__(self, request: GenerationRequest) -> None:
        self._fold = CompletionFold(request)

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
