"""`CudaRunner`: a checkpoint on a device, behind `LaunchingRunner`.

forward   copies, cells, decoder                                -> logits, on the device
sample    rules, masks, draws, counts, cells, log probabilities -> page-locked memory, read once an event has fired
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import ExitStack, closing, contextmanager

import numpy as np
import structlog
import torch

from stepahead.kernels.cuda.backend import Backend
from stepahead.worker.errors import ModelError
from stepahead.worker.model.checkpoint import Checkpoint, open_checkpoint
from stepahead.worker.model.config import ModelConfig
from stepahead.worker.model.cuda_engine import CudaEngine, CudaOptions, FedStep
from stepahead.worker.model.cuda_results import Described, read_samples
from stepahead.worker.model.cuda_sampler import DeviceSampler
from stepahead.worker.model.facts import model_facts
from stepahead.worker.runner import CacheShape, ModelFacts, ProgressCallback, StepBatch, StepSamples

_log = structlog.get_logger(__name__)

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


class CudaRunner:
    """Runs a checkpoint on a device. Construct it anywhere; call everything else on the launching thread only.

    Args:
        spec: see `registry.make_runner`; not a toy.
        dtype: "auto" (what the checkpoint stores) or a key of DTYPES.
        backend: the device.
        options: see `CudaOptions`.

    Raises:
        ModelError: there is no such dtype.
    """

    def __init__(self, spec: str, dtype: str, backend: Backend, options: CudaOptions) -> None:
        if dtype not in (*DTYPES, "auto"):
            raise ModelError(f"dtype {dtype!r} is not supported; supported are auto, {', '.join(DTYPES)}")
        self._spec = spec
        self._dtype = dtype
        self._backend = backend
        self._options = options
        self._stream = ExitStack()  # holds the device's stream as the launching thread's own
        self._loaded: tuple[ModelConfig, CudaEngine] | None = None
        self._sampler: DeviceSampler | None = None
        self._fed: FedStep | None = None
        self._prompt: list[Described] = []

    def load(self, progress: ProgressCallback) -> ModelFacts:
        """See `Runner.load`."""
        self._stream.enter_context(self._backend.create_stream().current())
        with closing(open_checkpoint(self._spec)) as checkpoint, torch.inference_mode():
            config = checkpoint.config
            dtype = config.stored_dtype if self._dtype == "auto" else self._dtype
            dtype = dtype if dtype in DTYPES else "bfloat16"  # quantized weights
            engine = self._load_engine(checkpoint, DTYPES[dtype], progress)
            self._loaded = config, engine
            facts = model_facts(checkpoint, engine, dtype, str(self._backend.device))
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

    def reset(self) -> None:
        """See `Runner.reset`."""
        with self._launching():
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

        with self._launching():
            self._fed = self._engine.forward(batch, describe)

    def launch_sample(self, batch: StepBatch) -> Callable[[], StepSamples]:
        """See `LaunchingRunner.launch_sample`."""
        assert self._fed is not None, "forward comes first"
        with self._launching():
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

    def _load_engine(self, checkpoint: Checkpoint, dtype: torch.dtype, progress: ProgressCallback) -> CudaEngine:
        def report(done: int, total: int) -> None:
            progress("weights", done, total)

        return CudaEngine(checkpoint.config, checkpoint.weights, dtype, self._backend, self._options, report)

    def _make_sampler(self, shape: CacheShape) -> None:
        self._sampler = None  # an older one's counts must go before the new ones come
        self._sampler = DeviceSampler(self._backend, shape.num_slots, self._model[0].vocab_size)

    @contextmanager
    def _launching(self) -> Generator[None]:
        """For launching a step: no gradients and, where it is asked for, no waiting."""
        with ExitStack() as exits:
            exits.enter_context(torch.inference_mode())
            if self._options.forbid_waits:
                exits.enter_context(self._backend.forbid_waits())
            yield

    @property
    def _model(self) -> tuple[ModelConfig, CudaEngine]:
        assert self._loaded is not None, "load comes first"
        return self._loaded

    @property
    def _engine(self) -> CudaEngine:
        return self._model[1]

    @property
    def _sampling(self) -> DeviceSampler:
        assert self._sampler is not None, "allocate comes before the first step"
        return self._sampler
