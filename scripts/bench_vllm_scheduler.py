"""vLLM's V1 scheduler alone, driven over pipes by `stepahead bench scheduler --vs-vllm PYTHON`.

Runs inside an environment that has vLLM (scripts/bench_vllm_scheduler.sh makes one). No model, no engine:
schedule(), update_from_output(), and handing each request its token. One command per line on stdin, one answer per
line on stdout:

    {"open": {"workloads": FILE, "scenario": NAME, "rows": N, "scheduler": "sync" | "async",
              "prefix_caching": BOOL}}  ->  {"name": TEXT}
    {"run": STEPS}  ->  {"wall_ns": [...], "cpu_ns": [...], "submit_ns": [...], "num_tokens": N}
"""
# ruff: noqa: ANN001, ANN201, PLC0415
# vLLM is not there when this file is checked, so its types are unknown; and it prints while it is being imported,
# so that happens after stdout was put aside.

from __future__ import annotations

import gc
import importlib.util
import json
import os
import sys
import tempfile
import time
from collections import deque
from pathlib import Path

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

MODEL_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "max_position_embeddings": 131072,
    "num_attention_heads": 1,
    "num_hidden_layers": 1,
    "num_key_value_heads": 1,
    "vocab_size": 2**20,
}
"""Only read for its limits; no weights exist."""


def load_workloads(path: str):
    """The module that defines the loads, from its file: this environment has no Stepahead."""
    spec = importlib.util.spec_from_file_location("workloads", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["workloads"] = module
    spec.loader.exec_module(module)
    return module


class Peer:
    """One scheduler under one load."""

    def __init__(
        self, workload, sampled_token_id: int, block_size: int, *, is_async: bool, prefix_caching: bool
    ) -> None:
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash

        self.workload = workload
        self.token_id = sampled_token_id
        self.is_async = is_async
        self.outputs: dict[str, list[int]] = {}
        self.num_submitted = 0
        self.submit_ns: list[int] = []
        self.pending: deque = deque()  # steps and their results; with async one step is ahead
        self.hasher = None
        if prefix_caching:
            init_none_hash(sha256)
            self.hasher = get_request_block_hasher(block_size, sha256)
        self.scheduler = make_scheduler(workload, block_size, is_async=is_async, prefix_caching=prefix_caching)
        self.fill()
        for _ in range(workload.num_warm_up_steps):
            self.step()
        self.submit_ns.clear()
        gc.collect()
        gc.freeze()  # as its engine does once it is up

    def fill(self) -> None:
        """Keeps the load's backlog waiting."""
        from vllm import SamplingParams
        from vllm.v1.request import Request

        wanted = self.workload.num_rows + self.workload.backlog
        while len(self.outputs) < wanted:
            index = self.num_submitted
            prompt = self.workload.prompt_of(index)
            params = SamplingParams(max_tokens=self.workload.max_tokens_of(index), ignore_eos=True)
            begin_ns = time.perf_counter_ns()
            request = Request(
                request_id=f"r{index}",
                prompt_token_ids=prompt,
                sampling_params=params,
                pooling_params=None,
                block_hasher=self.hasher,
            )
            self.scheduler.add_request(request)
            self.submit_ns.append(time.perf_counter_ns() - begin_ns)
            self.outputs[request.request_id] = []
            self.num_submitted += 1

    def step(self) -> tuple[int, int, int]:
        """Schedules a step and applies the oldest; returns wall and processor nanoseconds, and tokens."""
        if self.is_async and not self.pending:
            first = self.scheduler.schedule()
            self.pending.append((first, self.result_of(first)))
        wall_ns, cpu_ns = time.perf_counter_ns(), time.process_time_ns()
        scheduled = self.scheduler.schedule()
        cpu_ns, wall_ns = time.process_time_ns() - cpu_ns, time.perf_counter_ns() - wall_ns
        # Now, while the scheduler's counters are those of this very step.
        self.pending.append((scheduled, self.result_of(scheduled)))
        oldest, result = self.pending.popleft()
        outputs = self.outputs
        ended = []
        wall_at, cpu_at = time.perf_counter_ns(), time.process_time_ns()
        for batch in self.scheduler.update_from_output(oldest, result).values():
            for output in batch.outputs:
                outputs[output.request_id].extend(output.new_token_ids)
                if output.finish_reason is not None:
                    ended.append(output.request_id)
        cpu_ns, wall_ns = cpu_ns + time.process_time_ns() - cpu_at, wall_ns + time.perf_counter_ns() - wall_at
        for request_id in ended:
            del outputs[request_id]
        self.fill()
        return wall_ns, cpu_ns, sum(map(len, result.sampled_token_ids))

    def result_of(self, scheduled):
        """A model's answer: one token for every request whose newest known token was fed."""
        from vllm.v1.outputs import ModelRunnerOutput

        ids = list(scheduled.num_scheduled_tokens)
        requests = self.scheduler.requests
        sampled = []
        for request_id in ids:
            request = requests.get(request_id)
            samples = request is not None and request.num_computed_tokens >= request.num_prompt_tokens
            sampled.append([self.token_id] if samples else [])
        return ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: index for index, request_id in enumerate(ids)},
            sampled_token_ids=sampled,
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
        )

    def run(self, num_steps: int) -> dict[str, object]:
        """Times `num_steps` steps."""
        steps = [self.step() for _ in range(num_steps)]
        submit_ns, self.submit_ns = self.submit_ns, []
        return {
            "wall_ns": [step[0] for step in steps],
            "cpu_ns": [step[1] for step in steps],
            "submit_ns": submit_ns,
            "num_tokens": sum(step[2] for step in steps),
        }


def make_scheduler(workload, block_size: int, *, is_async: bool, prefix_caching: bool):
    """A scheduler with the load's limits."""
    import torch
    from vllm.config import CacheConfig, DeviceConfig, ModelConfig, ParallelConfig, SchedulerConfig, VllmConfig
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(MODEL_CONFIG), encoding="utf-8")
        model = ModelConfig(
            model=folder, dtype="bfloat16", max_model_len=workload.max_model_len, skip_tokenizer_init=True
        )
    cache = CacheConfig(
        block_size=block_size,
        gpu_memory_utilization=0.9,
        cache_dtype="auto",
        enable_prefix_caching=prefix_caching,
    )
    limits = SchedulerConfig(
        max_num_seqs=workload.num_rows,
        max_num_batched_tokens=workload.max_num_batched_tokens,
        max_model_len=workload.max_model_len,
        is_encoder_decoder=False,
        async_scheduling=is_async,
    )
    config = VllmConfig(
        model_config=model,
        cache_config=cache,
        scheduler_config=limits,
        parallel_config=ParallelConfig(),
        device_config=DeviceConfig("cpu"),
    )
    cache.num_gpu_blocks = workload.num_blocks
    spec = FullAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=1, dtype=torch.float32)
    kv_cache = KVCacheConfig(
        num_blocks=workload.num_blocks,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
    )
    return (AsyncScheduler if is_async else Scheduler)(
        vllm_config=config,
        kv_cache_config=kv_cache,
        block_size=block_size,
        log_stats=False,
        structured_output_manager=StructuredOutputManager(config),
    )


def main() -> None:
    """Answers commands until stdin ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print is no answer
    import vllm

    peer = None
    for line in sys.stdin:
        command = json.loads(line)
        if "open" in command:
            wanted = command["open"]
            workloads = load_workloads(wanted["workloads"])
            workload = workloads.WORKLOADS[wanted["scenario"]](wanted["rows"])
            peer = None
            gc.unfreeze()
            gc.collect()
            peer = Peer(
                workload,
                workloads.SAMPLED_TOKEN_ID,
                workloads.BLOCK_SIZE,
                is_async=wanted["scheduler"] == "async",
                prefix_caching=wanted["prefix_caching"],
            )
            answer = {"name": f"vLLM {vllm.__version__}" + (" async" if peer.is_async else "")}
        else:
            answer = peer.run(command["run"])
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
