"""`CudaEngine`: a decoder on a device, its KV cache, the slots' cells, and recorded decode steps.

    a step    inputs --one copy--> resolve cells, embed, layers, rows that sample, head --> logits buffer
    recorded  the same for steps of one token a row, at padded sizes: one copy and one call

Nothing waits for the device: what the host knows of a step is copied from page-locked memory, and what only the
device knows (tokens sampled last, holes) stays there. Who owns a step's inputs while the next is launched early:

    host arrays    | N built, packed |    | N+1 built, packed |
    page-locked           | N, until its copy is made ...... |    torch gives it to nobody before; N+1 gets another
                                                | N+1 .............. |
    device                       | copy N | step N reads .... | copy N+1 | step N+1 reads  in the stream's order

With several ranks (`ranks.cuda_leader`) each runs the same lines: what it launches, padding and recorded steps
included, follows from the batch and the cache's shape alone, and rank 0 tells both, so that sums meet. Rank 0 looks
its cells up and sends the ids; the others, whose cells are empty, find the same holes where an id is missing.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from stepahead.kernels.cuda.backend import Backend, Graph
from stepahead.kernels.cuda.inputs import Cells, FedTokens, gather_rows, invalidate_cells, resolve_inputs
from stepahead.kernels.cuda.ops import CudaOps, kernel_arrays, resolved_step
from stepahead.kernels.cuda.step_arrays import PackedArrays, StepArrays
from stepahead.kernels.ops import StepLayout
from stepahead.worker.errors import ModelError
from stepahead.worker.model.blank_steps import hole_rows, largest_chunks
from stepahead.worker.model.config import ModelConfig
from stepahead.worker.model.decoder import Decoder, WeightLoader, attention_shape
from stepahead.worker.model.weights import WeightSource
from stepahead.worker.ranks.communicator import ALONE, Communicator
from stepahead.worker.ranks.shard import ShardSource
from stepahead.worker.ranks.split import shard_config
from stepahead.worker.runner import NO_POSITION, CacheShape, StepBatch

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_PIECE_BYTES = 16  # kernels move rows in pieces of so many
_MAX_HEAD_DIM = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaOptions:
    """How an engine runs."""

    graphs: bool = True
    """Record decode steps and replay them."""
    deterministic: bool = False
    """See `CudaOps`."""
    forbid_waits: bool = False
    """Raise where a step makes the host wait for the device: for checks."""

    def describe(self) -> str:
        """What all ranks must have the same, as the command line says it."""
        return f"--cuda-graphs {'on' if self.graphs else 'off'}{' --deterministic' if self.deterministic else ''}"


@dataclass(frozen=True, slots=True)
class FedStep:
    """What a forward left for the sampler, on the device."""

    logits: torch.Tensor  # [num_choices, vocab_size] float32, of the rows `choice_rows`
    choice_rows: NDArray[np.int64]  # [num_choices], rows of the batch, ascending
    row_status: torch.Tensor  # [num_rows or more] uint8, 0 or POSITION_MISMATCH


PromptPiece = Callable[[torch.Tensor, int, int], object]
"""Called as (logits [end - begin, vocab_size], begin, end) for some prompt tokens; then the logits are gone."""


@dataclass(frozen=True, slots=True)
class _State:
    """What lives as long as the engine, beside weights and KV cache."""

    shape: CacheShape
    cells: Cells
    logits: torch.Tensor  # [max_num_seqs, vocab_size] float32; on ranks other than 0 no columns
    row_status: torch.Tensor  # [max_num_seqs] uint8, of decode steps of padded sizes
    inputs: torch.Tensor  # bytes, where such steps read their inputs


class CudaEngine:
    """A loaded model on a device; one thread calls it.

    Args:
        config: of the model.
        source: its weights.
        dtype: of weights, activations and KV cache.
        backend: the device.
        options: see `CudaOptions`.
        progress: called as (bytes done, bytes in all).
        ranks: with several, this one's shard is loaded, and every method is called on all of them.

    Raises:
        ModelError: the kernels cannot compute the model, or see `WeightLoader.load` and `shard_config`.
    """

    def __init__(
        self,
        config: ModelConfig,
        source: WeightSource,
        dtype: torch.dtype,
        backend: Backend,
        options: CudaOptions,
        progress: Callable[[int, int], None],
        ranks: Communicator = ALONE,
    ) -> None:
        if ranks.size > 1:
            source = ShardSource(source, config, ranks.rank, ranks.size)
            config = shard_config(config, ranks.size)
        check_sizes(config, dtype, ranks.size)
        self._config = config
        self._backend = backend
        self._options = options
        self._ranks = ranks
        self._ops = CudaOps(attention_shape(config), dtype, backend, deterministic=options.deterministic)
        loader = WeightLoader(config, source, self._ops, progress, ranks.size)
        self._decoder = Decoder(config, loader.load(), self._ops, ranks)
        self.weight_bytes = loader.weight_bytes
        self.kv_bytes_per_token = 2 * config.num_layers * config.num_kv_heads * config.head_dim * dtype.itemsize
        self._state: _State | None = None
        self._graphs: dict[int, Graph] = {}  # by number of rows

    @property
    def cells(self) -> Cells:
        """Of the slots, see `kernels.cuda.inputs`."""
        return self._allocated.cells

    def cache_bytes(self, limits: CacheShape, memory_share: float) -> int:
        """See `LaunchingRunner.cache_bytes`. The largest steps: chunks of all tokens, and a decode of all rows."""
        self._state = None
        self._state = self._make_state(limits)
        self._ops.allocate_cache(1, limits.block_size, limits.max_model_len)
        chunk = self._backend.peak_bytes(lambda: self.forward(largest_chunks(limits), nobody_asked))
        decode = self._backend.peak_bytes(self._decode_body(limits.max_num_seqs))
        self._ops.free_cache()
        memory = self._backend.memory()
        reserved = max(chunk, decode) + (decode if self._options.graphs else 0)
        return int(memory.total * memory_share) - (memory.total - memory.free) - reserved

    def allocate(self, shape: CacheShape) -> None:
        """Allocates cells, buffers and cache. Raises `ModelError` if the cache does not fit."""
        self.forget_graphs()  # they hold what they were recorded with
        self._state = None
        self._state = self._make_state(shape)
        try:
            self._ops.allocate_cache(shape.num_blocks, shape.block_size, shape.max_model_len)
        except torch.OutOfMemoryError as error:
            raise ModelError(
                f"the KV cache of {shape.num_blocks} blocks does not fit the device: {error}"
            ) from error
        self.reset()

    def record(self) -> None:
        """Records the decode steps, if there are to be any. Each has run once before."""
        if self._options.graphs:
            for size in reversed(graph_sizes(self._allocated.shape.max_num_seqs)):
                body = self._decode_body(size)
                body()
                largest = next(iter(self._graphs.values()), None)
                self._graphs[size] = self._backend.capture(body, beside=largest)

    def forget_graphs(self) -> None:
        """Gives the recorded steps up."""
        self._graphs = {}

    def reset(self) -> None:
        """Empties the cells."""
        self.cells.positions.fill_(NO_POSITION)

    @contextmanager
    def launching(self) -> Generator[None]:
        """For launching a step: no gradients and, where it is asked for, no waiting."""
        with ExitStack() as exits:
            exits.enter_context(torch.inference_mode())
            if self._options.forbid_waits:
                exits.enter_context(self._backend.forbid_waits())
            yield

    def forward(self, batch: StepBatch, on_prompt_logits: PromptPiece) -> FedStep:
        """Launches a step's forward; see `Runner.forward`.

        Args:
            batch: of the step.
            on_prompt_logits: told, piece by piece, the logits of the tokens that answer `batch.prompt_targets`, the
                targets' entries counted through.
        """
        if len(batch.invalidated_slots):
            invalidate_cells(self._backend, self.cells, self._backend.upload(batch.invalidated_slots))
        if batch.copies or batch.zeroed_blocks:
            self._ops.change_blocks(batch.copies, batch.zeroed_blocks)
        size = self._graph_size(batch)
        return self._feed(batch, on_prompt_logits) if size is None else self._replay(batch, size)

    def _feed(self, batch: StepBatch, on_prompt_logits: PromptPiece) -> FedStep:
        state, backend = self._allocated, self._backend
        arrays = self._ops.arrange(_layout(batch))
        place = np.empty_like(arrays.token_order)
        place[arrays.token_order] = np.arange(len(place))
        sample_rows = batch.sample_rows.astype(np.int64)
        logit_places = place[batch.query_start_loc[sample_rows + 1] - 1]
        prompt_places = place[_prompt_tokens(batch)]
        more = {"logit_places": logit_places, "prompt_places": prompt_places}
        on_device = PackedArrays(_inputs(batch, arrays) | more).upload(backend)
        hidden, row_status = self._hidden(arrays, on_device)
        most = len(state.logits)
        for begin in range(0, len(prompt_places), most):
            end = min(begin + most, len(prompt_places))
            rows = gather_rows(backend, hidden, on_device["prompt_places"][begin:end])
            on_prompt_logits(self._decoder.logits(rows, state.logits[: end - begin]), begin, end)
        logits = state.logits[: len(logit_places)]
        if len(logit_places):
            self._decoder.logits(gather_rows(backend, hidden, on_device["logit_places"]), logits)
        return FedStep(logits, sample_rows, row_status)

    def _hidden(self, arrays: StepArrays, on_device: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the last layer's rows, in the device's token order, and the rows' status."""
        backend, state, ranks = self._backend, self._allocated, self._ranks
        fed = FedTokens(
            token_ids=on_device["token_ids"] if ranks.rank == 0 else ranks.broadcast(on_device["token_ids"]),
            positions=on_device["positions"],
            slot_mapping=on_device["slot_mapping"],
            rows=on_device["rows"],
            slots=on_device["slots"],
            seq_lens=on_device["seq_lens"],
        )
        resolved = resolve_inputs(backend, fed, state.cells)
        if ranks.rank == 0:
            ranks.broadcast(resolved.token_ids)
        step = resolved_step(arrays, on_device, resolved.slot_mapping, resolved.visible_lens)
        return self._decoder.hidden(self._embedded(resolved.token_ids), step), resolved.row_status

    def _embedded(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Returns [num_tokens, hidden_size]: embeddings, from the ranks that hold them; zeros for a hole."""
        table, ranks = self._decoder.embedding, self._ranks
        if ranks.size > 1:
            token_ids = token_ids - ranks.rank * len(table)
            token_ids.masked_fill_(token_ids >= len(table), -1)
        return ranks.all_reduce(gather_rows(self._backend, table, token_ids))

    def _graph_size(self, batch: StepBatch) -> int | None:
        """The recorded step that serves a batch: one token a row, as many rows or a few more."""
        if batch.num_tokens != batch.num_rows or batch.prompt_targets:
            return None
        return min((size for size in self._graphs if size >= batch.num_rows), default=None)

    def _replay(self, batch: StepBatch, size: int) -> FedStep:
        state = self._allocated
        self._padded(batch, size)[1].upload(self._backend, state.inputs)
        self._graphs[size].replay()
        rows = np.arange(batch.num_rows)
        return FedStep(state.logits[: batch.num_rows], rows, state.row_status)

    def _decode_body(self, size: int) -> Callable[[], None]:
        """What a decode step of `size` rows launches; its inputs are holes until others are copied there."""
        state = self._allocated
        arrays, packed = self._padded(hole_rows(state.shape, size), size)
        on_device = packed.upload(self._backend, state.inputs)

        def body() -> None:
            hidden, row_status = self._hidden(arrays, on_device)
            self._decoder.logits(hidden, state.logits[:size])
            state.row_status[:size].copy_(row_status)

        return body

    def _padded(self, batch: StepBatch, size: int) -> tuple[StepArrays, PackedArrays]:
        """A step of one token a row, padded with holes to `size` rows: they write nothing and see nothing."""
        shape = self._allocated.shape
        padding = hole_rows(shape, size - batch.num_rows)
        width = padding.block_tables.shape[1]
        tables = np.zeros((size, width), np.int32)
        tables[: batch.num_rows, : batch.block_tables.shape[1]] = batch.block_tables[:, :width]

        def joined(name: str) -> NDArray[np.generic]:
            return np.concatenate([getattr(batch, name), getattr(padding, name)])

        whole = replace(
            batch,
            **{name: joined(name) for name in ("slots", "token_ids", "positions", "seq_lens", "slot_mapping")},
            query_start_loc=np.arange(size + 1, dtype=np.int32),
            block_tables=tables,
        )
        # Splits of the longest context there may be: a recorded launch cannot grow.
        arrays = replace(self._ops.arrange(_layout(whole)), max_context=width * shape.block_size)
        return arrays, PackedArrays(_inputs(whole, arrays))

    def _make_state(self, shape: CacheShape) -> _State:
        """Allocates what does not depend on the number of blocks."""
        allocate, rows = self._backend.allocate, shape.max_num_seqs
        cells = Cells(allocate((shape.num_slots,), torch.int64), allocate((shape.num_slots,), torch.int64))
        cells.tokens.zero_()
        cells.positions.fill_(NO_POSITION)
        width = -(-shape.max_model_len // shape.block_size)
        per_row = 4 * width + 3 * 8 + 3 * 4
        return _State(
            shape=shape,
            cells=cells,
            logits=allocate((rows, self._config.vocab_size if self._ranks.rank == 0 else 0), torch.float32),
            row_status=allocate((rows,), torch.uint8),
            inputs=allocate((rows * per_row + 32 * _PIECE_BYTES,), torch.uint8),
        )

    @property
    def _allocated(self) -> _State:
        assert self._state is not None, "allocate comes before the first step"
        return self._state


def choose_dtype(asked: str, stored: str) -> str:
    """Returns a key of `DTYPES`: as asked, or for "auto" as stored, bfloat16 if that is quantized."""
    dtype = stored if asked == "auto" else asked
    return dtype if dtype in DTYPES else "bfloat16"


def check_sizes(config: ModelConfig, dtype: torch.dtype, num_ranks: int = 1) -> None:
    """Raises `ModelError` if the kernels cannot compute a model's sizes, or those of a rank's shard."""
    size = dtype.itemsize
    per_piece = _PIECE_BYTES // size
    faults: list[str] = []
    if config.head_dim // 2 % per_piece or config.head_dim > _MAX_HEAD_DIM:
        faults.append(f"a head size of {config.head_dim}, not a multiple of {2 * per_piece} up to {_MAX_HEAD_DIM}")
    if size == 2 and config.head_dim % 16:
        faults.append(f"a head size of {config.head_dim}, not a multiple of 16")
    inner = [config.intermediate_size] + ([config.mixture.intermediate_size] if config.mixture else [])
    for what, sizes in (("a hidden", [config.hidden_size]), ("an intermediate", inner)):
        faults += [f"{what} size of {each}, not a multiple of {per_piece}" for each in sizes if each % per_piece]
    if faults:
        what = "it has" if num_ranks == 1 else f"each of {num_ranks} ranks has"
        raise ModelError(f"the CUDA kernels cannot compute this model in {dtype}: {what} {', '.join(faults)}")


def graph_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Returns the numbers of rows that decode steps are recorded for, ascending.

    Padding is less than a quarter of the rows, or than 8: such steps wait for the weights, however wide they are.
    """
    sizes = [1, 2, 4, *range(8, 65, 8), *range(80, 257, 16), *range(288, max_num_seqs + 1, 32)]
    return (*(size for size in sizes if size < max_num_seqs), max_num_seqs)


def _inputs(batch: StepBatch, arrays: StepArrays) -> dict[str, NDArray[np.generic]]:
    tokens = batch.token_ids[arrays.token_order]
    return kernel_arrays(arrays) | {"token_ids": tokens, "slots": batch.slots, "seq_lens": batch.seq_lens}


def _layout(batch: StepBatch) -> StepLayout:
    return StepLayout(
        positions=batch.positions,
        slot_mapping=batch.slot_mapping,
        query_start_loc=batch.query_start_loc,
        seq_lens=batch.seq_lens,
        block_tables=batch.block_tables,
    )


def _prompt_tokens(batch: StepBatch) -> NDArray[np.int64]:
    """The tokens whose logits answer the batch's prompt targets, target by target."""
    starts: list[int] = batch.query_start_loc.tolist()
    parts = [np.arange(starts[one.row], starts[one.row] + len(one.token_ids)) for one in batch.prompt_targets]
    return np.concatenate([np.zeros(0, np.int64), *parts])


def nobody_asked(logits: torch.Tensor, begin: int, end: int) -> None:
    """A `PromptPiece` where nobody here asked for a prompt's log probabilities."""
