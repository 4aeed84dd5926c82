// The same instructions in software, for a CPU without AMX: tests run the path against this (build.py, emulate_tiles).
//
// Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2, the "Operation" of LDTILECFG,
// TILELOADD, TILESTORED, TILEZERO, TDPBF16PS and TILERELEASE. For TDPBF16PS it says: every result has two sums that
// begin at zero, one of the even inputs' products and one of the odd ones', each a chain of fused multiply-adds in
// ascending order; they are added to each other, and that to the result. Every operation rounds to nearest even;
// denormal inputs count as zero and denormal results become zero, whatever MXCSR says, which stays as it is.
//
// What the manual answers with an exception (a tile that is not configured, shapes that do not fit) ends the process
// with a line that says so. Bytes past a tile's configured columns and rows are zero after every write, as there.
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "tile_shape.h"

namespace {

struct TileState {
  TileConfig config;
  bool configured;
  alignas(64) uint8_t data[8][MAX_TILE_ROWS][MAX_TILE_BYTES];
};

inline TileState& tile_state() {
  static thread_local TileState state = {};
  return state;
}

inline void require(bool holds, const char* what) {
  if (holds) return;
  fprintf(stderr, "emulated AMX: %s\n", what);
  abort();
}

// One row of a result: both chains of 16 columns. Not inlined: its arithmetic must not move past a change of MXCSR.
__attribute__((noinline)) void multiply_tile_row(const uint8_t* a, const uint8_t (*b)[MAX_TILE_BYTES], int num_pairs,
                                                 uint8_t* c) {
  const __m512i high_half = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
  __m512 even = _mm512_setzero_ps(), odd = _mm512_setzero_ps();
  for (int k = 0; k < num_pairs; k++) {
    int32_t pair;
    memcpy(&pair, a + 4 * k, 4);
    const __m512i left = _mm512_set1_epi32(pair), right = _mm512_load_si512(b[k]);
    even = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_slli_epi32(left, 16)),
                           _mm512_castsi512_ps(_mm512_slli_epi32(right, 16)), even);
    odd = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_and_si512(left, high_half)),
                          _mm512_castsi512_ps(_mm512_and_si512(right, high_half)), odd);
  }
  float* sums = reinterpret_cast<float*>(c);
  _mm512_store_ps(sums, _mm512_add_ps(_mm512_load_ps(sums), _mm512_add_ps(even, odd)));
}

struct Tiles {
  static void configure(const TileConfig& config) {
    require(config.palette == 1 && config.start_row == 0, "LDTILECFG of another palette or row");
    for (uint8_t byte : config.reserved) require(byte == 0, "LDTILECFG with reserved bytes");
    for (int tile = 0; tile < 16; tile++) {
      const int rows = config.rows[tile], bytes = config.row_bytes[tile];
      require(tile < 8 || (rows == 0 && bytes == 0), "LDTILECFG of a tile that does not exist");
      require(rows <= MAX_TILE_ROWS && bytes <= MAX_TILE_BYTES, "LDTILECFG of a tile that is too large");
      require((rows == 0) == (bytes == 0), "LDTILECFG of rows without columns");
    }
    TileState& state = tile_state();
    state.config = config;
    state.configured = true;
    memset(state.data, 0, sizeof state.data);
  }

  static void release() {
    TileState& state = tile_state();
    state.configured = false;
    memset(state.data, 0, sizeof state.data);
  }

  template <int T>
  static void zero() {
    memset(checked(T).data[T], 0, sizeof tile_state().data[T]);
  }

  template <int T>
  static void load(const void* base, int64_t row_bytes) {
    TileState& state = checked(T);
    memset(state.data[T], 0, sizeof state.data[T]);
    for (int row = 0; row < state.config.rows[T]; row++)
      memcpy(state.data[T][row], static_cast<const char*>(base) + row * row_bytes, state.config.row_bytes[T]);
  }

  template <int T>
  static void store(void* base, int64_t row_bytes) {
    const TileState& state = checked(T);
    for (int row = 0; row < state.config.rows[T]; row++)
      memcpy(static_cast<char*>(base) + row * row_bytes, state.data[T][row], state.config.row_bytes[T]);
  }

  template <int C, int A, int B>
  static void multiply() {
    TileState& state = checked(C);
    checked(A);
    checked(B);
    const TileConfig& shape = state.config;
    require(C != A && A != B && C != B, "TDPBF16PS of the same tile twice");
    require(shape.row_bytes[A] % 4 == 0 && shape.row_bytes[B] % 4 == 0, "TDPBF16PS of half a pair");
    require(shape.rows[C] == shape.rows[A], "TDPBF16PS with more rows on one side");
    require(shape.row_bytes[C] == shape.row_bytes[B], "TDPBF16PS with more columns on one side");
    require(shape.row_bytes[A] / 4 == shape.rows[B], "TDPBF16PS of unlike depths");
    const unsigned caller = _mm_getcsr();
    _mm_setcsr(0x9fc0);  // nothing is signalled, to nearest even, denormals are zero on both sides
    for (int row = 0; row < shape.rows[C]; row++)
      multiply_tile_row(state.data[A][row], state.data[B], shape.rows[B], state.data[C][row]);
    _mm_setcsr(caller);
  }

 private:
  static TileState& checked(int tile) {
    TileState& state = tile_state();
    require(state.configured, "no tiles are configured");
    require(state.config.rows[tile] != 0, "the tile is not configured");
    return state;
  }
};

}  // namespace
