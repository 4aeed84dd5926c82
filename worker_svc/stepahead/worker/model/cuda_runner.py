"""`CudaRunner`: a checkpoint on a device, behind `LaunchingRunner`.

forward   copies, cells, decoder                                -> logits, on the device
sample    rules, masks, draws, counts, cells, log probabilities -> page-locked memory, read once an event has fired
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING

import numpy as np
import structlog
import torch

from stepahead.kernels.cuda.backend import Backend
from stepahead.worker.cache_sizing import refuse_longer
from stepahead.worker.errors import ModelError
from stepahead.worker.model.checkpoint import Checkpoint, open_checkpoint
from stepahead.worker.model.config import ModelConfig
from stepahead.worker.model.cuda_engine import DTYPES, CudaEngine, CudaOptions, FedStep, choose_dtype
from stepahead.worker.model.cuda_results import Described, read_samples
from stepahead.worker.model.cuda_sampler import DeviceSampler
from stepahead.worker.model.facts import fingerprint, model_facts
from stepahead.worker.ranks.communicator import ALONE, Communicator
from stepahead.worker.runner import CacheShape, ModelFacts, ProgressCallback, StepBatch, StepSamples

if TYPE_CHECKING:
    from stepahead.worker.ranks.cuda_leader import CudaLeader
    from stepahead.worker.ranks.place import RankPlace

_log = structlog.get_logger(__name__)


class CudaRunner:
    """Runs a checkpoint on a device. Construct it anywhere; call everything else on the launching thread only.

    Args:
        spec: see `registry.make_runner`; not a toy.
        dtype: "auto" (what the checkpoint stores) or a key of DTYPES.
        backend: the device.
        options: see `CudaOptions`.
        place: of rank 0 among several ranks; None: it is the only one.
        max_model_len: what is wanted; None: whatever the model has.

    Raises:
        ModelError: there is no such dtype.
    """

    def __init__(
        self,
        spec: str,
        dtype: str,
        backend: Backend,
        options: CudaOptions,
        place: RankPlace | None = None,
        *,
        max_model_len: int | None = None,
    ) -> None:
        if dtype not in (*DTYPES, "auto"):
            raise ModelError(f"dtype {dtype!r} is not supported; supported are auto, {', '.join(DTYPES)}")
        self._spec = spec
        self._dtype = dtype
        self._backend = backend
        self._options = options
        self._place = place
        self._max_model_len = max_model_len
        self._leader: CudaLeader | None = None
        self._stream = ExitStack()  # holds the device's stream as the launching thread's own
        self._loaded: tuple[ModelConfig, CudaEngine | CudaLeader] | None = None
        self._sampler: DeviceSampler | None = None
        self._fed: FedStep | None = None
        self._prompt: list[Described] = []

    def load(self, progress: ProgressCallback) -> ModelFacts:
        """See `Runner.load`."""
        self._stream.enter_context(self._backend.create_stream().current())
        with closing(open_checkpoint(self._spec)) as checkpoint, torch.inference_mode():
            config = checkpoint.config
            refuse_longer(self._max_model_len, config.max_context_tokens, checkpoint.name)
            dtype = choose_dtype(self._dtype, config.stored_dtype)
            engine = self._load_engine(checkpoint, dtype, progress)
            self._loaded = config, engine
            device, place = self._backend.device, self._place
            name = str(device) if place is None else f"{device.type} x{place.size}"
            facts = model_facts(checkpoint, engine, dtype, name)
        _log.info("model_loaded", model=facts.name, dtype=dtype, device=facts.device, bytes=facts.weight_bytes)
        return facts

    def cache_bytes(self, limits: CacheShape, memory_share: float) -> int:
        """See `LaunchingRunner.cache_bytes`."""
        with torch.inference_mode():
            self._make_sampler(limits)
            left = self._engine.cache_bytes(limits, memory_share)
        if left <= 0:
            raise ModelError(
                f"nothing is left of {memory_share:.0%} of the device's memory for a KV cache: raise "
                f"--gpu-memory-utilization, or lower --max-num-batched-tokens, --max-num-seqs or --max-model-len"
            )
        return left

    def allocate(self, shape: CacheShape) -> None:
        """See `Runner.allocate`. Records decode steps."""
        config, engine = self._model
        if shape.max_model_len > config.max_context_tokens:
            raise ModelError(
                f"max_model_len {shape.max_model_len} exceeds the model's {config.max_context_tokens} positions"
            )
        with torch.inference_mode():
            self._make_sampler(shape)
            engine.allocate(shape)
            engine.record()

    def reset(self) -> None:
        """See `Runner.reset`."""
        with self._engine.launching():
            self._engine.reset()

    def forward(self, batch: StepBatch) -> None:
        """See `Runner.forward`; returns when everything is launched."""
        self._prompt = []
        targets = batch.prompt_targets
        token_ids = np.concatenate([np.zeros(0, np.int64), *(target.token_ids for target in targets)])
        top_k = np.repeat(
            np.array([target.top_k for target in targets], np.int32), [len(target.token_ids) for target in targets]
        )

        def describe(logits: torch.Tensor, begin: int, end: int) -> None:
            self._prompt.append(self._sampling.describe_prompt(logits, token_ids[begin:end], top_k[begin:end]))

        with self._engine.launching():
            self._fed = self._engine.forward(batch, describe)

    def launch_sample(self, batch: StepBatch) -> Callable[[], StepSamples]:
        """See `LaunchingRunner.launch_sample`."""
        assert self._fed is not None, "forward comes first"
        with self._engine.launching():
            sampled = self._sampling.sample(batch, self._fed, self._engine.cells)
            event = self._backend.record_event()
        prompt = self._prompt

        def take() -> StepSamples:
            event.synchronize()
            return read_samples(batch, sampled, prompt)

        return take

    def sample(self, batch: StepBatch) -> StepSamples:
        """See `Runner.sample`: launches, then waits."""
        return self.launch_sample(batch)()

    def end_ranks(self) -> None:
        """See `LeadsRanks.end_ranks`."""
        if self._leader is not None:
            self._leader.end()

    def _load_engine(
        self, checkpoint: Checkpoint, dtype: str, progress: ProgressCallback
    ) -> CudaEngine | CudaLeader:
        def report(done: int, total: int) -> None:
            progress("weights", done, total)

        def load(ranks: Communicator = ALONE) -> CudaEngine:
            whole = (checkpoint.config, checkpoint.weights, DTYPES[dtype])
            return CudaEngine(*whole, self._backend, self._options, report, ranks)

        if self._place is None:
            return load()
        # Only several ranks need torch.distributed, which not every build of torch has.
        from stepahead.worker.ranks import cuda_leader, start_up  # noqa: PLC0415

        shard, group, reports = start_up.lead(
            self._place,
            self._backend.device,
            checkpoint.config,
            lambda group: (load(group), fingerprint(checkpoint, dtype)),
            options=self._options.describe(),
            ordered_sums=self._options.deterministic,
        )
        self._leader = cuda_leader.CudaLeader(shard, group, reports)
        return self._leader

    def _make_sampler(self, shape: CacheShape) -> None:
        self._sampler = None  # an older one's counts must go before the new ones come
        self._sampler = DeviceSampler(self._backend, shape.num_slots, self._model[0].vocab_size)

    @property
    def _model(self) -> tuple[ModelConfig, CudaEngine | CudaLeader]:
        assert self._loaded is not None, "load comes first"
        return self._loaded

    @property
    def _engine(self) -> CudaEngine | CudaLeader:
        return self._model[1]

    @property
    def _sampling(self) -> DeviceSampler:
        assert self._sampler is not None, "allocate comes before the first step"
        return self._sampler
