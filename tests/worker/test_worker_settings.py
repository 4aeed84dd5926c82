"""Flags, sizes, and how large the cache gets."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from stepahead.worker.cache_sizing import refuse_larger, size_cache, step_limits
from stepahead.worker.errors import ModelError, OptionRefused
from stepahead.worker.settings import (
    WorkerSettings,
    parse_listen,
    parse_size,
    settings_from_options,
    settings_options,
)
from tests.conformance.double import settings
from tests.worker.fakes import FakeRunner

FACTS = FakeRunner().load(lambda what, done, total: None)  # 64 positions, 8 bytes a token


def run(*arguments: str, env: dict[str, str] | None = None) -> tuple[Result, list[WorkerSettings]]:
    parsed: list[WorkerSettings] = []

    @click.command(context_settings={"auto_envvar_prefix": "STEPAHEAD"})
    @settings_options
    def command(**options: Any) -> None:
        parsed.append(settings_from_options(options))

    result = CliRunner().invoke(command, ["--model", "m", *arguments], env=env, catch_exceptions=False)
    return result, parsed


def parse(*arguments: str, env: dict[str, str] | None = None) -> WorkerSettings:
    result, parsed = run(*arguments, env=env)
    assert result.exit_code == 0, result.output
    return parsed[0]


def test_defaults() -> None:
    parsed = parse()
    assert (parsed.host, parsed.port) == ("127.0.0.1", 50061)
    assert (parsed.max_num_seqs, parsed.max_num_batched_tokens, parsed.block_size) == (32, 512, 16)
    assert (parsed.max_overlap_depth, parsed.num_slots) == (2, 96)
    assert (parsed.resume_grace_ns, parsed.max_step_ns) == (10_000_000_000, 300_000_000_000)
    assert (parsed.max_model_len, parsed.num_kv_blocks, parsed.kv_cache_bytes, parsed.threads) == (None,) * 4
    assert (parsed.dtype, parsed.log_format, parsed.announce_fd) == ("auto", "console", None)


@pytest.mark.parametrize(
    ("flag", "variable", "value", "field", "expected"),
    [
        ("--listen", "STEPAHEAD_LISTEN", "0.0.0.0:7", "port", 7),
        ("--dtype", "STEPAHEAD_DTYPE", "float32", "dtype", "float32"),
        ("--max-num-seqs", "STEPAHEAD_MAX_NUM_SEQS", "5", "max_num_seqs", 5),
        ("--max-model-len", "STEPAHEAD_MAX_MODEL_LEN", "99", "max_model_len", 99),
        ("--kv-cache-bytes", "STEPAHEAD_KV_CACHE_BYTES", "2MiB", "kv_cache_bytes", 2 << 20),
        ("--num-kv-blocks", "STEPAHEAD_NUM_KV_BLOCKS", "12", "num_kv_blocks", 12),
        ("--resume-grace", "STEPAHEAD_RESUME_GRACE", "0.5", "resume_grace_ns", 500_000_000),
        ("--threads", "STEPAHEAD_THREADS", "3", "threads", 3),
        ("--tensor-parallel-size", "STEPAHEAD_TENSOR_PARALLEL_SIZE", "2", "tensor_parallel_size", 2),
        ("--pin-threads", "STEPAHEAD_PIN_THREADS", None, "pin_threads", True),
        ("--announce-fd", "STEPAHEAD_ANNOUNCE_FD", "4", "announce_fd", 4),
        ("--device", "STEPAHEAD_DEVICE", "cuda:3", "device", "cuda:3"),
        ("--cuda-graphs", "STEPAHEAD_CUDA_GRAPHS", "off", "cuda_graphs", False),
        ("--gpu-memory-utilization", "STEPAHEAD_GPU_MEMORY_UTILIZATION", "0.5", "gpu_memory_utilization", 0.5),
    ],
)
def test_every_flag_is_an_environment_variable_too(
    flag: str, variable: str, value: str | None, field: str, expected: object
) -> None:
    assert getattr(parse(flag) if value is None else parse(flag, value), field) == expected
    assert getattr(parse(env={variable: value or "1"}), field) == expected


def test_a_gpu_is_asked_for_by_name() -> None:
    parsed = parse("--device", "cuda", "--deterministic", "--dtype", "float16")
    assert (parsed.device, parsed.deterministic, parsed.dtype, parsed.cuda_graphs) == (
        "cuda",
        True,
        "float16",
        True,
    )
    assert (parse().device, parse().deterministic, parse().gpu_memory_utilization) == ("cpu", False, 0.9)
    result = CliRunner().invoke(
        click.command()(settings_options(lambda **_: None)), ["--model", "m", "--device", "tpu"]
    )
    assert result.exit_code == 2
    assert "'tpu' is not cpu, cuda or cuda:N" in result.output


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--num-kv-blocks", "4", "--kv-cache-bytes", "1MiB"), ("--num-kv-blocks", "--kv-cache-bytes")),
        (("--tensor-parallel-size", "2", "--model", "toy:sleep"), ("--tensor-parallel-size", "--model toy:sleep")),
        (("--device", "cuda", "--model", "toy:sleep"), ("--device", "--model toy:sleep")),
        (("--dtype", "float16"), ("--dtype", "--device")),
        (("--pin-threads", "--device", "cuda"), ("--pin-threads", "--device cuda")),
        (("--pin-threads", "--tensor-parallel-size", "2"), ("--pin-threads", "--tensor-parallel-size 2")),
        (("--pin-threads", "--model", "toy:sleep"), ("--pin-threads", "--model toy:sleep")),
        (("--max-num-seqs", "600"), ("--max-num-seqs", "--max-num-batched-tokens 512")),
    ],
)
def test_options_that_exclude_each_other_are_both_named(arguments: tuple[str, ...], named: tuple[str, ...]) -> None:
    result, _ = run(*arguments)
    assert result.exit_code == 2
    assert all(option in result.output for option in named)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("1048576", 1 << 20),
        ("2GiB", 2 << 30),
        ("500MB", 500_000_000),
        ("1.5 KiB", 1536),
        ("7B", 7),
        ("3kB", 3000),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1", "2 apples", "2gib", "1e9", "2G"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size"):
        parse_size(text)


def test_listen_addresses() -> None:
    assert parse_listen("localhost:0") == ("localhost", 0)
    assert parse_listen("[::1]:80") == ("[::1]", 80)
    for text in ("80", ":80", "host:", "host:http", "host:65536"):
        with pytest.raises(ValueError, match="is not HOST:PORT"):
            parse_listen(text)


@pytest.mark.parametrize(
    ("host", "loopback"), [("127.0.0.1", True), ("localhost", True), ("[::1]", True), ("0.0.0.0", False)]
)
def test_loopback(host: str, loopback: bool) -> None:
    assert settings(host=host).is_loopback is loopback


def free(**fields: Any) -> WorkerSettings:
    return settings(**({"num_kv_blocks": None, "max_model_len": None} | fields))


def test_the_cache_covers_every_sequence_when_memory_allows() -> None:
    shape = size_cache(free(), FACTS, 1 << 30)
    assert (shape.max_model_len, shape.num_blocks) == (64, 3 * 16)
    assert (shape.num_slots, shape.max_num_seqs, shape.max_num_batched_tokens) == (9, 3, 8)


def test_the_cache_takes_at_most_a_quarter_of_the_memory() -> None:
    block_bytes = 4 * 8
    shape = size_cache(free(), FACTS, 4 * 20 * block_bytes)
    assert (shape.max_model_len, shape.num_blocks) == (64, 20)


def test_a_cache_of_a_device_takes_what_the_device_has_left() -> None:
    block_bytes = 4 * 8
    shape = size_cache(free(), FACTS, 1000 * block_bytes, fill=True)
    assert (shape.max_model_len, shape.num_blocks) == (64, 1000)
    assert replace(shape, num_blocks=16, group_of_layer=()) == step_limits(free(), FACTS)


def test_sequences_get_shorter_before_the_start_fails() -> None:
    block_bytes = 4 * 8
    assert size_cache(free(), FACTS, 4 * 5 * block_bytes).max_model_len == 20
    assert size_cache(free(num_kv_blocks=3), FACTS, 0).max_model_len == 12
    assert size_cache(free(kv_cache_bytes=7 * block_bytes + 1), FACTS, 0).num_blocks == 7


@pytest.mark.parametrize(
    ("fields", "available", "message"),
    [
        ({}, 0, "holds 0 blocks"),
        ({"max_model_len": 32}, 4 * 7 * 32, "holds 7 blocks of 4 tokens .* needs 8 .*lower --max-model-len"),
        ({"max_model_len": 32, "kv_cache_bytes": 100}, 1 << 30, "raise --num-kv-blocks or --kv-cache-bytes"),
        ({"max_model_len": 65}, 1 << 30, "more than the 64 positions"),
        (
            {"kv_cache_bytes": 1},
            0,
            r"one sequence of 2 tokens, the shortest there is, needs 1 \(32 bytes\): raise ",
        ),
        ({"num_kv_blocks": 1, "block_size": 1}, 0, "holds 1 blocks of 1 tokens .*2 tokens.* needs 2 "),
    ],
)
def test_a_cache_that_cannot_hold_one_sequence_is_refused(
    fields: dict[str, Any], available: int, message: str
) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        size_cache(free(**fields), FACTS, available)
    assert isinstance(caught.value, OptionRefused) is bool(fields), (
        "without options it is the machine that is small"
    )


@pytest.mark.parametrize("option", ["num_kv_blocks", "kv_cache_bytes"])
def test_a_cache_larger_than_the_memory_is_refused_with_both_sizes(option: str) -> None:
    block_bytes = 4 * FACTS.kv_bytes_per_token
    settings = free(**{option: 10 if option == "num_kv_blocks" else 10 * block_bytes})
    shape = size_cache(settings, FACTS, 0)
    refuse_larger(settings, shape, FACTS, 10 * block_bytes)
    named = f"--{option.replace('_', '-')} {getattr(settings, option)}"
    match = f"{named}: the KV cache needs {10 * block_bytes} bytes, and {10 * block_bytes - 1} bytes of memory are"
    with pytest.raises(OptionRefused, match=match):
        refuse_larger(settings, shape, FACTS, 10 * block_bytes - 1)


def test_a_model_without_cache_needs_blocks_not_bytes() -> None:
    facts = replace(FACTS, kv_bytes_per_token=0)
    assert size_cache(free(), facts, 0).num_blocks == 48
    with pytest.raises(ModelError, match="no KV cache"):
        size_cache(free(kv_cache_bytes=100), facts, 0)


def test_a_model_of_one_position_is_refused() -> None:
    with pytest.raises(ModelError, match="supports 1 positions, the least is 2"):
        size_cache(free(), replace(FACTS, max_context_tokens=1), 1 << 30)


def test_long_contexts_are_cut_to_a_default() -> None:
    facts = replace(FACTS, max_context_tokens=131072)
    assert size_cache(free(), facts, 1 << 40).max_model_len == 4096
