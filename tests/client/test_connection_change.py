"""What a client tells of a connection that breaks: when it is lost, for how long it tries, and when it is back."""

import asyncio
import json

import pytest

from stepahead.client import AsyncClient, Client, ConnectionChange, UnavailableError
from stepahead.client.reattaching import Reattachment
from tests.client.fake_server import FakeServer, broken, choice_finished, delta, finished, response, started
from tests.client.test_client_reattach import answers, rest


def generate(kind: str, address: str, **options) -> list[ConnectionChange]:
    """Generates with one of the clients; returns what was told, also of a request that fails."""
    told: list[ConnectionChange] = []

    async def asynchronous() -> None:
        async with AsyncClient(address, on_connection_change=told.append) as client:
            await client.generate("hi", **options)

    try:
        if kind == "async":
            asyncio.run(asynchronous())
        else:
            with Client(address, on_connection_change=told.append) as client:
                client.generate("hi", **options)
    except UnavailableError:
        told.append(ConnectionChange("failed"))
    return told


@pytest.fixture(params=["sync", "async"])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


def test_a_break_and_its_end_are_told_once_each(fake: FakeServer, kind):
    fake.generate = broken(response(started(), delta(0, [1], "a")))
    end = rest(delta(1, [2], "b"), choice_finished(2), finished(2))
    fake.attach = answers(([], False), ([], False), ([rest(), end], True))
    lost, back = generate(kind, fake.address, request_id="mine", reattach_window=20)
    assert (lost.is_lost, lost.request_id, lost.seconds_left) == (True, "mine", 20)
    assert isinstance(lost.error, UnavailableError)
    assert back == ConnectionChange("mine")


def test_the_timeout_bounds_what_is_told(fake: FakeServer, kind):
    fake.generate = broken(response(started(), delta(0, [1], "a")))
    fake.attach = answers(([rest(delta(1, [2], "b"), choice_finished(2), finished(2))], True))
    assert 0 < generate(kind, fake.address, timeout=5)[0].seconds_left <= 5


def test_nothing_is_told_of_a_request_that_nobody_accepted(kind):
    """Nobody listens: there is no connection to lose."""
    assert generate(kind, "127.0.0.1:1") == [ConnectionChange("failed")]


def test_a_break_that_is_given_up_has_no_end():
    told = Reattachment(2.0)
    told.note_answer(is_news=True)
    error = UnavailableError("gone")
    told.delay_after(error, 10.0)
    assert told.news_after_break(10.5) == (error, 1.5)
    told.delay_after(error, 11.0)
    assert told.news_after_break(11.0) is None
    with pytest.raises(UnavailableError):
        told.delay_after(error, 13.0)


def test_the_command_says_it_on_stderr_for_all_its_requests_together(fake: FakeServer):
    from click.testing import CliRunner

    from stepahead.cli.main import main

    fake.generate = broken(response(started(), delta(0, [1], "a")))

    def attach(request, context):
        yield rest(delta(1, [2], "b"), choice_finished(2), finished(2))

    fake.attach = attach
    lost = f"connection to {fake.address} lost; trying again, 30 s left\n"
    back = f"connection to {fake.address} is back\n"
    for command in (["generate", "hi"], ["generate", "hi", "--json"], ["chat", "hi"]):
        result = CliRunner().invoke(main, [*command, "--address", fake.address])
        assert (result.exit_code, result.stderr) == (0, lost + back)
    lines = "\n".join([json.dumps({"prompt": "hi"})] * 3)
    result = CliRunner().invoke(main, ["generate", "--input", "-", "--address", fake.address], input=lines)
    assert (result.exit_code, result.stdout) == (0, "ab\n" * 3)
    assert result.stderr.count(lost) == result.stderr.count(back) >= 1
