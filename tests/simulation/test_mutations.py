"""Every deliberate breakage of the core is noticed, by the rule that should notice it."""

from __future__ import annotations

import pytest

from tests.simulation.mutations import MUTATIONS, Mutation, hunt
from tests.untraced import untraced


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_the_mutation_is_caught(mutation: Mutation, monkeypatch: pytest.MonkeyPatch) -> None:
    """invariants.md section 6.8: break one rule at a time; the suite must fail each time."""
    mutation.apply(monkeypatch)
    with untraced():  # what a broken core runs is no coverage
        caught = hunt(mutation)
    assert caught is not None, "nothing noticed"
    assert caught[0] in mutation.caught_by


def test_without_a_mutation_nothing_is_caught() -> None:
    """The hunt itself finds nothing in the unbroken core."""
    with untraced():
        assert hunt(Mutation("none", lambda _: None, frozenset())) is None
