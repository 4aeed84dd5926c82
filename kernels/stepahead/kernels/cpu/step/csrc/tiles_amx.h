// The tile instructions of AMX: eight registers of up to 16 rows of 64 bytes, shaped by a configuration.
//
// The compiler's own wrappers (GCC 12) name no memory in a load and 8 of the configuration's 64 bytes: what feeds them
// could be moved behind them or dropped, what comes after moved before them. Hence the fences, which cost nothing.
#pragma once
#include <immintrin.h>

#include <cstdint>

#include "tile_shape.h"

namespace {

struct Tiles {
  static void fence() { __asm__ volatile("" ::: "memory"); }

  static void configure(const TileConfig& config) {
    fence();
    _tile_loadconfig(&config);
    fence();
  }
  static void release() { _tile_release(); }

  template <int T>
  static void zero();
  template <int T>
  static void load(const void* base, int64_t row_bytes);
  template <int T>
  static void store(void* base, int64_t row_bytes);
  // c += a by b, bf16 pairs summed in float32.
  template <int C, int A, int B>
  static void multiply();
};

// The wrappers paste their arguments into assembly text: literals only.
#define STEP_TILE_INPUT(T)                                        \
  template <>                                                     \
  inline void Tiles::load<T>(const void* base, int64_t row_bytes) { \
    fence();                                                      \
    _tile_loadd(T, base, row_bytes);                              \
    fence();                                                      \
  }
#define STEP_TILE_RESULT(T)                                   \
  template <>                                                 \
  inline void Tiles::zero<T>() {                              \
    _tile_zero(T);                                            \
  }                                                           \
  template <>                                                 \
  inline void Tiles::store<T>(void* base, int64_t row_bytes) { \
    _tile_stored(T, base, row_bytes);                         \
  }
#define STEP_TILE_MULTIPLY(C, A, B)          \
  template <>                                \
  inline void Tiles::multiply<C, A, B>() {   \
    _tile_dpbf16ps(C, A, B);                 \
  }

STEP_TILE_RESULT(0)
STEP_TILE_RESULT(1)
STEP_TILE_RESULT(2)
STEP_TILE_RESULT(3)
STEP_TILE_INPUT(2)
STEP_TILE_INPUT(3)
STEP_TILE_INPUT(4)
STEP_TILE_INPUT(5)
STEP_TILE_INPUT(6)
STEP_TILE_INPUT(7)
STEP_TILE_MULTIPLY(0, 4, 6)
STEP_TILE_MULTIPLY(1, 4, 7)
STEP_TILE_MULTIPLY(2, 5, 6)
STEP_TILE_MULTIPLY(3, 5, 7)
STEP_TILE_MULTIPLY(0, 5, 2)
STEP_TILE_MULTIPLY(1, 5, 3)

#undef STEP_TILE_INPUT
#undef STEP_TILE_RESULT
#undef STEP_TILE_MULTIPLY

}  // namespace
