"""Columns of steady decode: whatever happens, every stream is told the tokens it would be told row by row."""

from __future__ import annotations

import asyncio
import random
from types import SimpleNamespace
from typing import Any, cast

import pytest

from stepahead.scheduler import steady_rows, stream_rows
from stepahead.scheduler.core import CommitOutcome, Finished, FinishReason, LaneId, Preempted, RequestKey, StepId
from stepahead.scheduler.delivery import MessageBudget
from stepahead.scheduler.errors import RequestCancelled
from stepahead.scheduler.live_request import LiveRequest
from stepahead.scheduler.multiplex import MultiplexSession
from stepahead.scheduler.output_log import LogCursor
from stepahead.scheduler.request_book import RequestBook
from stepahead.scheduler.subscription import Subscription
from stepahead.v1 import generation_pb2
from tests.scheduler.requests import live_request
from tests.scheduler.test_delivery import FakeLoop

NUM_LANES = 2


class Reader:
    """A stream of one request, with a cursor of its own."""

    def __init__(self, live: LiveRequest) -> None:
        self.queued = self.woken = False
        self.subscription = Subscription(live, self)
        self.token_ids: list[int] = []

    def wake(self) -> None:
        """Reads when the test says so."""

    def read(self) -> None:
        self.queued = self.woken = False
        response = generation_pb2.GenerateResponse()
        self.subscription.take(response.events)
        for event in response.events:
            if event.HasField("delta"):
                assert event.delta.first_token_index == len(self.token_ids)
                self.token_ids += event.delta.token_ids


class World:
    """A book with streams and lanes; the test plays core, budget and clients."""

    def __init__(self, num_sessions: int = 2) -> None:
        self.loop = FakeLoop()
        budget = MessageBudget(cast(asyncio.AbstractEventLoop, self.loop), 10**6)
        self.book = RequestBook(budget, lambda _key, _reason: None, lambda _live, _reason: None)
        front_end = SimpleNamespace(
            engine=SimpleNamespace(book=self.book), release=lambda subscription: subscription.close()
        )
        self.sessions = [MultiplexSession(cast(Any, front_end), cast(Any, None)) for _ in range(num_sessions)]
        self.keys: list[list[RequestKey]] = [[] for _ in range(NUM_LANES)]
        self.made: dict[int, list[int]] = {}
        self.told: dict[int, list[int]] = {}
        self.ended: set[int] = set()
        self.readers: dict[int, Reader] = {}
        self.streams: dict[int, Reader] = {}
        """Of requests that no session has asked for."""
        self.num_commits = 0
        self.num_column_commits = 0

    async def join(self, session: int | None, lane: int, **fields: Any) -> int:
        """A request of a Multiplex session; None: of a Generate call."""
        output = generation_pb2.OutputParams(text=False)
        live = await live_request(
            generation_pb2.GenerateRequest(token_ids=generation_pb2.TokenIdsInput(ids=[1]), output=output, **fields)
        )
        handle = len(self.made) + 1
        key = live.choices[0].key = RequestKey(handle)
        live.times.admitted_ns = 2
        self.book.add(live)
        self.made[handle], self.told[handle] = [], []
        if session is None:
            reader = self.streams[handle] = Reader(live)
            self.told[handle] = reader.token_ids
        else:
            stream = self.sessions[session]
            stream._subscriptions[handle] = Subscription(live, stream, handle=handle, dirty=stream._dirty)
        self.keys[lane] = [*self.keys[lane], key]
        return handle

    def commit(self, lane: int, ends: list[RequestKey] | None = None) -> None:
        self.num_commits += 1
        keys = self.keys[lane]
        tokens = [1000 * self.num_commits + index for index in range(len(keys))]
        for key, token in zip(keys, tokens, strict=True):
            self.made[key].append(token)
        outcome = CommitOutcome(StepId(self.num_commits), keys=keys, token_ids=tokens)
        ended = {key: Finished(key, FinishReason.LENGTH, len(self.made[key])) for key in ends or []}
        before = {key: len(self.book.choices[key].log._token_ids) for key in keys}
        self.book.fan_out(LaneId(lane), outcome, ended)
        choices = self.book.choices
        self.num_column_commits += any(
            key in choices and len(choices[key].log._token_ids) == before[key] for key in keys
        )
        self.loop.advance(1.0)
        writers = [each.writer for key in keys if key in choices for each in choices[key].live.subscriptions]
        assert all(writer.queued or writer.woken for writer in writers), "a stream with news waits for its turn"
        self._leave(ends or [])

    def cancel(self, key: RequestKey) -> None:
        self.book.fail(self.book.choices[key].live, RequestCancelled("no more"), FinishReason.CANCELLED)
        self._leave([key])

    def _leave(self, keys: list[RequestKey]) -> None:
        for lane, of_lane in enumerate(self.keys):
            if not set(of_lane).isdisjoint(keys):
                self.keys[lane] = [key for key in of_lane if key not in keys]

    def lose(self, lane: int, to: int) -> None:
        lost, self.keys[lane] = self.keys[lane], []
        self.book.forget_rows(LaneId(lane))
        self.book.note_preempted(tuple(map(Preempted, lost)))
        self.keys[to] = [*self.keys[to], *lost]

    def preempt(self, key: RequestKey, to: int) -> None:
        self._leave([key])
        self.book.note_preempted((Preempted(key),))
        self.keys[to] = [*self.keys[to], key]

    def read(self, key: int) -> None:
        """One message of a Generate call, checked as a client checks it."""
        self.streams[key].read()
        if self.streams[key].subscription.live.is_over:
            self.ended.add(key)

    def take(self, session: int) -> None:
        """One message, checked as a client checks it."""
        stream = self.sessions[session]
        stream.queued = stream.woken = False
        response = stream._take() or generation_pb2.MultiplexResponse()
        columns = response.tokens
        counts = columns.token_counts or [1] * len(columns.handles)
        assert sum(counts) == len(columns.token_ids)
        start = 0
        for handle, first, count in zip(columns.handles, columns.first_token_indexes, counts, strict=True):
            assert handle not in self.ended
            assert first == len(self.told[handle])
            self.told[handle] += columns.token_ids[start : start + count]
            start += count
        for entry in response.events:
            for event in entry.events:
                if event.HasField("delta"):
                    assert event.delta.first_token_index == len(self.told[entry.handle])
                    self.told[entry.handle] += event.delta.token_ids
                elif event.HasField("finished"):
                    self.ended.add(entry.handle)
        self.ended.update(failure.handle for failure in response.failures)

    def live_keys(self) -> list[RequestKey]:
        return [key for keys in self.keys for key in keys]


async def crowd(size: int) -> World:
    """As many requests of one stream on one lane, in steady decode."""
    world = World()
    for _ in range(size):
        await world.join(0, 0)
    for _ in range(steady_rows.STEADY_AFTER):
        world.commit(0)
        world.take(0)
    assert world.num_column_commits == 0
    return world


async def test_rows_that_stay_the_same_are_told_in_columns() -> None:
    world = await crowd(steady_rows.MIN_ROWS)
    for _ in range(3):
        world.commit(0)
    assert world.num_column_commits == 3
    world.take(0)
    assert world.told == world.made
    world.commit(0)
    world.take(0)
    assert world.told == world.made
    assert [choice.log.token_ids for choice in world.book.choices.values()] == list(world.made.values())


async def stream_crowd(size: int) -> World:
    """As many Generate calls on one lane, in steady decode, all of them told the first tokens."""
    world = World()
    for _ in range(size):
        await world.join(None, 0)
    for _ in range(steady_rows.STEADY_AFTER - 1):
        world.commit(0)
        for stream in world.streams:
            world.read(stream)
    assert world.num_column_commits == 0
    return world


async def test_streams_of_their_own_pick_their_tokens_when_they_have_a_turn() -> None:
    world = await stream_crowd(3)
    for number in range(1, 10):
        world.commit(0)  # asserts that whoever has been told everything waits for a turn again
        assert world.num_column_commits == number
        world.read(1 + number % 2)
        log = world.book.choices[RequestKey(1 + number % 2)].log
        assert log._token_ids == world.told[1 + number % 2] == world.made[1 + number % 2]
    assert len(world.told[3]) < len(world.made[3])
    world.read(3)
    assert world.told[3] == world.made[3]


async def test_k8_a_stream_that_failed_in_the_turn_of_the_first_columns_has_no_token_more() -> None:
    """A row's mask fails before the turn's tokens are looked at: its end stands, whatever was sampled behind it."""
    world = await stream_crowd(2)
    choice, keys = world.book.choices[RequestKey(1)], world.keys[0]
    delivered = list(world.made[1])
    world.book.fail(choice.live, RequestCancelled("no token is allowed"))
    world.book.fan_out(LaneId(0), CommitOutcome(StepId(9), keys=keys, token_ids=[8, 9]), {})
    world.read(1)
    assert choice.log.token_ids == world.told[1] == delivered
    world.read(2)
    assert world.told[2][-1] == 9


async def test_a_stream_that_nobody_reads_lacks_few_columns() -> None:
    world = await stream_crowd(2)
    log = world.book.choices[RequestKey(1)].log
    for _ in range(3 * stream_rows.MAX_COLUMNS):
        world.commit(0)
        world.read(2)
        assert len(world.made[1]) - len(log._token_ids) <= stream_rows.MAX_COLUMNS
    world.read(1)
    assert world.told == world.made


@pytest.mark.parametrize("fields", [
    {"stopping": generation_pb2.StoppingParams(stop_strings=["never"])},
    {"logprobs": generation_pb2.LogprobParams(output_top_k=1)},
])  # fmt: skip
async def test_a_stream_with_more_than_a_token_a_step_stays_a_row(fields: dict[str, Any]) -> None:
    world = await stream_crowd(1)
    handle = await world.join(None, 0, **fields)
    world.book.with_stop_strings.clear()  # nobody scans here
    for _ in range(2 * steady_rows.STEADY_AFTER):
        world.commit(0)
        assert world.book.choices[RequestKey(handle)].log._token_ids == world.made[handle]
    assert world.num_column_commits > 0, "the other one's"


async def test_few_rows_or_rows_that_want_text_scanned_stay_rows() -> None:
    world = World()
    for _ in range(steady_rows.MIN_ROWS - 1):
        await world.join(0, 0)
    await world.join(0, 0, stopping=generation_pb2.StoppingParams(stop_strings=["never"]))
    for key in world.live_keys():
        world.book.with_stop_strings.discard(key)  # nobody scans here
    for _ in range(20):
        world.commit(0)
        world.take(0)
    assert world.num_column_commits == 0
    assert world.told == world.made


async def test_a_neighbour_of_another_kind_stays_a_row() -> None:
    world = await crowd(steady_rows.MIN_ROWS + 2)
    reader = Reader(world.book.choices[RequestKey(3)].live)
    for index in range(steady_rows.STEADY_AFTER + 4):
        if not index:
            await world.join(1, 0)
        world.commit(0)
        world.take(0)
        world.take(1)
        reader.read()
    assert world.num_column_commits >= 3
    assert world.told == world.made
    assert reader.token_ids == world.made[3]


async def test_a_reader_far_behind_is_told_from_the_logs(monkeypatch: pytest.MonkeyPatch) -> None:
    """What nobody has taken is kept once, and is cut into messages as ever."""
    monkeypatch.setattr(steady_rows, "MAX_UNTOLD_TOKENS", 10 * steady_rows.MIN_ROWS)
    world = await crowd(steady_rows.MIN_ROWS)
    for _ in range(100):
        world.commit(0)
    assert world.num_column_commits == 10
    assert all(choice.log.steady is None for choice in world.book.choices.values())
    world.take(0)
    assert world.told == world.made


async def test_logs_lack_few_columns() -> None:
    world = await crowd(steady_rows.MIN_ROWS)
    log = world.book.choices[RequestKey(1)].log
    for _ in range(3 * steady_rows.MAX_UNSETTLED):
        world.commit(0)
        world.take(0)
        assert len(world.made[1]) - len(log._token_ids) <= steady_rows.MAX_UNSETTLED
    assert log.token_ids == world.made[1]
    cursor = LogCursor()
    fresh = log.read(cursor)
    assert fresh is not None
    assert fresh.token_ids == world.made[1]


@pytest.mark.parametrize("seed", range(40))
async def test_nothing_is_lost_or_told_twice(seed: int) -> None:
    """D8, K1: ends, cancels, preemptions, lost lanes and further readers at any moment of steady decode."""
    rng = random.Random(seed)
    world = World()
    for _ in range(2 * steady_rows.MIN_ROWS + rng.randrange(20)):
        await world.join(rng.choice([0, 0, 0, 1, None]), rng.choice([0, 0, 1]))
    for _ in range(500):
        keys, lane = world.live_keys(), rng.randrange(NUM_LANES)
        if not keys:
            break
        key = rng.choice(keys)
        match rng.choices(["commit", "take", "stream", "end", "cancel", "preempt", "lose", "read", "join"],
                          [100, 90, 80, 2, 2, 2, 1, 4, 2])[0]:  # fmt: skip
            case "commit":
                world.commit(lane)
            case "take":
                world.take(rng.randrange(2))
            case "stream" if world.streams:
                world.read(rng.choice(list(world.streams)))
            case "end" if world.keys[lane]:
                world.commit(lane, [rng.choice(world.keys[lane])])
            case "cancel":
                world.cancel(key)
            case "preempt":
                world.preempt(key, to=lane)
            case "lose":
                world.lose(lane, to=1 - lane)
            case "read" if key in world.readers:
                world.readers[key].read()
                if rng.random() < 0.5:
                    world.readers.pop(key).subscription.close()
            case "read":
                world.readers[key] = Reader(world.book.choices[key].live)
            case "join":
                await world.join(rng.choice([0, 1, None]), lane)
            case _:
                pass
    assert world.num_column_commits > 0
    for key in world.live_keys():
        world.cancel(key)
    for session in range(2):
        world.take(session)
    for stream in world.streams:
        world.read(stream)
    assert world.told == world.made
    assert world.ended == set(world.made)
    for key, reader in world.readers.items():
        reader.read()
        assert reader.token_ids == world.made[key]
