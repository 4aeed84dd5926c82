"""The CUDA runner, its kernels run on this CPU, against the CPU's: every family, every option, every kind of step.

The back end's memory cannot be looked into and its copies to the host arrive late, so a step that would wait for a
GPU fails here. Rules F2, G7, H7, I7, J1, J2, J3, J7, J8.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch

from stepahead.kernels.cuda.host.opaque import HostWait, OpaqueBackend
from stepahead.worker.errors import ModelError
from stepahead.worker.model.cuda_engine import CudaOptions, graph_sizes
from stepahead.worker.model.cuda_runner import CudaRunner
from stepahead.worker.model.registry import make_cuda_runner, make_runner
from stepahead.worker.runner import LaunchingRunner, SampleStatus
from tests.kernels.cuda.conftest import compilers  # noqa: F401 - skips where kernels cannot be compiled
from tests.worker_model.conftest import VOCAB_SIZE
from tests.worker_model.driver import Driver
from tests.worker_model.plan_driver import SHAPE, Asked, PlanDriver
from tests.worker_model.test_sampling_options import DRAWN, OPTIONS, bad_words_from

PROMPT = np.random.default_rng(4).integers(3, VOCAB_SIZE, 19).tolist()
LOGPROBS = {"logprobs_top_k": 3, "prompt_logprobs_top_k": 2}
# One family for each thing that only it has.
KINDS = [
    *("llama-mha", "llama-biases", "llama-rope-yarn", "qwen2-window", "smollm3", "gemma", "gemma2", "gemma3"),
    *("phi3-longrope", "mixtral", "qwen3-moe"),
]


def cuda_runner(model, *, dtype="float32", backend=None, **options):
    return CudaRunner(str(model.path), dtype, backend or OpaqueBackend(), CudaOptions(forbid_waits=True, **options))


def cpu_runner(model):
    return make_runner(str(model.path), dtype="float32", threads=1, kernels="torch")


def assert_same(found, wanted):
    assert found.tokens == wanted.tokens
    for ours, theirs in ((found.logprobs, wanted.logprobs), (found.prompt_logprobs, wanted.prompt_logprobs)):
        assert [(one.position, one.rank, one.top_ids) for one in ours] == [
            (one.position, one.rank, one.top_ids) for one in theirs
        ]
        for one, other in zip(ours, theirs, strict=True):
            np.testing.assert_allclose([one.value, *one.top_values], [other.value, *other.top_values], atol=1e-4)


@pytest.fixture
def gpu(tiny):
    return PlanDriver(cuda_runner(tiny("llama-gqa-tied")))


@pytest.fixture
def cpu(tiny):
    return PlanDriver(cpu_runner(tiny("llama-gqa-tied")))


@pytest.mark.parametrize("variant", KINDS)
def test_every_kind_of_family_gives_the_cpus_tokens_in_float32(tiny, variant):
    model, backend = tiny(variant), OpaqueBackend()
    asked = [Asked(PROMPT, LOGPROBS), Asked(PROMPT[:3], DRAWN), Asked(PROMPT[4:], DRAWN | LOGPROBS)]
    wanted = PlanDriver(cpu_runner(model)).generate(asked, 9, chunk=7)
    found = PlanDriver(cuda_runner(model, backend=backend)).generate(asked, 9, chunk=5, ahead=1)
    for ours, theirs in zip(found, wanted, strict=True):
        assert_same(ours, theirs)
    assert backend.num_replays >= 6


@pytest.mark.parametrize("base", [{}, DRAWN], ids=["greedy", "drawn"])
@pytest.mark.parametrize("option", OPTIONS)
def test_j1_j7_every_option_means_the_same(gpu, cpu, option, base):
    """Beside strangers, and from the middle of a replay; the state counts a token before the host knows it."""
    plain = cpu.generate([Asked(PROMPT, base)], 12)[0].tokens
    fields = base | (bad_words_from(plain) if option == "bad-words" else OPTIONS[option])
    asked = [
        Asked(PROMPT, fields | LOGPROBS | {"processed_logprobs": True}),
        Asked(PROMPT[:4]),
        Asked(PROMPT, fields | LOGPROBS),
    ]
    wanted = cpu.generate(asked, 12)
    for ours, theirs in zip(gpu.generate(asked, 12, chunk=6), wanted, strict=True):
        assert_same(ours, theirs)
    resumed = gpu.generate([replace(asked[0], outputs=wanted[0].tokens[:5])], 12, ahead=2)[0]
    assert resumed.tokens == wanted[0].tokens[5:]


def test_j2_rows_that_sample_nothing_count_nothing(gpu, cpu):
    """A row without an allowed id, and the hole behind it; a step may also leave sampling rows out."""
    results = []
    for driver in (cpu, gpu):
        admissions = [
            driver.admission(slot, Asked(PROMPT[: 3 + slot], {"presence_penalty": 20.0})) for slot in (0, 1)
        ]
        rows = [(slot, 0, 3 + slot, True) for slot in (0, 1)]
        driver.execute(driver.build(rows=rows, admissions=admissions, joined_slots=[0, 1]))
        skipped = driver.build(decode=2)
        nothing = np.zeros(-(-VOCAB_SIZE // 8), np.uint8)
        masked = replace(skipped, sampling=replace(skipped.sampling, masks=(nothing, None)))
        found = [driver.execute(masked), driver.execute(driver.build(decode=2))]
        driver.table.note_unsampled(slot=0, incarnation=admissions[0].incarnation, step_id=2, position=3)
        again = driver.build(rows=[(0, 3, 1, True)], decode=1)
        found += [driver.execute(again), driver.execute(driver.build(decode=2))]
        results.append([(one.status.tolist(), one.token_ids[one.status == 0].tolist()) for one in found])
    assert results[0] == results[1]
    assert results[1][0][0] == [SampleStatus.NOTHING_ALLOWED, SampleStatus.OK]
    assert results[1][1][0] == [SampleStatus.POSITION_MISMATCH, SampleStatus.OK]


def test_i7_masks_and_left_out_rows(tiny):
    """Grammar masks reach the device packed; rows that a gate skips are left out of the sampling."""
    model, allowed = tiny("llama-mha"), np.zeros(VOCAB_SIZE, np.bool_)
    allowed[[7, 50, 130]] = True
    outputs = []
    for runner in (cpu_runner(model), cuda_runner(model)):
        driver = Driver(runner)
        seqs = [driver.admit(PROMPT, mask=np.packbits(allowed, bitorder="little")), driver.admit(PROMPT[:2])]
        driver.run(seqs, 5, chunk=6)
        batch = driver.batch([(seqs[0], 1), (seqs[1], 1)])
        runner.forward(batch)
        last = replace(
            batch,
            sample_rows=batch.sample_rows[1:],
            sampling=replace(driver.batch([(seqs[1], 1)]).sampling, masks=()),
        )
        outputs.append([seq.outputs[:5] for seq in seqs] + [runner.sample(last).token_ids.tolist()])
    assert outputs[0] == outputs[1]
    assert set(outputs[0][0]) <= {7, 50, 130}


def test_f2_a_copied_block_continues_as_its_original(gpu, cpu):
    """A second choice forks the prompt: its last block is a copy."""
    results = []
    for driver in (cpu, gpu):
        first = driver.admission(0, Asked(PROMPT))
        found = driver.execute(driver.build(rows=[(0, 0, 19, True)], admissions=[first], joined_slots=[0]))
        fork = driver.admission(1, Asked(PROMPT, DRAWN))
        fork.block_ids[:4] = first.block_ids[:4]
        fork.num_settled_tokens = 18
        copies = {"copy_src_block_ids": [first.block_ids[4]], "copy_dst_block_ids": [fork.block_ids[4]]}
        batch = driver.build(rows=[(1, 18, 1, True)], decode=1, admissions=[fork], joined_slots=[1], **copies)
        results.append([found.token_ids.tolist(), driver.execute(batch).token_ids.tolist()])
    assert results[0] == results[1]


def test_recorded_and_plain_steps_give_the_same_bits(tiny):
    asked = [Asked(PROMPT, DRAWN | LOGPROBS), Asked(PROMPT[:5], LOGPROBS), Asked(PROMPT[:9])]
    backends = [OpaqueBackend(), OpaqueBackend()]
    found = [
        PlanDriver(cuda_runner(tiny("qwen3"), backend=backend, graphs=graphs, deterministic=True)).generate(
            asked, 8
        )
        for backend, graphs in zip(backends, (True, False), strict=True)
    ]
    assert found[0] == found[1]
    assert (backends[0].num_replays > 0, backends[1].num_replays) == (True, 0)


def test_padding_rows_write_nowhere(tiny):
    runner = cuda_runner(tiny("llama-mha"))
    driver = Driver(runner, num_blocks=200)
    seqs = [driver.admit(PROMPT[:length]) for length in (5, 7, 9)]
    driver.run(seqs, 1)
    cache, cells = runner._engine._ops._cache, runner._engine.cells
    batch = driver.batch([(seq, 1) for seq in seqs])  # three rows: the recorded step has four
    before = [one.clone() for one in (cache, cells.tokens, cells.positions)]
    runner.forward(batch)
    changed = (cache != before[0]).as_subclass(torch.Tensor).flatten(3).any(-1).any(0)  # [blocks, 2]
    assert set(changed.any(1).nonzero().flatten().tolist()) <= set((batch.slot_mapping // 4).tolist())
    for cell, old in zip((cells.tokens, cells.positions), before[1:], strict=True):
        assert (cell == old).as_subclass(torch.Tensor).all()


@pytest.mark.parametrize(("dtype", "allowed"), [("bfloat16", 0.05), ("float16", 0.01)])
@pytest.mark.parametrize("variant", ["qwen3", "gemma3"])
def test_halves_are_near_float32(tiny, variant, dtype, allowed):
    model = tiny(variant)
    found = Driver(runner := cuda_runner(model, dtype=dtype))
    seq = found.admit(PROMPT)
    found.run([seq], 1, chunk=8)
    assert found.facts.dtype == dtype
    logits = runner._fed.logits.as_subclass(torch.Tensor)[0].numpy()
    wanted = model.logits(PROMPT)[-1]
    assert np.linalg.norm(logits - wanted) < allowed * np.linalg.norm(wanted)


def test_j3_deterministic_rows_have_the_same_bits_alone_and_beside_strangers(tiny):
    logits = []
    for lengths in ((19,), (19, 4, 11, 7, 15)):
        runner = cuda_runner(tiny("llama-gqa-tied"), deterministic=True)
        driver = Driver(runner, num_blocks=200)
        seqs = [driver.admit(PROMPT[:length]) for length in lengths]
        for _ in range(3):
            driver.step([(seq, len(seq.prompt) if not seq.decoding else 1) for seq in seqs])
        logits.append(runner._fed.logits.as_subclass(torch.Tensor)[0].clone())
    assert torch.equal(logits[0], logits[1])


def test_results_are_not_there_before_the_device_has_got_there(tiny):
    """`launch_sample` returns at once; whoever took the memory without waiting would read garbage."""
    runner = cuda_runner(tiny("llama-mha"))
    driver = Driver(runner)
    batch = driver.batch([(driver.admit(PROMPT), 19)])
    runner.forward(batch)
    fed = runner._fed
    with torch.inference_mode():
        sampled = runner._sampling.sample(batch, fed, runner._engine.cells)
        assert sampled.tokens.tolist() == [-1]
        runner._backend.record_event().synchronize()
    assert 0 <= sampled.tokens.tolist()[0] < VOCAB_SIZE
    with pytest.raises(HostWait, match="looks into"):
        fed.logits.tolist()


def test_a_wait_while_launching_is_noticed():
    backend = OpaqueBackend()
    tensor = backend.allocate((3,), torch.float32)
    with backend.forbid_waits():
        for wait in (
            lambda: backend.record_event().synchronize(),
            lambda: backend.copy(tensor, torch.zeros(3)),
            lambda: tensor + torch.zeros(3),
            lambda: bool(tensor.sum()),
            lambda: torch.nonzero(tensor),
            lambda: torch.where(tensor > 0, tensor, 0.0),
        ):
            with pytest.raises(HostWait):
                wait()
    backend.record_event().synchronize()
    with pytest.raises(HostWait, match="old values"):
        backend.capture(lambda: backend.upload(np.zeros(3, np.float32))).replay()


def test_the_cache_takes_what_the_largest_steps_leave(tiny):
    runner = cuda_runner(tiny("llama-mha"))
    assert isinstance(runner, LaunchingRunner)
    runner.load(lambda what, done, total: None)
    left = [runner.cache_bytes(SHAPE, share) for share in (0.9, 0.5)]
    total = OpaqueBackend().memory().total
    assert left[0] - left[1] == pytest.approx(total * 0.4, abs=2)
    assert 0 < left[0] < total * 0.9
    with pytest.raises(ModelError, match="--gpu-memory-utilization"):
        runner.cache_bytes(SHAPE, 0.0001)


@pytest.mark.parametrize(
    ("variant", "dtype", "message"),
    [
        ("llama-mqa-head-dim", "float32", "head size of 12"),
        ("llama-mha", "bfloat16", "head size of 8"),
    ],
)
def test_sizes_without_a_kernel_are_refused(tiny, variant, dtype, message):
    with pytest.raises(ModelError, match=message):
        cuda_runner(tiny(variant), dtype=dtype).load(lambda what, done, total: None)


def test_what_does_not_run_on_a_gpu_is_refused(tiny):
    with pytest.raises(ModelError, match="toy models compute on the CPU"):
        make_cuda_runner("toy:tagged", "cuda")
    with pytest.raises(ModelError, match="dtype 'int8'"):
        cuda_runner(tiny("llama-mha"), dtype="int8")
    if not torch.cuda.is_available():
        with pytest.raises(ModelError, match="--device cuda:1"):
            make_cuda_runner(str(tiny("llama-mha").path), "cuda:1")


@pytest.mark.parametrize("most", [1, 3, 8, 32, 100, 256, 500])
def test_recorded_sizes_pad_little(most):
    sizes = graph_sizes(most)
    assert list(sizes) == sorted(set(sizes))
    assert sizes[-1] == most
    for rows in range(8, most + 1):
        padded = min(size for size in sizes if size >= rows)
        assert padded - rows < max(8, rows / 4)
