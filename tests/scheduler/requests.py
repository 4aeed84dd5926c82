"""Models and requests for tests of the scheduler's shell."""

from __future__ import annotations

from typing import Any

from stepahead.scheduler.core import RequestKey
from stepahead.scheduler.front_end import text_maker
from stepahead.scheduler.live_request import Choice, LiveRequest, RequestTimes
from stepahead.scheduler.output_log import OutputLog
from stepahead.scheduler.served_model import ServedModel
from stepahead.scheduler.text.codec import TextCodec
from stepahead.scheduler.validation import AcceptedRequest, validate
from stepahead.v1 import generation_pb2
from tests.scheduler.text.builders import plain_pieces

PIECES = ("<unk>", "AB", "CDEF", "G", " ", "é")
EOS = 5
VOCAB_SIZE = 8
"""Two ids more than there are pieces, as in models whose logits are padded."""


def served_model(codec: TextCodec | None = None, **fields: Any) -> ServedModel:
    """A model of 16 positions."""
    defaults: dict[str, Any] = {
        "name": "tiny",
        "fingerprint": "f",
        "vocab_size": VOCAB_SIZE,
        "max_model_len": 16,
        "eos_token_ids": frozenset({EOS}),
        "bos_token_id": None,
        "codec": codec,
        "tokenizer_sha256": "",
    }
    return ServedModel(**(defaults | fields))


def codec() -> TextCodec:
    """Token `i` is the text `PIECES[i]`."""
    return plain_pieces(PIECES)


async def accept(message: generation_pb2.GenerateRequest, model: ServedModel | None = None) -> AcceptedRequest:
    """Validates a request."""
    return await validate(message, model or served_model(codec()), default_max_tokens=8)


async def live_request(message: generation_pb2.GenerateRequest) -> LiveRequest:
    """An accepted request, as the front end makes it."""
    accepted = await accept(message)
    make_text = text_maker(accepted, served_model(codec()))
    choices = tuple(
        Choice(key=RequestKey(index + 1), index=index, log=OutputLog(make_text))
        for index in range(accepted.num_choices)
    )
    return LiveRequest(
        accepted=accepted, choices=choices, digest=b"", model_name="tiny", times=RequestTimes(accepted_ns=1)
    )
