"""Two ranks that serve many models one after the other: this process is rank 0, `rank_double` is rank 1."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from stepahead.kernels.cuda.host.opaque import OpaqueBackend
from stepahead.worker.model.cuda_engine import CudaOptions
from stepahead.worker.model.cuda_runner import CudaRunner
from stepahead.worker.model.registry import make_runner
from stepahead.worker.ranks import rank_group
from stepahead.worker.ranks.messages import Stop
from stepahead.worker.ranks.place import RankPlace
from stepahead.worker.runner import Runner
from tests.architecture.tree import ROOT

PLACE = RankPlace(rank=0, size=2, local_size=2, address="127.0.0.1", port=0)


class Pair:
    """The two, connected by gloo."""

    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
            variables = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            command = [sys.executable, "-m", "tests.worker_model.rank_double"]
            self.other = subprocess.Popen(
                command, cwd=ROOT, env={**os.environ, **variables}, stdin=subprocess.PIPE, text=True
            )
            place = RankPlace(
                rank=0, size=2, local_size=2, address="127.0.0.1", port=port, listen_fd=listener.detach()
            )
        self.group = rank_group.connect(place, torch.device("cpu"))
        self._disconnect = self.group.close
        self.group.close = lambda: None  # a worker that ends does not end the pair

    def connect(self, _place: RankPlace, _device: torch.device, *, ordered_sums: bool) -> rank_group.RankGroup:
        """In place of `rank_group.connect`: the ranks are connected once for all models."""
        self.group._ordered_sums = ordered_sums
        return self.group

    @contextmanager
    def host(self, spec: object, *, dtype: str = "float32") -> Iterator[Runner]:
        """A runner of both ranks on the CPU. After it the other one is ready for its next model."""
        self.tell("host", str(spec), dtype)
        try:
            yield make_runner(str(spec), dtype=dtype, threads=1, kernels="torch", place=PLACE)
        finally:
            self.group.send(Stop())

    @contextmanager
    def device(
        self, spec: object, *, dtype: str = "float32", backend: OpaqueBackend | None = None, **options: bool
    ) -> Iterator[CudaRunner]:
        """A runner of both ranks on devices whose kernels run on this CPU."""
        self.tell("device", str(spec), dtype, options)
        try:
            yield self.device_runner(spec, dtype, backend or OpaqueBackend(), **options)
        finally:
            self.group.send(Stop())

    def device_runner(self, spec: object, dtype: str, backend: OpaqueBackend, **options: bool) -> CudaRunner:
        """Rank 0's runner; the other rank has been told."""
        return CudaRunner(str(spec), dtype, backend, CudaOptions(forbid_waits=True, **options), PLACE)

    def tell(self, *command: Any) -> None:
        """Tells the other process what to do next, see `rank_double`."""
        print(json.dumps(command), file=self.other.stdin, flush=True)

    def close(self) -> None:
        """Ends both."""
        assert self.other.stdin is not None
        self.other.stdin.close()
        self.other.wait(10)
        self._disconnect()


@contextmanager
def connected_pair() -> Iterator[Pair]:
    """A pair, whose ranks every runner of several ranks gets meanwhile."""
    with pytest.MonkeyPatch.context() as patch:
        ranks, num_threads = Pair(), torch.get_num_threads()
        patch.setattr(rank_group, "connect", ranks.connect)
        torch.set_num_threads(1)  # two processes whose threads spin for each other take many times as long
        try:
            yield ranks
        finally:
            torch.set_num_threads(num_threads)
            ranks.close()
    assert ranks.other.returncode == 0


def logits_of_every_step(driver, prompts, read_logits, *, chunk, num_outputs):
    """Chunks, decodes of many lengths and late arrivals share steps.

    Returns what `read_logits` makes of the runner after each step, and the outputs of each prompt.
    """
    seqs = [driver.admit(prompt) for prompt in prompts]
    logits = []
    while pending := [seq for seq in seqs if len(seq.outputs) < num_outputs]:
        driver.step(
            [(seq, min(chunk, len(seq.prompt) - seq.num_fed) if not seq.decoding else 1) for seq in pending]
        )
        logits.append(read_logits(driver.runner))
    return logits, [seq.outputs for seq in seqs]
