"""Log probabilities of a prompt that was given as text: the tokens have names, in every kind of output."""

import json

import grpc
import pytest

from tests.client.fake_server import (
    FakeServer,
    choice_finished,
    delta,
    finished,
    prompt_logprobs,
    response,
    started,
)

PROMPT = ("--prompt-logprobs", "0")


@pytest.fixture(autouse=True)
def _answers(fake: FakeServer) -> None:
    """The fake tokenizer makes a token of each character, its code point."""
    fake.generate = lambda request, context: iter(
        [
            response(started(request.request_id), prompt_logprobs(1, (-2.0, 3, []), (-1.0, 1, []))),
            response(delta(0, [7], "x"), choice_finished(1), finished(1)),
        ]
    )


def ids(printed: str) -> list[int | None]:
    entries = json.loads(printed)["prompt_logprobs"]
    return [None if entry is None else entry["token_id"] for entry in entries]


@pytest.mark.parametrize("arguments", [("abc",), ("abc", "--chat")])
def test_text_and_chat_prompts_name_their_tokens(stepahead, fake: FakeServer, arguments):
    common = ("generate", *arguments, *PROMPT, "--address", fake.address)
    assert ids(stepahead(*common, "--json").stdout) == [None, ord("b"), ord("c")]
    assert stepahead(*common).stdout == (
        "x\n--- prompt\n       -         -\n      98   -2.0000  rank 3\n      99   -1.0000  rank 1\n"
    )


def test_a_conversation_and_a_file_of_requests_name_them_too(stepahead, fake: FakeServer):
    talk = stepahead("chat", "abc", *PROMPT, "--address", fake.address)
    assert "      98   -2.0000  rank 3\n" in talk.stdout
    line = json.dumps({"prompt": "abc", "prompt_logprobs": 0})
    batch = stepahead("generate", "--input", "-", "--json", "--address", fake.address, stdin=line)
    assert ids(batch.stdout) == [None, ord("b"), ord("c")]


def test_ids_that_do_not_fit_are_not_guessed(stepahead, fake: FakeServer):
    answer = stepahead("generate", "abcd", *PROMPT, "--json", "--address", fake.address)
    assert ids(answer.stdout) == [None, None, None]


class WithoutTokenizer(FakeServer):
    def Tokenize(self, request, context):  # noqa: N802 - the call's name
        context.abort(grpc.StatusCode.UNAVAILABLE, "gone")


def test_an_answer_is_printed_even_if_its_prompt_cannot_be_tokenized(stepahead, fake: FakeServer):
    mute = WithoutTokenizer()
    mute.generate = fake.generate
    answer = stepahead("generate", "abc", *PROMPT, "--json", "--address", mute.address)
    mute.close()
    assert (answer.exit_code, ids(answer.stdout)) == (1, [None, None, None])
