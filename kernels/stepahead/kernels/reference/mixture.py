"""Routing of a mixture of experts: which experts a token goes to, and how much each counts."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def choose_experts(
    logits: NDArray[np.float32], experts_per_token: int, *, normalized: bool
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Returns the weights and ids of each token's experts, best first, both [num_tokens, experts_per_token].

    A weight is the expert's softmax probability among all, in float32, or, normalised, among the chosen (Mixtral:
    Jiang et al., 2024). On a tie the lower expert is first.

    Args:
        logits: [num_tokens, num_experts], the router's.
        experts_per_token: how many are chosen.
        normalized: whether the weights of a token are made to sum to 1.
    """
    masses = np.exp(logits - logits.max(axis=1, keepdims=True))
    probabilities = masses / masses.sum(axis=1, keepdims=True)
    chosen = np.argsort(-probabilities, axis=1, kind="stable")[:, :experts_per_token]
    weights = np.take_along_axis(probabilities, chosen, axis=1)
    return (weights / weights.sum(axis=1, keepdims=True) if normalized else weights), chosen
