"""A mixture of experts: each token goes through the few MLPs that a router chooses for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch

from stepahead.kernels.ops import Ops, PackedLinear


@dataclass(frozen=True, slots=True)
class Mlp:
    """down(activation(gate(x)) * up(x)): an MLP, or one expert of a mixture."""

    gate_up: PackedLinear
    down: PackedLinear


@dataclass(frozen=True, slots=True)
class Mixture:
    """The experts of a layer and their router, [num_experts, hidden_size]."""

    router: PackedLinear
    experts: tuple[Mlp, ...]
    experts_per_token: int
    normalized: bool


def choose_experts(logits: torch.Tensor, mixture: Mixture) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the weights and the ids of each token's experts, best first, both [num_tokens, experts_per_token].

    A weight is the expert's softmax probability among all, or, normalised, among the chosen (Mixtral: Jiang et al.,
    2024).

    Args:
        logits: [num_tokens, num_experts], the router's.
        mixture: how many are chosen.
    """
    probabilities = logits.float().softmax(-1)
    weights, chosen = probabilities.topk(mixture.experts_per_token, dim=-1)
    if mixture.normalized:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights, chosen


def apply_mixture(x: torch.Tensor, mixture: Mixture, ops: Ops) -> torch.Tensor:
    """Returns [num_tokens, hidden_size]: the sum of each token's experts, weighted; silu inside.

    Args:
        x: [num_tokens, hidden_size], normed.
        mixture: the layer's.
        ops: the device's.
    """
    if not ops.host_may_look:
        return _apply_every_expert(x, mixture, ops)
    weights, chosen = choose_experts(ops.linear(x, mixture.router), mixture)
    result = torch.zeros_like(x)
    asked = cast("list[int]", chosen.flatten().tolist())  # pyright: ignore[reportUnknownMemberType]
    for expert in sorted(set(asked)):
        tokens, places = torch.where(chosen == expert)
        mlp = mixture.experts[expert]
        answer = ops.linear(ops.silu_mul(ops.linear(x[tokens], mlp.gate_up)), mlp.down)
        result.index_add_(0, tokens, (answer * weights[tokens, places, None]).to(x.dtype))
    return result


def _apply_every_expert(x: torch.Tensor, mixture: Mixture, ops: Ops) -> torch.Tensor:
    """`apply_mixture` where nobody on the host may know who chose whom: every token goes through every expert.

    What was not chosen counts nothing. Right, and as fast as it can be while all experts are read anyway; a large
    prompt pays for num_experts / experts_per_token times the arithmetic.
    """
    weights, chosen = choose_experts(ops.linear(x, mixture.router), mixture)
    result = torch.zeros_like(x)
    for index, mlp in enumerate(mixture.experts):
        others = chosen != index
        weight = weights.masked_fill(others, 0.0).sum(-1, keepdim=True)
        answer = ops.linear(ops.silu_mul(ops.linear(x, mlp.gate_up)), mlp.down)
        # Not a product with 0: an expert nobody asked may answer with an infinity.
        result = result + (answer * weight).masked_fill(others.all(-1, keepdim=True), 0.0).to(x.dtype)
    return result
