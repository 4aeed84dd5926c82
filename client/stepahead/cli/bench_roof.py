"""How fast a step could be at best, from what it reads and multiplies and from what this machine gave meanwhile."""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from stepahead.cli.announcements import Ready
from stepahead.cli.failures import StackError

_MODULE = "stepahead.kernels.cpu.step.speed"
_TIMEOUT_S = 120.0
_BYTES_OF = {"bfloat16": 2, "float32": 4}


@dataclass(frozen=True, slots=True)
class MachineSpeed:
    """What the step library's own threads reach when they do nothing else."""

    read_bytes_per_s: float
    flops_per_s: float


@dataclass(frozen=True, slots=True)
class ModelWork:
    """What a decode step cannot do without."""

    weight_bytes: int
    """As they are stored, maybe in less than their dtype has; each step reads all of them, whatever its width."""
    kv_bytes_per_token: int
    flops_per_token: float
    """A multiplication and an addition per weight."""


def work_of(worker: Ready) -> ModelWork | None:
    """The work of the model that a worker announced; None for one without weights, such as a toy."""
    weight_bytes = worker.number("weight_bytes")
    if not weight_bytes:
        return None
    num_weights = weight_bytes / _BYTES_OF[worker.text("dtype")]
    return ModelWork(worker.number("stored_weight_bytes"), worker.number("kv_bytes_per_token"), 2 * num_weights)


def decode_roof_s(work: ModelWork, speed: MachineSpeed, num_rows: int, mean_context: float) -> float:
    """Seconds that a decode step takes at least.

    The larger of two times (Williams et al., "Roofline", 2009): weights and the cache of every row at the measured
    read rate, and the matrices' operations at the measured rate of multiplication; attention's are left out.

    Args:
        work: of the model.
        speed: of the machine.
        num_rows: sequences in the step.
        mean_context: positions that a row attends to, on average.
    """
    num_bytes = work.weight_bytes + num_rows * mean_context * work.kv_bytes_per_token
    return max(num_bytes / speed.read_bytes_per_s, num_rows * work.flops_per_token / speed.flops_per_s)


class SpeedProbe:
    """A process that measures the machine when asked, beside the systems under test. An async context manager.

    Args:
        weight_bytes: what one read goes over: as much as the model has, or caches would flatter it.
        threads: of the worker; None: as many as there are cores.
    """

    def __init__(self, weight_bytes: int, threads: int | None) -> None:
        threads_flag = () if threads is None else ("--threads", str(threads))
        self._argv = (sys.executable, "-m", _MODULE, "--weight-bytes", str(weight_bytes), *threads_flag)
        self._process: asyncio.subprocess.Process | None = None

    async def __aenter__(self) -> Self:
        self._process = await asyncio.create_subprocess_exec(
            *self._argv, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
        )
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.close()
        await self._process.wait()

    async def measure(self) -> MachineSpeed:
        """Measures for a few tenths of a second. Raises StackError if the probe has ended."""
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b"\n")
        line = await asyncio.wait_for(process.stdout.readline(), _TIMEOUT_S)
        if not line:
            raise StackError("the speed probe ended", advice="its stderr is above; --no-roof measures without it")
        fields = json.loads(line)
        return MachineSpeed(fields["read_bytes_per_s"], fields["flops_per_s"])
