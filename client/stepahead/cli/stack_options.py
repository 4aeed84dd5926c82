"""What a stack on this machine is told, and how its services are told."""

import os
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StackOptions:
    """What to run. None leaves a value to the service's own default; sizes are as their flags take them."""

    model: str
    workers: int = 1
    listen: str = "127.0.0.1:0"
    overlap: str | None = None
    dtype: str | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    max_model_len: int | None = None
    block_size: int | None = None
    num_kv_blocks: int | None = None
    kv_cache_bytes: str | None = None
    tensor_parallel_size: int | None = None
    threads: int | None = None
    log_format: str | None = None
    drain_timeout: float = 30.0
    worker_flags: tuple[str, ...] = ()
    scheduler_flags: tuple[str, ...] = ()
    """Further flags as the services take them, for experiments."""


def num_cores() -> int:
    """Cores this process may use; a container's CPU set counts where the platform tells."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def worker_arguments(options: StackOptions, cores: int, *, listen: str = "127.0.0.1:0") -> list[str]:
    """The flags of one worker. Workers that share the machine share its cores."""
    threads = options.threads
    if threads is None and options.workers > 1:
        threads = max(1, cores // (options.workers * (options.tensor_parallel_size or 1)))
    flags: dict[str, str | int | None] = {
        "--model": options.model,
        "--listen": listen,
        "--dtype": options.dtype,
        "--max-num-seqs": options.max_num_seqs,
        "--max-num-batched-tokens": options.max_num_batched_tokens,
        "--max-model-len": options.max_model_len,
        "--block-size": options.block_size,
        "--num-kv-blocks": options.num_kv_blocks,
        "--kv-cache-bytes": options.kv_cache_bytes,
        "--tensor-parallel-size": options.tensor_parallel_size,
        "--threads": threads,
        "--log-format": options.log_format,
    }
    # A worker holds slots for two steps in flight unless told otherwise; a deeper overlap needs more.
    if options.overlap is not None and options.overlap.isdigit() and int(options.overlap) > 2:
        flags["--max-overlap-depth"] = options.overlap
    return [*_flatten(flags), *options.worker_flags]


def scheduler_arguments(options: StackOptions, worker_addresses: Sequence[str]) -> list[str]:
    """The flags of the scheduler."""
    flags: dict[str, str | int | None] = {
        "--listen": options.listen,
        "--overlap": options.overlap,
        "--log-format": options.log_format,
        "--drain-timeout": f"{options.drain_timeout:g}",
    }
    workers = [part for address in worker_addresses for part in ("--worker", address)]
    return [*_flatten(flags), *options.scheduler_flags, *workers]


def _flatten(flags: dict[str, str | int | None]) -> list[str]:
    return [part for name, value in flags.items() if value is not None for part in (name, str(value))]
