// bf16 on AMX tiles: what AVX512 does to single vectors, and the one multiplication in tiles.
//
// A panel is a B operand where it lies: 16 steps of one of its vectors are a tile whose rows are `b_step` apart. So are
// a KV tile's keys and values; rows of activations are A operands. An instruction multiplies up to 16 rows by 16
// columns over 16 steps (32 inputs).
//
// The bits of a row. By the manual TDPBF16PS sums the even and the odd inputs of one instruction apart, from zero, and
// adds them to the result at its end. VDPBF16PS adds a pair's two products to the result one after the other. So the
// two do not agree, and where one instruction ends and the next begins is part of the sum. Hence:
//   - one row and many take the same instruction, over tiles of fewer rows (a row of A and C meets no other row);
//   - a run is cut into tiles of STEPS steps from its begin, whatever the rows; what is left is one instruction, padded
//     with zeros, which add nothing. Whoever cuts a panel into runs does so at multiples of STEPS (linear.h);
//   - a KV tile's values are one instruction however many of its tokens are seen (attention.h).
// Attention takes tiles too: a chunk's queries share every key and value, and one row costs no more than with
// VDPBF16PS, being bound by memory.
#pragma once
#include "tile.h"
#include "tile_coded.h"
#include "vector_avx512.h"
#ifdef STEP_EMULATE_TILES
#include "tiles_emulated.h"
#else
#include "tiles_amx.h"
#endif

namespace {

// What this thread's tiles are configured for.
struct RowBlocks {
  int first, second;  // rows of the two blocks; second 0: one block, and half tiles; first 0: nothing yet
};

inline RowBlocks& configured_blocks() {
  static thread_local RowBlocks blocks = {};
  return blocks;
}

struct AmxBf16Path : Avx512Bf16Path {
  static constexpr int ROWS = 32;  // two blocks by two vectors are 4 accumulators: as many as hide the latency
  static constexpr int ROW_BLOCK = MAX_TILE_ROWS;
  static constexpr int ATTENTION_ROWS = MAX_TILE_ROWS;
  static constexpr int PACED_ROWS = ROWS;  // not measured: a pass of tiles takes as long for 1 row as for 32
  static constexpr int STEPS = MAX_TILE_ROWS;
  static constexpr bool TILES = true;
  static constexpr int PROBE_VECTORS = 4 * MAX_TILE_ROWS * STEPS;

  static constexpr int PAIR_BYTES = GROUP * sizeof(Activation);
  static constexpr int HALF_STEPS = STEPS / 2;  // of a KV tile's values

  // The threads are the library's, but what else runs on their cores need not save and restore 8 KiB of tiles.
  struct Session {
    Session() { configured_blocks() = {}; }
    ~Session() { Tiles::release(); }
  };

  // Tiles: 0 and 1 are the sums of the first block by both vectors, 4 its activations, 6 and 7 the weights. The second
  // block has 2 and 3, and 5. Without it 5, 2 and 3 are 4, 6 and 7 of half the depth. Another configuration takes some
  // 200 cycles and is avoided.
  static void configure(int first, int second) {
    TileConfig config;
    config.set(0, first, 64);
    config.set(1, first, 64);
    config.set(4, first, STEPS * PAIR_BYTES);
    config.set(6, STEPS, 64);
    config.set(7, STEPS, 64);
    if (second) {
      config.set(2, second, 64);
      config.set(3, second, 64);
      config.set(5, second, STEPS * PAIR_BYTES);
    } else {
      config.set(5, first, HALF_STEPS * PAIR_BYTES);
      config.set(2, HALF_STEPS, 64);
      config.set(3, HALF_STEPS, 64);
    }
    Tiles::configure(config);
    configured_blocks() = {first, second};
  }

  static void prepare(int first, int second, bool halves) {
    const RowBlocks& now = configured_blocks();
    const bool fits = now.first == first && (now.second == second || (second == 0 && !halves));
    if (!fits) configure(first, second);
  }

  // `multiply_runs` of tile.h in tiles.
  template <int R, int LINES>
  static void multiply_runs(const Run<AmxBf16Path>* runs, int num_runs, int64_t a_stride, int64_t b_step,
                             int64_t ahead_step, float* c, int64_t c_stride) {
    bool halves = false;
    for (int i = 0; i < num_runs; i++) halves |= runs[i].steps % STEPS == HALF_STEPS;
    begin_sums<R>(halves);
    for (int i = 0; i < num_runs; i++) {
      const Run<AmxBf16Path>& run = runs[i];
      int64_t k = 0;
      for (; k + STEPS <= run.steps; k += STEPS) {
        fetch_lines<LINES>(run, k, STEPS, ahead_step);
        multiply_step<R>(run.a + k * GROUP, a_stride, run.b0 + k * b_step, run.b1 + k * b_step, b_step);
      }
      if (k == run.steps) continue;
      fetch_lines<LINES>(run, k, run.steps - k, ahead_step);
      multiply_rest<R>(run, k, a_stride, b_step);
    }
    store_sums<R>(c, c_stride);
  }

  // `multiply_coded` of tile_coded.h: a chunk is decoded into plain weights, then multiplied as the run that it is part
  // of would be. Chunks take turns at two places, so that the next one is decoded while this one is multiplied.
  template <int R, int LINES, bool KEEP>
  static void multiply_coded(const char* panel, int64_t num_inputs, const Activation* a, int64_t a_stride,
                             FetchAhead ahead, Weight* plain, float* c) {
    static_assert(2 * CHUNK_PAIRS == STEPS, "a chunk is one instruction, as the same steps of a plain panel are");
    constexpr int64_t CHUNK_WEIGHTS = CHUNK_PAIRS * step::PAIR_WEIGHTS;
    const auto& header = *reinterpret_cast<const step::CodedHeader*>(panel);
    const HighBytes table = high_bytes(header.high_bytes);
    const step::Patch *patch = header.patches, *end = patch + header.num_patches;
    const char* pairs = panel + step::coded_header_bytes(num_inputs);
    begin_sums<R>(false);
    for (int64_t chunk = 0; chunk < num_inputs / GROUP / STEPS; chunk++) {
      Weight* out = plain + (KEEP ? chunk : chunk % 2) * CHUNK_WEIGHTS;
      const char* pair = pairs + chunk * CHUNK_PAIRS * step::PAIR_BYTES;
      patch = decode_chunk<AmxBf16Path, LINES>(pair, table, chunk * CHUNK_WEIGHTS, patch, end, ahead, out);
      multiply_step<R>(a + chunk * STEPS * GROUP, a_stride, out, out + WIDTH * GROUP, 2 * WIDTH * GROUP);
    }
    store_sums<R>(c, 2 * WIDTH);
  }

  // What bounds a step: four independent sums, nothing from memory.
  static void multiply_registers(int64_t times) {
    prepare(ROW_BLOCK, ROW_BLOCK, false);
    for (int64_t i = 0; i < times; i++) {
      Tiles::multiply<0, 4, 6>();
      Tiles::multiply<1, 4, 7>();
      Tiles::multiply<2, 5, 6>();
      Tiles::multiply<3, 5, 7>();
    }
  }

 private:
  template <int R>
  static void begin_sums(bool halves) {
    prepare(R < ROW_BLOCK ? R : ROW_BLOCK, R > ROW_BLOCK ? R - ROW_BLOCK : 0, halves);
    Tiles::zero<0>();
    Tiles::zero<1>();
    if constexpr (R > ROW_BLOCK) {
      Tiles::zero<2>();
      Tiles::zero<3>();
    }
  }

  template <int R>
  static void store_sums(float* c, int64_t c_stride) {
    Tiles::store<0>(c, c_stride * sizeof(float));
    Tiles::store<1>(c + WIDTH, c_stride * sizeof(float));
    if constexpr (R > ROW_BLOCK) {
      Tiles::store<2>(c + ROW_BLOCK * c_stride, c_stride * sizeof(float));
      Tiles::store<3>(c + ROW_BLOCK * c_stride + WIDTH, c_stride * sizeof(float));
    }
  }

  template <int LINES>
  static void fetch_lines(const Run<AmxBf16Path>& run, int64_t k, int64_t steps, int64_t ahead_step) {
    for (int64_t i = k; i < k + steps; i++) {
      if (LINES > 0) fetch(run.ahead[0] + i * ahead_step);
      if (LINES > 1) fetch(run.ahead[1] + i * ahead_step);
    }
  }

  // One instruction for each block and vector; strides in elements.
  template <int R>
  static void multiply_step(const Activation* a, int64_t a_stride, const Weight* b0, const Weight* b1, int64_t b_step) {
    Tiles::load<6>(b0, b_step * sizeof(Weight));
    Tiles::load<7>(b1, b_step * sizeof(Weight));
    Tiles::load<4>(a, a_stride * sizeof(Activation));
    Tiles::multiply<0, 4, 6>();
    Tiles::multiply<1, 4, 7>();
    if constexpr (R > ROW_BLOCK) {
      Tiles::load<5>(a + ROW_BLOCK * a_stride, a_stride * sizeof(Activation));
      Tiles::multiply<2, 5, 6>();
      Tiles::multiply<3, 5, 7>();
    }
  }

  // The last steps of a run, less than a tile. Half a tile is multiplied where it lies if the tiles are shaped for it,
  // anything else as a tile filled up with zeros: the same sums.
  template <int R>
  static void multiply_rest(const Run<AmxBf16Path>& run, int64_t k, int64_t a_stride, int64_t b_step) {
    const int64_t steps = run.steps - k;
    const Activation* a = run.a + k * GROUP;
    const Weight *b0 = run.b0 + k * b_step, *b1 = run.b1 + k * b_step;
    if (R <= ROW_BLOCK && steps == HALF_STEPS) {
      Tiles::load<2>(b0, b_step * sizeof(Weight));
      Tiles::load<3>(b1, b_step * sizeof(Weight));
      Tiles::load<5>(a, a_stride * sizeof(Activation));
      Tiles::multiply<0, 5, 2>();
      Tiles::multiply<1, 5, 3>();
      return;
    }
    alignas(64) Activation left[R][STEPS * GROUP] = {};
    alignas(64) Weight right[2][STEPS][WIDTH * GROUP] = {};
    for (int row = 0; row < R; row++) memcpy(left[row], a + row * a_stride, steps * PAIR_BYTES);
    for (int64_t i = 0; i < steps; i++) {
      memcpy(right[0][i], b0 + i * b_step, sizeof right[0][i]);
      memcpy(right[1][i], b1 + i * b_step, sizeof right[1][i]);
    }
    multiply_step<R>(left[0], STEPS * GROUP, right[0][0], right[1][0], WIDTH * GROUP);
  }
};

}  // namespace
