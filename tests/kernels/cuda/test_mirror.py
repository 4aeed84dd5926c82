"""The GPU check's comparison, tried with the host in the GPU's place."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from stepahead.kernels.cuda.host.backend import HostBackend
from tests.kernels.cuda.mirror import MirrorBackend
from tests.kernels.cuda.small_runs import RUNS, largest_difference, same


@pytest.mark.parametrize("name", RUNS)
def test_a_mirrored_run_writes_the_same(name):
    assert same(RUNS[name](MirrorBackend(HostBackend())), RUNS[name](HostBackend()))


@pytest.mark.parametrize(
    ("one", "other", "difference"),
    [
        ([1.0, np.nan], [1.5, np.nan], 0.5),
        ([1.0, np.nan], [1.0, 2.0], np.inf),
        ([-np.inf, 0.0], [-np.inf, 0.25], 0.25),
        ([-np.inf], [1.0], np.inf),
    ],
)
def test_differences_are_seen(one, other, difference):
    assert largest_difference([torch.tensor(one)], [torch.tensor(other)]) == difference
    assert largest_difference([torch.tensor([1, 2])], [torch.tensor([1, 3])]) == np.inf
