"""`generate --input`: a file of requests, what is said of each line, and how it is interrupted."""

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.client.fake_server import (
    WAIT_S,
    FakeServer,
    choice_finished,
    delta,
    failing,
    finished,
    response,
    started,
    violation,
)

COMMAND = (sys.executable, "-c", "from stepahead.cli.main import main; main()", "generate", "--input")


def shouting(request, context):
    """Answers with the prompt in capitals; refuses "bad"."""
    if request.text == "bad":
        yield from failing(violation("sampling.top_p"))(request, context)
    count = request.num_choices or 1
    for index in range(count):
        name = f"{request.text.upper()}{index if count > 1 else ''}"
        yield response(*([started(request.request_id)] if index == 0 else []), delta(0, [1], name, choice=index))
    ends = [choice_finished(1, choice=index) for index in range(count)]
    yield response(*ends, finished(count))


@pytest.fixture
def run(stepahead, fake: FakeServer, tmp_path: Path):
    """Writes the lines to a file and runs them."""
    fake.generate = shouting

    def run(*lines: object, options: tuple[str, ...] = ()):
        path = tmp_path / "requests.jsonl"
        path.write_text("\n".join(each if isinstance(each, str) else json.dumps(each) for each in lines))
        return stepahead("generate", "--input", str(path), "--address", fake.address, *options)

    return run


def test_answers_keep_the_order_and_a_refused_line_costs_no_other(run, fake: FakeServer, tmp_path: Path):
    lines = (
        {"prompt": "one", "request_id": "a"},
        "",
        {"prompt": "bad", "request_id": "b"},
        {"prompt": "three", "request_id": "c", "max_tokens": 9, "logit_bias": {"3": -1.5}},
    )
    result = run(*lines, options=("--max-tokens", "4", "--concurrency", "2", "--json"))
    objects = [json.loads(line) for line in result.stdout.splitlines()]
    assert [(each["line"], each["request_id"]) for each in objects] == [(1, "a"), (3, "b"), (4, "c")]
    assert [each.get("text") for each in objects] == ["ONE", None, "THREE"]
    assert objects[1]["error"]["fields"] == ["sampling.top_p"]
    assert result.exit_code == 2
    assert result.stderr.startswith(f"{tmp_path / 'requests.jsonl'}:3: error: INVALID_ARGUMENT: sampling.top_p")
    assert {each.request_id: each.stopping.max_tokens for each in fake.requests} == {"a": 4, "b": 4, "c": 9}
    (third,) = (each for each in fake.requests if each.request_id == "c")  # two at a time come in any order
    assert [(each.token_id, each.bias) for each in third.sampling.logit_bias] == [(3, -1.5)]
    assert run(*lines).stdout == "ONE\nTHREE\n"


def test_several_choices_are_labelled_with_their_line(run):
    assert run({"prompt": "a"}, {"prompt": "b", "num_choices": 2}).stdout == (
        "A\n--- line 2, choice 0 (length)\nB0\n--- line 2, choice 1 (length)\nB1\n"
    )


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ('{"prompt": "a", "max_tokns": 3}', "unknown max_tokns; did you mean max_tokens?"),
        ('{"prompt": "a", "zzz": 3}', "unknown zzz; known are allowed_token_ids, "),
        ("[1]", "not an object"),
        ("{", "no JSON: "),
        ('{"max_tokens": 3}', "prompt must be"),
        ('{"prompt": "a", "logit_bias": {"x": 1}}', "logit_bias: 'x' is no token id"),
        ('{"prompt": "a", "max_tokens": -1}', "stopping.max_tokens: -1 is negative"),
        ('{"prompt": "a", "temperature": NaN}', "no JSON: NaN is no number"),
        ('{"prompt": "a", "logit_bias": {"3": -Infinity}}', "no JSON: -Infinity is no number"),
        ('{"prompt": "a", "temperature": 1e999}', "1e999 is too large for a number"),
        ('{"prompt": []}', "prompt is empty"),
        ('{"prompt": ""}', "prompt is empty"),
        ('{"prompt": "a", "seed": 1, "seed": 1}', "seed occurs twice"),
        ('{"prompt": "a", "logit_bias": {"3": 1, "4": 1, "3": 2}}', "3 occurs twice"),
        ('{"prompt": "a", "served_model": "b"}', "unknown served_model; it is model here"),
        ("[" * 100_000, "no JSON that can be read: it is nested too deeply"),
        ('{"prompt": [[1]]}', "token_ids.ids[0]: must be an integer"),
        ('{"prompt": "a", "stop": null}', "stopping.stop_strings: must be a list"),
    ],
)
def test_nothing_is_sent_if_a_line_is_no_request(run, fake: FakeServer, tmp_path, line, text):
    result = run({"prompt": "good"}, line, {"prompt": "good"}, line)
    assert result.exit_code == 2
    assert result.stdout == ""
    for number in (2, 4):
        assert f"{tmp_path / 'requests.jsonl'}:{number}: {text}" in result.stderr
    assert fake.requests == []


def test_many_bad_lines_are_not_all_printed(run):
    assert "and 5 more" in run(*["x"] * 25).stderr


@pytest.mark.parametrize(
    ("data", "text"), [(b"\n\n", "holds no request"), (b'{"prompt": "\xff"}', ":1: no UTF-8 at byte 13")]
)
def test_files_without_requests_are_refused(stepahead, tmp_path: Path, data, text):
    path = tmp_path / "requests.jsonl"
    path.write_bytes(data)
    result = stepahead("generate", "--input", str(path))
    assert (result.exit_code, text in result.stderr) == (2, True)


def test_lines_end_with_newlines_only(run, fake: FakeServer):
    """JSON texts may hold U+2028; an editor's byte order mark is no part of the first request."""
    assert run('\ufeff{"prompt": "a\u2028b"}\r', {"prompt": "c"}).exit_code == 0
    assert sorted(each.text for each in fake.requests) == ["a\u2028b", "c"]


@pytest.mark.parametrize(("option", "value"), [("--chat", ()), ("--request-id", ("x",))])
def test_options_of_one_prompt_are_refused(run, fake: FakeServer, option, value):
    result = run({"prompt": "a"}, options=(option, *value))
    assert (result.exit_code, option in result.stderr, fake.requests) == (2, True, [])


@pytest.mark.parametrize(
    ("number", "exit_code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_f6_a_signal_cancels_every_request_on_the_server(fake: FakeServer, number, exit_code, tmp_path):
    def script(request, context):
        if request.text == "quick":
            yield from shouting(request, context)
            return
        yield response(started(request.request_id))
        left = threading.Event()
        if context.add_callback(left.set):
            left.wait(WAIT_S)

    fake.generate = script
    path = tmp_path / "requests.jsonl"
    prompts = ["quick", "slow", "slow", "slow"]
    path.write_text("\n".join(json.dumps({"prompt": each, "request_id": str(n)}) for n, each in enumerate(prompts)))
    process = subprocess.Popen(
        [*COMMAND, str(path), "--concurrency", "3", "--address", fake.address],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"QUICK\n"
    fake.wait_for_requests(4)
    process.send_signal(number)
    _, stderr = process.communicate(timeout=WAIT_S)
    assert (process.returncode, stderr) == (exit_code, b"")
    assert sorted(fake.cancelled_ids) == ["1", "2", "3"]
