// A matrix product over packed panels, its units shared by all threads, and what is done with each result at once.
#pragma once
#include "cache_ahead.h"
#include "model.h"
#include "tile.h"
#include "tile_coded.h"

namespace {

// Rows of a unit. A unit's panel stays in the second-level cache; more rows would make units too long to share.
static constexpr int UNIT_ROWS = 96;

// How far ahead a single pass over a panel fetches. Where memory sets the pace 2 to 4 KiB measured best; more rows take
// longer per byte, and the fetches must bridge what the multiplications leave idle.
template <class P>
STEP_INLINE constexpr int prefetch_bytes(int rows) {
  return rows <= P::PACED_ROWS ? 3072 : 8192;
}

// The same over a coded panel, whose bytes take longer each.
STEP_INLINE constexpr int coded_prefetch_bytes(int rows) { return rows == 1 ? 3072 : 8192; }

static constexpr int64_t LINE_BYTES = 64;

// What a pass fetches a step: as much as a vector of weights, a line with AVX512. Narrow vectors take their steps faster.
template <class P>
static constexpr int64_t FETCH_BYTES = P::WIDTH * P::GROUP * sizeof(typename P::Weight);

// A thread's memory for one decoded panel, and which panel that is.
struct PanelRoom {
  char* memory;
  const char* panel;
};

struct Thread {
  step::Pool& pool;
  int index;
  uint64_t* cycles;  // [NUM_PHASES] of this thread, or null: nobody asks
  CacheAhead* ahead;
  PanelRoom* room;
};

// A phase: waits for the one before, then calls work() if there is any.
template <class Work>
STEP_INLINE void in_phase(const Thread& thread, step::Phase phase, int64_t num_units, Work work) {
  const uint64_t arrived = thread.cycles ? __builtin_ia32_rdtsc() : 0;
  const bool under_way = thread.pool.next_phase(thread.index, num_units);
  const uint64_t begun = thread.cycles ? __builtin_ia32_rdtsc() : 0;
  if (under_way) work();
  if (!thread.cycles) return;
  thread.cycles[step::PHASE_WAIT] += begun - arrived;
  thread.cycles[phase] += __builtin_ia32_rdtsc() - begun;
}

// Calls work(unit) for units of the phase until none is left.
template <class Work>
STEP_INLINE void share(const Thread& thread, step::Phase phase, int64_t num_units, Work work) {
  in_phase(thread, phase, num_units, [&] {
    step::Pool& pool = thread.pool;
    for (int64_t unit = pool.take(thread.index, false); unit >= 0; unit = pool.take(thread.index, false)) {
      work(unit);
      pool.complete(thread.index);
    }
  });
}

// The same with open units: compute(unit) writes to this thread's memory only, commit(unit) takes the result from there.
template <class Compute, class Commit>
STEP_INLINE void share_open(const Thread& thread, step::Phase phase, int64_t num_units, Compute compute,
                            Commit commit) {
  in_phase(thread, phase, num_units, [&] {
    step::Pool& pool = thread.pool;
    for (int64_t unit = pool.take(thread.index, true); unit >= 0; unit = pool.take(thread.index, true)) {
      compute(unit);
      if (!pool.commit(thread.index)) continue;
      commit(unit);
      pool.complete(thread.index);
    }
    for (auto late = pool.overdue(thread.index); late.unit >= 0; late = pool.overdue(thread.index)) {
      compute(late.unit);
      if (!pool.take_over(late)) continue;
      commit(late.unit);
      pool.complete(thread.index);
    }
  });
}

// Memory in one piece.
struct Span {
  const char* memory;
  int64_t num_bytes;
};

// Multiplies a block of rows by a panel and fetches `first` on the way, then keys and values, in LINES places a step:
// the panel is cut into runs, each beside one run of theirs, and a little of what lies behind it where the cut must wait
// for a whole instruction.
template <class P, int LINES>
STEP_INLINE void multiply_beside(CacheAhead& ahead, Span first, const Run<P>& panel, int64_t stride, int rows,
                                 float* sums) {
  constexpr int MAX_RUNS = 24;
  constexpr int64_t b_step = 2 * P::WIDTH * P::GROUP, step_bytes = LINES * FETCH_BYTES<P>;
  Run<P> runs[MAX_RUNS];
  int num_runs = 0;
  int64_t done = 0;
  while (done < panel.steps) {
    Run<P>& run = runs[num_runs++];
    run = {panel.a + done * P::GROUP, panel.b0 + done * b_step, panel.b1 + done * b_step, panel.steps - done, {}};
    const char* memory = reinterpret_cast<const char*>(run.b0);  // nothing left to fetch: what is at hand
    if (num_runs < MAX_RUNS && (first.num_bytes || !ahead.empty())) {
      int64_t num_bytes = run.steps * step_bytes;
      if (first.num_bytes) {
        memory = first.memory;
        if (num_bytes > first.num_bytes) num_bytes = first.num_bytes;
        first.num_bytes = 0;
      } else {
        memory = ahead.take(&num_bytes);
      }
      const int64_t steps = step::round_up((num_bytes + step_bytes - 1) / step_bytes, P::STEPS);
      if (steps < run.steps) run.steps = steps;
    }
    run.ahead[0] = memory;
    run.ahead[1] = memory + FETCH_BYTES<P>;
    done += run.steps;
  }
  multiply_rows<P, LINES>(rows)(runs, num_runs, stride, b_step, step_bytes, sums, 2 * P::WIDTH);
}

// A panel, and the rows it is multiplied by.
struct PanelUnit {
  int64_t panel, begin, end;
  bool last_rows;  // no other unit follows on this panel
};

// Where the results of a matrix go: what a row has of a panel begins at memory + row * row_bytes + panel * panel_bytes.
struct Target {
  char* memory;  // null: nobody keeps them
  int64_t row_bytes, panel_bytes;
};

// Asks for the lines that results of the rows `begin` .. `end` go to, to write them. Most often another core or a farther
// cache has them, and stores would wait for them one after the other.
STEP_INLINE void claim_target(const Target& target, const PanelUnit& unit, int64_t begin, int64_t end) {
  if (!target.memory) return;
  for (int64_t row = begin; row < end; row++) {
    char* results = target.memory + row * target.row_bytes + unit.panel * target.panel_bytes;
    for (int64_t i = 0; i < target.panel_bytes; i += LINE_BYTES) __builtin_prefetch(results + i, 1, 3);
  }
}

// A pass of a unit: a block of its rows by the whole panel.
struct Pass {
  int64_t index, count;
  int rows;
  bool fetches_next;  // a part of the panel that follows
};

// What a pass fetches of the panel behind `panel`: the first one FETCH_BYTES a step, the second one the rest.
template <class P>
STEP_INLINE Span share_of_next(const step::Linear& matrix, const char* panel, const Pass& pass) {
  if (!pass.fetches_next) return {panel, 0};
  const int64_t first = matrix.num_inputs / P::GROUP * FETCH_BYTES<P>;
  const char* next = panel + matrix.panel_bytes;
  return pass.index == 0 ? Span{next, first} : Span{next + first, matrix.panel_bytes - first};
}

// Multiplies a block of rows by a plain panel at `weights` into `sums`, and fetches weights of the panel behind it,
// which is `panel` in the matrix. A few rows are done in one pass, as fast as memory gives: fetch a little ahead. More
// rows are done in several passes and memory would idle in all but the first: fetch the next panel in the first two,
// then keys and values. FETCH_BYTES a step spread this evenly: memory keeps pace and the multiplier does not wait. Two
// passes alone would fetch too little that way.
template <class P>
STEP_INLINE void multiply_block(CacheAhead& ahead, const step::Linear& matrix, const char* panel, Run<P> run,
                                int64_t stride, const Pass& pass, float* sums) {
  constexpr int64_t b_step = 2 * P::WIDTH * P::GROUP;
  constexpr int64_t step_bytes = b_step * sizeof(*run.b0);
  if (pass.count == 1) {
    run.ahead[0] = reinterpret_cast<const char*>(run.b0) + prefetch_bytes<P>(pass.rows);
    run.ahead[1] = run.ahead[0] + step_bytes / 2;
    multiply_rows<P, 2>(pass.rows)(&run, 1, stride, b_step, step_bytes, sums, 2 * P::WIDTH);
  } else if (pass.fetches_next || !ahead.empty()) {
    const Span weights = share_of_next<P>(matrix, panel, pass);
    (pass.count == 2 ? multiply_beside<P, 2> : multiply_beside<P, 1>)(ahead, weights, run, stride, pass.rows, sums);
  } else {
    multiply_rows<P, 0>(pass.rows)(&run, 1, stride, b_step, 0, sums, 2 * P::WIDTH);
  }
}

// The first pass of a unit over a coded panel. If others follow, it leaves the plain panel to them.
template <class P>
STEP_INLINE void multiply_coded_block(PanelRoom& room, const step::Linear& matrix, const char* panel,
                                      const typename P::Activation* input, int64_t stride, const Pass& pass,
                                      float* sums) {
  auto* plain = reinterpret_cast<typename P::Weight*>(room.memory);
  if (pass.count == 1) {
    room.panel = nullptr;
    multiply_coded_rows<P, 3, false>(pass.rows)(panel, matrix.num_inputs, input, stride,
                                                {panel + coded_prefetch_bytes(pass.rows), 64}, plain, sums);
    return;
  }
  room.panel = panel;
  const FetchAhead ahead = {pass.fetches_next ? panel + matrix.panel_bytes : panel, LINE_BYTES};
  multiply_coded_rows<P, 2, true>(pass.rows)(panel, matrix.num_inputs, input, stride, ahead, plain, sums);
}

// sums[row - begin] = a row by the panel, two vectors.
template <class P>
STEP_INLINE void multiply_unit(const Thread& thread, const step::Linear& matrix,
                               const typename P::Activation* input, int64_t stride, const PanelUnit& unit,
                               const Target& target, float* sums) {
  const char* panel = matrix.weights + unit.panel * matrix.panel_bytes;
  const int64_t count = unit.end - unit.begin, passes = (count + P::ROWS - 1) / P::ROWS;
  const bool coded = P::CODED && matrix.coded;
  for (int64_t index = 0; index < passes; index++) {
    const int64_t first = first_row<P>(count, index, passes), next = first_row<P>(count, index + 1, passes);
    const Pass pass = {index, passes, static_cast<int>(next - first), unit.last_rows && index < 2};
    const auto* left = input + (unit.begin + first) * stride;
    float* out = sums + first * 2 * P::WIDTH;
    claim_target(target, unit, unit.begin + first, unit.begin + next);
    if constexpr (P::CODED)
      if (coded && (passes == 1 || thread.room->panel != panel)) {
        multiply_coded_block<P>(*thread.room, matrix, panel, left, stride, pass, out);
        continue;
      }
    const auto* weights = reinterpret_cast<const typename P::Weight*>(coded ? thread.room->memory : panel);
    const Run<P> run = {left, weights, weights + P::WIDTH * P::GROUP, matrix.num_inputs / P::GROUP, {}};
    multiply_block<P>(*thread.ahead, matrix, panel, run, stride, pass, out);
  }
}

// Adds the bias and calls finish(row, panel, first vector, second vector) for each row.
template <class P, class Finish>
STEP_INLINE void finish_unit(const step::Linear& matrix, const PanelUnit& unit, const float* sums, Finish finish) {
  auto bias0 = P::zero(), bias1 = P::zero();
  if (matrix.bias) {
    bias0 = P::load(matrix.bias + unit.panel * 2 * P::WIDTH);
    bias1 = P::load(matrix.bias + unit.panel * 2 * P::WIDTH + P::WIDTH);
  }
  for (int64_t row = unit.begin; row < unit.end; row++, sums += 2 * P::WIDTH) {
    auto v0 = P::load(sums), v1 = P::load(sums + P::WIDTH);
    if (matrix.bias) v0 = P::add(v0, bias0), v1 = P::add(v1, bias1);
    finish(row, unit.panel, v0, v1);
  }
}

// Calls finish(row, panel, first vector, second vector) for every row and panel; it stores in `target`.
template <class P, class Finish>
void linear(const Thread& thread, step::Phase phase, const step::Linear& matrix,
            const typename P::Activation* input, int64_t stride, int64_t num_rows, const Target& target,
            Finish finish) {
  const int64_t row_units = (num_rows + UNIT_ROWS - 1) / UNIT_ROWS;
  alignas(64) float sums[UNIT_ROWS * 2 * P::WIDTH];
  // Units of a panel are neighbours: a thread's next unit finds the panel in its cache.
  auto unit_of = [&](int64_t unit) -> PanelUnit {
    const int64_t part = unit % row_units;
    return {unit / row_units, num_rows * part / row_units, num_rows * (part + 1) / row_units, part == row_units - 1};
  };
  share_open(
      thread, phase, matrix.num_panels * row_units,
      [&](int64_t unit) { multiply_unit<P>(thread, matrix, input, stride, unit_of(unit), target, sums); },
      [&](int64_t unit) { finish_unit<P>(matrix, unit_of(unit), sums, finish); });
}

}  // namespace
