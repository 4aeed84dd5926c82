"""A deterministic world: the real core, fake workers, and a seeded adversary who picks what happens next.

One seed decides everything: sizes, requests, the order of events, faults. After every event that the core sees its
invariants are checked; at the end every answer is compared with the oracle (rules D4, G7, J3, K6).
"""

from __future__ import annotations

import random
from collections import Counter, deque
from dataclasses import dataclass, field, replace
from typing import Any, cast

from stepahead.scheduler.convert import lane_config_from_proto, plan_to_proto, result_from_proto
from stepahead.scheduler.core import (
    Admitted,
    Batching,
    CommitOutcome,
    Finished,
    FinishReason,
    LaneId,
    Ordering,
    Preempted,
    QueueFull,
    Request,
    RequestInfeasible,
    RequestKey,
    RowFault,
    SamplingSpec,
    Scheduler,
    SchedulerConfig,
    StepId,
    UnknownLane,
)
from stepahead.scheduler.core.invariants import check_invariants
from stepahead.scheduler.errors import ApiError, NothingAllowed, RowFailed
from stepahead.scheduler.gates import Gates
from stepahead.v1 import worker_pb2
from tests.simulation.fake_worker import FakeWorker
from tests.simulation.gate_shell import Book, Choice, Compiled, Link, Live, Log, MaskThread
from tests.simulation.tagged_model import Grammar, SimRequest, Stretch, TaggedModel, oracle

MAX_EVENTS_WITHOUT_COMMIT = 3000
"""Far more than any schedule of these sizes needs between two commits."""


EVENTS_OF_WORKERS = frozenset({"run_row", "complete", "overdue_gates"})
"""The core does not see them."""


class SimulationFailure(AssertionError):
    """The world came out wrong."""


@dataclass
class Client:
    """What the client of one request has seen."""

    request: SimRequest
    tokens: list[int] = field(default_factory=list)
    stretches: list[Stretch] = field(default_factory=list)
    finished: Finished | None = None


@dataclass
class LaneWorld:
    """One worker process and the messages on their way from it."""

    worker: FakeWorker | None
    limits: worker_pb2.WorkerLimits
    link: Link
    inbox: deque[worker_pb2.RunStepsResponse] = field(default_factory=deque)
    ghosts: deque[worker_pb2.StepBoundary] = field(default_factory=deque)
    """Results of epochs that ended; they may still arrive."""


class World:
    """See the module docstring."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.depth = rng.choice([0, 1, 1, 1, 2])
        self.vocab = rng.choice([5, 11, 29])
        self.faulty = rng.random() < 0.5
        self.calm = rng.random() < 0.3
        """Nobody aborts, no deadline passes: whatever is stuck stays stuck (rule O8)."""
        self.eager = rng.random() < 0.5
        """Plans leave whenever a window is open, as in the real step loop."""
        self.suppressing = rng.random() < 0.7
        """Whether the worker keeps stop ids back until min_tokens; the core must hold the line without it (J6)."""
        self.replay_rng = random.Random(f"replays {seed}")
        self.replays = self.replay_rng.random() < 0.3
        """Whether the workers replay windows; then histories are long, and windows short and often lost."""
        self.config = SchedulerConfig(
            overlap_depth=self.depth,
            settle_prompts_in_place=rng.random() < 0.2,
            batching=rng.choice([Batching.CONTINUOUS, Batching.CONTINUOUS, Batching.FIXED]),
            ordering=rng.choice(list(Ordering)),
            ageing_admissions=rng.choice([1, 4, 64]),
            max_waiting=rng.choice([None, None, 6]),
            prefix_caching=rng.random() < 0.8 or self.replays,
            max_held_steps=rng.choice([0, 2, 8]),
            skip_ahead_window=rng.choice([0, 1, 4]),
            max_times_passed=rng.choice([0, 2, 8]),
        )
        self.scheduler = Scheduler(self.config)
        self.counters: Counter[str] = Counter()
        self.clients: dict[RequestKey, Client] = {}
        self.events_since_commit = 0
        self.now_ns = 0
        self.epoch = 0
        self.next_key = 1
        self.to_submit = rng.randint(18, 36)
        self.max_model_len = rng.choice([12, 24, 40])
        # Drawn apart, so that half of the worlds are what they were before there were windows.
        self.window_rng = random.Random(f"windows {seed}")
        self.model = self._model()
        if self.replays:
            self.max_model_len = 40
            windows = self.replay_rng.choice([(0, 3), (0, 2), (0, 2, 4), (3,), (2, 4)])
            self.model = TaggedModel(windows, num_layers=self.replay_rng.choice([1, 2]))
        # As windows are: worlds without constraints are what they were before there were any.
        self.gate_rng = random.Random(f"gates {seed}")
        self.constrains = self.gate_rng.random() < 0.4
        self.book = Book(self._fail)
        fail_rate = 0.01 if self.faulty else 0.0
        self.masks = MaskThread(self.gate_rng, self.book, withholds=not self.calm, fail_rate=fail_rate)
        self.gates = Gates(cast("Any", self.masks), self.scheduler, cast("Any", self.book))
        num_lanes = rng.choice([1, 1, 2])
        self.lanes = {
            LaneId(i): LaneWorld(None, self._limits(), Link(LaneId(i), self._send_gate)) for i in range(num_lanes)
        }
        for lane_id in self.lanes:
            self._start_worker(lane_id)

    def _model(self) -> TaggedModel:
        rng = self.window_rng
        if rng.random() < 0.5:
            return TaggedModel()
        windows = rng.choice([[], [0], [0]]) + sorted(rng.sample([1, 2, 3, 4, 5, 8], rng.choice([1, 1, 2])))
        return TaggedModel(tuple(windows), num_layers=rng.choice([1, 2]))

    def _kv_groups(self, num_blocks: int) -> list[worker_pb2.KvGroup]:
        """Window pools are often too small for a whole prompt, and now and then for the window.

        Where layers that see everything remember more, what is left of a window is not enough: replays.
        """
        choices = [3, 5] if self.replays else [3, 5, 7, 9, 12]
        if self.replays:
            num_blocks += 24
        sizes = [self.window_rng.choice(choices) if window else num_blocks for window in self.model.windows]
        return [
            worker_pb2.KvGroup(window_tokens=window, num_layers=self.model.num_layers, num_blocks=size)
            for window, size in zip(self.model.windows, sizes, strict=True)
        ]

    def _limits(self) -> worker_pb2.WorkerLimits:
        rng = self.rng
        max_num_seqs = rng.choice([1, 2, 3, 4])
        block_size = rng.choice([1, 2, 4])
        limits = worker_pb2.WorkerLimits(
            max_num_seqs=max_num_seqs,
            num_slots=max_num_seqs * (self.depth + 1),
            max_num_batched_tokens=max_num_seqs + rng.choice([0, 1, 3, 16]),
            max_model_len=self.max_model_len,
            num_blocks=rng.choice([5, 8, 12, 16]),
            block_size=block_size,
            max_overlap_depth=2,
            replays_windows=self.replays,
        )
        limits.kv_groups.extend(self._kv_groups(limits.num_blocks))
        return limits

    def _start_worker(self, lane_id: LaneId) -> None:
        lane = self.lanes[lane_id]
        self.epoch += 1
        lane.worker = FakeWorker(
            lane.limits,
            overlap_depth=self.depth,
            epoch=self.epoch,
            vocab=self.vocab,
            model=self.model,
            rng=self.rng,
            skip_rate=0.03 if self.faulty else 0.0,
            nan_rate=0.004 if self.faulty else 0.0,
            fail_rate=0.02 if self.faulty else 0.0,
        )
        self.scheduler.open_lane(lane_id, lane_config_from_proto(lane.limits), self.epoch)
        lane.link.worker_epoch = self.epoch

    # ---------------------------------------------------------------------------------------- events

    def run(self, *, max_events: int = 60_000) -> None:
        """Runs until everything has ended. Raises if a rule breaks or nothing moves any more (rule O8)."""
        for _ in range(max_events):
            if not self._step():
                break
            self.events_since_commit += 1
            if self.scheduler.sequences and self.events_since_commit > MAX_EVENTS_WITHOUT_COMMIT:
                raise SimulationFailure("O8: requests are live and nothing is committed any more")
        else:
            raise SimulationFailure("O8: the world did not come to rest")
        self._check_end()

    def _step(self) -> bool:
        """Lets one event happen. False when nothing is left to happen."""
        choices = self._enabled()
        if not choices:
            return False
        weights = [weight for weight, _, _ in choices]
        _, name, action = self.rng.choices(choices, weights)[0]
        self.counters[name] += 1
        action()
        has_news = name not in EVENTS_OF_WORKERS
        if self.eager:
            for lane_id, lane in self.lanes.items():
                while lane.worker is not None and self._plan(lane_id):
                    has_news = True
        if has_news:
            check_invariants(self.scheduler)
        return True

    def _enabled(self) -> list[tuple[float, str, object]]:
        rng = self.rng
        events: list[tuple[float, str, object]] = []
        if self.to_submit:
            events.append((1.0, "submit", self._submit))
        live = list(self.scheduler.sequences)
        for lane_id, lane in self.lanes.items():
            worker = lane.worker
            if worker is None:
                if self.to_submit or live:
                    events.append((0.5, "restart", lambda lane_id=lane_id: self._start_worker(lane_id)))
                continue
            core_lane = self.scheduler.lanes[lane_id]
            if len(core_lane.in_flight) <= self.depth and live:
                events.append((3.0, "plan", lambda lane_id=lane_id: self._plan(lane_id)))
            rows = worker.runnable()
            if rows:
                events.append((6.0, "run_row", lambda w=worker, rows=rows: w.run(rng.choice(rows))))
            if self.faulty and worker.overdue is not None:
                events.append((0.1, "overdue_gates", worker.end_wait))
            if worker.steps:
                events.append((3.0, "complete", lambda lane=lane: self._complete(lane)))
            if lane.inbox:
                events.append((3.0, "deliver", lambda lane_id=lane_id: self._deliver(lane_id)))
            crash_rate = 0.05 if self.replays and self.model.windows[0] else 0.01 * self.faulty
            if crash_rate and live:
                events.append((crash_rate, "crash", lambda lane_id=lane_id: self._crash(lane_id)))
        if live and not self.calm:
            events.append((0.08, "abort", lambda: self._abort(rng.choice(live))))
            events.append((0.3, "tick", self._tick))
        if self.masks.jobs and self.masks.is_held:
            events.append((0.5, "withheld_masks", self._cancel_held))
        elif self.masks.jobs:
            events.append((2.0, "masks", lambda: self.masks.jobs.popleft().finish()))
        for lane_id, lane in self.lanes.items():
            if lane.ghosts and lane.worker is not None:
                events.append((1.0, "ghost", lambda lane_id=lane_id: self._ghost(lane_id)))
        return events

    def _submit(self) -> None:
        rng = self.rng
        self.to_submit -= 1
        key = RequestKey(self.next_key)
        self.next_key += 1
        max_tokens = rng.choice([1, 2, 3, 8, 20, 60])
        fork_of = rng.choice(live) if (live := list(self.scheduler.sequences)) and rng.random() < 0.2 else None
        request = SimRequest(
            prompt=self._prompt() if fork_of is None else self.clients[fork_of].request.prompt,
            max_tokens=max_tokens,
            min_tokens=rng.choice([0, 0, 1, min(3, max_tokens)]) if max_tokens > 1 else 0,
            stop_ids=frozenset(rng.sample(range(self.vocab), rng.choice([0, 1, 2]))),
            seed=rng.getrandbits(32),
            stop_text_modulus=rng.choice([0, 0, 17]),
            approximate_replay_tokens=self.replay_rng.choice([0, max(self.model.windows), 4]),
        )
        deadline = self.now_ns + rng.randint(1, 40) if rng.random() < 0.1 else None
        queue_deadline = self.now_ns + rng.randint(1, 20) if rng.random() < 0.1 else None
        salt = rng.choice(["", "", "other tenant"])
        if fork_of is not None:
            salt = self.scheduler.sequences[fork_of].request.cache_salt
        request, num_choices = self._constrained(request)
        self._offer(
            Request(
                key=key,
                prompt_token_ids=request.prompt,
                max_tokens=request.max_tokens,
                min_tokens=request.min_tokens,
                stop_token_ids=request.stop_ids,
                sampling=SamplingSpec(
                    seed=request.seed,
                    suppressed_token_ids=tuple(sorted(request.stop_ids)) if self.suppressing else (),
                ),
                priority=rng.choice([0, 0, 1, -1]) if self.config.ordering is Ordering.PRIORITY else 0,
                tenant=rng.choice(["a", "b", "c"]),
                cache_salt=salt,
                constrained=request.grammar is not None,
                fork_of=fork_of,
                approximate_replay_tokens=request.approximate_replay_tokens,
                deadline_ns=deadline,
                queue_deadline_ns=queue_deadline,
            ),
            [replace(request, choice_index=index) for index in range(num_choices)],
        )

    def _constrained(self, request: SimRequest) -> tuple[SimRequest, int]:
        """The request, constrained or not, and how many choices it has."""
        rng = self.gate_rng
        if not self.constrains or rng.random() < 0.3:
            return request, 1
        grammar = Grammar(rng.getrandbits(32), self.vocab)
        return replace(request, grammar=grammar), rng.choice([1, 1, 2, 3])

    def _offer(self, first: Request, choices: list[SimRequest]) -> None:
        """Adds a request, every choice but the first as a fork of that one."""
        requests = [first]
        for choice in choices[1:]:
            sampling = replace(first.sampling, choice_index=choice.choice_index)
            requests.append(replace(first, key=RequestKey(self.next_key), sampling=sampling, fork_of=first.key))
            self.next_key += 1
        try:
            self.scheduler.add_requests(requests)
        except RequestInfeasible:
            self.counters["infeasible"] += 1
            return
        except QueueFull:
            self.counters["queue_full"] += 1
            return
        except UnknownLane:
            if self.scheduler.lanes:
                raise
            self.counters["refused_without_lane"] += 1
            return
        live = Live()
        for request, choice in zip(requests, choices, strict=True):
            client = self.clients[request.key] = Client(choice)
            live.choices.append(Choice(request.key, live, Log(client.tokens)))
        self.book.add(live)
        self.counters["forked_choices"] += len(choices) - 1
        if choices[0].grammar is not None:
            self.counters["constrained"] += 1
            self.gates.add(cast("Any", live), cast("Any", Compiled(choices[0].grammar, live)))

    def _prompt(self) -> tuple[int, ...]:
        """Often the beginning of an earlier prompt or answer goes on, as in conversations."""
        rng = self.rng
        lengths = [9, 14, 20] if self.replays else [1, 2, 3, 5, 9, 14]
        fresh = [rng.randrange(self.vocab) for _ in range(rng.choice(lengths))]
        earlier = [client for client in self.clients.values() if client.tokens]
        if not earlier or rng.random() < 0.4:
            return tuple(fresh)
        client = rng.choice(earlier)
        history = [*client.request.prompt, *client.tokens]
        kept = history[: rng.randint(1, len(history))]
        return tuple((kept + fresh[: rng.randint(0, 3)])[: self.max_model_len - 1])

    def _plan(self, lane_id: LaneId) -> bool:
        outcome = self.scheduler.plan(lane_id)
        self.counters["admissions"] += len(outcome.admitted)
        for entry in outcome.admitted:
            self._note_stretch(entry)
        self.counters["preemptions"] += len(outcome.preempted)
        self.counters["gated_preemptions"] += self._num_gated(outcome.preempted)
        if outcome.plan is None:
            return False
        plan = outcome.plan
        self.counters["sit_outs"] += len(plan.sit_out_slots)
        self.counters["chunks"] += sum(not samples for samples in plan.row_samples)
        self.counters["dispatched"] += 1
        wire = worker_pb2.StepPlan.FromString(plan_to_proto(plan).SerializeToString())
        worker = self.lanes[lane_id].worker
        assert worker is not None
        worker.accept(wire)
        self.gates.open(cast("Any", self.lanes[lane_id].link))
        return True

    def _num_gated(self, preempted: tuple[Preempted, ...]) -> int:
        """How many are constrained and have outputs."""
        clients = [self.clients[entry.key] for entry in preempted]
        return sum(client.request.grammar is not None and bool(client.tokens) for client in clients)

    def _note_stretch(self, entry: Admitted) -> None:
        """What an admission says of its replay is true, and approximate ones were asked for (rule N8)."""
        client, stay = self.clients[entry.key], self.scheduler.sequences[entry.key].stay
        assert stay is not None
        replay = None if stay.replay is None else (stay.replay.start, stay.replay.end)
        needed = self.model.num_layers * sum(window - 1 for window in self.model.windows if window)
        approximate = None if replay is None or replay[1] - replay[0] >= needed else replay
        told = (entry.replays, entry.approximate_from)
        if told != (replay is not None, None if approximate is None else len(client.tokens)):
            raise SimulationFailure(f"N8: {told} was told of {replay}, {needed} would be exact")
        if approximate is not None and not client.request.approximate_replay_tokens:
            raise SimulationFailure("N8: nobody asked for an approximate replay")
        client.stretches.append((len(client.tokens), approximate))
        self.counters["exact_replays"] += replay is not None and approximate is None
        self.counters["approximate_replays"] += approximate is not None
        self.counters["mixed_replays"] += replay is not None and 0 in self.model.windows

    def _complete(self, lane: LaneWorld) -> None:
        assert lane.worker is not None
        event = lane.worker.completed()
        if event is not None:
            lane.inbox.append(worker_pb2.RunStepsResponse.FromString(event.SerializeToString()))

    def _deliver(self, lane_id: LaneId) -> None:
        event = self.lanes[lane_id].inbox.popleft()
        if event.WhichOneof("event") == "failed":
            worker = self.lanes[lane_id].worker
            assert worker is not None
            self.scheduler.fail_step(lane_id, worker.epoch, StepId(event.failed.step_id))
            self.gates.open(cast("Any", self.lanes[lane_id].link))
            return
        self._commit(lane_id, event.boundary)

    def _commit(self, lane_id: LaneId, boundary: worker_pb2.StepBoundary) -> None:
        self.events_since_commit = 0
        outcome = self.scheduler.commit(lane_id, result_from_proto(boundary))
        self._check_refused(lane_id, boundary)
        self.counters["overrun_rows"] += outcome.num_overrun_rows
        ended = {finished.key: finished for finished in outcome.finished}
        for key, token in zip(outcome.keys, outcome.token_ids, strict=True):
            client = self.clients[key]
            if client.finished is not None:
                raise SimulationFailure("D8: a token after the terminal message")
            grammar = client.request.grammar
            if grammar is not None and token not in grammar.allowed(client.tokens):
                raise SimulationFailure(f"I2: request {key}: {token} after {client.tokens} is outside of its mask")
            client.tokens.append(token)
            index = len(client.tokens) - 1
            if client.request.matches_stop_text(token, index):
                self.counters["stop_texts"] += 1
                finished = self.scheduler.finish_at(key, index + 1)
                # The shell's precedence: a stop string on the last token reports STOP (rule D5).
                ended[key] = finished or Finished(key, FinishReason.STOP, index + 1)
        num_ended = len(ended)
        self.gates.advance(outcome, ended)
        self.counters["complete_texts"] += len(ended) - num_ended
        self.gates.open(cast("Any", self.lanes[lane_id].link))
        for finished in ended.values():
            self._finished(finished)

    def _check_refused(self, lane_id: LaneId, boundary: worker_pb2.StepBoundary) -> None:
        """A row with a mask that leaves nothing ends its request: no token is invented, none is tried again."""
        code = worker_pb2.RowError.CODE_NOTHING_ALLOWED
        refused = {error.incarnation for error in boundary.completion.row_errors if error.code == code}
        lane = self.scheduler.lanes[lane_id]
        if refused & {stay.incarnation for stay in [*lane.prefilling, *lane.decoding, *lane.finishing]}:
            raise SimulationFailure("I7: a request goes on although nothing can follow")

    def _send_gate(self, lane_id: LaneId, gate: worker_pb2.SampleGate) -> None:
        """Now and then twice, as after a connection that broke."""
        worker = self.lanes[lane_id].worker
        if worker is None or gate.step_id <= self.scheduler.lanes[lane_id].committed_through:
            self.counters["useless_gates"] += 1  # its step has completed
            return
        for _ in range(1 + (self.gate_rng.random() < 0.1)):
            worker.take_gate(worker_pb2.SampleGate.FromString(gate.SerializeToString()))

    def _fail(self, live: Live, error: ApiError) -> None:
        """The shell ends a request for what its gates found: a failed mask, or that nothing can follow (I7)."""
        clients = [self.clients[choice.key] for choice in live.choices if choice.key in self.book.choices]
        grammars = [(client, client.request.grammar) for client in clients]
        is_dead_end = any(grammar and not grammar.allowed(client.tokens) for client, grammar in grammars)
        if isinstance(error, NothingAllowed) and not is_dead_end:
            raise SimulationFailure("I7: a request ends although tokens can follow")
        if not isinstance(error, NothingAllowed) and not (isinstance(error, RowFailed) and live.is_broken):
            raise SimulationFailure(f"I5: {error}")
        self.counters["failed_masks" if live.is_broken else "dead_ends"] += 1
        self._end_all(live, FinishReason.ERROR)

    def _cancel_held(self) -> None:
        """A client goes whose mask never comes."""
        self._end_all(self.rng.choice(self.masks.jobs[0].matchers).live, FinishReason.CANCELLED)

    def _end_all(self, live: Live, reason: FinishReason) -> None:
        for choice in live.choices:
            finished = self.scheduler.abort(choice.key, reason)
            if finished is not None:
                self._finished(finished)

    def _ghost(self, lane_id: LaneId) -> None:
        outcome = self.scheduler.commit(lane_id, result_from_proto(self.lanes[lane_id].ghosts.popleft()))
        if outcome.keys or outcome.finished:
            raise SimulationFailure("B5: a result of an older epoch changed something")

    def _abort(self, key: RequestKey) -> None:
        finished = self.scheduler.abort(key)
        assert finished is not None
        self._finished(finished)
        if self.scheduler.abort(key) is not None:
            raise SimulationFailure("F3: a second abort found the request live")

    def _tick(self) -> None:
        self.now_ns += self.rng.randint(1, 3)
        for finished in self.scheduler.expire(self.now_ns):
            self.counters["expired"] += 1
            self._finished(finished)

    def _crash(self, lane_id: LaneId) -> None:
        lane = self.lanes[lane_id]
        lane.ghosts.extend(e.boundary for e in lane.inbox if e.WhichOneof("event") == "boundary")
        lane.inbox.clear()
        if lane.worker is not None:
            self.counters.update(lane.worker.counters)
        lane.worker = None
        self.gates.forget(cast("Any", lane.link))
        lost = self.scheduler.lose_lane(lane_id)
        lane.link.worker_epoch = 0
        self.counters["lost_sequences"] += len(lost)
        self.counters["gated_losses"] += self._num_gated(lost)

    def _finished(self, finished: Finished) -> None:
        client = self.clients[finished.key]
        if client.finished is not None:
            raise SimulationFailure("D8: two terminal messages")
        if finished.num_output_tokens != len(client.tokens):
            raise SimulationFailure("B11: the terminal message counts other tokens than were delivered")
        client.finished = finished
        del self.book.choices[finished.key]
        self._check_overrun(finished)
        self.counters[f"finished_{finished.reason.value}"] += 1

    def _check_overrun(self, finished: Finished) -> None:
        """An end that could be foreseen costs no row, one that could not at most D (rules D1, D2)."""
        if finished.reason not in (FinishReason.STOP, FinishReason.LENGTH):
            return
        rows = sum(
            stay.sequence.request.key == finished.key
            for lane in self.scheduler.lanes.values()
            for step in lane.in_flight
            for stay in [*step.decode_rows, *(row[0] for row in step.explicit_rows)]
        )
        if rows > (self.depth if finished.reason is FinishReason.STOP else 0):
            raise SimulationFailure(f"D1, D2: {finished.reason} left {rows} rows in flight")

    # ---------------------------------------------------------------------------------------- end

    def _check_end(self) -> None:
        for lane in self.lanes.values():
            if lane.worker is not None:
                self.counters.update(lane.worker.counters)
        if not self.scheduler.is_idle:
            raise SimulationFailure("A8: at rest, but not idle")
        self.gates.advance(CommitOutcome(StepId(0)), {})  # it forgets what has ended when it is called
        if self.gates._matchers:
            raise SimulationFailure("E6: a grammar outlives its request")
        delivered = sum(len(client.tokens) for client in self.clients.values())
        if self.counters["preemptions"] > delivered + len(self.clients):
            raise SimulationFailure(f"E8: {self.counters['preemptions']} preemptions for {delivered} tokens")
        for key, client in self.clients.items():
            finished = client.finished
            if finished is None:
                raise SimulationFailure(f"D8: request {key} never ended")
            expected, reason = oracle(
                client.request,
                self.model,
                vocab=self.vocab,
                max_model_len=self.max_model_len,
                suppressing=self.suppressing,
                stretches=client.stretches,
            )
            is_whole = finished.reason in (FinishReason.STOP, FinishReason.LENGTH)
            if is_whole or finished.fault is RowFault.NOTHING_ALLOWED:
                if (client.tokens, finished.reason.value) != (expected, reason):
                    raise SimulationFailure(
                        f"D4: request {key}: {client.tokens} {finished.reason}, oracle {expected} {reason}"
                    )
            elif client.tokens != expected[: len(client.tokens)]:
                raise SimulationFailure(f"D4: request {key}: {client.tokens} is no prefix of {expected}")
