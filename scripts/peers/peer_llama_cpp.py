"""llama.cpp through llama-cpp-python's batch interface, behind the contract of peer.py: closed batches in lockstep.

`--requantize OUT bf16` writes a copy of the GGUF in another type and ends.
"""

from __future__ import annotations

import argparse
import ctypes
import os
from collections.abc import Callable

from peer import Request, serve, take_stdout

CHANNEL = take_stdout()

import llama_cpp  # noqa: E402 - it prints, so after standard output is taken
import numpy as np  # noqa: E402

MAX_BATCH = 2048


class Sequences:
    """A model and a context of so many sequences of so many tokens."""

    def __init__(self, path: str, num_sequences: int, max_tokens: int, threads: int) -> None:
        model = llama_cpp.llama_model_load_from_file(path.encode(), llama_cpp.llama_model_default_params())
        self._num_ids = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        options = llama_cpp.llama_context_default_params()
        options.n_ctx = num_sequences * max_tokens
        options.n_seq_max = num_sequences
        options.n_batch, options.n_ubatch = MAX_BATCH, 512
        options.n_threads = options.n_threads_batch = threads
        self._context = llama_cpp.llama_init_from_model(model, options)
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._batch = llama_cpp.llama_batch_init(MAX_BATCH, 0, 1)

    def decode(self, rows: list[tuple[int, int, int, bool]]) -> dict[int, int]:
        """Rows are (token, position, sequence, whether its logits are wanted); returns the likeliest ids."""
        batch = self._batch
        batch.n_tokens = len(rows)
        for index, (token, position, sequence, wanted) in enumerate(rows):
            batch.token[index], batch.pos[index] = token, position
            batch.n_seq_id[index], batch.seq_id[index][0], batch.logits[index] = 1, sequence, wanted
        if llama_cpp.llama_decode(self._context, batch) != 0:
            raise RuntimeError("llama_decode failed")
        chosen = {}
        for index, (_, _, sequence, wanted) in enumerate(rows):
            if wanted:
                logits = llama_cpp.llama_get_logits_ith(self._context, index)
                chosen[sequence] = int(np.ctypeslib.as_array(logits, shape=(self._num_ids,)).argmax())
        return chosen

    def run(self, requests: list[Request], clock: Callable[[], float]) -> list[list[float]]:
        """See peer.py."""
        llama_cpp.llama_memory_clear(self._memory, True)  # noqa: FBT003 - the library's signature
        times: list[list[float]] = [[] for _ in requests]
        last: dict[int, int] = {}
        prompts = [
            (token, position, sequence, position == len(request.prompt) - 1)
            for sequence, request in enumerate(requests)
            for position, token in enumerate(request.prompt)
        ]
        for start in range(0, len(prompts), MAX_BATCH):
            chosen = self.decode(prompts[start : start + MAX_BATCH])
            last |= chosen
            for sequence in chosen:
                times[sequence].append(clock())
        while live := [i for i, request in enumerate(requests) if len(times[i]) < request.output_tokens]:
            ends = {i: len(requests[i].prompt) + len(times[i]) - 1 for i in live}
            last = self.decode([(last[i], ends[i], i, True) for i in live])
            for i in live:
                times[i].append(clock())
        return times


def requantize(source: str, target: str, kind: str) -> None:
    """Writes the model in f16, bf16 or q8_0."""
    parameters = llama_cpp.llama_model_quantize_default_params()
    parameters.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind.upper()}")
    parameters.allow_requantize = True
    if llama_cpp.llama_model_quantize(source.encode(), target.encode(), ctypes.byref(parameters)) != 0:
        raise SystemExit(f"{source} cannot be written as {kind}")


def main() -> None:
    """Loads the model and serves."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True, help="GGUF file")
    parser.add_argument("--requantize", nargs=2, metavar=("OUT", "TYPE"))
    parser.add_argument("--max-num-seqs", type=int, default=32)
    parser.add_argument("--max-model-len", type=int, default=640)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    arguments = parser.parse_args()
    llama_cpp.llama_backend_init()
    if arguments.requantize:
        requantize(arguments.model, *arguments.requantize)
        return
    sequences = Sequences(arguments.model, arguments.max_num_seqs, arguments.max_model_len, arguments.threads)
    kind = arguments.model.rsplit(".", 2)[-2]
    serve(CHANNEL, f"llama.cpp {kind}", sequences.run, open_loop=False, version=llama_cpp.__version__)


if __name__ == "__main__":
    main()
