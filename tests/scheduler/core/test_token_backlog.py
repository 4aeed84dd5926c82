"""Tokens wait as columns and reach every history whole and in order, whoever looks and whenever."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from stepahead.scheduler.core.token_backlog import MAX_COLUMNS, TokenBacklog
from tests.scheduler.core.builders import Driver


@given(
    steps=st.lists(st.tuples(st.integers(0, 2), st.booleans()), max_size=3 * MAX_COLUMNS),
    num_rows=st.integers(0, 3),
)
def test_columns_of_changing_sets_keep_their_order(steps: list[tuple[int, bool]], num_rows: int) -> None:
    """A3: as if every token had been appended at once. Sets overlap: row r is in set s if r != s."""
    backlog = TokenBacklog()
    histories: list[list[int]] = [[] for _ in range(num_rows)]
    expected: list[list[int]] = [[] for _ in range(num_rows)]
    sets = [[row for row in range(num_rows) if row != left_out] for left_out in range(3)]
    columns = [[histories[row] for row in rows] for rows in sets]
    for step, (chosen, looks) in enumerate(steps):
        tokens = [100 * step + row for row in sets[chosen]]
        backlog.push(columns[chosen], tokens)
        for row, token in zip(sets[chosen], tokens, strict=True):
            expected[row].append(token)
        if looks:
            backlog.flush()
            assert histories == expected
    backlog.flush()
    assert histories == expected


def test_the_histories_lag_by_a_bounded_number_of_steps() -> None:
    """The backlog holds at most MAX_COLUMNS steps: a set that never changes costs bounded memory."""
    backlog, history = TokenBacklog(), [7]
    for token in range(MAX_COLUMNS):
        assert history == [7]
        backlog.push([history] if token == 0 else backlog._histories, [token])
    assert history == [7, *range(MAX_COLUMNS)]


def test_a_steady_step_writes_no_history() -> None:
    """What makes a wide step cheap; whoever reads a history sees all of it."""
    driver = Driver.of()
    for key in (1, 2):
        driver.add(key, 4, max_tokens=9)
    driver.must_plan()
    driver.must_plan()
    driver.commit(10, 20)
    driver.must_plan()
    driver.commit(11, 21)
    sequence = driver.sequence(1)
    assert len(sequence.unflushed_history) == 5
    assert sequence.num_output_tokens == 2
    assert len(sequence.unflushed_history) == 6
