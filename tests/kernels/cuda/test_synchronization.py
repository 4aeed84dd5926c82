"""Thread orders, races and bounds in every kernel; and every barrier is missed when it is gone."""

from __future__ import annotations

from functools import cache

import pytest

from stepahead.kernels.cuda.errors import KernelFault
from stepahead.kernels.cuda.host.backend import HostBackend, Site
from stepahead.kernels.cuda.sources import declarations, source_names
from tests.kernels.cuda.small_runs import RUNS, same

EVERY_RUN = pytest.mark.parametrize("name", RUNS)


@cache
def checked(name):
    """(results, (kernel, site) pairs) of a run that broke no rule."""
    backend = HostBackend(checked=True)
    return RUNS[name](backend), frozenset(backend.sites)


@EVERY_RUN
def test_no_race_no_access_out_of_bounds_and_no_influence_of_thread_order(name):
    results, _ = checked(name)
    for seed in (0, 1, 2):
        assert same(RUNS[name](HostBackend(seed=seed)), results)


def notices(name, site):
    """How a run without one barrier is found out: the fault, or "result"; None if it is not."""
    try:
        results = RUNS[name](HostBackend(checked=True, skipped=site))
    except KernelFault as fault:
        return str(fault)
    return None if same(results, checked(name)[0]) else "result"


def all_sites():
    return sorted({(site, name) for name in RUNS for _, site in checked(name)[1]})


def test_every_barrier_is_missed_when_it_is_gone():
    noticed: dict[Site, str | None] = {}
    for site, name in all_sites():
        if noticed.get(site) is None:
            noticed[site] = notices(name, site)
    assert [str(site) for site, how in noticed.items() if how is None] == []
    assert len(noticed) > 15


def test_every_kernel_of_every_source_runs_here():
    declared = {kernel.name for source in source_names() for kernel in declarations(source)}
    backend = HostBackend()
    for run in RUNS.values():
        run(backend)
    assert backend.kernels == declared
