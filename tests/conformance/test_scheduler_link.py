"""The scheduler's side of the worker protocol, against a worker that is played by hand."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import pytest

from stepahead.scheduler import worker_link
from stepahead.v1 import operations_pb2, worker_pb2
from tests.conformance.scripted_worker import ScriptedStream, ScriptedWorker, serve_script, worker_info
from tests.e2e.stack import Answer, Stack, eventually, serve_scheduler

RETAIN = worker_pb2.SETTLE_MODE_RETAIN
IN_PLACE = worker_pb2.SETTLE_MODE_COMPLETE_IN_PLACE


@dataclass(slots=True)
class Play:
    """A scheduler and the worker it is connected to."""

    stack: Stack
    worker: ScriptedWorker
    stream: ScriptedStream
    message: worker_pb2.OpenSession

    def ask(self, *arguments: Any, **fields: Any) -> asyncio.Task[Answer]:
        return asyncio.create_task(self.stack.generate(*arguments, **fields))

    async def is_connected(self) -> bool:
        # The worker has sent SessionOpened; the scheduler may not have read it.
        await eventually(lambda: bool(self.stack.server.engine.links))
        return (await self.stack.status()).workers[0].connected


@asynccontextmanager
async def play(depth: int = 1, **fields: Any) -> AsyncIterator[Play]:
    """A ready scheduler of one scripted worker."""
    async with (
        serve_script() as (worker, address),
        serve_scheduler(address, overlap_depth=depth, **fields) as stack,
    ):
        stream, message = await worker.open()
        await eventually(lambda: bool(stack.server.engine.links))
        yield Play(stack, worker, stream, message)


async def reopened(play: Play, epoch: int = 2) -> ScriptedStream:
    """The stream of the next session, not of a resume."""
    stream, message = await play.worker.open(epoch=epoch)
    assert not message.HasField("resume")
    assert message.scheduler_epoch == play.message.scheduler_epoch + 1
    return stream


def oks(answer: Answer, token_ids: list[int]) -> bool:
    return answer.ok and answer.token_ids == token_ids


async def test_plans_go_one_step_ahead_and_say_what_they_build_on() -> None:
    """B1, B3, B8, D2: with D = 1 step 2 is planned before step 1's token is known; the last needs no overrun."""
    async with play() as it:
        assert (it.message.protocol_major, it.message.overlap_depth, it.message.stream_generation) == (1, 1, 1)
        assert it.message.model_fingerprint == "s" * 64
        asked = it.ask([5, 6, 7], 3)
        first, second = await it.stream.plan(), await it.stream.plan()
        assert (first.step_id, first.previous_step_id, first.committed_through) == (1, 0, 0)
        assert (second.step_id, second.previous_step_id, second.committed_through) == (2, 1, 0)
        assert (first.settle, second.settle) == (RETAIN, RETAIN)
        (admission,) = first.admissions
        assert list(admission.token_ids) == [5, 6, 7]
        assert (admission.num_prompt_tokens, admission.num_settled_tokens) == (3, 0)
        assert (list(first.row_starts), list(first.row_counts), list(first.row_samples)) == ([0], [3], [True])
        assert (list(second.joined_slots), second.total_tokens) == ([admission.slot], 1)
        await it.stream.complete(first, it.stream.rows(first), [11])
        third = await it.stream.plan()
        assert (third.step_id, third.committed_through) == (3, 1)
        assert third.ByteSize() < 32, "steady decode is O(changes)"
        await it.stream.complete(second, it.stream.rows(second), [12])
        await it.stream.complete(third, it.stream.rows(third), [13])
        assert oks(await asked, [11, 12, 13])
        assert it.stream.commands.empty(), "no step is planned for a request that must have ended"
        await it.stack.assert_quiescent()


async def test_without_overlap_a_plan_waits_for_the_boundary() -> None:
    async with play(depth=0) as it:
        asked = it.ask([5], 2)
        first = await it.stream.plan()
        assert (first.settle, it.message.overlap_depth) == (IN_PLACE, 0)
        await asyncio.sleep(0)
        assert it.stream.commands.empty()
        await it.stream.complete(first, it.stream.rows(first), [11])
        second = await it.stream.step(12)
        assert (second.step_id, second.committed_through) == (2, 1)
        assert oks(await asked, [11, 12])


async def test_stale_boundaries_are_dropped() -> None:
    """B5, B2: a boundary of an older epoch, and one that came before."""
    async with play(depth=0) as it:
        asked = it.ask([5], 2)
        first = await it.stream.plan()
        rows = it.stream.rows(first)
        await it.stream.complete(first, rows, [99], epoch=7)
        await it.stream.complete(first, rows, [11])
        await it.stream.complete(first, rows, [98])
        await it.stream.step(12)
        assert oks(await asked, [11, 12])
        assert await it.is_connected()


@pytest.mark.parametrize("code", [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.OK])
async def test_a_broken_stream_is_resumed_and_plans_are_sent_again(code: grpc.StatusCode) -> None:
    """Rule 7: first every plan above the accepted one, in order."""
    async with play() as it:
        asked = it.ask([5], 4)
        first, second = await it.stream.plan(), await it.stream.plan()
        await it.stream.complete(first, it.stream.rows(first), [11])
        third = await it.stream.plan()
        it.stream.end(code, "a network on the way")
        stream, message = await it.worker.open(last_completed_step_id=1, last_accepted_step_id=1)
        assert message.scheduler_epoch == it.message.scheduler_epoch
        assert message.stream_generation == 2
        assert (message.resume.session_id, message.resume.last_completed_step_id) == (71, 1)
        stream.members, stream._incarnations = it.stream.members, it.stream._incarnations
        assert [await stream.plan(), await stream.plan()] == [second, third]
        await stream.complete(second, stream.rows(second), [12])
        fourth = await stream.plan()
        await stream.complete(third, stream.rows(third), [13])
        await stream.complete(fourth, stream.rows(fourth), [14])
        assert oks(await asked, [11, 12, 13, 14])
        (status,) = (await it.stack.status()).workers
        assert (status.connected, status.steps.resumes, status.worker_epoch) == (True, 1, 1)


async def test_accepted_plans_are_not_sent_again_and_a_repeat_is_harmless() -> None:
    async with play() as it:
        asked = it.ask([5], 2)
        first, second = await it.stream.plan(), await it.stream.plan()
        it.stream.end(grpc.StatusCode.UNAVAILABLE)
        stream, _ = await it.worker.open(last_accepted_step_id=2)
        rejected = worker_pb2.StepRejected(step_id=2, reason=worker_pb2.StepRejected.REASON_ALREADY_EXECUTED)
        await stream.send(rejected=rejected)
        await stream.complete(first, stream.rows(first), [11])
        await stream.complete(second, stream.rows(second), [12])
        assert oks(await asked, [11, 12])
        assert stream.commands.empty()


@pytest.mark.parametrize("refusal", ["status", "other epoch"])
async def test_a_refused_resume_starts_over_with_the_whole_history(refusal: str) -> None:
    """O1, O2, G3: no token is lost or repeated."""
    async with play() as it:
        asked = it.ask([5, 6], 4)
        first, _ = await it.stream.plan(), await it.stream.plan()
        await it.stream.complete(first, it.stream.rows(first), [11])
        await it.stream.plan()
        it.stream.end(grpc.StatusCode.UNAVAILABLE)
        if refusal == "status":
            stream, _ = await it.worker.accept()
            stream.end(grpc.StatusCode.FAILED_PRECONDITION, "there is no such session")
        else:
            await it.worker.open(epoch=9)
        stream = await reopened(it)
        again, decode = await stream.plan(), await stream.plan()
        (admission,) = again.admissions
        assert (again.step_id, list(admission.token_ids)) == (1, [5, 6, 11])
        assert admission.num_prompt_tokens == 2
        assert admission.incarnation > first.admissions[0].incarnation
        await stream.complete(again, stream.rows(again), [12], epoch=2)
        last = await stream.plan()
        await stream.complete(decode, stream.rows(decode), [13], epoch=2)
        await stream.complete(last, stream.rows(last), [14], epoch=2)
        answer = await asked
        assert oks(answer, [11, 12, 13, 14])
        assert answer.finished is not None
        assert answer.finished.timings.preemptions == 1


async def test_an_idle_lane_takes_over_at_once() -> None:
    """O1: nothing else would wake it up."""
    async with (
        serve_script() as (first, first_address),
        serve_script() as (second, second_address),
        serve_scheduler(first_address, second_address, overlap_depth=0) as stack,
    ):
        streams = [(await worker.open())[0] for worker in (first, second)]
        await eventually(lambda: len(stack.server.engine.links) == 2)
        asked = asyncio.create_task(stack.generate([5], 3))
        await eventually(lambda: any(not stream.commands.empty() for stream in streams))
        streams.sort(key=lambda stream: stream.commands.empty())
        busy, idle = streams
        await busy.step(11)
        busy.end(grpc.StatusCode.ABORTED, "another scheduler took the worker")
        plan = await idle.plan()
        assert list(plan.admissions[0].token_ids) == [5, 11]
        await idle.complete(plan, idle.rows(plan), [12])
        await idle.step(13)
        assert oks(await asked, [11, 12, 13])


async def test_a_resume_that_nobody_answers_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """O1: a stopped worker accepts connections and says nothing."""
    monkeypatch.setattr(worker_link, "OPEN_TIMEOUT_S", 0.05)
    async with play() as it:
        it.stream.end(grpc.StatusCode.UNAVAILABLE)
        _, first = await it.worker.accept()
        _, second = await it.worker.accept()
        assert (first.stream_generation, second.stream_generation) == (2, 3)
        await it.worker.open()
        await eventually(it.is_connected)


def row_error(code: Any, incarnation: int) -> worker_pb2.RowError:
    return worker_pb2.RowError(slot=0, incarnation=incarnation, code=code)


async def send_fault(stream: ScriptedStream, plan: worker_pb2.StepPlan, fault: str) -> None:
    """Something that no worker may send after this plan."""
    (row,) = stream.rows(plan)
    rejected, failed = worker_pb2.StepRejected, worker_pb2.StepFailed
    match fault:
        case "other rows":
            await stream.complete(plan, [row + 1], [11])
        case "two rows":
            await stream.complete(plan, [row, row], [11, 12])
        case "no token":
            await stream.complete(plan, [row], [])
        case "too many counts":
            await stream.complete(plan, [row], [11], token_counts=[1, 0])
        case "two tokens":
            await stream.complete(plan, [row], [11, 12], token_counts=[2])
        case "unknown row error":
            await stream.complete(plan, [row], [], token_counts=[0], errors=[row_error(99, row)])
        case "a later step":
            await stream.complete(worker_pb2.StepPlan(step_id=5), [row], [11])
        case "rejected":
            await stream.send(rejected=rejected(step_id=1, reason=rejected.REASON_NOT_NEXT))
        case "rejected for an unknown reason":
            await stream.send(rejected=rejected(step_id=1, reason=99))  # pyright: ignore[reportArgumentType]
        case "another step failed":
            await stream.send(failed=failed(step_id=5, scope=failed.SCOPE_STEP, message="out of order"))
        case "epoch failed":
            await stream.send(failed=failed(step_id=1, scope=failed.SCOPE_EPOCH, message="device lost"))
        case "opened twice":
            await stream.send(opened=worker_pb2.SessionOpened(session_id=1))
        case _:
            assert fault == "nothing"
            await stream.send()


FAULTS = [
    "other rows", "two rows", "no token", "too many counts", "two tokens", "unknown row error", "a later step",
    "rejected", "rejected for an unknown reason", "another step failed", "epoch failed", "opened twice", "nothing",
]  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_worker_that_breaks_the_protocol_loses_its_epoch(fault: str) -> None:
    """O2, O5, B4: the lane starts over, the request goes on, the scheduler lives."""
    async with play(depth=0) as it:
        asked = it.ask([5], 2)
        await send_fault(it.stream, await it.stream.plan(), fault)
        stream = await reopened(it)
        await stream.step(21, epoch=2)
        await stream.step(22, epoch=2)
        assert oks(await asked, [21, 22])
        await it.stack.assert_quiescent()


async def test_the_first_message_must_be_opened() -> None:
    async with serve_script() as (worker, address), serve_scheduler(address) as stack:
        stream, _ = await worker.accept()
        await stream.send(pong=worker_pb2.Pong())
        await worker.open()
        await eventually(lambda: bool(stack.server.engine.links))


async def test_a_failed_step_is_run_again() -> None:
    """O3: S and U roll back; the same positions are fed again, numbering goes on."""
    async with play(depth=0) as it:
        asked = it.ask([5, 6], 2)
        first = await it.stream.plan()
        it.stream.rows(first)
        failed = worker_pb2.StepFailed
        await it.stream.send(failed=failed(step_id=1, scope=failed.SCOPE_STEP, message="out of memory"))
        second = await it.stream.plan()
        assert (second.step_id, second.committed_through) == (2, 1)
        assert (list(second.row_starts), list(second.row_counts), list(second.row_samples)) == ([0], [2], [True])
        await it.stream.complete(second, it.stream.rows(second), [11])
        await it.stream.step(12)
        assert oks(await asked, [11, 12])
        assert await it.is_connected()


async def test_a_row_error_ends_that_request_only() -> None:
    """J10, O3, BL-32."""
    async with play(depth=0) as it:
        asked = it.ask([5], 2)
        plan = await it.stream.plan()
        both = [asked, it.ask([6], 2)]
        (row,) = it.stream.rows(plan)
        await eventually(lambda: len(it.stack.server.engine.book.requests) == 2)
        await it.stream.complete(plan, [row], [11])
        second = await it.stream.plan()
        rows = it.stream.rows(second)
        assert len(rows) == 2
        counts = [int(each != row) for each in rows]
        error = row_error(worker_pb2.RowError.CODE_NON_FINITE, row)
        await it.stream.complete(second, rows, [31], token_counts=counts, errors=[error])
        await it.stream.step(32)
        failed, other = await asyncio.gather(*both)
        assert failed.code is grpc.StatusCode.INTERNAL
        assert (failed.error_info.reason, failed.reason, failed.token_ids) == ("ROW_FAILED", "ERROR", [11])
        assert oks(other, [31, 32])
        await it.stack.assert_quiescent()


async def test_a_step_that_hangs_closes_the_epoch() -> None:
    """O4: the worker answers pings, but its step is too old."""
    async with play(max_step_s=5.0) as it:
        it.stream.running_step_age_ns = 6_000_000_000
        await reopened(it)
        assert await it.is_connected()


async def test_a_worker_with_impossible_limits_is_refused() -> None:
    """O5, O7: another worker's nonsense must not end the scheduler."""
    async with serve_script(worker_info(num_blocks=0)) as (worker, address), serve_scheduler(address) as stack:
        await eventually(lambda: worker.num_info_calls > 0)
        await asyncio.sleep(0)
        status = await stack.status()
        assert status.state == operations_pb2.SCHEDULER_STATE_NOT_READY
        assert worker.streams.empty()
        assert stack.server.cluster.model is None, "a refused worker does not decide what is served"
        assert not any(task.done() for task in stack.server.cluster._tasks.values())


@pytest.mark.parametrize(("major", "minor"), [(1, 0), (0, 9), (2, 1)])
async def test_a_worker_that_would_ignore_fields_is_refused(
    major: int, minor: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """V1: an older worker would sample without the penalties it was sent, and nobody would know."""
    info = worker_info()
    info.protocol_major, info.protocol_minor = major, minor
    async with serve_script(info) as (worker, address), serve_scheduler(address) as stack:
        await eventually(lambda: f"it speaks protocol {major}.{minor}" in capsys.readouterr().out)
        assert worker.streams.empty()
        assert stack.server.cluster.model is None
        worker.info = worker_info()
        worker.info.protocol_minor = 7  # newer ones know more
        await worker.open()


async def test_a_request_that_can_never_fit_is_refused() -> None:
    """G9, V3: within the context limit, but more than the whole cache."""
    async with (
        serve_script(worker_info(num_blocks=8)) as (worker, address),
        serve_scheduler(address, overlap_depth=0) as stack,
    ):
        stream, _ = await worker.open()
        await eventually(lambda: bool(stack.server.engine.links))
        refused = await stack.generate([1] * 10, 24)
        assert refused.code is grpc.StatusCode.INVALID_ARGUMENT
        assert refused.fields == ["stopping.max_tokens"]
        asked = asyncio.create_task(stack.generate([1] * 10, 23))
        for token in range(23):
            await stream.step(token)
        assert oks(await asked, list(range(23))), "32 positions and a last token, which is never fed"


async def test_a_loading_worker_is_asked_again() -> None:
    async with serve_script() as (worker, address):
        worker.is_loading = True
        async with serve_scheduler(address) as stack:
            await eventually(lambda: worker.num_info_calls >= 2)
            answer = await stack.generate([1], 1)
            assert answer.code is grpc.StatusCode.UNAVAILABLE
            assert answer.error_info.reason == "NOT_READY"
            worker.is_loading = False
            await worker.open()
            await eventually(lambda: bool(stack.server.engine.links))


@pytest.mark.parametrize("fault", ["another model", "another length", "a bundle without its digest"])
async def test_a_worker_that_does_not_fit_is_refused_and_logged(
    fault: str, capsys: pytest.CaptureFixture[str]
) -> None:
    other = {
        "another model": worker_info(model={"name": "other", "fingerprint": "o" * 64}),
        "another length": worker_info(max_model_len=32),
        "a bundle without its digest": worker_info(model={"has_tokenizer": True}),
    }[fault]
    async with serve_script(other) as (worker, second):
        if fault == "a bundle without its digest":
            worker.bundle = [worker_pb2.GetTokenizerBundleResponse(data=b"x", sha256="0" * 64)]
            read_fd, write_fd = os.pipe()
            try:
                async with serve_scheduler(second, announce_fd=write_fd) as stack:
                    await eventually(lambda: worker.num_info_calls > 0)
                    await eventually(lambda: "worker refused" in capsys.readouterr().out)
                    assert stack.server.cluster.model is None
                told = [json.loads(line) for line in os.read(read_fd, 4096).splitlines()]
            finally:
                os.close(read_fd)
                os.close(write_fd)
            reason = "its tokenizer bundle does not match its digest"
            assert told[0]["event"] == "listening"
            assert told[1] == {"event": "refused", "worker": second, "message": reason}
            return
        async with serve_script() as (first, address), serve_scheduler(address, second) as stack:
            worker.is_loading = True
            await first.open()
            await eventually(lambda: bool(stack.server.engine.links))
            worker.is_loading = False
            logged: list[str] = []

            def is_logged() -> bool:
                logged.append(capsys.readouterr().out)
                return "worker refused" in "".join(logged)

            await eventually(is_logged)
            assert worker.streams.empty()
            assert len(stack.server.engine.links) == 1


async def test_sessions_are_closed_when_the_scheduler_stops() -> None:
    async with play() as it:
        stream = it.stream
    close = await stream.command("close")
    assert close.reason
