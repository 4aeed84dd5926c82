"""The host back end itself: faults it must see, conversions and tensor-core layouts it must have right."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from stepahead.kernels.cuda import sources
from stepahead.kernels.cuda.backend import Launch
from stepahead.kernels.cuda.errors import KernelArgumentError, KernelBuildError, KernelFault
from stepahead.kernels.cuda.host import build
from stepahead.kernels.cuda.host.backend import HostBackend, Site
from stepahead.kernels.cuda.sources import Module


@pytest.fixture(scope="module")
def module(tmp_path_factory):
    """faulty.cu as a module, with the shipped headers beside it."""
    folder = tmp_path_factory.mktemp("csrc")
    for header in sources.SOURCE_DIRECTORY.glob("*.cuh"):
        (folder / header.name).write_text(header.read_text())
    (folder / "faulty.cu").write_text(Path(__file__).with_name("faulty.cu").read_text())
    (folder / "broken.cu").write_text("KERNEL(32, 32)\nbroken(float* x) { *x = __unknown(1); }\n")
    patch = pytest.MonkeyPatch()
    for owner in (sources, build):
        patch.setattr(owner, "SOURCE_DIRECTORY", folder)
    patch.setattr(build, "_FLAGS", (f"-I{folder}", *build._FLAGS))
    for cached in (sources.sources_digest, sources.declarations):
        cached.cache_clear()
    yield Module("faulty")
    patch.undo()
    for cached in (sources.sources_digest, sources.declarations):
        cached.cache_clear()


def run(module, kernel, *arguments, backend=None, blocks=1, threads=64):
    launch = Launch(module=module, kernel=kernel, grid=(blocks, 1, 1), num_threads=threads, arguments=arguments)
    (backend or HostBackend(checked=True)).launch(launch)


@pytest.mark.parametrize(
    ("kernel", "fault"),
    [
        ("divergent", "names a lane that is not there|deadlock"),
        ("two_barriers", "different barriers"),
        ("disagreeing_lanes", "disagree"),
        ("past_shared", "out of bounds.*thread 63"),
        ("past_global", "out of bounds.*thread 63"),
        ("before_global", "out of bounds.*thread 0"),
        ("unsynchronized_lanes", "race"),
        ("shuffle_orders_no_memory", "race"),
        ("warp_barrier_between_warps", "race"),
        ("blocks_write_one_place", "race: write after write.*block 1"),
        ("count_without_atomic", "race"),
    ],
)
def test_faults_are_seen(module, kernel, fault):
    with pytest.raises(KernelFault, match=fault):
        run(module, kernel, torch.zeros(64), blocks=2)


@pytest.mark.parametrize(
    ("kernel", "fault"),
    [("atomic_and_plain", "race"), ("copies_left", "copies under way"), ("copy_without_barrier", "race")],
)
def test_faults_of_atomics_and_copies_are_seen(module, kernel, fault):
    with pytest.raises(KernelFault, match=fault):
        run(module, kernel, torch.zeros(256, dtype=torch.int32))


@pytest.mark.parametrize("kernel", ["good_lanes", "good_early_end", "good_atomics"])
def test_what_is_allowed_is_no_fault(module, kernel):
    run(module, kernel, torch.zeros(64))


def test_a_read_before_a_write_is_nan(module):
    x = torch.zeros(64)
    run(module, "never_written", x)
    assert torch.isnan(x[0])
    assert x[1:].eq(1).all()


def test_without_checks_a_write_past_shared_memory_is_still_seen(module):
    with pytest.raises(KernelFault, match="write past a shared array"):
        run(module, "past_shared", torch.zeros(64), backend=HostBackend())


def test_orders_of_threads_differ_by_seed(module):
    results = []
    for seed in (0, 1, 2):
        x = torch.arange(64.0)
        run(module, "unsynchronized_lanes", x, backend=HostBackend(seed=seed))
        results.append(x.tolist())
    assert len({tuple(map(str, result)) for result in results}) > 1


def test_arguments_are_counted_and_measured(module):
    x = torch.zeros(64)
    with pytest.raises(KernelFault, match="2 arguments, the kernel takes 1"):
        run(module, "good_lanes", x, x)
    short = torch.zeros(64, dtype=torch.int16)
    with pytest.raises(KernelFault, match="argument 5 has 8 bytes, the kernel takes 4"):
        run(module, "convert", short, short, x, x, x, np.int64(64))


def test_launches_no_device_takes_are_refused(module):
    x = torch.zeros(64)
    with pytest.raises(KernelArgumentError, match="65 threads, at most 64"):
        run(module, "good_lanes", x, threads=65)
    with pytest.raises(KernelArgumentError, match="is on meta"):
        run(module, "good_lanes", x.to("meta"))
    grid = (1, 65536, 1)
    with pytest.raises(KernelArgumentError, match="grid"):
        HostBackend().launch(Launch(module=module, kernel="good_lanes", grid=grid, num_threads=64, arguments=(x,)))


def test_a_skipped_barrier_is_one_line_of_one_file(module):
    backend = HostBackend(checked=True)
    run(module, "good_lanes", torch.zeros(64), backend=backend)
    ((kernel, site),) = backend.sites
    assert (kernel, site.file) == ("good_lanes", "faulty.cu")
    with pytest.raises(KernelFault, match="race"):
        run(module, "good_lanes", torch.zeros(64), backend=HostBackend(checked=True, skipped=site))
    other = Site(site.file, site.line + 1)
    run(module, "good_lanes", torch.zeros(64), backend=HostBackend(checked=True, skipped=other))


def test_a_built_in_nobody_defined_does_not_compile(module):
    del module
    with pytest.raises(KernelBuildError, match="__unknown"):
        build.built_module(Module("broken"), checked=False)


def test_conversions_round_as_numpy_and_torch_do(module):
    random = np.random.default_rng(0)
    bits = random.integers(0, 2**32, 100_000, np.uint64).astype(np.uint32)
    halves = np.arange(2**16, dtype=np.uint16).view(np.float16).astype(np.float32)
    edges = np.array([65504, 65519.99, 65520, 5.96e-8, 2.98e-8, 2.99e-8, 0, -0.0, np.inf, -np.inf], np.float32)
    x = np.concatenate([bits.view(np.float32), halves, edges])
    half, brain = (torch.zeros(len(x), dtype=torch.int16) for _ in range(2))
    from_half, from_brain = torch.zeros(len(x)), torch.zeros(len(x))
    arguments = (half, brain, from_half, from_brain, torch.from_numpy(x), np.int32(len(x)))
    run(module, "convert", *arguments, backend=HostBackend(), blocks=-(-len(x) // 64))
    number = ~np.isnan(x)
    with np.errstate(over="ignore"):
        wanted_half = x.astype(np.float16)
    wanted_brain = torch.from_numpy(x).to(torch.bfloat16)
    assert np.array_equal(half.numpy()[number], wanted_half.view(np.int16)[number])
    assert np.array_equal(brain.numpy()[number], wanted_brain.view(torch.int16).numpy()[number])
    assert np.array_equal(from_half.numpy()[number], wanted_half.astype(np.float32)[number])
    assert np.array_equal(from_brain.numpy()[number], wanted_brain.float().numpy()[number])
    assert torch.isnan(from_half[torch.from_numpy(~number)]).all()
    assert torch.isnan(from_brain[torch.from_numpy(~number)]).all()


def test_tensor_core_fragments_give_a_matrix_product(module):
    random = np.random.default_rng(1)
    a, b, d = (
        torch.from_numpy(random.standard_normal(shape).astype(np.float16))
        for shape in ((16, 32), (16, 32), (32, 16))
    )
    c, e = torch.zeros(16, 16), torch.zeros(16, 16)
    run(module, "multiply", c, e, a, b, d, threads=32)
    assert torch.allclose(c, a.float() @ b.float().T, atol=1e-4)
    assert torch.allclose(e, a.float() @ d.float(), atol=1e-4)
