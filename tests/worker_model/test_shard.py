"""What each rank holds of a model, and that four ranks' parts are the whole; no process but this one."""

from __future__ import annotations

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace

import numpy as np
import pytest
import torch

from stepahead.kernels.block_tables import GroupLayout
from stepahead.kernels.ops import StepLayout
from stepahead.worker.errors import ModelError, OptionRefused
from stepahead.worker.model.blank_steps import largest_chunks
from stepahead.worker.model.checkpoint import open_checkpoint
from stepahead.worker.model.config import read_config
from stepahead.worker.model.torch_engine import TorchEngine
from stepahead.worker.ranks.communicator import Communicator
from stepahead.worker.ranks.messages import (
    Allocate,
    ChangeBlocks,
    Forward,
    Launch,
    MeasureCache,
    RecordSteps,
    Stop,
    pack,
    unpack,
)
from stepahead.worker.ranks.place import RankPlace
from stepahead.worker.ranks.shard import ShardSource
from stepahead.worker.ranks.split import shard_config
from stepahead.worker.runner import CacheGroup, CacheShape, PromptTargets
from tests.worker_model.conftest import VOCAB_SIZE
from tests.worker_model.gguf_files import write_gguf

SHAPE = CacheShape(
    num_slots=2, num_blocks=8, block_size=4, max_model_len=32, max_num_batched_tokens=32, max_num_seqs=2
)
TOKENS = np.random.default_rng(6).integers(3, VOCAB_SIZE, 18)
LAYOUT = StepLayout(
    positions=np.arange(18),
    slot_mapping=np.arange(4, 22),
    query_start_loc=np.array([0, 18], np.int32),
    seq_lens=np.array([18], np.int32),
    block_tables=np.array([[1, 2, 3, 4, 5]], np.int32),
)


class ThreadRanks:
    """Ranks as threads of one process: a call returns when every rank has made it."""

    def __init__(self, size):
        self.size = size
        self.barrier = threading.Barrier(size, timeout=20)
        self.parts = [torch.empty(0)] * size

    def meet(self, rank, x):
        self.parts[rank] = x.clone()
        self.barrier.wait()
        parts = list(self.parts)
        self.barrier.wait()
        return parts


class ThreadRank(Communicator):
    def __init__(self, ranks, rank):
        self.ranks = ranks
        self._rank = rank

    @property
    def rank(self):
        return self._rank

    @property
    def size(self):
        return self.ranks.size

    def all_reduce(self, x):
        return x.copy_(sum(self.ranks.meet(self._rank, x)))

    def gather(self, x):
        parts = self.ranks.meet(self._rank, x)
        return parts if self._rank == 0 else []


def logits_of(path, size):
    """[18, vocab_size] of every rank's engine after one prompt."""
    ranks = ThreadRanks(size)

    def run(rank):
        checkpoint = open_checkpoint(str(path))
        engine = TorchEngine(
            checkpoint.config, checkpoint.weights, torch.float32, 1, lambda *call: None, ThreadRank(ranks, rank)
        )
        engine.allocate(SHAPE)
        logits = engine.forward(TOKENS, LAYOUT, np.arange(18)).logits
        checkpoint.close()
        return logits

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))


@pytest.mark.parametrize("variant", ["llama-biases", "gemma3", "phi3", "qwen3-moe"])
def test_four_ranks_with_two_kv_heads_are_the_whole(tiny, variant):
    """Each KV head is on two ranks; 131 ids are 33 a rank and one row of padding."""
    first, *others = logits_of(tiny(variant).path, 4)
    np.testing.assert_allclose(first, tiny(variant).logits(TOKENS.tolist()), atol=1e-3)
    assert [len(logits) for logits in others] == [0, 0, 0]


@pytest.mark.parametrize(
    ("variant", "size", "message"),
    [
        (
            "llama-gqa-tied",
            3,
            r"3 does not divide num_attention_heads 4 and num_key_value_heads 2; possible are 2, 4",
        ),
        ("mixtral", 5, r"num_attention_heads 4 and num_key_value_heads 2 and the experts' intermediate size 48"),
        ("qwen3-moe", 16, r"num_attention_heads 4 and the experts' intermediate size 24; possible are 2, 4"),
        ("llama-gqa-tied", 8, r"does not divide num_attention_heads 4; possible"),
    ],
)
def test_sizes_that_do_not_divide_are_refused_by_name(tiny, variant, size, message):
    with pytest.raises(OptionRefused, match=message):
        shard_config(read_config(tiny(variant).path), size)


def test_a_model_that_cannot_be_split_at_all_is_told_apart(tiny):
    config = replace(read_config(tiny("llama-mha").path), intermediate_size=47)
    with pytest.raises(ModelError, match="intermediate_size 47; this model cannot be split"):
        shard_config(config, 2)
    mixture = read_config(tiny("mixtral").path)
    assert shard_config(replace(mixture, intermediate_size=47), 2).num_heads == 2, "no layer has such an MLP"


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "model.layers.0.self_attn.k_proj.weight"])
def test_a_tensor_of_another_size_is_refused_as_a_whole(tiny, name):
    """A rank's part of it might have had the right size."""
    checkpoint = open_checkpoint(str(tiny("llama-mha").path))
    config = replace(checkpoint.config, vocab_size=132, num_kv_heads=2)
    with pytest.raises(ModelError, match=rf"{name} has shape .* the configuration says"):
        ShardSource(checkpoint.weights, config, 0, 2).read(name)
    checkpoint.close()


def test_a_rank_maps_its_part_and_copies_nothing(tiny):
    checkpoint = open_checkpoint(str(tiny("llama-gqa-tied").path))
    whole, _ = checkpoint.weights.read("model.layers.1.mlp.down_proj.weight")
    part, stored_bytes = ShardSource(checkpoint.weights, checkpoint.config, 1, 2).read(
        "model.layers.1.mlp.down_proj.weight"
    )
    assert torch.equal(part, whole[:, 24:])
    assert part.untyped_storage().nbytes() > part.numel() * 4, "a view of the mapped tensor"
    assert stored_bytes == whole.numel() * 4
    checkpoint.close()


def test_messages_survive_the_way_between_ranks():
    grouped = replace(SHAPE, more_groups=(CacheGroup(8, 3),), group_of_layer=(0, 1))
    for message in (
        Allocate(SHAPE),
        Allocate(grouped),
        ChangeBlocks(((1, 2), (3, 4)), (5,)),
        ChangeBlocks((), ()),
        MeasureCache(SHAPE, 0.1),
        RecordSteps(),
        Stop(),
    ):
        assert unpack(pack(message)) == message
    window = GroupLayout(np.arange(18), np.array([[-1, 2]], np.int32), np.array([4], np.int32))
    layout = replace(LAYOUT, more_groups=(window,), floors=np.array([0], np.int32))
    message = unpack(pack(Forward(TOKENS, layout, np.zeros(0, np.int64))))
    assert isinstance(message, Forward)
    np.testing.assert_array_equal(message.token_ids, TOKENS)
    assert message.logit_tokens.dtype == np.int64
    assert len(message.logit_tokens) == 0
    (group,) = message.layout.more_groups
    arrays = [
        (getattr(received, each.name), getattr(sent, each.name))
        for received, sent in ((message.layout, layout), (group, window))
        for each in fields(sent)
        if each.name != "more_groups"
    ]
    for array, expected in arrays:
        assert (array.dtype, array.flags.writeable) == (expected.dtype, True)
        np.testing.assert_array_equal(array, expected)
    with pytest.raises(TypeError, match="a bytes cannot stand in a message"):
        pack(ChangeBlocks((), (b"",)))  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="a RankPlace cannot stand in a message"):
        pack(Allocate(RankPlace(rank=0, size=2, local_size=2, address="", port=0)))  # pyright: ignore[reportArgumentType]


def test_a_whole_batch_survives_the_way_between_ranks():
    batch = replace(
        largest_chunks(SHAPE),
        copies=((1, 2),),
        zeroed_blocks=(3,),
        prompt_targets=(PromptTargets(0, 2, TOKENS),),
        more_groups=(GroupLayout(np.arange(18), np.array([[-1, 2]], np.int32)),),
    )
    message = unpack(pack(Launch(batch)))
    assert isinstance(message, Launch)
    for name in ("token_ids", "positions", "query_start_loc", "block_tables", "slot_mapping", "sample_rows"):
        found, wanted = getattr(message.batch, name), getattr(batch, name)
        assert found.dtype == wanted.dtype
        np.testing.assert_array_equal(found, wanted)
    assert (message.batch.copies, message.batch.zeroed_blocks) == (batch.copies, batch.zeroed_blocks)
    np.testing.assert_array_equal(message.batch.prompt_targets[0].token_ids, TOKENS)
    np.testing.assert_array_equal(message.batch.more_groups[0].block_tables, [[-1, 2]])
    np.testing.assert_array_equal(message.batch.sampling.temperature, batch.sampling.temperature)


@pytest.mark.parametrize("form", ["directory", "gguf"])
def test_a_model_that_cannot_be_shared_is_refused_before_torch_comes(tiny, tmp_path, form):
    """And so before any rank starts: here none could."""
    model = tiny("llama-gqa-tied")
    spec = str(model.path)
    if form == "gguf":
        spec = str(tmp_path / "model.gguf")
        write_gguf(tmp_path / "model.gguf", model, "llama")
    code = "import sys; sys.modules['torch'] = None; from stepahead.worker.__main__ import main; main()"
    arguments = ["--model", spec, "--tensor-parallel-size", "8", "--listen", "127.0.0.1:0"]
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.splitlines()
    assert "--tensor-parallel-size 8 does not divide num_attention_heads 4; possible are 2, 4" in line
