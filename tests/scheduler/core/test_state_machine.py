"""A rule machine drives the core against a naive model; every invariant is checked after every rule.

The model knows only what a client could know: for each request the tokens it was given and how it ended. It
predicts every delivered token and every end from the rows of the step and the request alone, and plays a worker's
honesty: behind an empty row come holes, behind a failed step failures.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from typing_extensions import override

from stepahead.scheduler.core import (
    CommitOutcome,
    Finished,
    FinishReason,
    Incarnation,
    LaneId,
    Request,
    RequestInfeasible,
    RequestKey,
    RowFault,
    Scheduler,
    SchedulerConfig,
    StepId,
    StepResult,
    UnknownLane,
    WindowPool,
)
from stepahead.scheduler.core.invariants import check_invariants
from tests.scheduler.core.builders import WorkerBooks, make_lane_config, make_request

LANES = st.sampled_from([LaneId(0), LaneId(1)])
VOCAB = 6
STOPS = st.sampled_from([frozenset[int](), frozenset({2}), frozenset({2, 3})])


@dataclass
class Seen:
    """What the client of one request has seen."""

    request: Request
    limit: int
    tokens: list[int] = field(default_factory=list[int])
    finished: Finished | None = None

    def end_at(self, token: int) -> FinishReason | None:
        """How the newest token ends the request, by the rules D5, D7 and J6 in their plainest form."""
        if token in self.request.stop_token_ids and len(self.tokens) > self.request.min_tokens:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(self.tokens) >= self.limit else None


@dataclass
class Worker:
    """A lane's books, and which rows and steps can no longer succeed."""

    epoch: int
    books: WorkerBooks = field(default_factory=WorkerBooks)
    holes: set[tuple[StepId, Incarnation]] = field(default_factory=set[tuple[StepId, Incarnation]])
    doomed: set[StepId] = field(default_factory=set[StepId])


class CoreMachine(RuleBasedStateMachine):
    """Rules: submit, abort, stop string, plan, commit, fail, lose, open, tick."""

    @initialize(
        depth=st.integers(0, 2),
        in_place=st.booleans(),
        patience=st.sampled_from([(0, 0), (1, 2), (8, 2)]),
        rows=st.integers(1, 3),
        budget=st.integers(0, 4),
        pools=st.tuples(st.integers(4, 9), st.sampled_from([(), (), ((1, 4),), ((3, 5),), ((2, 4), (5, 7))])),
        block_size=st.integers(1, 3),
        first=st.lists(st.tuples(st.integers(1, 4), st.integers(1, 8)), min_size=1, max_size=5),
    )
    def start(
        self,
        depth: int,
        in_place: bool,
        patience: tuple[int, int],
        rows: int,
        budget: int,
        pools: tuple[int, tuple[tuple[int, int], ...]],
        block_size: int,
        first: list[tuple[int, int]],
    ) -> None:
        """A scheduler with lane 0 open and some requests."""
        self.scheduler = Scheduler(
            SchedulerConfig(
                overlap_depth=depth,
                settle_prompts_in_place=in_place,
                skip_ahead_window=patience[0],
                max_times_passed=patience[1],
            )
        )
        num_blocks, windows = pools
        self.lane_config = make_lane_config(
            max_num_seqs=rows,
            num_slots=rows * (depth + 1),
            max_num_batched_tokens=rows + budget,
            num_blocks=0 if windows and num_blocks == 4 else num_blocks,
            windows=tuple(WindowPool(window=window, num_blocks=size) for window, size in windows),
            block_size=block_size,
            max_model_len=12,
        )
        self.workers: dict[LaneId, Worker] = {}
        self.ghosts: list[StepResult] = []
        self.clients: dict[RequestKey, Seen] = {}
        self.key_of: dict[Incarnation, RequestKey] = {}
        self.admitted: set[RequestKey] = set()
        self.now_ns = 0
        self.epochs = 0
        self.open_lane(LaneId(0))
        for prompt, max_tokens in first:
            self.submit(prompt, max_tokens, 0, frozenset({2}), None, None)

    # ------------------------------------------------------------------------------------------- events

    @rule(
        prompt=st.sampled_from([1, 1, 2, 3, 4, 6, 9, 12]),
        max_tokens=st.integers(1, 12),
        min_tokens=st.integers(0, 3),
        stops=STOPS,
        deadline=st.one_of(st.none(), st.integers(1, 20)),
        queue_deadline=st.one_of(st.none(), st.integers(1, 20)),
    )
    def submit(
        self,
        prompt: int,
        max_tokens: int,
        min_tokens: int,
        stops: frozenset[int],
        deadline: int | None,
        queue_deadline: int | None,
    ) -> None:
        """Accepted if and only if it fits alone (V3, G9)."""
        request = make_request(
            len(self.clients) + 1,
            prompt,
            max_tokens=max_tokens,
            min_tokens=min(min_tokens, max_tokens),
            stop_token_ids=stops,
            deadline_ns=None if deadline is None else self.now_ns + deadline,
            queue_deadline_ns=None if queue_deadline is None else self.now_ns + queue_deadline,
        )
        limit = min(max_tokens, 12 - prompt)
        fits = limit >= 1 and prompt + limit - 1 <= self.lane_config.num_cache_tokens(
            self.scheduler.config.overlap_depth
        )
        try:
            self.scheduler.add_request(request)
        except RequestInfeasible:
            assert not fits, "V3: a feasible request was refused"
        except UnknownLane:
            assert not self.workers
        else:
            assert fits, "G9: an infeasible request was accepted"
            self.clients[request.key] = Seen(request, limit)

    @rule(key=st.integers(1, 30))
    def abort(self, key: int) -> None:
        """One terminal for a live request, nothing for any other (F1, F3)."""
        client = self.clients.get(RequestKey(key))
        finished = self.scheduler.abort(RequestKey(key))
        assert (finished is not None) == (client is not None and client.finished is None)
        if finished is not None:
            self.end(finished, FinishReason.CANCELLED)

    @rule(key=st.integers(1, 30), back=st.integers(0, 2))
    def stop_string(self, key: int, back: int) -> None:
        """The shell recognises a stop string at one of the last outputs (K6)."""
        client = self.clients.get(RequestKey(key))
        if client is None or client.finished is not None or len(client.tokens) <= back:
            return
        del client.tokens[len(client.tokens) - back :]
        finished = self.scheduler.finish_at(RequestKey(key), len(client.tokens))
        assert finished is not None
        self.end(finished, FinishReason.STOP)

    @rule(step=st.integers(1, 6))
    def tick(self, step: int) -> None:
        """Exactly those are ended whose time has come (deadlines)."""
        self.now_ns += step
        due = {key for key, client in self.clients.items() if client.finished is None and self.is_due(client)}
        expired = self.scheduler.expire(self.now_ns)
        assert {finished.key for finished in expired} == due
        for finished in expired:
            self.end(finished, FinishReason.ERROR)
        next_ns = self.scheduler.next_deadline_ns
        assert next_ns is None or next_ns > self.now_ns

    def is_due(self, client: Seen) -> bool:
        """Whether a deadline has passed; the queue's counts for requests that were never admitted."""
        request = client.request
        return (request.deadline_ns is not None and request.deadline_ns <= self.now_ns) or (
            request.key not in self.admitted
            and request.queue_deadline_ns is not None
            and request.queue_deadline_ns <= self.now_ns
        )

    @rule(lane_id=LANES)
    def plan(self, lane_id: LaneId) -> None:
        """A lane is asked for its next step."""
        self.try_plan(lane_id)

    def try_plan(self, lane_id: LaneId) -> bool:
        """Plans; the books take it. True if there was a plan."""
        worker = self.workers.get(lane_id)
        if worker is None:
            return False
        outcome = self.scheduler.plan(lane_id)
        for event in outcome.admitted:
            assert event.first_time == (event.key not in self.admitted)
            self.admitted.add(event.key)
            stay = self.scheduler.sequences[event.key].stay
            if stay is not None:  # else it lost its place in the same call, before any plan named it
                self.key_of[stay.incarnation] = event.key
        if outcome.plan is None:
            return False
        for admission in outcome.plan.admissions:
            client = self.clients[self.key_of[admission.incarnation]]
            assert admission.token_ids == client.request.prompt_token_ids + tuple(client.tokens), "G3"
        worker.books.accept(outcome.plan)
        if any(step_id >= outcome.plan.committed_through + 1 for step_id in worker.doomed):
            worker.doomed.add(outcome.plan.step_id)
        return True

    @rule(
        lane_id=LANES,
        seed=st.integers(0, 2**16),
        trouble=st.sampled_from(["skip", "skip", "none", "fault", "fail"]),
    )
    def settle(self, lane_id: LaneId, seed: int, trouble: str) -> None:
        """A step ends, well or badly, mostly with others behind it."""
        for _ in range(seed % 4):
            self.try_plan(lane_id)
        self.try_settle(lane_id, seed, trouble)

    def try_settle(self, lane_id: LaneId, seed: int, trouble: str) -> bool:
        """The oldest step in flight completes, or fails. True if there was one."""
        worker = self.workers.get(lane_id)
        if worker is None or not worker.books.steps:
            return False
        plan, _ = worker.books.steps[0]
        if plan.step_id in worker.doomed or trouble == "fail":
            worker.books.steps.popleft()
            worker.doomed.update(later.step_id for later, _ in worker.books.steps)
            worker.doomed.discard(plan.step_id)
            self.scheduler.fail_step(lane_id, worker.epoch, plan.step_id)
            return True
        result = self.result_of(worker, seed, trouble)
        expected = self.predict(result)
        outcome = self.scheduler.commit(lane_id, result)
        worker.books.steps.popleft()
        self.compare(outcome, expected, result)
        return True

    @rule(lane_id=LANES, seed=st.integers(0, 2**16), turns=st.integers(1, 12), slack=st.integers(0, 2))
    def work(self, lane_id: LaneId, seed: int, turns: int, slack: int) -> None:
        """Some quiet turns of the step loop: plan, and settle once more than `slack` steps are in flight."""
        for turn in range(turns):
            planned = self.try_plan(lane_id)
            worker = self.workers.get(lane_id)
            if worker is not None and (not planned or len(worker.books.steps) > slack):
                self.try_settle(lane_id, seed + 37 * turn, "none")

    def result_of(self, worker: Worker, seed: int, trouble: str) -> StepResult:
        """Draws tokens and at most one empty row; rows behind an empty one are holes."""
        plan, rows = worker.books.steps[0]
        counts: list[int] = []
        tokens: list[int] = []
        faults: dict[Incarnation, RowFault] = {}
        for index, row in enumerate(rows):
            unlucky = trouble in ("skip", "fault") and index == seed % len(rows)
            hole = (plan.step_id, row.incarnation) in worker.holes
            if row.samples and not unlucky and not hole:
                counts.append(1)
                tokens.append((seed >> index) % VOCAB)
                continue
            counts.append(0)
            if not row.samples:
                continue
            worker.holes.update((later.step_id, row.incarnation) for later, _ in list(worker.books.steps)[1:])
            if hole:
                faults[row.incarnation] = RowFault.POSITION_MISMATCH
            elif trouble == "fault":
                faults[row.incarnation] = RowFault.NON_FINITE
        return StepResult(
            epoch=worker.epoch,
            step_id=plan.step_id,
            incarnations=[row.incarnation for row in rows],
            token_counts=None if all(counts) else counts,
            token_ids=tokens,
            faults=faults,
        )

    def predict(self, result: StepResult) -> list[tuple[RequestKey, int]]:
        """Every token of a request that has not ended is delivered, in row order (D3, F2, G1)."""
        counts = result.token_counts or [1] * len(result.incarnations)
        sampled = iter(result.token_ids)
        pairs = [(self.key_of[i], next(sampled)) for i, n in zip(result.incarnations, counts, strict=True) if n]
        return [(key, token) for key, token in pairs if self.clients[key].finished is None]

    def compare(self, outcome: CommitOutcome, expected: list[tuple[RequestKey, int]], result: StepResult) -> None:
        """Tokens and ends are what the model says, no more and no less (D5, D7, D8, J10)."""
        assert list(zip(outcome.keys, outcome.token_ids, strict=True)) == expected
        ends: dict[RequestKey, FinishReason] = {}
        for key, token in expected:
            client = self.clients[key]
            client.tokens.append(token)
            reason = client.end_at(token)
            if reason is not None:
                ends[key] = reason
        for incarnation, fault in result.faults.items():
            key = self.key_of[incarnation]
            if fault is RowFault.NON_FINITE and self.clients[key].finished is None:
                ends[key] = FinishReason.ERROR
        assert {finished.key: finished.reason for finished in outcome.finished} == ends
        for finished in outcome.finished:
            self.end(finished, ends[finished.key])

    def end(self, finished: Finished, reason: FinishReason) -> None:
        """Terminal exactly once, counting what was delivered (D8, B11)."""
        client = self.clients[finished.key]
        assert client.finished is None, "D8: a second terminal"
        assert finished.reason is reason
        assert finished.num_output_tokens == len(client.tokens)
        client.finished = finished

    # ------------------------------------------------------------------------------------------- lanes

    @precondition(lambda self: len(self.workers) < 2)
    @rule(lane_id=LANES)
    def open_lane(self, lane_id: LaneId) -> None:
        """A worker with an empty batch."""
        if lane_id not in self.workers:
            self.epochs += 1
            self.scheduler.open_lane(lane_id, self.lane_config, self.epochs)
            self.workers[lane_id] = Worker(self.epochs)

    @rule(lane_id=LANES, sure=st.integers(0, 3))
    def lose_lane(self, lane_id: LaneId, sure: int) -> None:
        """The worker is gone; its results may still arrive."""
        worker = self.workers.get(lane_id)
        if worker is None or sure:
            return
        if worker.books.steps:
            self.ghosts.append(self.result_of(worker, 1, "none"))
        del self.workers[lane_id]
        self.scheduler.lose_lane(lane_id)

    @precondition(lambda self: self.ghosts)
    @rule(lane_id=LANES)
    def ghost(self, lane_id: LaneId) -> None:
        """A result of an epoch that ended changes nothing (B5)."""
        if lane_id in self.workers:
            outcome = self.scheduler.commit(lane_id, self.ghosts.pop())
            assert not outcome.keys
            assert not outcome.finished

    # ------------------------------------------------------------------------------------------- checks

    @invariant()
    def rules_hold(self) -> None:
        """Every rule of the core, and the live requests are exactly those that have not ended."""
        check_invariants(self.scheduler)
        live = {key for key, client in self.clients.items() if client.finished is None}
        assert set(self.scheduler.sequences) == live
        for key in live:
            sequence = self.scheduler.sequences[key]
            assert sequence.history[sequence.num_prompt_tokens :] == self.clients[key].tokens

    @override
    def teardown(self) -> None:
        """Without further trouble everything ends, within a bound (O8, D9, E6)."""
        if not hasattr(self, "workers"):
            return
        if not self.workers:
            self.open_lane(LaneId(0))
        for turn in range(4000):
            if self.scheduler.is_idle:
                break
            moved = [self.try_plan(lane_id) for lane_id in self.workers]
            if not any(moved):
                moved = [self.try_settle(lane_id, turn, "none") for lane_id in self.workers]
                assert any(moved), "O8: nothing moves, and not idle"
            check_invariants(self.scheduler)
        assert self.scheduler.is_idle, "O8: not at rest"
        assert all(client.finished is not None for client in self.clients.values()), "D8: no terminal"


# No shrinking: a failure prints its calls and replays exactly, and minutes of shrinking in CI help nobody.
CoreMachine.TestCase.settings = settings(
    derandomize=True,
    database=None,
    deadline=None,
    max_examples=150,
    stateful_step_count=60,
    phases=[Phase.explicit, Phase.generate],
)
TestCoreMachine = CoreMachine.TestCase
