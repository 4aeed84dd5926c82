"""Everything of the service that is not a step: facts, tokenizer, health, bad messages, loading, shutdown."""

from __future__ import annotations

import asyncio
import hashlib
import threading

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from stepahead.v1 import worker_pb2
from stepahead.worker.announce import Announcer
from stepahead.worker.errors import ModelError
from stepahead.worker.runner import ModelFacts, ProgressCallback
from stepahead.worker.server import WorkerServer
from tests.conformance.double import Scheduler, connect, reason_of, serve, settings
from tests.worker.fakes import FakeRunner
from tests.worker.plans import start


async def test_worker_info_states_model_and_limits() -> None:
    async with serve(FakeRunner) as server, connect(server) as stub:
        info = await stub.GetWorkerInfo(worker_pb2.GetWorkerInfoRequest())
        assert (info.protocol_major, info.protocol_minor) == (1, 1)
        assert (info.model.name, info.model.vocab_size, info.model.dtype) == ("fake", 40, "int64")
        assert list(info.model.eos_token_ids) == [0]
        assert not info.model.HasField("bos_token_id")
        assert info.model.has_tokenizer
        limits = info.limits
        assert (limits.max_num_seqs, limits.max_overlap_depth, limits.num_slots) == (3, 2, 9)
        assert (limits.num_blocks, limits.block_size, limits.kv_cache_bytes) == (32, 4, 1024)
        assert (limits.max_num_batched_tokens, limits.max_model_len) == (8, 16)


async def test_the_tokenizer_comes_in_pieces_with_a_digest_on_the_last() -> None:
    async with serve(FakeRunner) as server, connect(server) as stub:
        pieces = [piece async for piece in stub.GetTokenizerBundle(worker_pb2.GetTokenizerBundleRequest())]
        bundle = b"".join(piece.data for piece in pieces)
        assert [len(piece.data) for piece in pieces] == [1 << 20, 1_536_000 - (1 << 20)]
        assert [piece.sha256 for piece in pieces] == ["", hashlib.sha256(bundle).hexdigest()]


class NoTokenizer(FakeRunner):
    def load(self, progress: ProgressCallback) -> ModelFacts:
        facts = super().load(progress)
        return ModelFacts(
            **{name: getattr(facts, name) for name in facts.__dataclass_fields__ if name != "tokenizer_bundle"}
        )


async def test_a_model_without_tokenizer_says_so() -> None:
    async with serve(NoTokenizer) as server, connect(server) as stub:
        assert not (await stub.GetWorkerInfo(worker_pb2.GetWorkerInfoRequest())).model.has_tokenizer
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            _ = [piece async for piece in stub.GetTokenizerBundle(worker_pb2.GetTokenizerBundleRequest())]
        assert caught.value.code() == grpc.StatusCode.NOT_FOUND
        assert reason_of(caught.value.trailing_metadata()) == "NO_TOKENIZER"


class SlowToLoad(FakeRunner):
    def __init__(self, go_on: threading.Event) -> None:
        super().__init__()
        self._go_on = go_on

    def load(self, progress: ProgressCallback) -> ModelFacts:
        self._go_on.wait(20)
        return super().load(progress)


async def test_while_weights_load_the_worker_answers_loading() -> None:
    go_on = threading.Event()
    server = WorkerServer(settings(), lambda: SlowToLoad(go_on), Announcer(None))
    await server.listen()
    loading = asyncio.create_task(server.load())
    async with connect(server) as stub, grpc.aio.insecure_channel(server.address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.GetWorkerInfo(worker_pb2.GetWorkerInfoRequest())
        assert (caught.value.code(), caught.value.details()) == (grpc.StatusCode.UNAVAILABLE, "loading")
        scheduler = Scheduler(stub)
        await scheduler.send_open()
        end = await scheduler.end()
        assert (end.code, end.reason) == (grpc.StatusCode.UNAVAILABLE, "LOADING")
        health = health_pb2_grpc.HealthStub(channel)
        services = ("", "stepahead.v1.WorkerService")
        requests = [health_pb2.HealthCheckRequest(service=service) for service in services]
        before = [(await health.Check(request)).status for request in requests]
        go_on.set()
        await loading
        after = [(await health.Check(request)).status for request in requests]
        assert before == [health_pb2.HealthCheckResponse.NOT_SERVING] * 2
        assert after == [health_pb2.HealthCheckResponse.SERVING] * 2
        assert (await stub.GetWorkerInfo(worker_pb2.GetWorkerInfoRequest())).model.name == "fake"
    assert await server.close()


class Unloadable(FakeRunner):
    def load(self, progress: ProgressCallback) -> ModelFacts:
        raise ModelError("no such model: give a folder")


async def test_a_model_that_cannot_be_loaded_fails_the_start() -> None:
    server = WorkerServer(settings(), Unloadable, Announcer(None))
    await server.listen()
    with pytest.raises(ModelError, match="give a folder"):
        await server.load()
    assert await server.close()


async def test_two_workers_cannot_share_a_port() -> None:
    """grpc#16920: with port reuse on, the second worker would steal connections."""
    async with serve(FakeRunner) as server:
        port = int(server.address.rpartition(":")[2])
        second = WorkerServer(settings(port=port), FakeRunner, Announcer(None))
        with pytest.raises(ModelError, match="cannot listen on"):
            await second.listen()
        await second.close()


async def test_the_first_message_must_open_and_only_the_first() -> None:
    async with serve(FakeRunner) as server, connect(server) as stub:
        scheduler = Scheduler(stub)
        await scheduler.send(ping=worker_pb2.Ping(nonce=1))
        end = await scheduler.end()
        assert (end.code, end.message) == (
            grpc.StatusCode.INVALID_ARGUMENT,
            "command: the first message must be open",
        )
        scheduler = Scheduler(stub)
        await scheduler.open()
        await scheduler.send_open(scheduler_epoch=2)
        assert (await scheduler.end()).code == grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("payload", [b"", b"\xfa\x07\x03abc"], ids=["empty", "unknown field"])
async def test_an_unset_or_unknown_command_ends_its_stream_only(payload: bytes) -> None:
    async with serve(FakeRunner) as server, connect(server) as stub:
        scheduler = Scheduler(stub)
        await scheduler.open()
        await scheduler.send_raw(payload)
        end = await scheduler.end()
        assert (end.code, end.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD")
        assert end.message.startswith("command: is not set, or unknown")
        await Scheduler(stub).open(scheduler_epoch=2)


async def test_bytes_that_are_no_message_end_their_stream_only() -> None:
    async with serve(FakeRunner) as server, grpc.aio.insecure_channel(server.address) as channel:
        call = channel.stream_stream("/stepahead.v1.WorkerService/RunSteps")()
        await call.write(b"\xff\xff\xff")
        assert await call.code() in (grpc.StatusCode.INTERNAL, grpc.StatusCode.INVALID_ARGUMENT)
        assert "Traceback" not in (await call.details() or "")
        async with connect(server) as stub:
            await Scheduler(stub).open()


async def test_an_oversized_message_ends_its_stream_only() -> None:
    async with serve(FakeRunner) as server, grpc.aio.insecure_channel(server.address) as channel:
        call = channel.stream_stream("/stepahead.v1.WorkerService/RunSteps")()
        await call.write(b"\x12\x00" * (33 << 20))
        assert await call.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        async with connect(server) as stub:
            await Scheduler(stub).open()


async def test_shutdown_ends_streams_unavailable() -> None:
    async with serve(FakeRunner) as server, connect(server) as stub:
        scheduler = Scheduler(stub)
        await scheduler.open()
        await scheduler.plans(start(1, 0, [1, 2]))
        await scheduler.boundary()
        closing = asyncio.create_task(server.close())
        end = await scheduler.end()
        assert (end.code, end.reason) == (grpc.StatusCode.UNAVAILABLE, "WORKER_SHUTTING_DOWN")
        assert await closing
