// Rotary position embedding, in place (half-split pairs: element i turns with element i + head_dim / 2).
//
// Work: one block per token, one thread per 8 (4 for float) pairs of a head. The tables hold what
// reference.rope.rope_tables computes, so every kind of frequency scaling is the same kernel.
// Traffic: queries and keys read and written once; a token's table row is read by all of its heads.
//
// Module constant: SCALAR.
#include "scalar.cuh"

#define THREADS 128

typedef Vector<SCALAR> Piece;

// heads: token t's heads as neighbours, token_stride values from one token to the next; num_heads: those that turn
// (queries and keys); positions: [num_tokens]; cos, sin: [num_positions, head_dim / 2] float32.
// head_dim / 2 is a multiple of Vector::size. Grid: (num_tokens).
KERNEL(THREADS, 64)
rope(SCALAR* heads, const i64* positions, const float* cos, const float* sin, i64 token_stride, int num_heads,
     int head_dim) {
  const int half = head_dim / 2, pieces = half / Piece::size;
  const i64 table_row = positions[blockIdx.x] * half;
  for (int index = threadIdx.x; index < num_heads * pieces; index += THREADS) {
    const int start = index % pieces * Piece::size;
    SCALAR* first_half = heads + blockIdx.x * token_stride + index / pieces * head_dim + start;
    Piece first, second;
    first.load(first_half);
    second.load(first_half + half);
#pragma unroll
    for (int i = 0; i < Piece::size; i++) {
      const float turn_cos = cos[table_row + start + i], turn_sin = sin[table_row + start + i];
      const float x = first.values[i], y = second.values[i];
      first.values[i] = x * turn_cos - y * turn_sin;
      second.values[i] = y * turn_cos + x * turn_sin;
    }
    first.store(first_half);
    second.store(first_half + half);
  }
}
