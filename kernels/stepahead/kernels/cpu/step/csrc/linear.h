// A matrix product over packed panels, its units shared by all threads, and what is done with each result at once.
#pragma once
#include "model.h"
#include "tile.h"

namespace {

// Rows of a unit. A unit's panel stays in the second-level cache; more rows would make units too long to share.
static constexpr int UNIT_ROWS = 96;

struct Thread {
  step::Pool& pool;
  int index;
};

// Calls work(unit) for units of the phase until none is left; begins with a barrier.
template <class Work>
STEP_INLINE void share(const Thread& thread, int64_t num_units, Work work) {
  thread.pool.next_phase(num_units);
  for (int64_t unit = thread.pool.take(thread.index); unit >= 0; unit = thread.pool.take(thread.index)) work(unit);
}

// Calls finish(row, panel, first vector, second vector) for every row and panel.
template <class P, class Finish>
void linear(const Thread& thread, const step::Linear& matrix, const typename P::Activation* input, int64_t stride,
            int64_t num_rows, Finish finish) {
  const int64_t row_units = (num_rows + UNIT_ROWS - 1) / UNIT_ROWS;
  const int64_t b_step = 2 * P::WIDTH * P::GROUP;
  share(thread, matrix.num_panels * row_units, [&](int64_t unit) {
    // Units of a panel are neighbours: a thread's next unit finds the panel in its cache.
    const int64_t panel = unit / row_units, begin = num_rows * (unit % row_units) / row_units;
    const int64_t end = num_rows * (unit % row_units + 1) / row_units;
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
      const Run<P> run = {input + row * stride, weights, weights + P::WIDTH * P::GROUP, matrix.num_inputs / P::GROUP};
      const bool fresh = pass == 0 && unit % row_units == 0;
      (fresh ? multiply_rows<P, true>(rows) : multiply_rows<P, false>(rows))(&run, 1, stride, b_step, sums, 2 * P::WIDTH);
      for (int r = 0; r < rows; r++) {
        auto v0 = P::load(sums + r * 2 * P::WIDTH), v1 = P::load(sums + r * 2 * P::WIDTH + P::WIDTH);
        if (matrix.bias) v0 = P::add(v0, bias0), v1 = P::add(v1, bias1);
        finish(row + r, panel, v0, v1);
      }
    }
  });
}

}  // namespace
