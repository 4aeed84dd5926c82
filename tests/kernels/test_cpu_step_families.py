"""What families add to Llama, in the compiled step: against the reference, and bit by bit against itself."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from stepahead.kernels.block_tables import NO_SLOT, NULL_BLOCK
from stepahead.kernels.cpu.step.library import TensorKind
from stepahead.kernels.cpu.step.step_shape import MixtureShape
from stepahead.kernels.reference.attention import LayerAttention
from stepahead.kernels.reference.rope import RopeConfig
from tests.kernels.step_model import (
    ReferenceDecoder,
    available_sets,
    cases,
    layout_of,
    make_step,
    random_weights,
    shape_of,
)

SETS = available_sets()
ROPE = RopeConfig(head_dim=32, theta=10_000.0)
LOCAL = RopeConfig(head_dim=32, theta=50.0)


def layers_of(*windows, rope=ROPE):
    return {"num_layers": len(windows), "layers": tuple(LayerAttention(rope=rope, window=size) for size in windows)}


# The keys are taken in parts of 128: windows inside one, over several, and just one key.
ADDITIONS = {
    "windows": layers_of(1, 20, 150),
    "window-and-full": layers_of(40, None),
    "own-ropes": {"layers": (LayerAttention(rope=LOCAL, window=30), LayerAttention(rope=ROPE))},
    "no-rope": {"layers": (LayerAttention(rope=None), LayerAttention(rope=ROPE))},
    "no-rope-at-all": layers_of(None, None, rope=None),
    "attention-cap": {"attention_cap": 0.7, "attention_scale": 0.5},
    "logit-cap": {"logit_cap": 0.9},
    "embedding-scale": {"embedding_scale": 6.5},
    "embedding-scale-untied": {"embedding_scale": 6.5, "tied_head": False},
    "gelu": {"gelu": True},
    "post-norms": {"post_norms": True},
    "partial-rope": {"rope": RopeConfig(head_dim=32, theta=10_000.0, rotary_dim=12)},
}
EXPERTS = MixtureShape(
    num_experts=5, experts_per_token=2, intermediate_size=24, normalized=True, layers=(True, True)
)
# More experts than a panel has columns; a layer without any; weights that do not sum to 1.
MANY = {"num_experts": 41, "experts_per_token": 3, "layers": (True, False), "normalized": False}
MIXTURES = {
    "mixture": {"mixture": EXPERTS},
    "mixture-many": {"mixture": replace(EXPERTS, **MANY), "intermediate_size": 10},
    "mixture-all": {"mixture": replace(EXPERTS, experts_per_token=5), "post_norms": True},
}
GEMMA = {
    **layers_of(20, 150),
    "attention_cap": 5.0,
    "logit_cap": 9.0,
    "embedding_scale": 6.5,
    "gelu": True,
    "post_norms": True,
}


def decoder(additions):
    shape = shape_of(**additions)
    return shape, random_weights(shape, biases=False, qk_norm=True)


@pytest.mark.parametrize("isa", SETS)
@pytest.mark.parametrize("name", [*ADDITIONS, *MIXTURES, "gemma"])
def test_mixed_steps_equal_the_reference(name, isa):
    rng = np.random.default_rng(5)
    shape, weights = decoder({**ADDITIONS, **MIXTURES, "gemma": GEMMA}[name])
    step, reference = make_step(shape, weights, isa, num_blocks=60), ReferenceDecoder(shape, weights, num_blocks=60)
    llama = {key: array for key, array in weights.items() if not key[0].name.startswith("POST")}
    llama |= {key: array[0] for key, array in weights.items() if array.ndim == 3}  # its first expert, for all
    plain_shape = shape_of(num_layers=shape.num_layers, tied_head=shape.tied_head)
    plain = ReferenceDecoder(plain_shape, llama, num_blocks=60)
    blocks = rng.permutation(60).reshape(3, 20).tolist()
    fed, differences = [0, 0, 0], []
    for counts in ([7, 1, 130], [90, 5, 1], [1, 1, 1], [33, 200, 1], [1, 1, 60]):
        layout = layout_of(list(zip(fed, counts, strict=True)), blocks)
        token_ids = rng.integers(0, shape.vocab_size, sum(counts))
        outputs = step.forward(token_ids, layout, np.arange(len(token_ids)))
        expected = reference.forward(token_ids, layout)
        np.testing.assert_allclose(outputs.logits, expected, atol=3e-5)
        np.testing.assert_array_equal(outputs.best_ids, outputs.logits.argmax(axis=1))
        differences.append(np.abs(plain.forward(token_ids, layout) - expected).max())
        fed = [start + count for start, count in zip(fed, counts, strict=True)]
    assert max(differences) > 1e-2  # else the addition does nothing here


def last_logits(step, token_ids, counts, block_size=16):
    """The bits of the last token's logits, the prompt fed in chunks over shuffled blocks, a neighbour beside it."""
    rng = np.random.default_rng(len(counts))
    blocks = rng.permutation(60).tolist()
    own, other, start = blocks[:30], blocks[30:], 0
    for count in counts:
        neighbour = rng.integers(1, 20)
        rows = [(start, count), (0, neighbour)] if count % 2 else [(0, neighbour), (start, count)]
        tables = [own, other] if count % 2 else [other, own]
        given = [token_ids[start : start + count], rng.integers(0, 99, neighbour)]
        layout = layout_of(rows, tables, block_size)
        last = count - 1 if count % 2 else neighbour + count - 1
        outputs = step.forward(np.concatenate(given if count % 2 else given[::-1]), layout, np.array([last]))
        start += count
    return outputs.logits[0].view(np.uint32)


@pytest.mark.parametrize(("isa", "dtype"), cases())
@pytest.mark.parametrize("name", ["windows", "gemma", "mixture-many"])
def test_h7_the_same_bits_however_tokens_are_batched(name, dtype, isa):
    shape, weights = decoder({**ADDITIONS, **MIXTURES, "gemma": GEMMA}[name])
    token_ids = np.random.default_rng(1).integers(0, shape.vocab_size, 281)
    step = make_step(shape, weights, isa, dtype=dtype, num_blocks=60)
    expected = last_logits(step, token_ids, [281])
    cuts = [[280, 1], [128, 153], [1] * 281]
    cuts += [[size] * (281 // size) + [281 % size] * (281 % size > 0) for size in range(2, 18)]
    for counts in cuts:
        np.testing.assert_array_equal(last_logits(step, token_ids, counts), expected, str(counts[:3]))


@pytest.mark.parametrize(("isa", "dtype"), cases())
@pytest.mark.parametrize("name", ["windows", "gemma", "mixture-many"])
def test_h7_the_same_bits_in_a_crowd(name, dtype, isa):
    """Rows of many lengths, some with chunks; then each alone. So many keep the cores busy with matrices."""
    shape, weights = decoder({**ADDITIONS, **MIXTURES, "gemma": GEMMA}[name])
    rng = np.random.default_rng(7)
    counts, starts = [1, 3] * 20, rng.integers(0, 60, 40).tolist()
    blocks = rng.permutation(160).reshape(40, 4).tolist()
    step = make_step(shape, weights, isa, dtype=dtype, num_blocks=160)
    tokens = [rng.integers(0, shape.vocab_size, start + count) for start, count in zip(starts, counts, strict=True)]
    for own, start, table in zip(tokens, starts, blocks, strict=True):
        if start:
            step.forward(own[:start], layout_of([(0, start)], [table]), np.array([], np.int64))
    fed = np.concatenate([own[start:] for own, start in zip(tokens, starts, strict=True)])
    layout, last = layout_of(list(zip(starts, counts, strict=True)), blocks), np.cumsum(counts) - 1
    together = step.forward(fed, layout, last).logits.copy()
    # Every token's logits, and in another order: the last layer then keeps all tokens.
    every = step.forward(fed, layout, np.arange(len(fed))).logits[last]
    backwards = step.forward(fed, layout, last[::-1].copy()).logits[::-1]
    np.testing.assert_array_equal(every.view(np.uint32), together.view(np.uint32))
    np.testing.assert_array_equal(backwards.view(np.uint32), together.view(np.uint32))
    for row in (0, 1, 17, 38, 39):
        alone = layout_of([(starts[row], counts[row])], [blocks[row]])
        logits = step.forward(tokens[row][starts[row] :], alone, np.array([counts[row] - 1])).logits
        np.testing.assert_array_equal(logits[0].view(np.uint32), together[row].view(np.uint32))


@pytest.mark.parametrize("isa", SETS)
@pytest.mark.parametrize("name", ["windows", "window-and-full", "post-norms"])
def test_n6_n7_rows_that_see_from_a_floor_on_and_tokens_that_are_not_kept(name, isa):
    """In front of a floor there is no block; what is not kept changes no byte of the cache."""
    rng = np.random.default_rng(12)
    shape = shape_of(**ADDITIONS[name])
    weights = random_weights(shape, biases=False, qk_norm=False)
    step, reference = make_step(shape, weights, isa), ReferenceDecoder(shape, weights)
    blocks = rng.permutation(40).reshape(2, 20).tolist()
    layout = layout_of([(0, 200), (0, 9)], blocks)
    token_ids = rng.integers(0, shape.vocab_size, 209)
    step.forward(token_ids, layout, np.arange(209))
    reference.forward(token_ids, layout)
    before = [part[:, blocks[0]].copy() for part in step.cache_memory()]
    for start, count in ((160, 1), (160, 20), (175, 25), (199, 1)):
        layout = layout_of([(start, count), (9, 1)], blocks)
        layout.slot_mapping[:count] = NO_SLOT
        layout.block_tables[0, :10] = NULL_BLOCK
        layout = replace(layout, floors=np.array([160, 0], np.int32))
        token_ids = rng.integers(0, shape.vocab_size, count + 1)
        ours = step.forward(token_ids, layout, np.arange(count + 1)).logits
        np.testing.assert_allclose(ours, reference.forward(token_ids, layout), atol=2e-5)
    for part, earlier in zip(step.cache_memory(), before, strict=True):
        np.testing.assert_array_equal(part[:, blocks[0]], earlier)


@pytest.mark.parametrize("isa", SETS)
def test_j10_a_window_passes_over_what_it_left_behind(isa):
    """Blocks wholly before every window are not read: they may be gone, and hold anything."""
    shape, weights = decoder(layers_of(20, 30))
    step = make_step(shape, weights, isa)
    tokens = np.random.default_rng(2).integers(0, shape.vocab_size, 201)
    blocks = list(range(13))
    step.forward(tokens[:200], layout_of([(0, 200)], [blocks]), np.array([], np.int64))
    follow = layout_of([(200, 1)], [blocks])
    expected = step.forward(tokens[200:], follow, np.array([0])).logits
    for part in step.cache_memory():
        part[:, :10] = np.nan  # positions 0 .. 159; the window begins at 171
    np.testing.assert_array_equal(step.forward(tokens[200:], follow, np.array([0])).logits, expected)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": (LayerAttention(rope=ROPE),)}, "layers: 1 entries for 2 layers"),
        (layers_of(3, 0), "window must be positive, not 0"),
        (layers_of(3, 3, rope=RopeConfig(head_dim=16, theta=1.0)), "rope.head_dim 16 is not head_dim 32"),
        ({"attention_cap": 0.0}, "attention_cap must be positive"),
        ({"mixture": replace(EXPERTS, layers=(True,))}, "mixture.layers: 1 entries for 2 layers"),
        (
            {"mixture": replace(EXPERTS, experts_per_token=6)},
            "must be in 1..num_experts 5, not 6",
        ),
        ({"mixture": replace(EXPERTS, intermediate_size=0)}, "mixture.intermediate_size must be positive"),
        ({"mixture": EXPERTS, "gelu": True}, "the experts of a mixture use silu"),
        ({"logit_cap": -1.0}, "logit_cap must be positive"),
    ],
)
@pytest.mark.skipif(not SETS, reason="the step library cannot be built here")
def test_shapes_that_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        make_step(shape_of(**changes), {}, SETS[0])


@pytest.mark.skipif(not SETS, reason="the step library cannot be built here")
def test_a_post_norm_needs_a_model_that_has_them():
    _, weights = decoder({"post_norms": True})
    with pytest.raises(ValueError, match="POST_ATTENTION_NORM: this model has no post norms"):
        make_step(shape_of(), weights, SETS[0])


@pytest.mark.parametrize("isa", SETS)
def test_j10_a_token_that_routes_by_nan_fails_alone(isa):
    shape, weights = decoder({"mixture": EXPERTS, "tied_head": False})
    weights[TensorKind.EMBEDDING, 0][7] = np.nan
    step, layout = make_step(shape, weights, isa), layout_of([(0, 1), (0, 1)], [[3], [8]])
    expected = step.forward(np.array([4, 5]), layout, np.arange(2)).logits
    outputs = step.forward(np.array([7, 5]), layout, np.arange(2))
    assert np.isnan(outputs.best_logits).tolist() == [True, False]
    np.testing.assert_array_equal(outputs.logits[1], expected[1])


@pytest.mark.skipif(not SETS, reason="the step library cannot be built here")
def test_weights_that_a_mixture_or_an_mlp_does_not_have():
    mixed = shape_of(mixture=replace(EXPERTS, layers=(True, False)))
    step = make_step(mixed, {}, SETS[0])
    gate, router = torch.zeros(24, 40), torch.zeros(5, 40)
    step.set_tensor(TensorKind.GATE, 0, gate, expert=4)
    for arguments, message in (
        ((TensorKind.GATE, 0, gate, 5), "GATE of layer 0: expert 5 is outside 0..4"),
        ((TensorKind.GATE, 1, torch.zeros(72, 40), 1), "GATE of layer 1: expert 1 is outside 0..0"),
        ((TensorKind.QUERY, 0, torch.zeros(128, 40), 1), "QUERY of layer 0: expert 1 is outside 0..0"),
        ((TensorKind.ROUTER, 1, router, 0), "ROUTER: layer 1 is no mixture"),
        ((TensorKind.UP_BIAS, 0, torch.zeros(24), 0), "UP_BIAS: layer 0 is a mixture"),
    ):
        with pytest.raises(ValueError, match=message):
            step.set_tensor(*arguments[:3], expert=arguments[3])
