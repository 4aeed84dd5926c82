"""Two ranks on devices, their kernels on this CPU and gloo between them, compute what one does.

Memory is opaque and copies to the host arrive late: a rank that would wait for a GPU in the middle of a step fails.
Rules F2, G7, J1, J2, J3, J7, J8.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from stepahead.kernels.cuda.backend import DeviceMemory
from stepahead.kernels.cuda.host.opaque import OpaqueBackend
from stepahead.worker.errors import ModelError, RankLost
from stepahead.worker.model import registry
from stepahead.worker.model.cuda_engine import CudaOptions
from stepahead.worker.model.cuda_runner import CudaRunner
from stepahead.worker.model.registry import make_cuda_runner, make_runner
from stepahead.worker.ranks import rank_group
from stepahead.worker.ranks.messages import Stop
from stepahead.worker.ranks.rank_group import RankGroup, connect
from stepahead.worker.runner import SampleStatus
from tests.e2e.byte_model import save_byte_model
from tests.e2e.stack import serve
from tests.e2e.test_cuda_worker import WORKER, mixed, serve_on_device
from tests.kernels.cuda.conftest import compilers  # noqa: F401 - skips where kernels cannot be compiled
from tests.worker_model import rank_pair
from tests.worker_model.conftest import VOCAB_SIZE
from tests.worker_model.driver import Driver
from tests.worker_model.plan_driver import SHAPE, Asked, PlanDriver
from tests.worker_model.rank_pair import PLACE, connected_pair
from tests.worker_model.test_cuda_runner import LOGPROBS, PROMPT, assert_same
from tests.worker_model.test_sampling_options import DRAWN, OPTIONS

RNG = np.random.default_rng(29)
PROMPTS = [RNG.integers(3, VOCAB_SIZE, size).tolist() for size in (1, 13, 22, 9)]


@pytest.fixture(scope="module")
def pair():
    with connected_pair() as ranks:
        yield ranks


@pytest.fixture(scope="module")
def byte_model(tmp_path_factory):
    return save_byte_model(tmp_path_factory.mktemp("bytes"))


def alone(spec, **options):
    return CudaRunner(str(spec), "float32", OpaqueBackend(), CudaOptions(forbid_waits=True, **options))


def seen(tensor):
    """A copy of what lies in the device's memory."""
    return tensor.as_subclass(torch.Tensor).clone()


def logits_of_every_step(driver):
    return rank_pair.logits_of_every_step(
        driver, PROMPTS, lambda runner: seen(runner._fed.logits).numpy(), chunk=7, num_outputs=6
    )


# Tied and not, shared KV heads, biases, norms of heads, caps of scores and logits, windows, experts.
@pytest.mark.parametrize("variant", ["llama-gqa-tied", "llama-biases", "qwen3", "gemma2", "mixtral"])
def test_two_ranks_compute_the_logits_and_the_tokens_of_one(tiny, pair, variant):
    path, sizes, backend = tiny(variant).path, {"num_blocks": 200}, OpaqueBackend()
    single = Driver(alone(path), **sizes)
    expected, expected_tokens = logits_of_every_step(single)
    with pair.device(path, backend=backend) as runner:
        driver = Driver(runner, **sizes)
        ours, tokens = logits_of_every_step(driver)
    assert tokens == expected_tokens
    for one, two in zip(expected, ours, strict=True):
        assert two.shape == one.shape
        assert np.abs(two - one).max() < 1e-5 * np.abs(one).max()  # sums in another order
    assert backend.num_replays >= 4
    assert driver.facts.fingerprint == single.facts.fingerprint
    assert (single.facts.device, driver.facts.device) == ("cpu", "cpu x2")
    assert driver.facts.kv_bytes_per_token == single.facts.kv_bytes_per_token
    assert driver.facts.weight_bytes < 1.5 * single.facts.weight_bytes


def test_j1_j7_j8_options_and_log_probabilities_mean_the_same(tiny, pair):
    """Drawn beside greedy, some steps ahead; more prompt tokens with log probabilities than rows of logits."""
    model = tiny("llama-gqa-tied")
    asked = [
        Asked(PROMPT, OPTIONS["all"] | DRAWN | LOGPROBS | {"processed_logprobs": True}),
        Asked(PROMPT[:4], DRAWN),
        Asked(PROMPT[2:], LOGPROBS),
    ]
    cpu = PlanDriver(make_runner(str(model.path), dtype="float32", threads=1, kernels="torch"))
    wanted = cpu.generate(asked, 10)
    with pair.device(model.path) as runner:
        driver = PlanDriver(runner)
        for ours, theirs in zip(driver.generate(asked, 10, chunk=17, ahead=2), wanted, strict=True):
            assert_same(ours, theirs)
        resumed = driver.generate([replace(asked[0], outputs=wanted[0].tokens[:5])], 10, ahead=1)[0]
    assert resumed.tokens == wanted[0].tokens[5:]


def test_f2_j2_copies_zeros_and_holes_reach_every_rank(tiny, pair):
    """A hole is known to rank 0's device alone: it must write nothing in another rank's cache either."""
    results = []

    def drive(runner):
        driver = PlanDriver(runner)
        first = driver.admission(0, Asked(PROMPT))
        steps = [driver.build(rows=[(0, 0, 19, True)], admissions=[first], joined_slots=[0])]
        fork = driver.admission(1, Asked(PROMPT, DRAWN))
        fork.block_ids[:4] = first.block_ids[:4]
        fork.num_settled_tokens = 18
        copies = {"copy_src_block_ids": [first.block_ids[4]], "copy_dst_block_ids": [fork.block_ids[4]]}
        steps.append(driver.build(rows=[(1, 18, 1, True)], decode=1, admissions=[fork], joined_slots=[1], **copies))
        nothing = np.zeros(-(-VOCAB_SIZE // 8), np.uint8)
        masked = driver.build(decode=2)
        steps.append(replace(masked, sampling=replace(masked.sampling, masks=(nothing, None))))
        hole = driver.build(decode=2)  # row 0 has sampled nothing. If it wrote, both rows would read it
        steps.append(replace(hole, slot_mapping=np.array([first.block_ids[0] * 4, hole.slot_mapping[1]])))
        found = [driver.execute(step) for step in steps]
        driver.table.note_unsampled(slot=0, incarnation=first.incarnation, step_id=3, position=20)
        again = driver.build(rows=[(0, 20, 1, True)], decode=1)  # written now, and read from then on
        found += [driver.execute(step) for step in (again, driver.build(decode=2), driver.build(decode=2))]
        last = driver.execute(replace(driver.build(decode=2), zeroed_blocks=(first.block_ids[0],)))
        results.append([(one.status.tolist(), one.token_ids[one.status == 0].tolist()) for one in [*found, last]])

    drive(alone(tiny("llama-mha").path))
    with pair.device(tiny("llama-mha").path) as runner:
        drive(runner)
    assert results[0] == results[1]
    assert [status for status, _ in results[1][2:4]] == [
        [SampleStatus.NOTHING_ALLOWED, SampleStatus.OK],
        [SampleStatus.POSITION_MISMATCH, SampleStatus.OK],
    ]


def test_j3_deterministic_rows_have_the_same_bits_alone_beside_strangers_and_recorded(tiny, pair):
    logits = []
    for lengths, graphs in (((19,), True), ((19, 4, 11, 7, 15), True), ((19, 4, 11), False)):
        with pair.device(tiny("llama-gqa-tied").path, deterministic=True, graphs=graphs) as runner:
            driver = Driver(runner, num_blocks=200)
            seqs = [driver.admit(PROMPT[:length]) for length in lengths]
            for _ in range(2):
                driver.step([(seq, len(seq.prompt) if not seq.decoding else 1) for seq in seqs])
            logits.append(seen(runner._fed.logits)[0])
    assert torch.equal(logits[0], logits[1])
    assert torch.equal(logits[0], logits[2])
    single = Driver(alone(tiny("llama-gqa-tied").path), num_blocks=200)
    single.run([single.admit(PROMPT)], 2)
    torch.testing.assert_close(logits[0], seen(single.runner._fed.logits)[0], rtol=1e-5, atol=1e-5)


@pytest.mark.e2e
@pytest.mark.parametrize("depth", [0, 2])
async def test_g7_two_ranks_behind_a_scheduler_give_the_cpus_tokens(pair, byte_model, depth):
    """Few blocks: sequences are preempted and replayed. The worker's end lets the other rank go."""
    messages = mixed()
    async with serve(str(byte_model), worker=WORKER | {"dtype": "float32"}) as stack:
        wanted = [(await stack.answer(message)).token_ids for message in messages]
    pair.tell("device", str(byte_model), "float32", {})
    fewer = WORKER | {"num_kv_blocks": 40}
    async with serve_on_device(byte_model, worker=fewer, place=PLACE, overlap_depth=depth) as stack:
        assert [answer.token_ids for answer in await stack.answers(messages)] == wanted
        await stack.assert_quiescent()
        (worker,) = (await stack.status()).workers
        assert (worker.steps.boundaries_with_running_step > 0) == (depth > 0)
        assert worker.device == "cpu x2"


def test_the_gpu_with_the_least_memory_sizes_the_cache(tiny, pair):
    limits, share, sizes = replace(SHAPE, max_num_batched_tokens=16), 0.5, OpaqueBackend().memory()
    wide = OpaqueBackend()
    wide.memory = lambda: DeviceMemory(total=1 << 40, free=1 << 40)
    with pair.device(tiny("llama-mha").path, backend=wide) as runner:
        runner.load(lambda *call: None)
        assert 0 < runner.cache_bytes(limits, share) < 2 * share * sizes.total, "the other rank has that much"
        wide.memory = lambda: DeviceMemory(total=sizes.total // 2, free=sizes.free // 2)
        assert 0 < runner.cache_bytes(limits, share) < share * sizes.total, "rank 0 has half of that"
        wide.memory = lambda: DeviceMemory(total=1 << 40, free=1 << 40)
        with pytest.raises(ModelError, match="nothing is left of 0% of the device's memory"):
            runner.cache_bytes(limits, 0.0001)


def test_ranks_that_would_compute_differently_refuse_to_start(tiny, pair):
    """Another model; and other options, with which recorded steps would not meet plain ones."""
    path = str(tiny("llama-mha").path)
    for told, message in (
        ((str(tiny("llama-gqa-tied").path), "float32", {}), "rank 1 has another model than rank 0"),
        (
            (path, "float32", {"graphs": False}),
            "rank 1 runs with --cuda-graphs off, rank 0 with --cuda-graphs on: give every rank the same options",
        ),
    ):
        pair.tell("device", *told)
        with pytest.raises(ModelError, match=message):
            pair.device_runner(path, "float32", OpaqueBackend()).load(lambda *call: None)


def test_a_shard_without_a_kernel_is_refused(tiny, pair):
    """Experts of 24 are 12 a rank, no multiple of what a kernel moves at once in bfloat16."""
    pair.tell("device", str(tiny("qwen3-moe").path), "bfloat16", {})
    with pytest.raises(ModelError, match="each of 2 ranks has an intermediate size of 12, not a multiple of 8"):
        pair.device_runner(tiny("qwen3-moe").path, "bfloat16", OpaqueBackend()).load(lambda *call: None)


@pytest.mark.parametrize(
    ("device", "changes", "visible", "wanted"),
    [
        ("cuda", {}, 2, 0),
        ("cuda:0", {"local_rank": 1, "rank": 1}, 2, 1),
        ("cuda:2", {"local_rank": 1, "rank": 1}, 4, 3),
        ("cuda", {"local_size": 1, "rank": 1}, 1, 0),  # a machine of its own
        ("cuda", {}, 1, "a GPU each, cuda:0 to cuda:1, and CUDA shows 1, cuda:0"),
        ("cuda:3", {}, 4, "a GPU each, cuda:3 to cuda:4, and CUDA shows 4, cuda:0, cuda:1, cuda:2, cuda:3"),
        ("cuda", {"local_size": 1, "local_rank": 2}, 1, "cuda:0 to cuda:2, and CUDA shows 1"),
        ("cuda", {}, 0, "and CUDA shows 0"),
    ],
)
def test_each_rank_of_a_machine_has_a_gpu_of_its_own(monkeypatch, device, changes, visible, wanted):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    place = replace(PLACE, **changes)
    if isinstance(wanted, int):
        assert registry._gpu_index(device, place) == wanted
    else:
        with pytest.raises(
            ModelError, match=f"--tensor-parallel-size 2: the ranks on this machine need {wanted}|{wanted}"
        ):
            make_cuda_runner("random:llama-tiny", device, place=place)


class FakeDistributed:
    """Notes what is asked of torch.distributed; every call goes through, or fails as NCCL does."""

    def __init__(self, fault=None):
        self.calls, self.fault = [], fault

    def __getattr__(self, name):
        def call(*arguments, **options):
            self.calls.append((name, arguments, options))
            if self.fault is not None:
                raise RuntimeError(self.fault)
            return name

        return call


@pytest.mark.parametrize(("rank", "handling"), [(0, "0"), (1, None)])
def test_gpus_are_connected_by_nccl_and_hosts_by_gloo(monkeypatch, rank, handling):
    """Rank 0 lets nobody abort a blocked sum: what is launched behind it would be answered as if it were right."""
    fake, environment = FakeDistributed(), {}
    monkeypatch.setattr(rank_group, "_dist", fake)
    monkeypatch.setattr(rank_group, "_store", lambda place: "store")
    monkeypatch.setattr(rank_group.os, "environ", environment)
    group = connect(replace(PLACE, rank=rank), torch.device("cuda", rank))
    (_, backend, options), (_, _, host) = fake.calls
    assert (backend, options["device_id"], options["rank"]) == (("nccl",), torch.device("cuda", rank), rank)
    assert (host["backend"], options["timeout"] < host["timeout"]) == ("gloo", True)
    assert environment.get("TORCH_NCCL_ASYNC_ERROR_HANDLING") == handling
    assert environment["NCCL_SOCKET_IFNAME"] == "=lo", "ranks of one machine"
    group.send(Stop())
    group.all_reduce(torch.zeros(1))
    assert [options.get("group") for _, _, options in fake.calls[2:]] == ["new_group", None]


def test_the_cause_that_nccl_names_is_told(monkeypatch):
    fault = "NCCL error in: x.cpp:4, unhandled cuda error\nncclUnhandledCudaError: ...\nLast error: Duplicate GPU"
    monkeypatch.setattr(rank_group, "_dist", FakeDistributed(fault))
    with pytest.raises(RankLost, match="unhandled cuda error Last error: Duplicate GPU"):
        RankGroup(0, 2, None).broadcast(torch.zeros(1))
