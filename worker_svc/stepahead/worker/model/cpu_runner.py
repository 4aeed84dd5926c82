"""`CpuRunner`: a decoder on the CPU, in the compiled step library or in torch.

STEPAHEAD_CPU_KERNELS (read by `registry`) chooses: `auto` is the library where it can be built and the CPU has the
instructions, otherwise torch, and one log line says why; `native` and `torch` insist. So does the name of one of
its instruction sets (`avx2`, `avx512_bf16`, `amx_bf16`), of which it otherwise takes the best. With several ranks
it is always torch.
"""

from __future__ import annotations

import os
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import structlog
import torch
from numpy.typing import NDArray
from typing_extensions import override

from stepahead.kernels.cpu.logprobs import row_logprobs
from stepahead.kernels.cpu.ops import has_fast_bfloat16
from stepahead.kernels.cpu.step.decoder_step import MAX_THREADS
from stepahead.kernels.cpu.step.library import InstructionSet
from stepahead.kernels.cpu.step.step_chain import PlannedStep
from stepahead.kernels.reference.logprobs import LogprobEntries
from stepahead.worker.cache_sizing import refuse_longer
from stepahead.worker.errors import ModelError, OptionRefused
from stepahead.worker.model.cells import ResolvedStep
from stepahead.worker.model.chained_steps import ChainedSteps, greedy_samples, step_layout, times_of
from stepahead.worker.model.checkpoint import Checkpoint, open_checkpoint
from stepahead.worker.model.config import ModelConfig
from stepahead.worker.model.facts import fingerprint, model_facts
from stepahead.worker.model.host_runner import HostRunner
from stepahead.worker.model.native_engine import (
    NativeEngine,
    declined,
    left_out_paths,
    native_instruction_set,
)
from stepahead.worker.model.sampler import LargestLogits, describe_samples, sample_logits
from stepahead.worker.model.step_engine import StepEngine, StepLogits
from stepahead.worker.model.torch_engine import TorchEngine
from stepahead.worker.ranks.communicator import ALONE, Communicator
from stepahead.worker.runner import (
    CacheShape,
    DeviceTimes,
    ModelFacts,
    ProgressCallback,
    SamplingColumns,
    StepBatch,
    StepSamples,
)

if TYPE_CHECKING:
    from stepahead.worker.ranks.leader_engine import LeaderEngine
    from stepahead.worker.ranks.place import RankPlace

_log = structlog.get_logger(__name__)

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
_NO_LOGITS = np.empty((0, 0), np.float32)
INSTRUCTION_SETS = {isa.name.lower(): isa for isa in InstructionSet}
KERNELS = ("auto", "native", "torch", *INSTRUCTION_SETS)


class CpuRunner(HostRunner):
    """Runs a checkpoint on the CPU. Construct it anywhere; call everything else on the device thread only."""

    def __init__(
        self,
        spec: str,
        dtype: str,
        threads: int | None,
        kernels: str = "auto",
        place: RankPlace | None = None,
        *,
        max_model_len: int | None = None,
        pin_threads: bool = False,
    ) -> None:
        """Takes what `registry.make_runner` takes, and raises what it raises; nothing is read before `load`."""
        super().__init__()
        if dtype not in (*DTYPES, "auto"):
            raise ModelError(f"dtype {dtype!r} is not supported; supported are auto, {', '.join(DTYPES)}")
        if kernels not in KERNELS:
            raise ModelError(f"CPU kernels {kernels!r} do not exist; there are {', '.join(KERNELS)}")
        self._spec = spec
        self._dtype = dtype
        self._kernels = kernels
        num_cores = len(os.sched_getaffinity(0))
        self._threads = threads or min(num_cores, MAX_THREADS)
        if pin_threads and self._threads != num_cores:
            raise OptionRefused(
                f"--pin-threads: a thread for each core is needed; --threads are {self._threads} and this process "
                f"may use {num_cores} cores"
            )
        self._pin_threads = pin_threads
        self._place = place
        self._max_model_len = max_model_len
        self._leader: LeaderEngine | None = None
        self._loaded: tuple[ModelConfig, StepEngine] | None = None
        self._chain: ChainedSteps | None = None
        self._planned: PlannedStep | None = None  # the newest forward, if it was announced and had no hole
        self._logits = StepLogits(_NO_LOGITS)
        # Of prompts that ask, from `_feed` to `_describe_prompt`; `StepEngine.forward` says how much that may be.
        self._prompt_logits = _NO_LOGITS

    @override
    def load(self, progress: ProgressCallback) -> ModelFacts:
        """See `Runner.load`. Sets torch's thread count for this process."""
        with closing(open_checkpoint(self._spec)) as checkpoint:
            config = checkpoint.config
            refuse_longer(self._max_model_len, config.max_context_tokens, checkpoint.name)
            dtype = choose_dtype(self._dtype, config.stored_dtype)
            engine = self._load_engine(checkpoint, dtype, progress)
            self._loaded = config, engine
            facts = replace(
                model_facts(
                    checkpoint, engine, dtype, "cpu" if self._place is None else f"cpu x{self._place.size}"
                ),
                available_bytes=None if self._leader is None else self._leader.available_bytes,
                layer_windows=tuple(layer.window or 0 for layer in config.layers),
                stored_weight_bytes=engine.stored_bytes,
                replays_windows=True,
            )
        _log.info(
            "model_loaded",
            model=facts.name,
            dtype=dtype,
            kernels=engine.name,
            threads=self._threads,
            pinned=self._pin_threads,
            bytes=facts.weight_bytes,
            stored_bytes=engine.stored_bytes,
        )
        return facts

    def end_ranks(self) -> None:
        """See `LeadsRanks.end_ranks`."""
        if self._leader is not None:
            self._leader.end()

    def _load_engine(self, checkpoint: Checkpoint, dtype: str, progress: ProgressCallback) -> StepEngine:
        def report(done: int, total: int) -> None:
            progress("weights", done, total)

        config, weights = checkpoint.config, checkpoint.weights
        if self._kernels != "torch":
            isa, reason = native_instruction_set(INSTRUCTION_SETS.get(self._kernels))
            if missing := declined(1 if self._place is None else self._place.size):
                isa, reason = None, missing
            if isa is not None:
                for path in left_out_paths():
                    _log.warning("native_path_left_out", path=path, reason="the library's compiler did not know it")
                return NativeEngine(
                    config, weights, DTYPES[dtype], isa, self._threads, report, pin_threads=self._pin_threads
                )
            if self._kernels != "auto":
                raise ModelError(f"the native CPU kernels are not available: {reason}")
            _log.warning("native_kernels_unavailable", reason=reason, fallback="torch")
        if self._pin_threads:
            raise ModelError("--pin-threads needs the native CPU kernels: torch's threads are its own")

        def load(ranks: Communicator = ALONE) -> TorchEngine:
            return TorchEngine(config, weights, DTYPES[dtype], self._threads, report, ranks)

        if self._place is None:
            return load()
        # Only several ranks need torch.distributed, which not every build of torch has.
        from stepahead.worker.ranks import leader_engine, start_up  # noqa: PLC0415

        shard, group, reports = start_up.lead(
            self._place,
            torch.device("cpu"),
            config,
            lambda group: (load(group), fingerprint(checkpoint, dtype)),
        )
        self._leader = leader_engine.LeaderEngine(shard, group, reports)
        return self._leader

    @override
    def _allocate_cache(self, shape: CacheShape) -> None:
        config, engine = self._model
        if shape.max_model_len > config.max_context_tokens:
            raise ModelError(
                f"max_model_len {shape.max_model_len} exceeds the model's {config.max_context_tokens} positions"
            )
        engine.allocate(shape)

    @override
    def _change_blocks(self, copies: tuple[tuple[int, int], ...], zeroed: tuple[int, ...]) -> None:
        self._model[1].change_blocks(copies, zeroed)

    @override
    def allocate(self, shape: CacheShape) -> None:
        super().allocate(shape)
        self._chain = self._model[1].chain(self._cells)

    def announce(self, batch: StepBatch, *, gated: bool) -> None:
        """See `PlansAhead.announce`."""
        if self._chain is not None:
            self._chain.announce(batch, gated=gated)

    def break_off(self) -> None:
        """See `PlansAhead.break_off`."""
        if self._chain is not None:
            self._chain.break_off()

    def last_times(self) -> DeviceTimes | None:
        """See `PlansAhead.last_times`."""
        return None if self._planned is None else times_of(self._planned)

    @override
    def forward(self, batch: StepBatch) -> None:
        self._planned = planned = None if self._chain is None else self._chain.run(batch)
        if planned is None:
            super().forward(batch)
        elif not planned.greedy:
            outputs = planned.outputs
            self._logits = StepLogits(outputs.logits, LargestLogits(outputs.best_ids, outputs.best_logits))
            self._take_rows(batch.sample_rows)

    @override
    def sample(self, batch: StepBatch) -> StepSamples:
        if self._planned is not None and self._planned.greedy:
            return greedy_samples(self._planned)
        return super().sample(batch)

    @override
    def _feed(self, step: ResolvedStep, choice_rows: NDArray[np.int64], prompt_tokens: NDArray[np.int64]) -> None:
        layout = step_layout(step)
        last_tokens = step.query_start_loc[choice_rows + 1].astype(np.int64) - 1
        if not len(prompt_tokens):
            self._logits = self._model[1].forward(step.token_ids, layout, last_tokens)
            return
        logit_tokens = np.concatenate([last_tokens, prompt_tokens])
        outputs = self._model[1].forward(step.token_ids, layout, logit_tokens)
        self._logits = outputs.rows(np.arange(len(last_tokens)))  # a copy, so that the others can go
        self._prompt_logits = outputs.logits[len(last_tokens) :]

    @override
    def _choose(self, choices: NDArray[np.int64], sampling: SamplingColumns) -> StepSamples:
        step = self._logits
        if len(choices) < len(step.logits):
            step = step.rows(choices)
        return sample_logits(step.logits, sampling, step.largest, self._model[1].draw_rows)

    @override
    def _describe_choices(
        self, choices: NDArray[np.int64], sampling: SamplingColumns, token_ids: NDArray[np.int64]
    ) -> LogprobEntries:
        return describe_samples(self._logits.logits[choices], sampling, token_ids)

    @override
    def _describe_prompt(self, token_ids: NDArray[np.int64], top_k: NDArray[np.int64]) -> LogprobEntries:
        entries = row_logprobs(self._prompt_logits, token_ids, top_k)
        self._prompt_logits = _NO_LOGITS
        return entries

    @property
    def _model(self) -> tuple[ModelConfig, StepEngine]:
        assert self._loaded is not None, "load comes first"
        return self._loaded


def choose_dtype(asked: str, stored: str) -> str:
    """Returns "bfloat16" or "float32": as asked, or for "auto" what the checkpoint and this CPU are made for."""
    if asked != "auto":
        return asked
    return "float32" if stored == "float32" or not has_fast_bfloat16() else "bfloat16"
