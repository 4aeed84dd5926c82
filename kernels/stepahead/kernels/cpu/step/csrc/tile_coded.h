// The multiplication of tile.h by a coded panel (coded.h): decoded in registers on the way to the multiplier.
//
// The chain of multiply-adds of a result is that of the plain panel, weight by weight, so its bits are the same.
#pragma once
#include "coded.h"
#include "tile.h"

namespace {

// Memory to fetch on the way: `lines` cache lines per pair of steps, `step` bytes apart.
struct FetchAhead {
  const char* at;
  int64_t step;
};

// Pairs of steps between two looks at the patches; inputs come in multiples of 32.
static constexpr int64_t CHUNK_PAIRS = 8;

// One pair of steps of one vector: two multiply-adds per row.
template <class P, int R, int VECTOR>
STEP_INLINE void multiply_pair(Sums<P, R>& sums, const typename P::Activation* const* rows, int64_t a_stride,
                               const typename P::Right& first, const typename P::Right& second) {
#pragma GCC unroll 12
  for (int r = 0; r < R; r++)
    sums.v[r][VECTOR] = P::multiply(sums.v[r][VECTOR], P::spread(rows[r / 3] + (r % 3) * a_stride), first);
#pragma GCC unroll 12
  for (int r = 0; r < R; r++)
    sums.v[r][VECTOR] = P::multiply(sums.v[r][VECTOR], P::spread(rows[r / 3] + (r % 3) * a_stride + P::GROUP), second);
}

// A chunk without patches. With KEEP its plain weights are stored in `plain`.
template <class P, int R, int LINES, bool KEEP>
STEP_INLINE void multiply_chunk(Sums<P, R>& sums, const typename P::Activation* a, int64_t a_stride, const char* pair,
                                const typename P::HighBytes& high_bytes, FetchAhead& ahead,
                                typename P::Weight* plain) {
  constexpr int WORDS = P::WIDTH * P::GROUP;
  const typename P::Activation* rows[(R + 2) / 3];
#pragma GCC unroll 4
  for (int i = 0; i < (R + 2) / 3; i++) rows[i] = a + 3 * i * a_stride;
  // Unrolled, all fetches of a chunk would come at once, and stand in each other's way: 2 rows 5.4 -> 7.1 ms.
#pragma GCC unroll 1
  for (int64_t i = 0; i < CHUNK_PAIRS; i++) {
#pragma GCC unroll 3
    for (int line = 0; line < LINES; line++) (R == 1 ? fetch_once : fetch)(ahead.at + line * ahead.step);
    ahead.at += LINES * ahead.step;
    typename P::Right first, second;
    P::template decode<0>(pair, high_bytes, first, second);
    if (KEEP) P::store_weights(plain, first), P::store_weights(plain + 2 * WORDS, second);
    multiply_pair<P, R, 0>(sums, rows, a_stride, first, second);
    __asm__ volatile("" ::: "memory");  // load the inputs again: keeping them would push sums out of registers
    P::template decode<1>(pair, high_bytes, first, second);
    if (KEEP) P::store_weights(plain + WORDS, first), P::store_weights(plain + 3 * WORDS, second);
    multiply_pair<P, R, 1>(sums, rows, a_stride, first, second);
#pragma GCC unroll 4
    for (int j = 0; j < (R + 2) / 3; j++) rows[j] += 2 * P::GROUP;
    pair += step::PAIR_BYTES;
    plain += 4 * WORDS;
  }
}

// Writes a chunk's plain weights, from `patch` on with its patches; returns the first patch behind it.
template <class P, int LINES>
const step::Patch* decode_chunk(const char* pair, const typename P::HighBytes& high_bytes, int64_t first_position,
                                const step::Patch* patch, const step::Patch* end, FetchAhead& ahead,
                                typename P::Weight* plain) {
  constexpr int WORDS = P::WIDTH * P::GROUP;
#pragma GCC unroll 1
  for (int64_t i = 0; i < CHUNK_PAIRS; i++, pair += step::PAIR_BYTES) {
#pragma GCC unroll 3
    for (int line = 0; line < LINES; line++) fetch(ahead.at + line * ahead.step);
    ahead.at += LINES * ahead.step;
    typename P::Weight* out = plain + i * 4 * WORDS;
    typename P::Right first, second;
    P::template decode<0>(pair, high_bytes, first, second);
    P::store_weights(out, first), P::store_weights(out + 2 * WORDS, second);
    P::template decode<1>(pair, high_bytes, first, second);
    P::store_weights(out + WORDS, first), P::store_weights(out + 3 * WORDS, second);
  }
  for (; patch < end && patch->position < first_position + CHUNK_PAIRS * step::PAIR_WEIGHTS; patch++)
    plain[patch->position - first_position] = patch->weight;
  return patch;
}

// c[r] = R rows by a coded panel, as `multiply_runs` by a plain one. With KEEP `plain` is the whole panel's and holds
// it afterwards, else it is a chunk's.
template <class P, int R, int LINES, bool KEEP>
void multiply_coded(const char* panel, int64_t num_inputs, const typename P::Activation* a, int64_t a_stride,
                    FetchAhead ahead, typename P::Weight* plain, float* c) {
  const auto& header = *reinterpret_cast<const step::CodedHeader*>(panel);
  const auto high_bytes = P::high_bytes(header.high_bytes);
  const step::Patch *patch = header.patches, *end = patch + header.num_patches;
  const char* pair = panel + step::coded_header_bytes(num_inputs);
  constexpr int64_t CHUNK_WEIGHTS = CHUNK_PAIRS * step::PAIR_WEIGHTS;
  Sums<P, R> sums;
#pragma GCC unroll 12
  for (int r = 0; r < R; r++) sums.v[r][0] = sums.v[r][1] = P::zero();
  for (int64_t first = 0; first < num_inputs * 2 * P::WIDTH; first += CHUNK_WEIGHTS) {
    if (patch == end || patch->position >= first + CHUNK_WEIGHTS) {
      multiply_chunk<P, R, LINES, KEEP>(sums, a, a_stride, pair, high_bytes, ahead, plain);
    } else {
      patch = decode_chunk<P, LINES>(pair, high_bytes, first, patch, end, ahead, plain);
      constexpr int64_t STEP = 2 * P::WIDTH * P::GROUP;
      const Run<P> run = {a, plain, plain + P::WIDTH * P::GROUP, 2 * CHUNK_PAIRS, {}};
      multiply_add<P, R, 0>(sums, run, a_stride, STEP, 0);
    }
    a += 2 * CHUNK_PAIRS * P::GROUP;
    pair += CHUNK_PAIRS * step::PAIR_BYTES;
    if (KEEP) plain += CHUNK_WEIGHTS;
  }
#pragma GCC unroll 12
  for (int r = 0; r < R; r++) {
    P::store(c + r * 2 * P::WIDTH, sums.v[r][0]);
    P::store(c + r * 2 * P::WIDTH + P::WIDTH, sums.v[r][1]);
  }
}

template <class P>
using MultiplyCoded = void (*)(const char*, int64_t, const typename P::Activation*, int64_t, FetchAhead,
                               typename P::Weight*, float*);

template <class P, int R, int LINES, bool KEEP>
constexpr MultiplyCoded<P> coded_multiplication() {
  if constexpr (P::TILES)
    return P::template multiply_coded<R, LINES, KEEP>;
  else
    return multiply_coded<P, R, LINES, KEEP>;
}

template <class P, int LINES, bool KEEP, int... R>
constexpr MultiplyCoded<P> multiply_coded_for(int rows, std::integer_sequence<int, R...>) {
  constexpr MultiplyCoded<P> table[] = {coded_multiplication<P, R + 1, LINES, KEEP>()...};
  return table[rows - 1];
}

// The multiplication for 1 .. P::ROWS rows.
template <class P, int LINES, bool KEEP>
MultiplyCoded<P> multiply_coded_rows(int rows) {
  return multiply_coded_for<P, LINES, KEEP>(rows, std::make_integer_sequence<int, P::ROWS>());
}

}  // namespace
