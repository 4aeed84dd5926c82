"""Gate 1: the CUDA sources compile for every architecture, within their budgets; and the gate would notice."""

from __future__ import annotations

import pytest

from stepahead.kernels.cuda.errors import KernelBuildError
from stepahead.kernels.cuda.gates import GateRow, gate_modules, gate_rows, table
from stepahead.kernels.cuda.nvrtc import ARCHITECTURES, KernelResources, compile_text, nvrtc_version
from stepahead.kernels.cuda.sources import Module, declarations, source_names

# Many values live across a barrier, and room for few: what does not fit in registers goes to memory.
SPILLS = """
extern "C" __global__ void __launch_bounds__(1024, 2) crowded(float* x) {
  float values[64];
#pragma unroll
  for (int i = 0; i < 64; i++) values[i] = x[threadIdx.x + 1024 * i];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 64; i++) x[threadIdx.x + 1024 * ((i * 7) % 64)] = values[i] * values[(i + 9) % 64];
}
"""


def test_every_kernel_compiles_within_its_budget_and_spills_nothing():
    rows = list(gate_rows(gate_modules()))
    assert [(str(row.module), row.architecture, *row.offences) for row in rows if row.offences] == []
    declared = {kernel.name for source in source_names() for kernel in declarations(source)}
    for architecture in ARCHITECTURES:
        assert {row.resources.name for row in rows if row.architecture == architecture} == declared
    # Every module's every kernel has a line.
    assert len(table(rows).splitlines()) == 2 + sum(len(declarations(module.source)) for module in gate_modules())


def row_of(resources, budget=32):
    return GateRow(module=Module("x"), architecture="sm_90", resources=resources, register_budget=budget)


def test_a_spill_is_seen():
    (crowded,) = compile_text(SPILLS, "crowded.cu", "sm_90").kernels
    assert crowded.spill_bytes > 0
    assert len(row_of(crowded).offences) == 1


@pytest.mark.parametrize(("registers", "num_offences"), [(32, 0), (33, 1)])
def test_a_register_over_the_budget_is_seen(registers, num_offences):
    resources = KernelResources("x", registers=registers, spill_bytes=0, stack_bytes=0, shared_bytes=0)
    assert len(row_of(resources).offences) == num_offences


def test_text_that_only_another_compiler_takes_is_refused_with_its_line():
    text = 'extern "C" __global__ void f(float* x) {\n  *x = INFINITY;\n}\n'
    with pytest.raises(KernelBuildError, match=r"f\.cu\(2\).*INFINITY"):
        compile_text(text, "f.cu", "sm_80")


def test_the_compiler_is_the_pinned_one():
    assert nvrtc_version() == "13.0"


def test_the_text_declares_every_kernel_it_has():
    for source in source_names():
        kernels = declarations(source)
        assert kernels, source
        assert all(32 <= kernel.max_threads <= 1024 and kernel.register_budget <= 255 for kernel in kernels)
