"""How evenly tenants were served while they had to compete."""

from __future__ import annotations

import zlib
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate


def jain_index(shares: Sequence[float]) -> float:
    """Jain's fairness index: 1 if all shares are equal, 1/n if one of n has everything.

    (sum x)^2 / (n * sum x^2). Source: Jain, Chiu, Hawe, DEC Research Report TR-301, 1984.
    """
    squares = sum(share * share for share in shares)
    return sum(shares) ** 2 / (len(shares) * squares) if squares else 1.0


class TenantPicker:
    """Gives request number `index` a tenant by hash; tenant k is picked with a weight of 1 / (k + 1)."""

    def __init__(self, num_tenants: int) -> None:
        weights = [1 / (tenant + 1) for tenant in range(num_tenants)]
        self._bounds = [bound / sum(weights) for bound in accumulate(weights)]

    def tenant_of(self, index: int) -> int:
        """0 and up."""
        share = zlib.crc32(f"request {index}".encode()) / 2**32
        return min(bisect_left(self._bounds, share), len(self._bounds) - 1)


class ServiceMeter:
    """Tokens per second that each tenant was served while it and somebody else had requests waiting.

    Only then does the scheduler choose between tenants: who waits alone, or not at all, gets what there is. A
    prompt counts when its request is admitted, an output token when it is committed (as in Sheng et al., "Fairness
    in Serving Large Language Models", OSDI 2024, here with equal weights).
    """

    def __init__(self, num_tenants: int) -> None:
        self._waiting = [0] * num_tenants
        self._contended_ns = [0] * num_tenants
        self._served = [0] * num_tenants
        self._num_backlogged = 0
        self._now_ns = 0

    def advance(self, now_ns: int) -> None:
        """Time passes; who waits has waited until now."""
        if self._num_backlogged >= 2:
            passed_ns = now_ns - self._now_ns
            for tenant, waiting in enumerate(self._waiting):
                if waiting:
                    self._contended_ns[tenant] += passed_ns
        self._now_ns = now_ns

    def wait(self, tenant: int) -> None:
        """A request of the tenant begins to wait."""
        self._num_backlogged += not self._waiting[tenant]
        self._waiting[tenant] += 1

    def stop_waiting(self, tenant: int) -> None:
        """A request of the tenant waits no more."""
        self._waiting[tenant] -= 1
        self._num_backlogged -= not self._waiting[tenant]

    def serve(self, tenant: int, num_tokens: int) -> None:
        """The tenant gets tokens, which count if it competes for them."""
        if self._num_backlogged >= 2 and self._waiting[tenant]:
            self._served[tenant] += num_tokens

    def rates(self) -> list[float]:
        """Tokens per contended second, of the tenants that ever competed."""
        return [
            served / contended_ns * 1e9
            for served, contended_ns in zip(self._served, self._contended_ns, strict=True)
            if contended_ns
        ]
