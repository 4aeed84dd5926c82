"""The C functions of the step library, declared for ctypes. Mirrors `csrc/abi.h`, field by field.

Calls through ctypes release the interpreter lock for as long as they run.
"""

from __future__ import annotations

import ctypes
from enum import IntEnum
from functools import cache
from pathlib import Path
from typing import ClassVar

from stepahead.kernels.cpu.step.build import BuildUnavailable, built_library

ABI_VERSION = 10


class InstructionSet(IntEnum):
    """What a step can be computed with; larger is better."""

    AVX2 = 0
    """AVX2 and FMA: float32 arithmetic, weights in float32 or bfloat16."""
    AVX512_BF16 = 1
    """AVX512 with vdpbf16ps: bfloat16 products summed in float32; float32 models in float32."""
    AMX_BF16 = 2
    """AMX tiles for bfloat16 products, AVX512_BF16 for all else, and for float32 models altogether."""


class TensorKind(IntEnum):
    """Weights of a model: matrices in its weight type, then (from QUERY_BIAS on) float32 vectors."""

    EMBEDDING = 0
    HEAD = 1
    QUERY = 2
    KEY = 3
    VALUE = 4
    OUTPUT = 5
    GATE = 6
    UP = 7
    DOWN = 8
    ROUTER = 9
    QUERY_BIAS = 10
    KEY_BIAS = 11
    VALUE_BIAS = 12
    OUTPUT_BIAS = 13
    GATE_BIAS = 14
    UP_BIAS = 15
    DOWN_BIAS = 16
    ATTENTION_NORM = 17
    MLP_NORM = 18
    FINAL_NORM = 19
    QUERY_NORM = 20
    KEY_NORM = 21
    POST_ATTENTION_NORM = 22
    POST_MLP_NORM = 23


class Phase(IntEnum):
    """What a step's time goes to, `Phase` of abi.h."""

    EMBED = 0
    QKV = 1
    PLACE = 2
    ATTENTION = 3
    OUTPUT = 4
    NORM = 5
    GATE_UP = 6
    DOWN = 7
    ROUTE = 8
    HEAD = 9
    WAIT = 10


class Probe(IntEnum):
    """What bounds a step on this machine, `Probe` of abi.h."""

    READ = 0
    """All packed weights are read, by all threads: bytes."""
    MULTIPLY = 1
    """Registers are multiplied, by all threads: floating point operations."""


class LayerDims(ctypes.Structure):
    """`LayerDims` of abi.h."""

    _fields_: ClassVar = [("window", ctypes.c_int32), ("rope", ctypes.c_int32), ("mixture", ctypes.c_int32)]


class Dims(ctypes.Structure):
    """`Dims` of abi.h."""

    _fields_: ClassVar = [
        ("isa", ctypes.c_int32),
        ("bf16_weights", ctypes.c_int32),
        ("num_layers", ctypes.c_int32),
        ("hidden_size", ctypes.c_int32),
        ("intermediate_size", ctypes.c_int32),
        ("num_heads", ctypes.c_int32),
        ("num_kv_heads", ctypes.c_int32),
        ("head_dim", ctypes.c_int32),
        ("vocab_size", ctypes.c_int32),
        ("tied_head", ctypes.c_int32),
        ("num_threads", ctypes.c_int32),
        ("pin_threads", ctypes.c_int32),
        ("coded_weights", ctypes.c_int32),
        ("num_ropes", ctypes.c_int32),
        ("post_norms", ctypes.c_int32),
        ("gelu", ctypes.c_int32),
        ("num_experts", ctypes.c_int32),
        ("experts_per_token", ctypes.c_int32),
        ("expert_size", ctypes.c_int32),
        ("normalized", ctypes.c_int32),
        ("norm_eps", ctypes.c_float),
        ("attention_scale", ctypes.c_float),
        ("embedding_scale", ctypes.c_float),
        ("attention_cap", ctypes.c_float),
        ("logit_cap", ctypes.c_float),
        ("layers", ctypes.POINTER(LayerDims)),
    ]


class CacheDims(ctypes.Structure):
    """`CacheDims` of abi.h."""

    _fields_: ClassVar = [
        ("num_blocks", ctypes.c_void_p),
        ("windows", ctypes.c_void_p),
        ("groups", ctypes.c_void_p),
        ("num_groups", ctypes.c_int32),
        ("block_size", ctypes.c_int32),
        ("max_tokens", ctypes.c_int32),
        ("max_positions", ctypes.c_int32),
        ("cos", ctypes.c_void_p),
        ("sin", ctypes.c_void_p),
    ]


class Batch(ctypes.Structure):
    """`Batch` of abi.h."""

    _fields_: ClassVar = [
        ("num_rows", ctypes.c_int32),
        ("num_tokens", ctypes.c_int32),
        ("table_width", ctypes.c_int32),
        ("num_logits", ctypes.c_int32),
        ("token_ids", ctypes.c_void_p),
        ("positions", ctypes.c_void_p),
        ("slot_mapping", ctypes.c_void_p),
        ("query_start_loc", ctypes.c_void_p),
        ("seq_lens", ctypes.c_void_p),
        ("block_tables", ctypes.c_void_p),
        ("floors", ctypes.c_void_p),
        ("logit_tokens", ctypes.c_void_p),
        ("logits", ctypes.c_void_p),
        ("best_ids", ctypes.c_void_p),
        ("best_logits", ctypes.c_void_p),
    ]


class ChainedStep(ctypes.Structure):
    """`ChainedStep` of abi.h."""

    _fields_: ClassVar = [
        ("batch", Batch),
        ("cell_tokens", ctypes.c_void_p),
        ("cell_positions", ctypes.c_void_p),
        ("slots", ctypes.c_void_p),
        ("sample_rows", ctypes.c_void_p),
        ("emptied_slots", ctypes.c_void_p),
        ("num_emptied", ctypes.c_int32),
        ("greedy", ctypes.c_int32),
        ("state", ctypes.c_uint32),
        ("ordinal", ctypes.c_int64),
        ("started_ns", ctypes.c_int64),
        ("ended_ns", ctypes.c_int64),
        ("follower", ctypes.c_void_p),
        ("next", ctypes.c_void_p),
    ]


class StepState(IntEnum):
    """`StepState` of abi.h."""

    WAITS = 0
    RUNS = 1
    DONE = 2
    DROPPED = 3


class Draws(ctypes.Structure):
    """`Draws` of abi.h."""

    _fields_: ClassVar = [
        ("logits", ctypes.c_void_p),
        ("rows", ctypes.c_void_p),
        ("largest", ctypes.c_void_p),
        ("temperature", ctypes.c_void_p),
        ("top_p", ctypes.c_void_p),
        ("top_k", ctypes.c_void_p),
        ("min_p", ctypes.c_void_p),
        ("uniform", ctypes.c_void_p),
        ("token_ids", ctypes.c_void_p),
        ("num_draws", ctypes.c_int64),
    ]


_HANDLE = ctypes.c_void_p
_RESULT = type[ctypes.c_int32 | ctypes.c_uint32 | ctypes.c_int64 | ctypes.c_void_p]
_SIGNATURES: dict[str, tuple[_RESULT | None, list[type]]] = {
    "step_abi_version": (ctypes.c_int32, []),
    "step_has_isa": (ctypes.c_int32, [ctypes.c_int32]),
    "step_left_out": (ctypes.c_int32, [ctypes.c_int32]),
    "step_create": (_HANDLE, [ctypes.POINTER(Dims)]),
    "step_destroy": (None, [_HANDLE]),
    "step_stored_bytes": (ctypes.c_int64, [_HANDLE]),
    "step_set": (ctypes.c_int32, [_HANDLE, ctypes.c_int32, ctypes.c_int32, ctypes.c_int32, ctypes.c_void_p]),
    "step_allocate": (ctypes.c_int64, [_HANDLE, ctypes.POINTER(CacheDims)]),
    "step_cache_memory": (ctypes.c_void_p, [_HANDLE, ctypes.c_int32]),
    "step_change_blocks": (
        ctypes.c_int32,
        [_HANDLE, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64],
    ),
    "step_draw": (None, [_HANDLE, ctypes.POINTER(Draws)]),
    "step_profile": (None, [_HANDLE, ctypes.c_void_p]),
    "step_probe": (ctypes.c_int64, [_HANDLE, ctypes.c_int32, ctypes.c_int64]),
    "step_check": (ctypes.c_int32, [_HANDLE, ctypes.POINTER(Batch), ctypes.c_int32]),
    "step_start": (ctypes.c_int32, [_HANDLE, ctypes.POINTER(ChainedStep)]),
    "step_follow": (ctypes.c_int32, [_HANDLE, ctypes.POINTER(ChainedStep), ctypes.POINTER(ChainedStep)]),
    "step_wait": (ctypes.c_uint32, [ctypes.POINTER(ChainedStep)]),
    "step_passed": (ctypes.c_int64, [_HANDLE]),
    "step_forward": (None, [_HANDLE, ctypes.POINTER(Batch)]),
}


@cache
def step_library() -> ctypes.CDLL:
    """Returns the opened library, compiled first if need be.

    Raises:
        BuildUnavailable: it cannot be built or opened here.
    """
    return open_library(built_library())


def open_library(path: Path) -> ctypes.CDLL:
    """Returns a library with its functions declared.

    Raises:
        BuildUnavailable: it cannot be opened here, or has another interface.
    """
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise BuildUnavailable(f"{path.name} cannot be opened: {error}") from error
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    version = int(library.step_abi_version())
    if version != ABI_VERSION:
        raise BuildUnavailable(f"{path.name} has interface {version}, this package declares {ABI_VERSION}")
    return library


def instruction_sets() -> tuple[InstructionSet, ...]:
    """Returns what this CPU runs, best first; empty if it runs none.

    Raises:
        BuildUnavailable: the library cannot be built or opened here.
    """
    library = step_library()
    return tuple(isa for isa in sorted(InstructionSet, reverse=True) if library.step_has_isa(int(isa)))


def left_out_sets() -> tuple[InstructionSet, ...]:
    """Returns what this CPU runs but the library was built without: its compiler did not know the instructions.

    Raises:
        BuildUnavailable: the library cannot be built or opened here.
    """
    library = step_library()
    return tuple(isa for isa in InstructionSet if library.step_left_out(int(isa)))
