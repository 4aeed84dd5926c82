// A matrix product over packed panels, its units shared by all threads, and what is done with each result at once.
#pragma once
#include "cache_ahead.h"
#include "model.h"
#include "tile.h"

namespace {

// Rows of a unit. A unit's panel stays in the second-level cache; more rows would make units too long to share.
static constexpr int UNIT_ROWS = 96;

// How far ahead a single pass over a panel fetches. Up to three rows memory sets the pace and 2 to 4 KiB measured best;
// more rows take longer per byte, and the fetches must bridge what the multiplications leave idle.
STEP_INLINE constexpr int prefetch_bytes(int rows) { return rows <= 3 ? 3072 : 8192; }

struct Thread {
  step::Pool& pool;
  int index;
  uint64_t* cycles;  // [NUM_PHASES] of this thread, or null: nobody asks
  CacheAhead* ahead;
};

// Calls work(unit) for units of the phase until none is left; begins with a barrier.
template <class Work>
STEP_INLINE void share(const Thread& thread, step::Phase phase, int64_t num_units, Work work) {
  const uint64_t arrived = thread.cycles ? __builtin_ia32_rdtsc() : 0;
  thread.pool.next_phase(thread.index, num_units);
  const uint64_t begun = thread.cycles ? __builtin_ia32_rdtsc() : 0;
  for (int64_t unit = thread.pool.take(thread.index); unit >= 0; unit = thread.pool.take(thread.index)) work(unit);
  if (!thread.cycles) return;
  thread.cycles[step::PHASE_WAIT] += begun - arrived;
  thread.cycles[phase] += __builtin_ia32_rdtsc() - begun;
}

// Multiplies a block of rows by a panel and fetches keys and values on the way: the panel is cut into runs, each beside
// one run of theirs.
template <class P>
STEP_INLINE void multiply_beside(CacheAhead& ahead, const Run<P>& panel, int64_t stride, int rows, float* sums) {
  constexpr int MAX_RUNS = 24;
  constexpr int64_t b_step = 2 * P::WIDTH * P::GROUP, step_bytes = b_step * sizeof(*panel.b0);
  Run<P> runs[MAX_RUNS];
  int num_runs = 0;
  int64_t done = 0;
  while (done < panel.steps) {
    Run<P>& run = runs[num_runs++];
    run = {panel.a + done * P::GROUP, panel.b0 + done * b_step, panel.b1 + done * b_step, panel.steps - done, {}};
    const char* memory = reinterpret_cast<const char*>(run.b0);  // nothing left to fetch: what is at hand
    if (num_runs < MAX_RUNS && !ahead.empty()) {
      int64_t num_bytes = run.steps * step_bytes;
      memory = ahead.take(&num_bytes);
      run.steps = (num_bytes + step_bytes - 1) / step_bytes;
    }
    run.ahead[0] = memory;
    run.ahead[1] = memory + step_bytes / 2;
    done += run.steps;
  }
  multiply_rows<P, 2>(rows)(runs, num_runs, stride, b_step, step_bytes, sums, 2 * P::WIDTH);
}

// Multiplies a block of rows by a panel into `sums`, and fetches weights of the panel after it. A few rows are done in
// one pass, as fast as memory gives: fetch a little ahead. More rows are done in several passes and memory would idle
// in all but the first: fetch the next panel by halves in the first two, and keys and values in the others.
template <class P>
STEP_INLINE void multiply_block(CacheAhead& ahead, const Run<P>& panel, int64_t stride, int rows, int64_t pass,
                                int64_t num_passes, bool last_rows, float* sums) {
  constexpr int64_t b_step = 2 * P::WIDTH * P::GROUP;
  constexpr int64_t step_bytes = b_step * sizeof(*panel.b0);
  Run<P> run = panel;
  const char* weights = reinterpret_cast<const char*>(run.b0);
  if (num_passes == 1) {
    run.ahead[0] = weights + prefetch_bytes(rows);
    run.ahead[1] = run.ahead[0] + step_bytes / 2;
    multiply_rows<P, 2>(rows)(&run, 1, stride, b_step, step_bytes, sums, 2 * P::WIDTH);
  } else if (last_rows && pass < 2) {
    run.ahead[0] = weights + run.steps * (2 + pass) * step_bytes / 2;
    multiply_rows<P, 1>(rows)(&run, 1, stride, b_step, step_bytes / 2, sums, 2 * P::WIDTH);
  } else if (!ahead.empty()) {
    multiply_beside<P>(ahead, panel, stride, rows, sums);
  } else {
    multiply_rows<P, 0>(rows)(&run, 1, stride, b_step, 0, sums, 2 * P::WIDTH);
  }
}

// Multiplies rows begin .. end by a panel; finish(row, panel, first vector, second vector) takes the results.
// `last_rows`: no other unit follows on this panel.
template <class P, class Finish>
STEP_INLINE void multiply_unit(CacheAhead& ahead, const step::Linear& matrix, const typename P::Activation* input,
                               int64_t stride, int64_t begin, int64_t end, int64_t panel, bool last_rows,
                               Finish finish) {
  const auto* weights = reinterpret_cast<const typename P::Weight*>(matrix.weights + panel * matrix.panel_bytes);
  const int64_t passes = (end - begin + P::ROWS - 1) / P::ROWS;
  alignas(64) float sums[P::ROWS * 2 * P::WIDTH];
  auto bias0 = P::zero(), bias1 = P::zero();
  if (matrix.bias) {
    bias0 = P::load(matrix.bias + panel * 2 * P::WIDTH);
    bias1 = P::load(matrix.bias + panel * 2 * P::WIDTH + P::WIDTH);
  }
  for (int64_t pass = 0; pass < passes; pass++) {
    const int64_t row = begin + (end - begin) * pass / passes, next = begin + (end - begin) * (pass + 1) / passes;
    const int rows = static_cast<int>(next - row);
    const Run<P> run = {
        input + row * stride, weights, weights + P::WIDTH * P::GROUP, matrix.num_inputs / P::GROUP, {}};
    multiply_block<P>(ahead, run, stride, rows, pass, passes, last_rows, sums);
    for (int r = 0; r < rows; r++) {
      auto v0 = P::load(sums + r * 2 * P::WIDTH), v1 = P::load(sums + r * 2 * P::WIDTH + P::WIDTH);
      if (matrix.bias) v0 = P::add(v0, bias0), v1 = P::add(v1, bias1);
      finish(row + r, panel, v0, v1);
    }
  }
}

// Calls finish(row, panel, first vector, second vector) for every row and panel.
template <class P, class Finish>
void linear(const Thread& thread, step::Phase phase, const step::Linear& matrix,
            const typename P::Activation* input, int64_t stride, int64_t num_rows, Finish finish) {
  const int64_t row_units = (num_rows + UNIT_ROWS - 1) / UNIT_ROWS;
  share(thread, phase, matrix.num_panels * row_units, [&](int64_t unit) {
    // Units of a panel are neighbours: a thread's next unit finds the panel in its cache.
    const int64_t panel = unit / row_units, part = unit % row_units;
    const int64_t begin = num_rows * part / row_units, end = num_rows * (part + 1) / row_units;
    multiply_unit<P>(*thread.ahead, matrix, input, stride, begin, end, panel, part == row_units - 1, finish);
  });
}

}  // namespace
