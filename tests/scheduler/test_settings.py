"""Flags and environment of the scheduler process."""

from __future__ import annotations

import os

import click
import pytest
from click.testing import CliRunner

from stepahead.scheduler.settings import Settings, from_options, options, parse_overlap


def parse(*arguments: str, **environment: str) -> Settings:
    """Settings of a command line; a usage error raises SystemExit with its text."""
    found: list[Settings] = []

    @click.command()
    @options
    def command(**values: object) -> None:
        found.append(from_options(values))

    unset = {name: None for name in os.environ if name.startswith("STEPAHEAD_")}
    result = CliRunner().invoke(command, arguments, env=unset | environment)
    if result.exit_code:
        raise SystemExit(result.output)
    return found[0]


def test_defaults() -> None:
    settings = parse("--worker", "127.0.0.1:1")
    assert settings == Settings(listen="127.0.0.1:50051", workers=("127.0.0.1:1",), overlap_depth=1)


def test_flags() -> None:
    settings = parse(
        *("--listen", "0.0.0.0:1", "--worker", "a:1", "--worker", "b:2", "--overlap", "off"),
        *("--settle-prompts", "in-place", "--max-waiting-requests", "5", "--default-max-tokens", "6"),
        *("--messages-per-second", "700", "--drain-timeout", "8", "--lane-wait", "0", "--max-step", "10"),
        *("--keepalive", "0.5", "--log-format", "json", "--no-reflection"),
    )
    assert settings == Settings(
        listen="0.0.0.0:1",
        workers=("a:1", "b:2"),
        overlap_depth=0,
        settle_prompts_in_place=True,
        max_waiting_requests=5,
        default_max_tokens=6,
        messages_per_second=700,
        drain_timeout_s=8.0,
        lane_wait_s=0.0,
        max_step_s=10.0,
        keepalive_s=0.5,
        log_format="json",
        reflection=False,
    )


def test_every_flag_is_an_environment_variable() -> None:
    settings = parse(
        STEPAHEAD_LISTEN="0.0.0.0:1",
        STEPAHEAD_WORKER="a:1 b:2",
        STEPAHEAD_OVERLAP="2",
        STEPAHEAD_DRAIN_TIMEOUT="3",
        STEPAHEAD_REFLECTION="1",
        STEPAHEAD_LOG_FORMAT="json",
    )
    assert (settings.listen, settings.workers, settings.overlap_depth) == ("0.0.0.0:1", ("a:1", "b:2"), 2)
    assert (settings.drain_timeout_s, settings.reflection, settings.log_format) == (3.0, True, "json")
    assert parse("--overlap", "off", STEPAHEAD_OVERLAP="2", STEPAHEAD_WORKER="a:1").overlap_depth == 0


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([], "--worker"),
        (["--worker", "a:1", "--worker", "a:1"], "--worker"),
        (["--worker", "a:1", "--overlap", "sometimes"], "--overlap"),
        (["--worker", "a:1", "--overlap", "9"], "--overlap"),
        (["--worker", "a:1", "--overlap", "-1"], "--overlap"),
        (["--worker", "a:1", "--max-waiting-requests", "0"], "--max-waiting-requests"),
        (["--worker", "a:1", "--keepalive", "nan-ish"], "--keepalive"),
        (["--worker", "a:1", "--drain-timeout", "-1"], "--drain-timeout"),
        (["--worker", "a:1", "--announce-fd", "12345"], "--announce-fd"),
        (["--worker", "a:1", "--log-format", "xml"], "--log-format"),
    ],
)
def test_bad_flags_are_named(arguments: list[str], named: str) -> None:
    with pytest.raises(SystemExit, match=named):
        parse(*arguments)


@pytest.mark.parametrize(("text", "depth"), [("on", 1), ("off", 0), ("0", 0), ("8", 8)])
def test_overlap(text: str, depth: int) -> None:
    assert parse_overlap(text) == depth
