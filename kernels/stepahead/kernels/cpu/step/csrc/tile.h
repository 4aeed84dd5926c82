// The one multiplication of the library: R rows of activations by two vectors of columns.
//
// Every result is one chain of multiply-adds over its inputs in ascending order, in one lane of one register (on tiles:
// one chain of instructions, vector_amx.h). How many rows share a call, and what else the step holds, does not enter:
// this is what makes every row's bits independent of its batch ("batch-invariant by construction").
//
// What a path P says of itself, beside its vectors:
//
//     ROWS            most rows of a multiplication        STEPS          steps of one instruction: runs are cut
//     ATTENTION_ROWS  the same in attention                               at multiples of it
//     ROW_BLOCK       many rows are split at multiples     TILES          it brings `multiply_runs` itself
//     PACED_ROWS      up to so many rows memory sets       PROBE_VECTORS  vectors multiplied in a round of the probe
//                     the pace                             Session        lives on every thread for as long as a job
#pragma once
#include <cstddef>
#include <cstdint>
#include <utility>

#define STEP_INLINE inline __attribute__((always_inline))

namespace {

// Fetches into the second-level cache. Into the first it would hold one of its few line buffers for as long as memory
// takes: 8 rows 11.0 -> 10.0 ms, attention at 32 rows 6.9 -> 5.9 ms.
STEP_INLINE void fetch(const char* line) { __builtin_prefetch(line, 0, 2); }

// Fetches what is used once, past the third-level cache: what the service's own code and data have there stays. At one
// row the step is no faster alone, and the service beside it 117 -> 125 tokens a second. At eight rows it is slower.
STEP_INLINE void fetch_once(const char* line) { __builtin_prefetch(line, 0, 0); }

template <class P, int R>
struct Sums {
  typename P::F v[R][2];
};

// One run of inputs of a multiplication; a matrix is one run, the values of a sequence are one per KV tile.
template <class P>
struct Run {
  const typename P::Activation* a;
  const typename P::Weight *b0, *b1;  // the two vectors of columns at the first input
  int64_t steps;                      // input groups
  const char* ahead[2];               // memory to fetch on the way, a cache line of each per step
};

// Multiplies one run; LINES of `ahead` (0, 1 or 2) are fetched, `ahead_step` bytes further each step.
template <class P, int R, int LINES>
STEP_INLINE void multiply_add(Sums<P, R>& sums, const Run<P>& run, int64_t a_stride, int64_t b_step,
                              int64_t ahead_step) {
  const typename P::Activation* rows[(R + 2) / 3];  // every third row: the two after it are one or two strides on
  const typename P::Weight *b0 = run.b0, *b1 = run.b1;
  const char *ahead0 = run.ahead[0], *ahead1 = run.ahead[1];
#pragma GCC unroll 4
  for (int i = 0; i < (R + 2) / 3; i++) rows[i] = run.a + 3 * i * a_stride;
  for (int64_t k = 0; k < run.steps; k++) {
    const auto right0 = P::weights(b0), right1 = P::weights(b1);
    if (LINES > 0) {
      fetch(ahead0);
      ahead0 += ahead_step;
    }
    if (LINES > 1) {
      fetch(ahead1);
      ahead1 += ahead_step;
    }
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) {
      const auto left = P::spread(rows[r / 3] + (r % 3) * a_stride);
      sums.v[r][0] = P::multiply(sums.v[r][0], left, right0);
      sums.v[r][1] = P::multiply(sums.v[r][1], left, right1);
    }
#pragma GCC unroll 4
    for (int i = 0; i < (R + 2) / 3; i++) rows[i] += P::GROUP;
    b0 += b_step;
    b1 += b_step;
  }
}

// c[r] = sum over all runs, R rows of two vectors, `c_stride` floats apart.
template <class P, int R, int LINES>
void multiply_runs(const Run<P>* runs, int num_runs, int64_t a_stride, int64_t b_step, int64_t ahead_step, float* c,
                   int64_t c_stride) {
  Sums<P, R> sums;
#pragma GCC unroll 12
  for (int r = 0; r < R; r++) sums.v[r][0] = sums.v[r][1] = P::zero();
  for (int i = 0; i < num_runs; i++) multiply_add<P, R, LINES>(sums, runs[i], a_stride, b_step, ahead_step);
#pragma GCC unroll 12
  for (int r = 0; r < R; r++) {
    P::store(c + r * c_stride, sums.v[r][0]);
    P::store(c + r * c_stride + P::WIDTH, sums.v[r][1]);
  }
}

template <class P>
using Multiply = void (*)(const Run<P>*, int, int64_t, int64_t, int64_t, float*, int64_t);

template <class P, int R, int LINES>
constexpr Multiply<P> multiplication() {
  if constexpr (P::TILES)
    return P::template multiply_runs<R, LINES>;
  else
    return multiply_runs<P, R, LINES>;
}

template <class P, int LINES, int... R>
constexpr Multiply<P> multiply_for(int rows, std::integer_sequence<int, R...>) {
  constexpr Multiply<P> table[] = {multiplication<P, R + 1, LINES>()...};
  return table[rows - 1];
}

// The multiplication for 1 .. P::ROWS rows.
template <class P, int LINES>
Multiply<P> multiply_rows(int rows) {
  return multiply_for<P, LINES>(rows, std::make_integer_sequence<int, P::ROWS>());
}

// Of `count` rows done in so many passes: the first of a pass, that of the one behind the last being `count`.
template <class P>
STEP_INLINE int64_t first_row(int64_t count, int64_t pass, int64_t passes) {
  const int64_t blocks = (count + P::ROW_BLOCK - 1) / P::ROW_BLOCK, first = blocks * pass / passes * P::ROW_BLOCK;
  return first < count ? first : count;
}

// e^x to about one unit in the last place, exactly 1 at 0; below -87 it stays at the smallest normal number. Cephes'
// expf: range reduction by ln 2 in two parts, a polynomial of degree 5 for (e^r - 1 - r) / r^2.
template <class P>
STEP_INLINE typename P::F exponential(typename P::F x) {
  x = P::max(P::all(-87.3f), P::min(P::all(88.3f), x));  // this operand order lets NaN through
  const auto n = P::round(P::mul(x, P::all(1.44269504f)));
  auto r = P::negative_fma(n, P::all(0.693359375f), x);
  r = P::negative_fma(n, P::all(-2.12194440e-4f), r);
  auto p = P::all(1.9875691500e-4f);
  p = P::fma(p, r, P::all(1.3981999507e-3f));
  p = P::fma(p, r, P::all(8.3334519073e-3f));
  p = P::fma(p, r, P::all(4.1665795894e-2f));
  p = P::fma(p, r, P::all(1.6666665459e-1f));
  p = P::fma(p, r, P::all(5.0000001201e-1f));
  p = P::fma(p, P::mul(r, r), P::add(r, P::all(1.0f)));
  return P::mul(p, P::power_of_two(n));
}

// activation(gate) * up. Both activations are z * sigmoid(y): silu with y = z, gelu (its tanh form) with
// y = 2 sqrt(2 / pi) (z + 0.044715 z^3).
template <class P>
STEP_INLINE typename P::F gated(typename P::F gate, typename P::F up, bool gelu) {
  auto y = gate;
  if (gelu) y = P::mul(gate, P::fma(P::mul(gate, gate), P::all(0.0713548163f), P::all(1.5957691216f)));
  const auto e = exponential<P>(P::sub(P::zero(), y));
  return P::mul(P::div(gate, P::add(P::all(1.0f), e)), up);
}

// cap * tanh(x / cap), with tanh(y) = 1 - 2 / (e^2y + 1): good to about 1e-7 of cap.
template <class P>
STEP_INLINE typename P::F softcap(typename P::F x, float cap) {
  const auto e = exponential<P>(P::mul(x, P::all(2.0f / cap)));
  return P::mul(P::all(cap), P::sub(P::all(1.0f), P::div(P::all(2.0f), P::add(e, P::all(1.0f)))));
}

}  // namespace
