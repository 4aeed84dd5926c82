"""The commands that talk to a server: output, JSON, exit codes."""

import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import grpc
import pytest
from google.rpc import status_pb2

from stepahead.cli import entry, local_services, main, services
from stepahead.cli.failures import describe
from stepahead.cli.generate import generate
from stepahead.cli.options import ServerAddress
from stepahead.client.errors import ErrorDetails, FieldViolation, InvalidRequestError
from stepahead.v1 import generation_pb2
from tests.client.fake_server import (
    WAIT_S,
    FakeServer,
    choice_finished,
    columns,
    delta,
    failing,
    finished,
    prompt_logprobs,
    response,
    retry_status,
    small_steps,
    started,
    violation,
)


def test_generate_prints_the_text(stepahead, fake: FakeServer):
    result = stepahead("generate", "hi", "--address", fake.address)
    assert (result.exit_code, result.stdout) == (0, "Small steps help\n")


def test_generate_json_prints_one_object(stepahead, fake: FakeServer):
    result = stepahead("generate", "hi", "--address", fake.address, "--json", "--request-id", "mine")
    assert json.loads(result.stdout) == {
        "request_id": "mine",
        "model": "fake",
        "text": "Small steps help",
        "token_ids": [1, 2, 3],
        "finish_reason": "stop",
        "matched": ".",
        "usage": {"prompt_tokens": 3, "cached_prompt_tokens": 0, "output_tokens": 3},
        "timings": {
            "queue_ms": 1.0,
            "first_token_ms": 2.0,
            "decode_ms": 8.0,
            "total_ms": 10.0,
            "preemptions": 0,
        },
        "choices": [{"text": "Small steps help", "token_ids": [1, 2, 3], "finish_reason": "stop", "matched": "."}],
    }


def test_generate_sends_its_options(stepahead, fake: FakeServer):
    stepahead(
        "generate", "--token-ids", "7, 8", "--address", fake.address, "--max-tokens", "4", "--temperature", "0",
        "--top-k", "-1", "--seed", str(2**64 - 1), "--stop", "a", "--stop", "b c", "--stop-token-ids", "3,4",
        "--ignore-eos", "--served-model", "fake", "--num-choices", "1",
    )  # fmt: skip
    sent = fake.requests[0]
    assert list(sent.token_ids.ids) == [7, 8]
    assert (sent.stopping.max_tokens, sent.sampling.top_k, sent.sampling.seed) == (4, -1, 2**64 - 1)
    assert list(sent.stopping.stop_strings) == ["a", "b c"]
    assert list(sent.stopping.stop_token_ids) == [3, 4]
    assert sent.stopping.ignore_eos
    assert not sent.stopping.HasField("include_stop_in_output")
    assert sent.model == "fake"
    assert not sent.HasField("constraint")
    assert not sent.logprobs.HasField("output_top_k")


def test_generate_sends_every_way_to_draw(stepahead, fake: FakeServer):
    stepahead(
        "generate", "hi", "--address", fake.address, "--repetition-penalty", "1.5", "--frequency-penalty", "-1",
        "--presence-penalty", "2", "--logit-bias", "7=-2.5", "--logit-bias", "9=1", "--bad-words", "1,2",
        "--bad-words", "3", "--allowed-token-ids", "4,5", "--processed-logprobs", "--logprobs", "0", "--priority",
        "-3", "--cache-salt", "mine", "--reattach-window", "0", "--approximate-replay-tokens", "4095",
    )  # fmt: skip
    sent = fake.requests[0]
    sampling = sent.sampling
    assert (sampling.repetition_penalty, sampling.frequency_penalty, sampling.presence_penalty) == (1.5, -1, 2)
    assert [(each.token_id, each.bias) for each in sampling.logit_bias] == [(7, -2.5), (9, 1)]
    assert [list(word.ids) for word in sampling.bad_words] == [[1, 2], [3]]
    assert list(sampling.allowed_token_ids) == [4, 5]
    assert sent.logprobs.kind == generation_pb2.LogprobParams.KIND_PROCESSED
    assert sent.logprobs.HasField("output_top_k")
    assert (sent.scheduling.priority, sent.scheduling.cache_salt) == (-3, "mine")
    assert not sent.scheduling.HasField("reattach_window_ms")
    assert sent.scheduling.approximate_replay_tokens == 4095


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_n8_an_answer_that_is_not_exact_says_so(stepahead, fake: FakeServer, flags):
    said = {"window_replays": 2, "approximate_replays": 1, "first_approximate_token_index": 1}
    fake.generate = lambda request, context: iter(
        [response(started("r"), delta(0, [1, 2], "ab"), choice_finished(2, **said), finished(2))]
    )
    result = stepahead("generate", "hi", "--address", fake.address, *flags)
    if flags:
        assert json.loads(result.stdout).items() >= said.items()
    else:
        assert result.stdout == "ab\n"
        told = "the answer is approximate from token 1 on: 1 of 2 window replays were cut short\n"
        assert result.stderr.endswith(told)


def test_lists_come_from_the_environment_too(stepahead, fake: FakeServer):
    env = {
        "STEPAHEAD_ADDRESS": fake.address,
        "STEPAHEAD_LOGIT_BIAS": "7=-2.5 9=1",
        "STEPAHEAD_BAD_WORDS": "1,2 3",
        "STEPAHEAD_CHOICE": "yes\nno way",
        "STEPAHEAD_REATTACH_WINDOW": "5",
    }
    stepahead("generate", "hi", env=env)
    sent = fake.requests[0]
    assert [each.token_id for each in sent.sampling.logit_bias] == [7, 9]
    assert [list(word.ids) for word in sent.sampling.bad_words] == [[1, 2], [3]]
    assert list(sent.constraint.choices.choices) == ["yes", "no way"]
    assert sent.scheduling.reattach_window_ms == 5000


@pytest.mark.parametrize(
    ("arguments", "kind", "value"),
    [
        (("--json-schema", '{"type": "object"}'), "json_schema", '{"type": "object"}'),
        (("--json-schema", "@{file}"), "json_schema", "from a file"),
        (("--grammar", "@{file}"), "grammar", "from a file"),
        (("--json-object",), "json_object", True),
        (("--regex", "@[a-z]+"), "regex", "@[a-z]+"),
    ],
)
def test_generate_restricts_the_answer(stepahead, fake: FakeServer, tmp_path: Path, arguments, kind, value):
    (tmp_path / "file").write_text("from a file")
    filled = [each.replace("{file}", str(tmp_path / "file")) for each in arguments]
    assert stepahead("generate", "hi", "--address", fake.address, *filled).exit_code == 0
    constraint = fake.requests[0].constraint
    assert constraint.WhichOneof("kind") == kind
    assert getattr(constraint, kind) == value


def test_options_come_from_the_environment_too(stepahead, fake: FakeServer):
    env = {"STEPAHEAD_ADDRESS": fake.address, "STEPAHEAD_MAX_TOKENS": "5", "STEPAHEAD_MODEL": "toy:score-table"}
    result = stepahead("generate", "hi", env={**env, "STEPAHEAD_JSON": "1"})
    assert json.loads(result.stdout)["text"] == "Small steps help"
    assert fake.requests[0].stopping.max_tokens == 5
    # What `up` loads is no name to ask for.
    assert fake.requests[0].model == ""


def test_stop_texts_from_the_environment_stand_one_per_line(stepahead, fake: FakeServer):
    stepahead("generate", "hi", env={"STEPAHEAD_ADDRESS": fake.address, "STEPAHEAD_STOP": "the end\n###"})
    assert list(fake.requests[0].stopping.stop_strings) == ["the end", "###"]


def test_a_piped_prompt_loses_the_newline_of_its_last_line(stepahead, fake: FakeServer):
    stepahead("generate", "-", "--address", fake.address, stdin="two\nlines\n\n")
    assert fake.requests[0].text == "two\nlines\n"


def test_prompt_from_stdin_and_as_chat(stepahead, fake: FakeServer):
    stepahead("generate", "-", "--chat", "--address", fake.address, stdin="from a pipe")
    assert fake.requests[0].chat.messages[0].content == "from a pipe"


def test_several_choices_are_all_printed(stepahead, fake: FakeServer):
    fake.generate = lambda request, context: iter(
        [
            response(started(), delta(0, [1], "a", choice=1), delta(0, [2], "b", choice=0)),
            response(choice_finished(1, choice=1), choice_finished(1, choice=0), finished(2)),
        ]
    )
    arguments = ("generate", "hi", "--num-choices", "2", "--address", fake.address)
    assert stepahead(*arguments).stdout == "--- choice 0 (length)\nb\n--- choice 1 (length)\na\n"
    choices = json.loads(stepahead(*arguments, "--json").stdout)["choices"]
    assert [each["text"] for each in choices] == ["b", "a"]


def test_without_a_tokenizer_the_ids_are_printed(stepahead, fake: FakeServer):
    fake.generate = lambda request, context: iter(
        [response(started(), delta(0, [7, 8])), response(choice_finished(2), finished(2))]
    )
    assert stepahead("generate", "--token-ids", "1", "--address", fake.address).stdout == "7,8\n"
    fake.generate = lambda request, context: iter(
        [
            response(started(), delta(0, [7, 8]), delta(0, [9], choice=1)),
            response(choice_finished(2), choice_finished(1, choice=1), finished(3)),
        ]
    )
    result = stepahead("generate", "--token-ids", "1", "--num-choices", "2", "--address", fake.address)
    assert result.stdout == "--- choice 0 (length)\n7,8\n--- choice 1 (length)\n9\n"


def test_log_probabilities_are_printed_and_part_of_the_json(stepahead, fake: FakeServer):
    likely = columns((-0.5, 1, [(7, -0.5), (8, -math.inf)]))
    fake.generate = lambda request, context: iter(
        [
            response(started(), prompt_logprobs(1, (-2.0, 3, []))),
            response(delta(0, [7], "a", logprobs=likely), choice_finished(1), finished(1)),
        ]
    )
    arguments = ("generate", "--token-ids", "5,6", "--logprobs", "2", "--prompt-logprobs", "0")
    printed = stepahead(*arguments, "--address", fake.address).stdout
    assert printed == (
        "a\n       7   -0.5000  rank 1       7: -0.5000  8: -inf\n"
        "--- prompt\n       -         -\n       6   -2.0000  rank 3\n"
    )
    rendered = json.loads(stepahead(*arguments, "--json", "--address", fake.address).stdout)
    entry = {
        "token_id": 7,
        "logprob": -0.5,
        "rank": 1,
        "top": [{"token_id": 7, "logprob": -0.5}, {"token_id": 8, "logprob": None}],
    }
    assert rendered["logprobs"] == [entry] == rendered["choices"][0]["logprobs"]
    assert rendered["prompt_logprobs"] == [None, {"token_id": 6, "logprob": -2.0, "rank": 3, "top": []}]
    assert (fake.requests[0].logprobs.output_top_k, fake.requests[0].logprobs.HasField("prompt_top_k")) == (2, True)


def test_a_failure_after_some_text_begins_a_line_of_its_own(stepahead, fake: FakeServer):
    fake.generate = failing(violation("constraint"), response(started(), delta(0, [1], "Small")))
    result = stepahead("generate", "hi", "--address", fake.address)
    assert (result.stdout, len(result.stderr.splitlines())) == ("Small\n", 1)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((), "exactly one of"),
        (("hi", "--token-ids", "1"), "exactly one of"),
        (("--token-ids", "x"), "no list of token ids"),
        (("--token-ids", "1,,2"), "'--token-ids': '1,,2' is no list of token ids"),
        (("--token-ids", ""), "'--token-ids': '' is no list"),
        (("--token-ids", "1_0"), "'1_0' is no list"),
        (("hi", "--allowed-token-ids", ""), "'--allowed-token-ids': '' is no list"),
        (("hi", "--stop-token-ids", ","), "'--stop-token-ids': ',' is no list"),
        (("hi", "--bad-words", "1", "--bad-words", ""), "'--bad-words': '' is no list"),
        (("hi", "--logit-bias", "=1"), "no bias of a token"),
        (("hi", "--logit-bias", ""), "no bias of a token"),
        (("hi", "--logit-bias", "7"), "no bias of a token"),
        (("hi", "--logit-bias", "7=1", "--logit-bias", "7=2"), "a token id occurs twice"),
        (("hi", "--json-schema", "@/no/such/file"), "cannot read"),
        (("hi", "--regex", "a", "--json-object"), "json_object and regex exclude each other"),
        (("hi", "--max-tokens", "-1"), "stopping.max_tokens: -1 is negative (option --max-tokens)"),
        (("hi", "--num-choices", "-1"), "num_choices: -1 is negative (option --num-choices)"),
        (("hi", "--priority", str(2**40)), "1099511627776 is above 2147483647, the most the field"),
        (("hi", "--json-schema", "{}", "--regex", "a"), "exclude each other (options --json-schema, --regex)"),
        (("hi", "--request-id", ""), "'--request-id': is empty"),
        (("hi", "--concurrency", "2"), "--concurrency goes with --input"),
        ((" ", "--chat"), "PROMPT is empty"),
    ],
)
def test_unclear_input_is_a_usage_error(stepahead, arguments, text):
    result = stepahead("generate", *arguments, "--address", "127.0.0.1:1")
    assert result.exit_code == 2
    assert text in result.stderr


@pytest.mark.parametrize(
    ("status", "parts"),
    [
        (retry_status(grpc.StatusCode.NOT_FOUND, 0), ["NOT_FOUND"]),
        (retry_status(grpc.StatusCode.RESOURCE_EXHAUSTED, 500), ["try again in 0.5 s"]),
        (retry_status(grpc.StatusCode.UNAVAILABLE, 500), ["UNAVAILABLE", "try later"]),
        (status_pb2.Status(code=grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]), ["try again later"]),
        (status_pb2.Status(code=grpc.StatusCode.DEADLINE_EXCEEDED.value[0]), ["--timeout"]),
        (retry_status(grpc.StatusCode.INTERNAL, 0), ["INTERNAL"]),
    ],
)
def test_failure_is_one_line_on_stderr_and_exit_code_1(stepahead, fake: FakeServer, status, parts):
    fake.generate = failing(status)
    result = stepahead("generate", "hi", "--address", fake.address)
    assert (result.exit_code, result.stdout) == (1, "")
    assert len(result.stderr.splitlines()) == 1
    for part in parts:
        assert part in result.stderr


@pytest.mark.parametrize("command", [("generate", "hi"), ("chat", "hi"), ("generate", "hi", "--json")])
def test_what_the_server_refuses_exits_as_what_is_refused_here(stepahead, fake: FakeServer, command):
    fake.generate = failing(violation("sampling.top_p"))
    result = stepahead(*command, "--address", fake.address)
    assert (result.exit_code, stepahead(*command, "--top-k", str(2**40)).exit_code) == (2, 2)
    assert result.stderr == "error: INVALID_ARGUMENT: sampling.top_p is wrong (option --top-p)\n"


def test_field_is_named_even_if_the_text_does_not(stepahead, fake: FakeServer):
    status = violation("sampling.top_p")
    status.message = "out of range\nand more"
    fake.generate = failing(status)
    result = stepahead("generate", "hi", "--address", fake.address)
    assert result.stderr == "error: INVALID_ARGUMENT [sampling.top_p]: out of range (option --top-p)\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--reattach-window", "-1"], "at least 0 and at most 4294967 seconds, not -1 (option --reattach-window)"),
        (["--timeout", "nan"], "above 0 and at most 4294967 seconds, not nan (option --timeout)"),
        (["--logprobs", "-1"], "-1 is negative (option --logprobs)"),
        (["--prompt-logprobs", "-1"], "-1 is negative (option --prompt-logprobs)"),
    ],
)
def test_a_refused_value_names_its_option(stepahead, arguments, words):
    result = stepahead("generate", "hi", *arguments)
    assert result.exit_code == 2
    assert result.stderr.endswith(words + "\n")


@pytest.mark.parametrize(
    ("field", "place"),
    [
        ("num_choices", "option --num-choices"),
        ("request_id", "option --request-id"),
        ("token_ids.ids[0]", "option --token-ids"),
        ("model", "option --served-model"),
        ("constraint.choices.choices[1]", "option --choice"),
        ("text", "the prompt"),
        ("chat.messages[0].content", "the prompt"),
        ("input", "the prompt"),
    ],
)
def test_a_refusal_says_where_the_value_was_given(stepahead, fake: FakeServer, field, place):
    fake.generate = failing(violation(field))
    result = stepahead("generate", "hi", "--address", fake.address)
    assert (result.exit_code, result.stderr) == (2, f"error: INVALID_ARGUMENT: {field} is wrong ({place})\n")


def test_options_from_the_environment_may_be_for_others(stepahead, fake: FakeServer):
    env = {"STEPAHEAD_CONCURRENCY": "2", "STEPAHEAD_REQUEST_ID": ""}
    assert stepahead("generate", "hi", "--address", fake.address, env=env).exit_code == 0


def test_every_field_that_has_an_option_names_one_that_exists():
    request = generation_pb2.GenerateRequest.DESCRIPTOR.fields_by_name
    known = {name for param in generate.params for name in param.opts}
    for part in ("sampling", "stopping", "logprobs", "constraint", "scheduling"):
        for field in request[part].message_type.fields:
            violation = FieldViolation(f"{part}.{field.name}[0].x", "no")
            error = InvalidRequestError("no", details=ErrorDetails(violations=(violation,)))
            option = describe(error).rpartition("(option ")[2].removesuffix(")")
            assert option in known, field.full_name


@pytest.mark.parametrize("arguments", [["up", "--model", "toy:tagged", "--drain-timeout"], ["health", "--timeout"]])
@pytest.mark.parametrize("value", ["nan", "inf", "-1"])
def test_a_duration_that_is_none_is_a_usage_error(stepahead, arguments, value):
    assert stepahead(*arguments, value).exit_code == 2


def test_ctrl_c_while_modules_load_is_quiet(monkeypatch):
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(main, "main", interrupted)
    with pytest.raises(SystemExit) as exit_info:
        entry.main()
    assert exit_info.value.code == 130


def test_ctrl_c_in_an_import_that_would_swallow_it_ends_the_command():
    """Python prints what a finalizer raises and goes on."""
    script = (
        "import os, signal, sys\n"
        "class Trap:\n"
        "    def __del__(self):\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n"
        "class Finder:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'click':\n"
        "            Trap()\n"
        "sys.meta_path.insert(0, Finder())\n"
        "from stepahead.cli.entry import main\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", script, "--help"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_value_that_does_not_fit_is_bad_input_without_a_server(stepahead):
    result = stepahead("generate", "hi", "--max-tokens", "-1", "--address", "127.0.0.1:1")
    assert result.exit_code == 2
    assert "stopping.max_tokens: -1" in result.stderr


def test_status_counts_sequences_apart_from_requests(stepahead, fake: FakeServer):
    """A request of five choices may have two that run and three that wait."""
    fake.status.num_running, fake.status.num_waiting = 2, 3
    fake.status.totals.requests_accepted = 1
    lines = [" ".join(line.split()) for line in stepahead("status", "--address", fake.address).stdout.splitlines()]
    assert "sequences 2 running, 3 waiting" in lines
    assert any(line.startswith("requests since start 1 accepted, ") for line in lines)


def test_nobody_listening_says_how_to_start_a_server(stepahead):
    for arguments in (("status",), ("generate", "hi"), ("chat", "hi")):
        result = stepahead(*arguments, "--address", "127.0.0.1:1")
        assert result.exit_code == 1
        assert "stepahead up" in result.stderr


def test_status_json_holds_integers_and_shares(stepahead, fake: FakeServer):
    status = json.loads(stepahead("status", "--json", "--address", fake.address).stdout)
    assert status["state"] == "serving"
    worker = status["workers"][0]
    assert worker["steps"]["busy_ns"] == 2**40
    assert worker["blocks"] == {"total": 100, "free": 100, "owned": 0, "cached_idle": 0, "quarantined": 0}
    assert (worker["overlap_share"], worker["idle_fraction"]) == (0.75, 0.0)


@pytest.mark.parametrize("num_more", [0, 1, 5])
def test_status_table_names_every_worker(stepahead, fake: FakeServer, num_more):
    for index in range(num_more):
        fake.status.workers.add(address=f"other:{index}", connected=False)
    result = stepahead("status", "--address", fake.address, env={"COLUMNS": "160"})
    for part in ("serving", "127.0.0.1:1", "75.0%", "0 of 100"):
        assert part in result.stdout
    assert result.stdout.count("other:") == result.stdout.count("not connected") == num_more


def test_chat_once(stepahead, fake: FakeServer):
    result = stepahead("chat", "hello", "--system", "be brief", "--address", fake.address)
    assert result.stdout == "Small steps help\n"
    assert [turn.role for turn in fake.requests[0].chat.messages] == ["system", "user"]


def test_chat_with_nothing_to_say_is_a_usage_error(stepahead, fake: FakeServer):
    for message in ("", " \n"):
        result = stepahead("chat", message, "--address", fake.address)
        assert (result.exit_code, "MESSAGE is empty" in result.stderr) == (2, True)
    assert not fake.requests


def test_chat_prints_no_line_for_an_answer_that_never_came(stepahead, fake: FakeServer):
    fake.generate = failing(violation("stopping.max_tokens"))
    refused = stepahead("chat", "hi", "--max-tokens", "0", "--address", fake.address)
    assert (refused.exit_code, refused.stdout) == (2, "")
    fake.generate = lambda request, context: iter([response(started()), response(choice_finished(0), finished(1))])
    silent = stepahead("chat", "hi", "--address", fake.address)
    assert (silent.exit_code, silent.stdout, silent.stderr) == (0, "", "(no text: length)\n")


def test_chat_keeps_the_conversation_until_reset(stepahead, fake: FakeServer):
    typed = "first\n\n/what\nsecond\n/reset\nthird\n/exit\nnever\n"
    result = stepahead("chat", "--address", fake.address, stdin=typed)
    assert result.exit_code == 0
    assert [[turn.content for turn in each.chat.messages] for each in fake.requests] == [
        ["first"],
        ["first", "Small steps help", "second"],
        ["third"],
    ]


def test_chat_goes_on_after_a_refused_message_and_ends_with_the_input(stepahead, fake: FakeServer):
    fake.generate = failing(violation("chat.messages"))
    result = stepahead("chat", "--address", fake.address, stdin="first\nsecond\n")
    assert result.exit_code == 0
    assert result.stderr.count("chat.messages is wrong") == 2
    assert [len(each.chat.messages) for each in fake.requests] == [1, 1]


def test_chat_stops_an_answer_at_ctrl_c_and_goes_on(stepahead, fake: FakeServer):
    def script(request, context):
        if request.chat.messages[-1].content == "second":
            yield from small_steps(request, context)
            return
        yield response(started(), delta(0, [1], "Small"))
        os.kill(os.getpid(), signal.SIGINT)
        fake.call_ended.wait(WAIT_S)

    fake.generate = script
    result = stepahead("chat", "--address", fake.address, stdin="first\nsecond\n")
    assert result.exit_code == 0
    assert "(stopped)" in result.stderr
    assert result.stdout.endswith("Small steps help\n> \n")


def test_chat_without_a_server_fails_before_anything_is_typed(stepahead):
    assert stepahead("chat", "--address", "127.0.0.1:1", stdin="hi\n").exit_code == 1


@pytest.mark.parametrize(
    ("number", "exit_code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
@pytest.mark.parametrize("output", [(), ("--json",)])
def test_f6_a_signal_cancels_the_request_wherever_it_lands(stepahead, fake: FakeServer, number, exit_code, output):
    """Also while a message is being handed over, where an exception would leave a lock of grpc held."""
    handler = signal.getsignal(number)

    def script(request, context):
        yield response(started())
        for index in range(400):
            if index == 200:
                os.kill(os.getpid(), number)
            yield response(delta(index, [1], "x"))
        fake.call_ended.wait(WAIT_S)

    fake.generate = script
    result = stepahead("generate", "hi", *output, "--address", fake.address)
    assert result.exit_code == exit_code
    assert "Traceback" not in result.output
    assert fake.call_ended.wait(WAIT_S)
    assert signal.getsignal(number) is handler


def test_f6_ctrl_c_cancels_the_request_and_exits_130(fake: FakeServer):
    fake.hang_after(response(started(), delta(0, [1], "Small")))
    command = (sys.executable, "-c", "from stepahead.cli.main import main; main()")
    process = subprocess.Popen(
        [*command, "generate", "hi", "--address", fake.address],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    assert process.stdout is not None
    assert process.stdout.read(5) == b"Small"
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=WAIT_S)
    assert process.returncode == 130
    assert fake.call_ended.wait(WAIT_S)


@pytest.mark.parametrize("service", ["scheduler", "worker"])
def test_services_get_their_arguments_untouched(stepahead, monkeypatch, service):
    executed = []
    monkeypatch.setattr(services.os, "execv", lambda path, argv: executed.append((path, argv)))
    stepahead(service, "--help", "--listen", "x", "y")
    arguments = ["-m", "stepahead.cli.module_entry", f"stepahead.{service}", "--help", "--listen", "x", "y"]
    assert executed == [(sys.executable, [sys.executable, *arguments])]


def test_missing_extra_says_what_to_install(stepahead, monkeypatch):
    monkeypatch.setattr(local_services.importlib.util, "find_spec", lambda name: None if name == "torch" else name)
    result = stepahead("up", "--model", "toy:score-table")
    assert result.exit_code == 1
    assert "pip install 'stepahead[scheduler,worker]'" in result.stderr
    assert "torch" in result.stderr


def test_taken_port_is_reported_before_anything_starts(stepahead, fake: FakeServer):
    result = stepahead("up", "--model", "toy:score-table", "--listen", fake.address)
    assert result.exit_code == 1
    assert f"cannot listen at {fake.address}" in result.stderr


@pytest.mark.parametrize("listen", ["127.0.0.1:0", "nowhere:5000", "unix:/tmp/x", "[::1]:0"])
def test_addresses_that_cannot_be_checked_are_left_to_the_scheduler(monkeypatch, listen):
    def unknown_host(*args, **options):
        raise socket.gaierror("unknown host")

    monkeypatch.setattr(local_services.socket, "getaddrinfo", unknown_host)
    local_services.require_free_port(listen)


def test_every_command_explains_itself(stepahead):
    listing = stepahead("--help").stdout
    for code in ("0", "1", "2", "3", "130", "143", "129"):
        assert re.search(rf"\b{code}\b", listing.partition("Exit codes:")[2].partition("Options:")[0])
    for command in ("up", "generate", "chat", "status", "lab"):
        assert command in listing
        assert stepahead(command, "--help").exit_code == 0
    assert "demo" not in listing
    assert stepahead("nothing").exit_code == 2


@pytest.mark.parametrize("address", ["", "nonsense", "127.0.0.1:99999", "127.0.0.1:0", ":50051", "host:"])
def test_an_address_without_a_possible_port_is_refused(stepahead, address):
    result = stepahead("generate", "hi", "--address", address)
    assert result.exit_code == 2
    assert f"Invalid value for '--address': {address!r} is not HOST:PORT" in result.stderr


@pytest.mark.parametrize("address", ["[::1]:50051", "unix:/run/stepahead.sock", "dns:///scheduler:50051"])
def test_an_address_may_be_any_that_grpc_dials(address):
    assert ServerAddress().convert(address, None, None) == address
