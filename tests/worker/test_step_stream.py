"""The sending half of a stream."""

from __future__ import annotations

import asyncio
import threading
import time

import grpc

from stepahead.v1 import worker_pb2
from stepahead.worker.status import StreamStatus
from stepahead.worker.step_stream import StepStream

ENDED = StreamStatus(code=grpc.StatusCode.ABORTED, reason="ENDED", message="ended")


def pong(nonce: int) -> worker_pb2.RunStepsResponse:
    return worker_pb2.RunStepsResponse(pong=worker_pb2.Pong(nonce=nonce))


async def test_messages_of_another_thread_keep_their_order_and_precede_the_end() -> None:
    stream = StepStream(asyncio.get_running_loop())

    def fill() -> None:
        for nonce in range(100):
            stream.send(pong(nonce))
        stream.end(ENDED)
        stream.send(pong(100))

    thread = threading.Thread(target=fill)
    thread.start()
    nonces = [message.pong.nonce async for message in stream.messages()]
    thread.join()
    assert nonces == list(range(100))
    assert stream.status is ENDED


async def test_the_first_end_counts() -> None:
    stream = StepStream(asyncio.get_running_loop())
    stream.finish(ENDED)
    stream.finish(None)
    assert stream.status is ENDED


async def test_a_superseded_stream_sends_nothing_more() -> None:
    stream = StepStream(asyncio.get_running_loop())
    stream.send(pong(1))
    await asyncio.sleep(0)
    stream.supersede(ENDED)
    assert [message async for message in stream.messages()] == []


async def test_the_send_delay_runs_from_the_device_event_to_the_hand_over() -> None:
    stream = StepStream(asyncio.get_running_loop())
    device_end_ns = time.monotonic_ns() - 5_000
    boundary = worker_pb2.RunStepsResponse(boundary=worker_pb2.StepBoundary(completed_step_id=1))
    stream.send(boundary, device_end_ns)
    stream.end(None)
    sent = [message async for message in stream.messages()]
    assert 5_000 <= sent[0].boundary.send_delay_ns <= time.monotonic_ns() - device_end_ns
