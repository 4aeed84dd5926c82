"""OpenVINO GenAI's continuous batching pipeline, behind the contract of peer.py.

Needs openvino-genai and a model that optimum-intel exported (with its tokenizer, which the pipeline insists on).
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable

from peer import Request, serve, take_stdout

CHANNEL = take_stdout()

import numpy as np  # noqa: E402
import openvino as ov  # noqa: E402
import openvino_genai as genai  # noqa: E402 - it prints, so after standard output is taken


class Pipeline:
    """The pipeline, and the next request's id."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        scheduler = genai.SchedulerConfig()
        scheduler.cache_size = arguments.cache_gib
        scheduler.max_num_batched_tokens = arguments.max_num_batched_tokens
        scheduler.max_num_seqs = arguments.max_num_seqs
        scheduler.dynamic_split_fuse = True
        scheduler.enable_prefix_caching = False
        properties = {"INFERENCE_PRECISION_HINT": arguments.precision, "INFERENCE_NUM_THREADS": arguments.threads}
        if arguments.kv_precision:
            properties["KV_CACHE_PRECISION"] = arguments.kv_precision
        self._pipeline = genai.ContinuousBatchingPipeline(arguments.model, scheduler, "CPU", properties)
        self._next_id = 0

    def add(self, request: Request) -> genai.GenerationHandle:
        """Hands a request over."""
        config = genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = request.output_tokens
        config.ignore_eos = True
        config.do_sample = False
        self._next_id += 1
        prompt = ov.Tensor(np.array([request.prompt], dtype=np.int64))
        return self._pipeline.add_request(self._next_id, prompt, config)

    def run(self, requests: list[Request], clock: Callable[[], float]) -> list[list[float]]:
        """See peer.py."""
        times: list[list[float]] = [[] for _ in requests]
        handles: dict[int, genai.GenerationHandle] = {}
        waiting = sorted(range(len(requests)), key=lambda index: requests[index].at_s)
        while waiting or self._pipeline.has_non_finished_requests():
            while waiting and requests[waiting[0]].at_s <= clock():
                index = waiting.pop(0)
                handles[index] = self.add(requests[index])
            if not self._pipeline.has_non_finished_requests():
                continue  # the next arrival is a moment away
            self._pipeline.step()
            now = clock()
            for index, handle in handles.items():
                while handle.can_read():
                    for output in handle.read().values():
                        times[index] += [now] * len(output.generated_ids)
        return times


def main() -> None:
    """Loads the model and serves."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--kv-precision", help="default: the plugin's, u8")
    parser.add_argument("--cache-gib", type=int, default=1)
    parser.add_argument("--max-num-seqs", type=int, default=32)
    parser.add_argument("--max-num-batched-tokens", type=int, default=2048)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    arguments = parser.parse_args()
    serve(
        CHANNEL, f"openvino-genai {arguments.precision}", Pipeline(arguments).run, open_loop=True,
        version=genai.__version__, kv_precision=arguments.kv_precision or "default",
        cache_gib=arguments.cache_gib,
    )  # fmt: skip


if __name__ == "__main__":
    main()
