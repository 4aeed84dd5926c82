"""`DecoderStep`: a model's weights and KV cache in the step library, and the one call per step.

Everything is checked here, in Python, before it reaches compiled code: shapes, dtypes, ranges, block ids.
"""

from __future__ import annotations

import ctypes
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from stepahead.kernels.cpu.step.draw_columns import DrawColumns, checked_columns
from stepahead.kernels.cpu.step.library import (
    CacheDims,
    Draws,
    InstructionSet,
    Phase,
    Probe,
    TensorKind,
    step_library,
)
from stepahead.kernels.cpu.step.step_cache import StepCache, check_range, step_cache
from stepahead.kernels.cpu.step.step_chain import Cells, StepChain
from stepahead.kernels.cpu.step.step_inputs import AllocatedModel, StepOutputs, step_inputs
from stepahead.kernels.cpu.step.step_shape import StepShape, check_shape, library_dims, tensor_shape
from stepahead.kernels.reference.rope import rope_tables

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from stepahead.kernels.block_tables import LayerGroups
    from stepahead.kernels.ops import StepLayout

MAX_THREADS = 256
_DTYPES = {torch.bfloat16: 1, torch.float32: 0}
_OF_EXPERTS = (TensorKind.GATE, TensorKind.UP, TensorKind.DOWN)
_NOT_OF_MIXTURES = (TensorKind.GATE_BIAS, TensorKind.UP_BIAS, TensorKind.DOWN_BIAS)


class DecoderStep:
    """One model in compiled code. Not for several threads at once.

    Life: construct, `set_tensor` for every weight, `allocate` once, then `forward` per step.
    """

    def __init__(
        self,
        shape: StepShape,
        dtype: torch.dtype,
        isa: InstructionSet,
        num_threads: int,
        *,
        pin_threads: bool = False,
        coded_weights: bool = True,
    ) -> None:
        """Makes room for the weights and starts the threads.

        Args:
            shape: sizes.
            dtype: of weights and KV cache, torch.bfloat16 or torch.float32. Sums and the residual are float32.
            isa: one of `instruction_sets()`.
            num_threads: 1 .. 256; they run on the cores this process may use.
            pin_threads: ties each to a core of its own, where there are exactly as many. Beside a busy neighbour a
                pinned thread waits out the neighbour's time slice, a free one moves (8 rows: 44 against 31 ms).
                Free ones that come to share a core move apart by themselves.
            coded_weights: stores bfloat16 matrices in 12 bits per weight where the instruction set can decode them;
                nothing is lost, every result has the same bits.

        Raises:
            BuildUnavailable: the library cannot be built or opened here.
            ValueError: an argument is out of range, or this CPU lacks the instruction set.
            MemoryError: no memory for the weights, or no threads.
        """
        check_shape(shape)
        if not 1 <= num_threads <= MAX_THREADS:
            raise ValueError(f"num_threads must be in 1..{MAX_THREADS}, not {num_threads}")
        if dtype not in _DTYPES:
            raise ValueError(f"dtype must be torch.bfloat16 or torch.float32, not {dtype}")
        self._library = step_library()
        if not self._library.step_has_isa(int(isa)):
            raise ValueError(f"isa: this CPU does not run {isa.name}")
        self._shape = shape
        self._dtype = dtype
        self._cache: StepCache | None = None
        self._cache_bytes = 0
        self._num_threads = num_threads
        self._cycles: NDArray[np.uint64] | None = None  # the library writes to it
        dims = library_dims(shape)
        dims.isa, dims.bf16_weights = int(isa), _DTYPES[dtype]
        dims.num_threads, dims.pin_threads = num_threads, int(pin_threads)
        dims.coded_weights = int(coded_weights)
        handle: int | None = self._library.step_create(ctypes.byref(dims))
        if not handle:
            raise MemoryError(f"the weights of {shape} or {num_threads} threads do not fit")
        self._handle = ctypes.c_void_p(handle)
        self._finalizer = weakref.finalize(self, self._library.step_destroy, self._handle)

    def close(self) -> None:
        """Ends the threads and frees all memory; the object cannot be used afterwards."""
        self._finalizer()

    def set_tensor(self, kind: TensorKind, layer: int, tensor: torch.Tensor, *, expert: int = 0) -> None:
        """Packs one weight; the tensor can be dropped afterwards.

        Args:
            kind: which weight.
            layer: 0 and up; 0 for embedding, head and final norm.
            tensor: [outputs, inputs] or [size], any float dtype.
            expert: which one's, of GATE, UP and DOWN in a layer that is a mixture.

        Raises:
            ValueError: the layer or expert does not exist or the tensor has another shape than the model says.
            MemoryError: no memory.
        """
        self._check_open()
        if not 0 <= layer < self._shape.num_layers:
            raise ValueError(f"layer {layer} is outside 0..{self._shape.num_layers - 1}")
        self._check_expert(kind, layer, expert)
        expected = tensor_shape(self._shape, kind, layer)
        if tuple(tensor.shape) != expected:
            raise ValueError(f"{kind.name} has shape {list(tensor.shape)}, must be {list(expected)}")
        if kind == TensorKind.EMBEDDING and self._shape.tied_head:
            raise ValueError("EMBEDDING of a tied model is its HEAD")
        if kind >= TensorKind.POST_ATTENTION_NORM and not self._shape.post_norms:
            raise ValueError(f"{kind.name}: this model has no post norms")
        dtype = self._dtype if kind < TensorKind.QUERY_BIAS else torch.float32
        plain = tensor.detach().to(device="cpu", dtype=dtype).contiguous()
        if self._library.step_set(self._handle, int(kind), layer, expert, plain.data_ptr()):
            raise MemoryError(f"no memory for {kind.name} of layer {layer}")

    def _check_expert(self, kind: TensorKind, layer: int, expert: int) -> None:
        mixture, is_mixture = self._shape.mixture, self._shape.is_mixture(layer)
        if kind in _NOT_OF_MIXTURES and is_mixture:
            raise ValueError(f"{kind.name}: layer {layer} is a mixture, its experts have none")
        if kind == TensorKind.ROUTER and not is_mixture:
            raise ValueError(f"ROUTER: layer {layer} is no mixture")
        num_experts = mixture.num_experts if mixture and is_mixture and kind in _OF_EXPERTS else 1
        if not 0 <= expert < num_experts:
            raise ValueError(f"{kind.name} of layer {layer}: expert {expert} is outside 0..{num_experts - 1}")

    def allocate(
        self,
        *,
        num_blocks: int,
        block_size: int,
        max_tokens: int,
        max_positions: int,
        groups: LayerGroups | None = None,
    ) -> int:
        """Allocates KV cache and activations, every byte of the cache written; returns the cache's bytes.

        A block takes whole tiles of 16 tokens: a block size that is no multiple of 16 wastes the rest.

        Args:
            num_blocks: blocks a step may name (of group 0).
            block_size: kv_slots per block.
            max_tokens: tokens a step may feed.
            max_positions: positions stay below this.
            groups: None: all layers are group 0.

        Raises:
            ValueError: an argument is not positive, layers and groups do not fit, or the cache exists already.
            MemoryError: no memory.
        """
        self._check_open()
        if self._cache is not None:
            raise ValueError("the cache is allocated already")
        cache = step_cache(self._shape, num_blocks, block_size, max_tokens, max_positions, groups)
        tables = [rope_tables(rope, max_positions) for rope in self._shape.ropes]
        # a model in which no layer turns has none
        cos, sin = (np.ascontiguousarray([table[part] for table in tables], np.float32) for part in range(2))
        # The library reads these two with every step.
        blocks = np.array(cache.group_blocks, np.int64)
        windows = np.array([window or 0 for window in cache.group_windows], np.int64)
        self._group_arrays = blocks, windows
        of_layer = np.array(cache.of_layer, np.int32)
        dims = CacheDims(
            num_blocks=blocks.ctypes.data,
            windows=windows.ctypes.data,
            groups=of_layer.ctypes.data,
            num_groups=len(blocks),
            block_size=block_size,
            max_tokens=max_tokens,
            max_positions=max_positions,
            cos=cos.ctypes.data,
            sin=sin.ctypes.data,
        )
        num_bytes = int(self._library.step_allocate(self._handle, ctypes.byref(dims)))
        if num_bytes < 0:
            blocks_text = " + ".join(map(str, cache.group_blocks))
            raise MemoryError(
                f"no memory for steps of {max_tokens} tokens "
                f"and a KV cache of {blocks_text} blocks of {block_size} tokens"
            )
        self._cache = cache
        self._cache_bytes = num_bytes
        return num_bytes

    def cache_memory(self) -> tuple[NDArray[Any], NDArray[Any]]:
        """Returns keys and values where they lie, for tests: [num_layers, num_blocks, elements of a block].

        Of uint16 (the bits of a bfloat16) or float32. Valid until `close`. Of a model of one group only.
        """
        rows = self._shape.num_layers, self._only_group
        element = ctypes.c_uint16 if self._dtype == torch.bfloat16 else ctypes.c_float
        num_elements = self._cache_bytes // 2 // ctypes.sizeof(element)
        views: list[NDArray[Any]] = []
        for part in range(2):
            address: int = self._library.step_cache_memory(self._handle, part)
            view: NDArray[Any] = np.ctypeslib.as_array((element * num_elements).from_address(address))
            views.append(view.reshape(*rows, -1))
        return views[0], views[1]

    def change_blocks(self, copies: tuple[tuple[int, int], ...], zeroed: tuple[int, ...]) -> None:
        """Copies blocks (source, destination), sources read before the first write, then zeroes blocks.

        Raises:
            ValueError: a block does not exist, or there are several groups.
            MemoryError: no memory to hold the sources.
        """
        num_blocks = self._only_group
        pairs = np.asarray(copies, dtype=np.int64).reshape(-1, 2)
        blocks = np.asarray(zeroed, dtype=np.int64)
        check_range("copies", pairs, num_blocks)
        check_range("zeroed", blocks, num_blocks)
        if self._library.step_change_blocks(
            self._handle, pairs.ctypes.data, len(pairs), blocks.ctypes.data, len(blocks)
        ):
            raise MemoryError(f"no memory to copy {len(pairs)} blocks")

    def forward(
        self,
        token_ids: NDArray[np.int64],
        layout: StepLayout,
        logit_tokens: NDArray[np.int64],
        *,
        logits: NDArray[np.float32] | None = None,
    ) -> StepOutputs:
        """Feeds the tokens of a step: writes their keys and values, returns the logits asked for.

        Args:
            token_ids: [num_tokens] int64.
            layout: where they go.
            logit_tokens: [num_logits] indexes into token_ids.
            logits: [num_logits, vocab_size] float32, contiguous, to write to; new memory if None. New memory costs
                page faults in the step: 0.6 ms at 32 rows of 49,152.

        Raises:
            ValueError: an array has another shape than the layout says, or an entry is out of range; nothing was
                written then.
        """
        if logits is None:
            logits = np.empty((len(logit_tokens), self._shape.vocab_size), np.float32)
        inputs = step_inputs(self._model, token_ids, layout, logit_tokens, logits)
        self._library.step_forward(self._handle, ctypes.byref(inputs.batch))
        return inputs.outputs

    def chain(self, cells: Cells) -> StepChain:
        """Returns what runs steps that follow each other by themselves; `forward` and `draw` may come between them.

        Raises:
            ValueError: an array is not int64 or not contiguous.
        """
        return StepChain(self._check_open, self._model, cells)

    def draw(self, logits: NDArray[np.float32], draws: DrawColumns) -> NDArray[np.int64]:
        """Draws tokens on the step's threads: `reference.sampling`, steps 7a to 7e.

        Order, ties and sums are the reference's; a mass may differ from NumPy's in its last bit.

        Args:
            logits: [any, vocab_size] float32, contiguous.
            draws: which rows, and by what.

        Returns:
            [num_draws] token ids.

        Raises:
            ValueError: a column has another length, a row does not exist, or its largest logit is not finite.
        """
        if not self._allocated:
            raise ValueError("allocate comes before the first draw")
        columns = checked_columns(logits, draws, self._shape.vocab_size)
        num_draws = len(columns["rows"])
        token_ids = np.empty(num_draws, np.int64)
        batch = Draws(
            logits=logits.ctypes.data,
            token_ids=token_ids.ctypes.data,
            num_draws=num_draws,
            **{name: column.ctypes.data for name, column in columns.items()},
        )
        self._library.step_draw(self._handle, ctypes.byref(batch))
        return token_ids

    def profile(self) -> NDArray[np.uint64]:
        """Starts to count what steps spend where; costs nothing unless called.

        Returns:
            [num_threads, len(Phase)], cycles of the time stamp counter, to which every later step adds.
        """
        self._check_open()
        self._cycles = np.zeros((self._num_threads, len(Phase)), np.uint64)
        self._library.step_profile(self._handle, self._cycles.ctypes.data)
        return self._cycles

    def probe(self, kind: Probe, amount: int) -> int:
        """Does what no step can do faster on this machine, for the caller to time.

        Args:
            kind: reading or multiplying.
            amount: how often the weights are read, or rounds of multiplications of each thread.

        Returns:
            Bytes read or floating point operations done, by all threads.
        """
        self._check_open()
        return int(self._library.step_probe(self._handle, int(kind), amount))

    @property
    def stored_bytes(self) -> int:
        """Bytes that all matrices take in memory, coded or not."""
        self._check_open()
        return int(self._library.step_stored_bytes(self._handle))

    @property
    def _model(self) -> AllocatedModel:
        return AllocatedModel(self._library, self._handle, self._allocated, self._shape.vocab_size)

    @property
    def _allocated(self) -> StepCache:
        self._check_open()
        if self._cache is None:
            raise ValueError("allocate comes before the first step")
        return self._cache

    @property
    def _only_group(self) -> int:
        """Blocks of the one group that all layers are."""
        num_blocks, *others = self._allocated.group_blocks
        if others:
            raise ValueError(f"the layers are {1 + len(others)} groups")
        return num_blocks

    def _check_open(self) -> None:
        if not self._finalizer.alive:
            raise ValueError("the step is closed")
