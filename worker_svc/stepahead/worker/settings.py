"""Settings of the worker process: flags and environment variables, read and checked once."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click
from typing_extensions import override

if TYPE_CHECKING:
    from collections.abc import Callable

MAX_THREADS = 256
"""Most compute threads of a process: what the compiled step takes."""

_UNITS = {"": 1, "B": 1} | {
    f"{prefix}{suffix}": base**power
    for power, prefix in enumerate("KMGT", start=1)
    for suffix, base in (("iB", 1024), ("B", 1000))
}


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """Everything the worker is told. None: the worker works it out."""

    model: str
    host: str
    port: int  # 0: a free one
    dtype: str
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int | None
    block_size: int
    num_kv_blocks: int | None
    kv_cache_bytes: int | None
    max_overlap_depth: int
    threads: int | None
    resume_grace_ns: int
    max_step_ns: int
    hold_events: bool
    reflection: bool | None  # None: on loopback listeners only
    log_format: str
    announce_fd: int | None
    single_step: bool = False
    tensor_parallel_size: int = 1
    device: str = "cpu"  # "cpu", "cuda" or "cuda:N"
    cuda_graphs: bool = True
    gpu_memory_utilization: float = 0.9
    deterministic: bool = False
    pin_threads: bool = False

    @property
    def num_slots(self) -> int:
        """Rows of the persistent batch: a slot is reusable only once the last step that named it completed."""
        return self.max_num_seqs * (self.max_overlap_depth + 1)

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach the listener."""
        return self.host in ("localhost", "::1", "[::1]") or self.host.startswith("127.")


def parse_size(text: str) -> int:
    """Bytes of a size such as ``2GiB``, ``500MB`` or ``1048576``.

    Raises:
        ValueError: it is not one.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    unit = None if match is None else _UNITS.get(match[2][:1].upper() + match[2][1:])
    if match is None or unit is None:
        message = f"{text!r} is not a size; write for example 2GiB, 500MB or a number of bytes"
        raise ValueError(message)
    return int(float(match[1]) * unit)


def parse_listen(text: str) -> tuple[str, int]:
    """Host and port of ``HOST:PORT``; a host in brackets may contain colons.

    Raises:
        ValueError: it is not one.
    """
    host, separator, port = text.rpartition(":")
    if not separator or not host or not port.isdigit() or int(port) > 65535:
        message = f"{text!r} is not HOST:PORT"
        raise ValueError(message)
    return host, int(port)


class _SizeType(click.ParamType[int]):
    name = "SIZE"

    @override
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            size = parse_size(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)
        if size < 1:
            self.fail("must be at least 1 byte", param, ctx)
        return size


class _ListenType(click.ParamType[tuple[str, int]]):
    name = "HOST:PORT"

    @override
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, int]:
        try:
            return parse_listen(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)


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


class _ShareType(click.FloatRange):
    """A number in (0, 1]; NaN is none."""

    def __init__(self) -> None:
        super().__init__(min=0, max=1, min_open=True)

    @override
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        share = float(super().convert(value, param, ctx))
        if math.isnan(share):
            self.fail("nan is no share", param, ctx)
        return share


class _DeviceType(click.ParamType[str]):
    name = "DEVICE"

    @override
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if not re.fullmatch(r"cpu|cuda(:\d+)?", str(value)):
            self.fail(f"{value!r} is not cpu, cuda or cuda:N", param, ctx)
        return str(value)


_MOST = 2**31 - 1  # what a field of the protocol and the compiled step can hold
_POSITIVE = click.IntRange(1, _MOST)

_OPTIONS = (
    click.option("--model", required=True, metavar="SPEC", help="Folder, FILE.gguf, hub id, or toy:NAME."),
    click.option(
        "--listen", type=_ListenType(), default="127.0.0.1:50061", show_default=True, help="Port 0: a free one."
    ),
    click.option(
        "--dtype",
        type=click.Choice(["auto", "bfloat16", "float16", "float32"]),
        default="auto",
        show_default=True,
        help="Storage of weights and cache; float16 on a GPU only.",
    ),
    click.option("--device", type=_DeviceType(), default="cpu", show_default=True, help="cpu, cuda or cuda:N."),
    click.option(
        "--cuda-graphs",
        type=click.Choice(["on", "off"]),
        default="on",
        show_default=True,
        help="Record decode steps on the GPU and replay each in one call.",
    ),
    click.option(
        "--gpu-memory-utilization",
        type=_ShareType(),
        default=0.9,
        show_default=True,
        help="Share of the GPU's memory for weights, steps and cache, if the cache's size is not given.",
    ),
    click.option(
        "--deterministic",
        is_flag=True,
        help="On a GPU: no token's bits depend on what else is in its step. Slower.",
    ),
    click.option(
        "--max-num-seqs", type=_POSITIVE, default=32, show_default=True, help="Sequences that may run in one step."
    ),
    click.option(
        "--max-num-batched-tokens",
        type=_POSITIVE,
        default=512,
        show_default=True,
        help="Tokens one step may feed.",
    ),
    click.option(
        "--max-model-len",
        type=click.IntRange(2, _MOST),
        default=None,
        help="Longest sequence; default: the model's context, at most 4096 and what the cache holds.",
    ),
    click.option(
        "--block-size", type=click.IntRange(1, 1024), default=16, show_default=True, help="Tokens per block."
    ),
    click.option(
        "--num-kv-blocks", type=_POSITIVE, default=None, help="Size of the KV cache in blocks, window layers aside."
    ),
    click.option("--kv-cache-bytes", type=_SizeType(), default=None, help="Size of the KV cache, e.g. 2GiB."),
    click.option(
        "--max-overlap-depth",
        type=click.IntRange(0, 8),
        default=2,
        show_default=True,
        help="Largest number of steps a scheduler may dispatch ahead.",
    ),
    click.option(
        "--tensor-parallel-size",
        type=click.IntRange(1, 1024),
        default=1,
        show_default=True,
        help="Processes that share the model, each with a part of every layer.",
    ),
    click.option(
        "--threads",
        type=click.IntRange(1, MAX_THREADS),
        default=None,
        help="Compute threads of each process; default: the machine's cores, shared.",
    ),
    click.option(
        "--pin-threads",
        is_flag=True,
        help="Tie each compute thread to a core, on a CPU whose cores nothing else uses.",
    ),
    click.option(
        "--resume-grace",
        type=Seconds(most=3600.0),
        default=10.0,
        show_default=True,
        metavar="SECONDS",
        help="How long a session outlives its stream.",
    ),
    click.option(
        "--max-step",
        type=Seconds(0.001),
        default=300.0,
        show_default=True,
        metavar="SECONDS",
        help="Device time after which a step counts as hung and the process ends.",
    ),
    click.option(
        "--hold-events", is_flag=True, help="Hold each retained step's end until the next command (labs)."
    ),
    click.option("--single-step", is_flag=True, help="Hold each step's end until the scheduler flushes (labs)."),
    click.option(
        "--reflection/--no-reflection", default=None, help="gRPC reflection; default: on loopback listeners."
    ),
    click.option(
        "--log-format", type=click.Choice(["console", "json"]), default="console", show_default=True, help="Logs."
    ),
    click.option("--announce-fd", type=click.IntRange(min=0), default=None, help="Write JSON events to this file."),
)


def settings_options(command: Callable[..., None]) -> Callable[..., None]:
    """Adds every option of the worker to a click command; see `settings_from_options`."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def settings_from_options(options: dict[str, Any]) -> WorkerSettings:
    """Settings from parsed options.

    Raises:
        click.UsageError: options contradict each other.
    """
    listen: tuple[str, int] = options.pop("listen")
    resume_grace_s: float = options.pop("resume_grace")
    max_step_s: float = options.pop("max_step")
    cuda_graphs: str = options.pop("cuda_graphs")
    settings = WorkerSettings(
        host=listen[0],
        port=listen[1],
        resume_grace_ns=round(resume_grace_s * 1e9),
        max_step_ns=round(max_step_s * 1e9),
        cuda_graphs=cuda_graphs == "on",
        **options,
    )
    _refuse_conflicts(settings)
    return settings


def _refuse_conflicts(settings: WorkerSettings) -> None:
    """What no model could make right is refused before one is loaded; every message names both options."""
    on_cpu, num_ranks = settings.device == "cpu", settings.tensor_parallel_size
    is_toy = settings.model.startswith("toy:")
    conflicts = (
        (
            settings.num_kv_blocks is not None and settings.kv_cache_bytes is not None,
            "--num-kv-blocks and --kv-cache-bytes say the same thing: give one of them",
        ),
        (
            is_toy and num_ranks > 1,
            f"--tensor-parallel-size {num_ranks}: --model {settings.model} computes on one rank",
        ),
        (is_toy and not on_cpu, f"--device {settings.device}: --model {settings.model} computes on the CPU"),
        (
            settings.pin_threads and not on_cpu,
            f"--pin-threads: --device {settings.device} has no compute threads of this process",
        ),
        (
            settings.pin_threads and num_ranks > 1,
            f"--pin-threads: the processes of --tensor-parallel-size {num_ranks} would take the same cores",
        ),
        (settings.pin_threads and is_toy, f"--pin-threads: --model {settings.model} has no compute threads"),
        (on_cpu and settings.dtype == "float16", "--dtype float16 needs a GPU: --device cuda"),
        (
            settings.max_num_batched_tokens < settings.max_num_seqs,
            f"--max-num-batched-tokens {settings.max_num_batched_tokens} is below --max-num-seqs "
            f"{settings.max_num_seqs}: a decode step of all sequences would not fit",
        ),
    )
    for is_conflict, message in conflicts:
        if is_conflict:
            raise click.UsageError(message)
