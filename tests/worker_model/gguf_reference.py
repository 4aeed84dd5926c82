"""Quantised GGUF blocks, number by number from the format's description (ggml-common.h and ggml-quants.c of ggml).

Slow and plain on purpose: what the loader computes with whole arrays is checked against this.
"""

import struct

import numpy as np


def half(raw, at):
    """A little-endian float16."""
    return struct.unpack_from("<e", raw, at)[0]


def nibbles(raw, at, count):
    """The low halves of `count` bytes, then their high halves."""
    low = [raw[at + i] & 15 for i in range(count)]
    return low + [raw[at + i] >> 4 for i in range(count)]


def q4_0(raw):
    """Scale, 32 numbers of 4 bits, zero at 8."""
    return [half(raw, 0) * (q - 8) for q in nibbles(raw, 2, 16)]


def q4_1(raw):
    """Scale, minimum, 32 numbers of 4 bits."""
    return [half(raw, 0) * q + half(raw, 2) for q in nibbles(raw, 4, 16)]


def fifth_bits(raw, at):
    """32 bits, one per number."""
    bits = struct.unpack_from("<I", raw, at)[0]
    return [(bits >> i & 1) << 4 for i in range(32)]


def q5_0(raw):
    """Scale, 32 fifth bits, 32 numbers of 4 bits, zero at 16."""
    return [half(raw, 0) * (q + h - 16) for q, h in zip(nibbles(raw, 6, 16), fifth_bits(raw, 2), strict=True)]


def q5_1(raw):
    """Scale, minimum, 32 fifth bits, 32 numbers of 4 bits."""
    bits = fifth_bits(raw, 4)
    return [half(raw, 0) * (q + h) + half(raw, 2) for q, h in zip(nibbles(raw, 8, 16), bits, strict=True)]


def q8_0(raw):
    """Scale, 32 signed bytes."""
    return [half(raw, 0) * q for q in struct.unpack_from("<32b", raw, 2)]


def six_bit_pairs(raw, at):
    """Eight (scale, minimum) pairs of 6 bits in 12 bytes."""
    pairs = []
    for i in range(8):
        if i < 4:
            pairs.append((raw[at + i] & 63, raw[at + i + 4] & 63))
        else:
            scale = raw[at + i + 4] & 15 | raw[at + i - 4] >> 6 << 4
            minimum = raw[at + i + 4] >> 4 | raw[at + i] >> 6 << 4
            pairs.append((scale, minimum))
    return pairs


def q2_k(raw):
    """16 groups of 16: 4-bit scale and minimum each, 2-bit numbers, then two scales of those."""
    d, dmin = half(raw, 80), half(raw, 82)
    values = []
    for i in range(256):
        part, inside = divmod(i, 128)
        q = raw[16 + part * 32 + inside % 32] >> 2 * (inside // 32) & 3
        group = raw[i // 16]
        values.append(d * (group & 15) * q - dmin * (group >> 4))
    return values


def q3_k(raw):
    """16 groups of 16: third bits (clear: minus 4), 2-bit numbers, 6-bit scales with zero at 32, a scale."""
    low = [raw[96 + i] & 15 for i in range(8)] + [raw[96 + i] >> 4 for i in range(8)]
    high = [raw[104 + i % 4] >> 2 * (i // 4) & 3 for i in range(16)]
    d = half(raw, 108)
    values = []
    for i in range(256):
        part, inside = divmod(i, 128)
        q = raw[32 + part * 32 + inside % 32] >> 2 * (inside // 32) & 3
        third = raw[i % 32] >> i // 32 & 1
        scale = (low[i // 16] | high[i // 16] << 4) - 32
        values.append(d * scale * (q - (0 if third else 4)))
    return values


def q4_k(raw):
    """Two scales, 8 groups of 32 with 6-bit scale and minimum, 4-bit numbers: a group low, the next high."""
    d, dmin = half(raw, 0), half(raw, 2)
    values = []
    for group, (scale, minimum) in enumerate(six_bit_pairs(raw, 4)):
        for i in range(32):
            q = raw[16 + group // 2 * 32 + i] >> 4 * (group % 2) & 15
            values.append(d * scale * q - dmin * minimum)
    return values


def q5_k(raw):
    """As q4_k, with fifth bits: bit g of byte i belongs to number i of group g."""
    d, dmin = half(raw, 0), half(raw, 2)
    values = []
    for group, (scale, minimum) in enumerate(six_bit_pairs(raw, 4)):
        for i in range(32):
            q = raw[48 + group // 2 * 32 + i] >> 4 * (group % 2) & 15 | (raw[16 + i] >> group & 1) << 4
            values.append(d * scale * q - dmin * minimum)
    return values


def q6_k(raw):
    """Low 4 bits, high 2 bits, 16 signed scales, a scale; zero at 32."""
    d = half(raw, 208)
    scales = struct.unpack_from("<16b", raw, 192)
    values = []
    for i in range(256):
        part, inside = divmod(i, 128)
        quarter, place = divmod(inside, 32)
        low = raw[part * 64 + place + 32 * (quarter % 2)] >> 4 * (quarter // 2) & 15
        high = raw[128 + part * 32 + place] >> 2 * quarter & 3
        values.append(d * scales[i // 16] * ((low | high << 4) - 32))
    return values


# type: how a block is read, its bytes, and where its float16 scales lie
BLOCKS = {
    "Q4_0": (q4_0, 18, slice(0, 2)),
    "Q4_1": (q4_1, 20, slice(0, 4)),
    "Q5_0": (q5_0, 22, slice(0, 2)),
    "Q5_1": (q5_1, 24, slice(0, 4)),
    "Q8_0": (q8_0, 34, slice(0, 2)),
    "Q2_K": (q2_k, 84, slice(80, 84)),
    "Q3_K": (q3_k, 110, slice(108, 110)),
    "Q4_K": (q4_k, 144, slice(0, 4)),
    "Q5_K": (q5_k, 176, slice(0, 4)),
    "Q6_K": (q6_k, 210, slice(208, 210)),
}


def random_rows(name, num_rows, num_blocks, rng):
    """[num_rows, bytes of num_blocks] uint8: any bits, but finite scales."""
    _, num_bytes, scales = BLOCKS[name]
    raw = rng.integers(0, 256, (num_rows, num_blocks, num_bytes), dtype=np.uint8)
    size = (num_rows, num_blocks, (scales.stop - scales.start) // 2)
    raw[..., scales] = rng.normal(size=size).astype("<f2").view(np.uint8)
    return raw.reshape(num_rows, -1)


def dequantised(name, rows):
    """[num_rows, row_size] float32 of rows of blocks."""
    read, num_bytes, _ = BLOCKS[name]
    return np.array(
        [
            [x for at in range(0, len(row), num_bytes) for x in read(bytes(row[at : at + num_bytes]))]
            for row in rows
        ],
        np.float32,
    )
