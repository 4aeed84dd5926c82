"""Command line and environment, read once, into frozen settings. Nothing reads the environment later."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import click
from typing_extensions import override

from stepahead.scheduler.core import Batching, Ordering
from stepahead.scheduler.worker_names import parse_worker

FunctionT = TypeVar("FunctionT", bound=Callable[..., object])


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Everything the scheduler process can be told."""

    listen: str
    """host:port of the public services; port 0 picks one."""
    workers: tuple[str, ...]
    """host:port of each worker, or dns://host:port of all workers behind a name."""
    overlap_depth: int
    settle_prompts_in_place: bool = False
    batching: Batching = Batching.CONTINUOUS
    ordering: Ordering = Ordering.FCFS
    prefix_caching: bool = True
    max_waiting_requests: int = 4096
    default_max_tokens: int = 1024
    messages_per_second: int = 4000
    """Budget of stream messages: each costs some 30 us of the loop that also plans steps."""
    drain_timeout_s: float = 30.0
    lane_wait_s: float = 120.0
    """How long accepted requests wait for a worker when there is none."""
    worker_wait_s: float = 30.0
    """How long a new request waits for a lost worker to come back, from its own arrival on; 0: not at all."""
    max_step_s: float = 120.0
    """A step that runs longer is a hang: the worker's session is closed."""
    keepalive_s: float = 10.0
    """Longest silence of a stream."""
    record_steps: bool = False
    """Keep the plan and the boundary of each of the newest steps for GetTimeline. They hold prompts."""
    log_format: str = "console"
    announce_fd: int | None = None
    resolve_interval_s: float = 5.0
    """How often a worker's name is resolved again."""
    reflection: bool | None = None
    """None: on loopback listeners only."""


def parse_overlap(value: str) -> int:
    """`on` is depth 1, `off` is depth 0, a number is itself.

    Raises:
        click.BadParameter: anything else.
    """
    named = {"on": 1, "off": 0}
    if value in named:
        return named[value]
    if value.isdecimal() and int(value) <= 8:
        return int(value)
    raise click.BadParameter(f"{value!r} is not on, off or a depth from 0 to 8", param_hint="--overlap")


class Seconds(click.FloatRange):
    """A number of seconds, at most a day. NaN compares with nothing, so that a range alone lets it through."""

    def __init__(self, least: float = 0.0, most: float = 86_400.0) -> None:
        super().__init__(least, most)

    @override
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Parses the option's text."""
        seconds = float(super().convert(value, param, ctx))
        if math.isnan(seconds):
            self.fail("nan is no number of seconds", param, ctx)
        return seconds


def _option(name: str, *names: str, **kwargs: object) -> Callable[[FunctionT], FunctionT]:
    """A click option that is also an environment variable STEPAHEAD_<NAME>."""
    env = "STEPAHEAD_" + name.split("/", maxsplit=1)[0].removeprefix("--").upper().replace("-", "_")
    return click.option(name, *names, envvar=env, show_default=True, show_envvar=True, **kwargs)  # type: ignore[arg-type]


def options(function: FunctionT) -> FunctionT:
    """Adds every option of the scheduler to a click command."""
    for decorator in reversed(
        [
            _option("--listen", default="127.0.0.1:50051", help="Address of the public services."),
            _option(
                "--worker",
                "workers",
                multiple=True,
                required=True,
                help="HOST:PORT of a worker, or dns://HOST:PORT of all workers behind a name; repeatable.",
            ),
            _option("--resolve-interval", type=Seconds(0.05), default=5.0, help="Seconds, for names."),
            _option(
                "--overlap",
                default="on",
                help="on (1), off (0), or how many steps are planned ahead: 2 hides more where steps are short.",
            ),
            _option(
                "--settle-prompts",
                type=click.Choice(["retain", "in-place"]),
                default="retain",
                help="Whether prompt steps are waited for in place.",
            ),
            _option(
                "--batching",
                type=click.Choice([policy.value for policy in Batching]),
                default=Batching.CONTINUOUS.value,
                help="When newcomers are admitted; fixed is for comparison.",
            ),
            _option(
                "--ordering",
                type=click.Choice([ordering.value for ordering in Ordering]),
                default=Ordering.FCFS.value,
                help="Who of the waiting goes first: arrival, priority with ageing, or fair shares per tenant.",
            ),
            _option(
                "--prefix-caching/--no-prefix-caching", default=True, help="Share KV blocks of equal prefixes."
            ),
            _option("--max-waiting-requests", type=click.IntRange(1), default=4096, help="Queue bound."),
            _option("--default-max-tokens", type=click.IntRange(1), default=1024, help="If a request has none."),
            _option("--messages-per-second", type=click.IntRange(100), default=4000, help="Stream budget."),
            _option("--drain-timeout", type=Seconds(), default=30.0, help="Seconds."),
            _option("--lane-wait", type=Seconds(), default=120.0, help="Seconds without a worker."),
            _option(
                "--worker-wait",
                type=Seconds(),
                default=30.0,
                help="Seconds a new request waits for a lost worker; 0: refused at once.",
            ),
            _option("--max-step", type=Seconds(0.1), default=120.0, help="Seconds a step may run."),
            _option("--keepalive", type=Seconds(0.1), default=10.0, help="Seconds of stream silence."),
            _option("--record-steps", is_flag=True, help="Keep plans and boundaries for GetTimeline (labs)."),
            _option("--log-format", type=click.Choice(["console", "json"]), default="console", help="Logs."),
            _option("--reflection/--no-reflection", default=None, help="Default: on loopback only."),
            click.option("--announce-fd", type=int, default=None, hidden=True),
        ]
    ):
        function = decorator(function)
    return function


def from_options(values: dict[str, object]) -> Settings:
    """Click values to settings.

    Raises:
        click.BadParameter: a value makes no sense.
    """
    announce_fd = values["announce_fd"]
    if isinstance(announce_fd, int):
        try:
            os.fstat(announce_fd)
        except OSError as error:
            raise click.BadParameter(str(error), param_hint="--announce-fd") from error
    workers = tuple(str(worker) for worker in values["workers"])  # type: ignore[attr-defined]
    if len(set(workers)) != len(workers):
        raise click.BadParameter("a worker is named twice", param_hint="--worker")
    for worker in workers:
        try:
            parse_worker(worker)
        except ValueError as error:
            raise click.BadParameter(str(error), param_hint="--worker") from error
    return Settings(
        listen=str(values["listen"]),
        workers=workers,
        overlap_depth=parse_overlap(str(values["overlap"])),
        settle_prompts_in_place=values["settle_prompts"] == "in-place",
        batching=Batching(str(values["batching"])),
        ordering=Ordering(str(values["ordering"])),
        prefix_caching=bool(values["prefix_caching"]),
        max_waiting_requests=_int(values["max_waiting_requests"]),
        default_max_tokens=_int(values["default_max_tokens"]),
        messages_per_second=_int(values["messages_per_second"]),
        drain_timeout_s=_float(values["drain_timeout"]),
        lane_wait_s=_float(values["lane_wait"]),
        worker_wait_s=_float(values["worker_wait"]),
        max_step_s=_float(values["max_step"]),
        keepalive_s=_float(values["keepalive"]),
        record_steps=bool(values["record_steps"]),
        resolve_interval_s=_float(values["resolve_interval"]),
        log_format=str(values["log_format"]),
        announce_fd=announce_fd if isinstance(announce_fd, int) else None,
        reflection=None if values["reflection"] is None else bool(values["reflection"]),
    )


def _int(value: object) -> int:
    assert isinstance(value, int)
    return value


def _float(value: object) -> float:
    assert isinstance(value, int | float)
    return float(value)
