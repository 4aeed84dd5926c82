"""How long the device waits for masks: constrained and free requests side by side, overlap on and off.

    .venv/bin/python scripts/bench_gates.py MODEL [--constrained 8] [--free 24] [--rounds 3]

MODEL is whatever `stepahead up` takes and has a tokenizer. Prints, per overlap mode, what the device waited between
a forward and its sampling (p50, p99) over steps with constrained rows, beside the same load without constraints.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from dataclasses import replace

from rich.console import Console

from stepahead.cli.bench_load import MAX_TIMELINE
from stepahead.cli.local_services import passing_log_dir
from stepahead.cli.stack import Stack, StackOptions, StackReady, run_stack
from stepahead.cli.stack_view import ConsoleView
from stepahead.client.channel import open_aio_channel
from stepahead.v1 import generation_pb2, generation_pb2_grpc, operations_pb2, operations_pb2_grpc

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
MAX_TOKENS = 128


def make_request(index: int, *, constrained: bool) -> generation_pb2.GenerateRequest:
    """A sampled request that runs to its limit, or as far as its schema lets it."""
    return generation_pb2.GenerateRequest(
        text=f"Person number {index} as JSON: ",
        sampling=generation_pb2.SamplingParams(temperature=1.0, seed=index),
        stopping=generation_pb2.StoppingParams(max_tokens=MAX_TOKENS, ignore_eos=not constrained),
        constraint=generation_pb2.Constraint(json_schema=json.dumps(SCHEMA)) if constrained else None,
    )


async def run_load(address: str, num_constrained: int, num_free: int) -> list[operations_pb2.StepRecord]:
    """All requests at once; returns the steps they took."""
    async with open_aio_channel(address) as channel:
        generation = generation_pb2_grpc.GenerationServiceStub(channel)
        operations = operations_pb2_grpc.OperationsServiceStub(channel)
        before = (await operations.GetStatus(operations_pb2.GetStatusRequest())).workers[0].steps.boundaries

        async def answer(request: generation_pb2.GenerateRequest) -> None:
            async for _ in generation.Generate(request):
                pass

        requests = [
            make_request(index, constrained=index < num_constrained) for index in range(num_constrained + num_free)
        ]
        await asyncio.gather(*map(answer, requests))
        after = (await operations.GetStatus(operations_pb2.GetStatusRequest())).workers[0].steps.boundaries
        timeline = operations_pb2.GetTimelineRequest(limit=min(MAX_TIMELINE, after - before))
        return list((await operations.GetTimeline(timeline)).records)


def summary(records: list[operations_pb2.StepRecord], num_rows: int) -> str:
    """Waits of the steps with at least half of the rows."""
    waits = sorted(record.sample_wait_ns / 1e3 for record in records if record.rows >= num_rows // 2)
    p50, p99 = waits[len(waits) // 2], waits[int(0.99 * (len(waits) - 1))]
    busy = sorted(record.busy_ns / 1e6 for record in records if record.rows >= num_rows // 2)
    return f"wait p50 {p50:7.1f} us, p99 {p99:7.1f} us over {len(waits)} steps of {busy[len(busy) // 2]:.1f} ms"


async def main() -> None:
    """See the module docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--constrained", type=int, default=8)
    parser.add_argument("--free", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    num_rows = arguments.constrained + arguments.free
    options = StackOptions(model=arguments.model, max_num_seqs=num_rows, max_model_len=512)

    for overlap in ("on", "off"):

        async def measure(ready: StackReady, overlap: str = overlap) -> None:
            await run_load(ready.address, arguments.constrained, arguments.free)  # warm-up
            for name, num_constrained in (("constrained", arguments.constrained), ("all free", 0)):
                records: list[operations_pb2.StepRecord] = []
                for _ in range(arguments.rounds):
                    records += await run_load(ready.address, num_constrained, num_rows - num_constrained)
                print(f"overlap {overlap:3s} {name:12s} {summary(records, num_rows)}", flush=True)

        view_console = Console(stderr=True, quiet=True)
        with passing_log_dir(verbose=False) as log_dir, ConsoleView(view_console) as view:
            await run_stack(Stack(replace(options, overlap=overlap), view, log_dir=log_dir), measure)


if __name__ == "__main__":
    asyncio.run(main())
