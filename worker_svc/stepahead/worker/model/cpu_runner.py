"""`CpuRunner`: a Llama-family model on the CPU in torch."""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import closing
from dataclasses import asdict

import numpy as np
import structlog
import torch
from numpy.typing import NDArray
from typing_extensions import override

from stepahead.kernels.cpu.ops import CpuOps, has_fast_bfloat16
from stepahead.kernels.ops import StepLayout
from stepahead.worker.errors import ModelError
from stepahead.worker.model.cells import ResolvedStep
from stepahead.worker.model.checkpoint import Checkpoint, open_checkpoint
from stepahead.worker.model.config import ModelConfig
from stepahead.worker.model.decoder import Decoder, WeightLoader, attention_shape
from stepahead.worker.model.host_runner import HostRunner
from stepahead.worker.model.sampler import sample_logits
from stepahead.worker.runner import CacheShape, ModelFacts, ProgressCallback, SamplingColumns, StepSamples

_log = structlog.get_logger(__name__)

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


class CpuRunner(HostRunner):
    """Runs a checkpoint on the CPU. Construct it anywhere; call everything else on the device thread only."""

    def __init__(self, spec: str, dtype: str, threads: int | None) -> None:
        """Takes a model specification (see `registry`), "bfloat16", "float32" or "auto", and the torch threads."""
        super().__init__()
        if dtype not in (*DTYPES, "auto"):
            raise ModelError(f"dtype {dtype!r} is not supported; supported are auto, {', '.join(DTYPES)}")
        self._spec = spec
        self._dtype = dtype
        self._threads = threads or len(os.sched_getaffinity(0))
        self._loaded: tuple[ModelConfig, CpuOps, Decoder] | None = None
        self._logits = torch.empty(0)

    @override
    def load(self, progress: ProgressCallback) -> ModelFacts:
        """See `Runner.load`. Sets torch's thread count for this process."""
        torch.set_num_threads(self._threads)
        with closing(open_checkpoint(self._spec)) as checkpoint, torch.inference_mode():
            config = checkpoint.config
            dtype = choose_dtype(self._dtype, config.stored_dtype)
            ops = CpuOps(attention_shape(config), DTYPES[dtype])
            loader = WeightLoader(
                config, checkpoint.weights, ops, lambda done, total: progress("weights", done, total)
            )
            self._loaded = config, ops, Decoder(config, loader.load(), ops)
            facts = ModelFacts(
                name=checkpoint.name,
                fingerprint=fingerprint(checkpoint, dtype),
                vocab_size=config.vocab_size,
                max_context_tokens=config.max_context_tokens,
                eos_token_ids=config.eos_token_ids,
                bos_token_id=config.bos_token_id,
                dtype=dtype,
                weight_bytes=loader.weight_bytes,
                kv_bytes_per_token=2
                * config.num_layers
                * config.num_kv_heads
                * config.head_dim
                * DTYPES[dtype].itemsize,
                device="cpu",
                tokenizer_bundle=checkpoint.tokenizer_bundle(),
            )
        _log.info("model_loaded", model=facts.name, dtype=dtype, threads=self._threads, bytes=facts.weight_bytes)
        return facts

    @override
    def _allocate_cache(self, shape: CacheShape) -> None:
        config, ops, _ = self._model
        if shape.max_model_len > config.max_context_tokens:
            raise ModelError(
                f"max_model_len {shape.max_model_len} exceeds the model's {config.max_context_tokens} positions"
            )
        with torch.inference_mode():
            ops.allocate_cache(shape.num_blocks, shape.block_size, shape.max_model_len)

    @override
    def _change_blocks(self, copies: tuple[tuple[int, int], ...], zeroed: tuple[int, ...]) -> None:
        with torch.inference_mode():
            self._model[1].change_blocks(copies, zeroed)

    @override
    def _feed(self, step: ResolvedStep, choice_rows: NDArray[np.int64]) -> None:
        layout = StepLayout(
            positions=step.positions,
            slot_mapping=step.slot_mapping,
            query_start_loc=step.query_start_loc,
            seq_lens=step.seq_lens,
            block_tables=step.block_tables,
        )
        last_tokens = step.query_start_loc[choice_rows + 1].astype(np.int64) - 1
        with torch.inference_mode():
            self._logits = self._model[2].forward(step.token_ids, layout, last_tokens)

    @override
    def _choose(self, choices: NDArray[np.int64], sampling: SamplingColumns) -> StepSamples:
        logits: NDArray[np.float32] = self._logits.numpy()
        return sample_logits(logits if len(choices) == len(logits) else logits[choices], sampling)

    @property
    def _model(self) -> tuple[ModelConfig, CpuOps, Decoder]:
        assert self._loaded is not None, "load comes first"
        return self._loaded


def choose_dtype(asked: str, stored: str) -> str:
    """Returns "bfloat16" or "float32": as asked, or for "auto" what the checkpoint and this CPU are made for."""
    if asked != "auto":
        return asked
    return "float32" if stored == "float32" or not has_fast_bfloat16() else "bfloat16"


def fingerprint(checkpoint: Checkpoint, dtype: str) -> str:
    """Returns a digest of the configuration, the tensors' names and shapes, the files' sizes and the dtype."""
    identity = {
        "config": asdict(checkpoint.config),
        "tensors": sorted((name, list(shape)) for name, shape in checkpoint.weights.shapes.items()),
        "bytes": checkpoint.weights.total_bytes,
        "dtype": dtype,
    }
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
