"""Gate 1: every kernel compiles for every architecture, within its register budget and without a spill.

`python -m stepahead.kernels.cuda.gates` prints the table and fails like the test does. It needs the NVRTC wheel and
no driver. The modules are those of common models; others compile the same text when they are first used.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

from stepahead.kernels.cuda.attention import chunk_module, decode_module
from stepahead.kernels.cuda.checks import SCALAR_NAMES
from stepahead.kernels.cuda.errors import KernelError
from stepahead.kernels.cuda.nvrtc import ARCHITECTURES, KernelResources, compile_module, nvrtc_version
from stepahead.kernels.cuda.sources import Module, declarations

_BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class GateRow:
    """One kernel of one module on one architecture."""

    module: Module
    architecture: str
    resources: KernelResources
    register_budget: int

    @property
    def offences(self) -> tuple[str, ...]:
        """What breaks the gate."""
        found: list[str] = []
        if self.resources.registers > self.register_budget:
            found.append(f"{self.resources.registers} registers, budget {self.register_budget}")
        if self.resources.spill_bytes or self.resources.stack_bytes:
            found.append(f"{self.resources.spill_bytes} bytes spilled, {self.resources.stack_bytes} bytes of stack")
        return tuple(found)


def gate_modules() -> tuple[Module, ...]:
    """Returns the modules the gate compiles: every source, every storage type, the usual heads."""
    modules = [Module(name) for name in ("copy_blocks", "gather_rows", "logprobs", "mask_logits", "penalties")]
    modules += [Module(name) for name in ("resolve_inputs", "sample", "write_kv")]
    for scalar in SCALAR_NAMES.values():
        modules += [Module(name, (("SCALAR", scalar),)) for name in ("gated_activation", "rope")]
        modules += [
            Module("rms_norm", (("SCALAR", scalar), ("WEIGHT", weight)))
            for weight in dict.fromkeys((scalar, "float"))
        ]
    for head_dim, group in ((64, 1), (64, 3), (128, 4), (128, 8), (256, 4)):
        modules.append(decode_module("bf16", head_dim, group, _BLOCK_SIZE))
    modules += [decode_module(scalar, 64, 3, _BLOCK_SIZE) for scalar in ("f16", "float")]
    modules += [chunk_module("bf16", head_dim, _BLOCK_SIZE) for head_dim in (64, 128, 256)]
    modules.append(chunk_module("f16", 64, _BLOCK_SIZE))
    return tuple(modules)


def gate_rows(modules: Iterable[Module], architectures: Iterable[str] = ARCHITECTURES) -> Iterator[GateRow]:
    """Compiles and yields a row per kernel.

    Raises:
        KernelUnavailable: NVRTC is not installed.
        KernelBuildError: a source does not compile.
    """
    jobs = [(module, architecture) for module in modules for architecture in architectures]
    # Processes: NVRTC compiles one program at a time in each, threads or not.
    num_workers = min(len(os.sched_getaffinity(0)), len(jobs))
    with ProcessPoolExecutor(num_workers, mp_context=multiprocessing.get_context("spawn")) as processes:
        compiled = processes.map(compile_module, *zip(*jobs, strict=True))
        for (module, architecture), binary in zip(jobs, compiled, strict=True):
            budgets = {kernel.name: kernel.register_budget for kernel in declarations(module.source)}
            for kernel in binary.kernels:
                budget = budgets[kernel.name]
                yield GateRow(module=module, architecture=architecture, resources=kernel, register_budget=budget)


def table(rows: Iterable[GateRow]) -> str:
    """Returns a Markdown table: registers by architecture, and what is spilled anywhere."""
    by_kernel: dict[tuple[Module, str], dict[str, GateRow]] = {}
    for row in rows:
        by_kernel.setdefault((row.module, row.resources.name), {})[row.architecture] = row
    lines = [
        f"| kernel | module | budget | {' | '.join(ARCHITECTURES)} | spilled | static shared |",
        f"|---|---|---|{'---|' * len(ARCHITECTURES)}---|---|",
    ]
    for (module, name), found in sorted(by_kernel.items()):
        registers = " | ".join(str(found[architecture].resources.registers) for architecture in ARCHITECTURES)
        budget = next(iter(found.values())).register_budget
        spilled = max(row.resources.spill_bytes + row.resources.stack_bytes for row in found.values())
        shared = max(row.resources.shared_bytes for row in found.values())
        lines.append(f"| {name} | {module} | {budget} | {registers} | {spilled} | {shared} |")
    return "\n".join(lines)


def main() -> int:
    """Prints the table; returns the number of rows that break the gate."""
    rows = list(gate_rows(gate_modules()))
    sys.stdout.write(f"NVRTC {nvrtc_version()}; registers a thread, bytes\n\n{table(rows)}\n")
    broken = [row for row in rows if row.offences]
    for row in broken:
        what = "; ".join(row.offences)
        sys.stderr.write(f"{row.resources.name} ({row.module}) on {row.architecture}: {what}\n")
    return len(broken)


if __name__ == "__main__":
    try:
        sys.exit(min(main(), 1))
    except KernelError as error:
        sys.exit(str(error))
