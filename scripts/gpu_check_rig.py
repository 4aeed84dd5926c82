"""What the parts of the GPU check measure with: a device, its clock, and how large things are.

With `small` the device is this CPU and sizes are tiny: every line of a part runs, its figures mean nothing.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch

from stepahead.kernels.cuda.backend import Backend, Stream
from stepahead.kernels.cuda.cupy_backend import CupyBackend
from stepahead.kernels.cuda.host.backend import HostBackend
from stepahead.kernels.cuda.host.opaque import OpaqueBackend

Row = dict[str, str | float | int | bool]


@dataclass(frozen=True, slots=True)
class Rig:
    """A device under measurement."""

    backend: Backend
    stream: Stream  # not the default one: work is recorded on it
    small: bool

    def pick(self, full: int, tiny: int) -> int:
        """Returns a size."""
        return tiny if self.small else full

    def fresh_backend(self) -> Backend:
        """Returns the back end for a whole runner; on the CPU one whose memory cannot be looked into."""
        return OpaqueBackend() if self.small else self.backend

    def microseconds(self, body: Callable[[], object], calls: int = 10, rounds: int = 7) -> float:
        """Returns the device time of one call of `body`, the median of some rounds of recorded calls.

        Recorded, because launching from Python takes longer than a small kernel.
        """
        calls, rounds = (1, 1) if self.small else (calls, rounds)
        body()
        self.backend.record_event().synchronize()

        def repeated() -> None:
            for _ in range(calls):
                body()

        with self.stream.current():
            graph = self.backend.capture(repeated)
            graph.replay()
            times: list[float] = []
            for _ in range(rounds):
                begin = self.backend.record_event()
                graph.replay()
                end = self.backend.record_event()
                end.synchronize()
                times.append(end.ns_since(begin) / 1e3 / calls)
        return max(statistics.median(times), 1e-3)

    def normal(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """Returns random values on the device: zeros would run faster than real ones."""
        return torch.randn(shape, device=self.backend.device, dtype=torch.float32).to(dtype)

    def integers(self, values: list[int] | range, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        """Returns integers on the device."""
        return torch.tensor(list(values), dtype=dtype, device=self.backend.device)


def open_rig(*, small: bool) -> Rig:
    """Returns the GPU, or for a dry run this CPU; raises `KernelUnavailable` where there is none."""
    backend = HostBackend() if small else CupyBackend()
    return Rig(backend, backend.create_stream(), small)
