"""The counter-based generator: published vectors, and draws that depend on their three numbers only (J4, J5)."""

import numpy as np
import pytest

from stepahead.kernels.reference.philox import draw_uniform, draw_words, philox_4x32

# kat_vectors of Random123 1.14: "philox4x32 10", counter, key, result.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    (
        (0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF),
        (0xFFFFFFFF, 0xFFFFFFFF),
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_published_vectors(counter, key, expected):
    words = philox_4x32(np.array([counter], np.uint32), np.array([key], np.uint32))
    assert tuple(words[0].tolist()) == expected


def test_vectorised_equals_one_by_one():
    counters = np.array([entry[0] for entry in KNOWN], np.uint32)
    keys = np.array([entry[1] for entry in KNOWN], np.uint32)
    assert philox_4x32(counters, keys).tolist() == [list(entry[2]) for entry in KNOWN]


def test_draw_places_its_numbers_as_documented():
    seed, choice, output = 0x299F31D0A4093822, 0x0370734413198A2E, 0x05A308D3243F6A88
    words = draw_words(np.array([seed], np.uint64), np.array([choice]), np.array([output]))
    counter = np.array([[0x243F6A88, 0x05A308D3, 0x13198A2E, 0x03707344]], np.uint32)
    assert words.tolist() == philox_4x32(counter, np.array([[0xA4093822, 0x299F31D0]], np.uint32)).tolist()


def test_j4_draw_is_the_same_alone_and_in_any_batch():
    rng = np.random.default_rng(1)
    seeds = rng.integers(0, 2**64, 100, dtype=np.uint64)
    choices, outputs = rng.integers(0, 8, 100), rng.integers(0, 5000, 100)
    together = draw_uniform(seeds, choices, outputs)
    order = rng.permutation(100)
    assert (draw_uniform(seeds[order], choices[order], outputs[order]) == together[order]).all()
    for row in range(100):
        one = slice(row, row + 1)
        assert draw_uniform(seeds[one], choices[one], outputs[one])[0] == together[row]


def test_j5_seed_choice_and_output_each_change_the_draw():
    draws = {
        float(draw_uniform(np.array([seed], np.uint64), np.array([choice]), np.array([output]))[0])
        for seed in (0, 1, 2**32, 2**63)
        for choice in (0, 1, 7)
        for output in (0, 1, 4095)
    }
    assert len(draws) == 4 * 3 * 3


def test_draws_are_uniform():
    outputs = np.arange(20_000)
    draws = draw_uniform(np.full(20_000, 7, np.uint64), np.zeros(20_000, np.int64), outputs)
    assert draws.min() >= 0.0
    assert draws.max() < 1.0
    counts = np.histogram(draws, bins=20, range=(0, 1))[0]
    chi_square = ((counts - 1000) ** 2 / 1000).sum()
    assert chi_square < 43.8  # 0.999 quantile of 19 degrees of freedom; the draws are fixed, so this never flakes
