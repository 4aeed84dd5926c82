"""Virtual token counters: how much service each tenant has had.

After "Fairness in Serving Large Language Models" (Sheng et al., OSDI 2024): a tenant is charged for the prompt
tokens that were fed for it and, with a weight, for its output tokens; the tenant with the smallest counter goes
first. A tenant that comes back from a pause starts at the smallest counter of those who are active, so that
nobody saves up service by staying away. Between tenants that always have work waiting the difference of
counters stays bounded by the cost of what fits into the batch at once.
"""

from __future__ import annotations

from stepahead.scheduler.core.sequence import Sequence

OUTPUT_WEIGHT = 2
"""An output token costs a step of its own, a prompt token a share of one."""


class FairShare:
    """Counters in virtual tokens, and who is active (has a request that has not ended)."""

    __slots__ = ("_num_active", "_served")

    def __init__(self) -> None:
        self._served: dict[str, int] = {}
        self._num_active: dict[str, int] = {}

    def served(self, tenant: str) -> int:
        """Virtual tokens of service."""
        return self._served.get(tenant, 0)

    def enter(self, tenant: str) -> None:
        """The tenant has one more live request."""
        active = self._num_active.get(tenant, 0)
        self._num_active[tenant] = active + 1
        if not active:
            floor = min((self._served[other] for other in self._num_active if other != tenant), default=0)
            self._served[tenant] = max(self._served.get(tenant, 0), floor)

    def leave(self, tenant: str) -> None:
        """One of the tenant's requests has ended. A tenant without any is forgotten once it is not ahead.

        Its counter is kept while it is above everybody else's, or leaving would wipe out what it has had.
        """
        self._num_active[tenant] -= 1
        if self._num_active[tenant]:
            return
        del self._num_active[tenant]
        floor = min((self._served[other] for other in self._num_active), default=0)
        for other in [name for name in self._served if name not in self._num_active]:
            if self._served[other] <= floor or not self._num_active:
                del self._served[other]

    def admission_cost(self, sequence: Sequence) -> int:
        """What admitting a sequence will be charged at least."""
        return len(sequence.history)

    def charge_admission(self, sequence: Sequence, num_cached_tokens: int) -> None:
        """Prompt (or history) tokens that will be fed."""
        self._served[sequence.request.tenant] += len(sequence.history) - num_cached_tokens

    def charge_outputs(self, sequence: Sequence) -> None:
        """Output tokens since the last charge."""
        fresh = sequence.num_output_tokens - sequence.num_charged_outputs
        sequence.num_charged_outputs += fresh
        self._served[sequence.request.tenant] += OUTPUT_WEIGHT * fresh
