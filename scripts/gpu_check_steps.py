"""Parts of the GPU check: whole steps. Tokens against the CPU's; decode, overlap and recording on and off."""

from __future__ import annotations

import statistics
import threading
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch
from gpu_check_rig import Rig, Row

from stepahead.worker.launch_stream import LaunchStream
from stepahead.worker.launched_device import LaunchedDevice
from stepahead.worker.model.cuda_engine import CudaOptions
from stepahead.worker.model.cuda_runner import CudaRunner
from stepahead.worker.model.registry import make_runner
from stepahead.worker.runner import LAST_SAMPLE, CacheShape, Runner, SamplingColumns, StepBatch
from stepahead.worker.step import Step
from tests.worker_model.driver import Driver

BLOCK = 16
IDLE_LIMIT = 0.01
"""Of the device's time, with overlap, at 256 rows."""
TINY = "random:llama-tiny"


def tokens(rig: Rig) -> list[Row]:
    """Tokens of a tiny random model in float32 against the CPU's."""
    cpu = make_runner(TINY, dtype="float32", kernels="torch")
    return [compare_tokens(cpu, _runner(rig, TINY, "float32"), rig.pick(48, 6))]


def compare_tokens(one: Runner, other: Runner, count: int) -> Row:
    """Greedy and drawn tokens of two runners of one model, chunked and batched."""
    rng = np.random.default_rng(1)
    prompts = [rng.integers(3, 320, size).tolist() for size in (5, 19, 40)]
    drawn = {"temperature": 0.9, "top_p": 0.95, "seed": 5}
    outputs: list[list[list[int]]] = []
    for runner in (one, other):
        driver = Driver(runner, num_blocks=200)
        seqs = [driver.admit(prompt, **(drawn if index else {})) for index, prompt in enumerate(prompts)]
        driver.run(seqs, count, chunk=7, shuffle=False)
        outputs.append([seq.outputs for seq in seqs])
    same = [one == other for one, other in zip(*outputs, strict=True)]
    return {"sequences": len(same), "equal": sum(same), "tokens each": count, "ok": all(same)}


def waits(rig: Rig) -> list[Row]:
    """Steps of every kind while an operation that makes the host wait raises: prompts, decode, options."""
    runner = _runner(rig, TINY, "float32")
    driver = Driver(runner, num_blocks=200)
    mask = np.packbits(np.arange(320) % 2 == 0, bitorder="little")
    seqs = [
        driver.admit(range(3, 30), mask=mask, temperature=1.0, top_k=5, top_p=0.9),
        driver.admit(range(9), suppressed=np.arange(3)),
    ]
    driver.run(seqs, 4, chunk=8)
    return [{"steps": driver.step_id, "ok": True}]


def _runner(rig: Rig, spec: str, dtype: str, *, graphs: bool = True) -> CudaRunner:
    return CudaRunner(spec, dtype, rig.fresh_backend(), CudaOptions(graphs=graphs, forbid_waits=True))


def decode(rig: Rig) -> Iterator[Row]:
    """Steady decode of a Llama 8B of random weights through the worker's device: no scheduler, no network.

    With overlap the next forward is launched before the host knows that the step has ended, as a plan sent ahead
    lets it; without, after.
    """
    spec, dtype = (TINY, "float32") if rig.small else ("random:llama-8b", "bfloat16")
    batches, context, steps = ((1, 3), 20, 4) if rig.small else ((1, 32, 256), 1024, 60)
    shape = decode_shape(max(batches), context + 3 * steps)
    runner = _runner(rig, spec, dtype)
    runner.load(lambda what, done, total: None)
    for graphs in (True, False):
        # The runner's own switch: loading 16 GB again would take a tenth of the time there is.
        runner._options = runner._engine._options = replace(runner._options, graphs=graphs)
        runner.allocate(shape)
        for num_rows in batches:
            for overlap in (True, False):
                yield measure(runner, shape, num_rows, context, steps, overlap=overlap, graphs=graphs)


def decode_shape(num_rows: int, length: int) -> CacheShape:
    """Returns the shape of batch and cache for so many rows of so many tokens."""
    blocks_per_row = -(-length // BLOCK)
    return CacheShape(
        num_slots=num_rows, num_blocks=num_rows * blocks_per_row, block_size=BLOCK,
        max_model_len=blocks_per_row * BLOCK, max_num_batched_tokens=num_rows, max_num_seqs=num_rows,
    )  # fmt: skip


def measure(
    runner: CudaRunner, shape: CacheShape, num_rows: int, context: int, steps: int, *, overlap: bool, graphs: bool
) -> Row:
    """Returns the figures of some decode steps of `num_rows` rows from a context on."""
    stream_errors: list[Exception] = []
    current = torch.cuda.current_stream() if torch.cuda.is_available() else None
    stream = LaunchStream(runner._backend.record_event, stream_errors.append)
    device = LaunchedDevice(runner, stream)
    stream.start()
    if current is not None:  # the stream is a thread's own: what was recorded must be replayed where it was
        stream.submit(lambda: torch.cuda.set_stream(current))
    stream.submit(runner.reset)
    ended = [threading.Event() for _ in range(steps)]
    made = [_step(index + 1) for index in range(steps)]
    batches = [_batch(shape, num_rows, context + index, first=index == 0) for index in range(steps)]
    for index, (step, batch) in enumerate(zip(made, batches, strict=True)):
        if index and not overlap:
            ended[index - 1].wait(60)
        device.launch_forward(step, batch, None)
        if index and overlap:
            ended[index - 1].wait(60)
        device.launch_sample(step, batch, ended[index].set)
    finished = ended[-1].wait(60)
    stream.close(10)
    if stream_errors:
        raise stream_errors[0]
    warm = made[steps // 4 :]
    gaps = sorted(step.gap_ns / 1e3 for step in warm)
    idle = sum(step.gap_ns for step in warm)
    total = warm[-1].ended_ns - warm[0].started_ns
    return {
        "rows": num_rows,
        "overlap": "on" if overlap else "off",
        "graphs": "on" if graphs else "off",
        "step ms": round(total / len(warm) / 1e6, 3),
        "tokens/s": round(num_rows * len(warm) / total * 1e9),
        "gap us p50": round(statistics.median(gaps), 1),
        "gap us p99": round(gaps[int(0.99 * (len(gaps) - 1))], 1),
        "idle": round(idle / max(total, 1), 5),
        "target": f"idle below {IDLE_LIMIT}" if overlap and num_rows == 256 else "",
        "ok": finished,
    }


def _step(step_id: int) -> Step:
    return Step(
        step_id=step_id, worker_epoch=1, in_place=False, batch=None, rows=None, gate=None,
        gate_wait_ns=0, max_step_ns=60_000_000_000, read_ns=0,
    )  # fmt: skip


def _batch(shape: CacheShape, num_rows: int, position: int, *, first: bool) -> StepBatch:
    """One token a row at `position`: a known one at first, then what the row sampled last."""
    width = shape.max_model_len // shape.block_size
    rows = np.arange(num_rows)
    tables = (rows[:, None] * width + np.arange(width)).astype(np.int32)
    integers = np.zeros(num_rows, np.int64)
    return StepBatch(
        step_id=1,
        slots=rows.astype(np.int32),
        token_ids=np.full(num_rows, 5 if first else LAST_SAMPLE, np.int64),
        positions=np.full(num_rows, position, np.int64),
        query_start_loc=np.arange(num_rows + 1, dtype=np.int32),
        seq_lens=np.full(num_rows, position + 1, np.int32),
        block_tables=tables[:, : position // shape.block_size + 1],
        slot_mapping=tables[:, position // shape.block_size].astype(np.int64) * shape.block_size
        + position % shape.block_size,
        sample_rows=rows.astype(np.int32),
        sampling=SamplingColumns(
            temperature=np.zeros(num_rows, np.float32), top_p=np.ones(num_rows, np.float32),
            top_k=np.zeros(num_rows, np.int32), min_p=np.zeros(num_rows, np.float32),
            seed=np.zeros(num_rows, np.uint64), choice_index=integers, output_index=integers + position,
        ),
        invalidated_slots=np.zeros(0, np.int32),
    )  # fmt: skip
