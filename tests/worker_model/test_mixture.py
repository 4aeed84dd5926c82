"""Routing and experts, against sums written out."""

import numpy as np
import pytest
import torch

from stepahead.kernels.cpu.ops import CpuOps
from stepahead.kernels.ops import AttentionShape
from stepahead.kernels.reference.rope import RopeConfig
from stepahead.worker.model.mixture import Mixture, Mlp, apply_mixture, choose_experts

ROPE = RopeConfig(head_dim=8, theta=10_000.0)
SHAPE = AttentionShape(num_layers=1, num_heads=1, num_kv_heads=1, head_dim=8, scale=1.0, rope=ROPE)


@pytest.fixture
def parts():
    """Weights of a mixture of five experts, three of them per token."""
    rng = np.random.default_rng(4)
    sizes = {"router": (5, 8), "gate_up": (5, 12, 8), "down": (5, 8, 6)}
    return {name: torch.from_numpy(rng.normal(size=size).astype(np.float32)) for name, size in sizes.items()}


def mixture_of(ops, parts, *, normalized):
    experts = tuple(
        Mlp(ops.pack_linear(parts["gate_up"][index], None), ops.pack_linear(parts["down"][index], None))
        for index in range(5)
    )
    return Mixture(ops.pack_linear(parts["router"], None), experts, 3, normalized)


@pytest.mark.parametrize("normalized", [False, True])
def test_each_token_gets_the_weighted_sum_of_its_experts(parts, normalized):
    ops = CpuOps(SHAPE, torch.float32)
    x = torch.from_numpy(np.random.default_rng(5).normal(size=(7, 8)).astype(np.float32))
    result = apply_mixture(x, mixture_of(ops, parts, normalized=normalized), ops)
    for token in range(7):
        probabilities = (parts["router"] @ x[token]).softmax(0)
        chosen = probabilities.argsort(descending=True)[:3].tolist()
        total = sum(probabilities[expert] for expert in chosen) if normalized else 1.0
        expected = torch.zeros(8)
        for expert in chosen:
            gate, up = (parts["gate_up"][expert] @ x[token]).chunk(2)
            answer = parts["down"][expert] @ (gate * gate.sigmoid() * up)
            expected += probabilities[expert] / total * answer
        torch.testing.assert_close(result[token], expected, atol=1e-5, rtol=1e-5)


def test_the_best_expert_comes_first(parts):
    mixture = mixture_of(CpuOps(SHAPE, torch.float32), parts, normalized=False)
    weights, chosen = choose_experts(torch.tensor([[0.0, 3.0, 1.0, 2.0, -1.0]]), mixture)
    assert chosen.tolist() == [[1, 3, 2]]
    assert (weights.diff() < 0).all()
