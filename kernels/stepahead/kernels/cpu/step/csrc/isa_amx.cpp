// The step for AMX with BF16. Compiled with those flags: nothing here may have external linkage but the table. A
// compiler that does not know them gets none (build.py), and leaves the path out.
#include "model.h"

#if defined(__AMX_BF16__) || defined(STEP_EMULATE_TILES)
#include "forward.h"
#include "vector_amx.h"

const step::Kernels* step::amx_kernels() {
  static constexpr Kernels narrow = kernels_of<AmxBf16Path>();
  return &narrow;
}
#else
const step::Kernels* step::amx_kernels() { return nullptr; }
#endif

#ifdef STEP_EMULATE_TILES
// One instruction, for tests of the emulation: c += a by b, `shape` as LDTILECFG reads it of tiles 0 (c), 4 (a), 6 (b),
// rows packed.
STEP_EXPORT void step_emulated_multiply(const void* shape, const void* a, const void* b, void* c) {
  AmxBf16Path::Session session;
  TileConfig config;
  memcpy(&config, shape, sizeof config);
  Tiles::configure(config);
  Tiles::load<0>(c, config.row_bytes[0]);
  Tiles::load<4>(a, config.row_bytes[4]);
  Tiles::load<6>(b, config.row_bytes[6]);
  Tiles::multiply<0, 4, 6>();
  Tiles::store<0>(c, config.row_bytes[0]);
}

// The path's multiplication, for tests: rows of `a` by runs that follow each other in `a` and `b`, two vectors at `b`,
// as `multiply_runs` has them. Tiles keep the shape of the call before.
STEP_EXPORT void step_emulated_runs(int32_t rows, int32_t num_runs, const int64_t* steps, const uint16_t* a,
                                    int64_t a_stride, const uint16_t* b, int64_t b_step, float* c, int64_t c_stride) {
  Run<AmxBf16Path> runs[16];
  for (int i = 0; i < num_runs; i++) {
    runs[i] = {a, b, b + AmxBf16Path::WIDTH * AmxBf16Path::GROUP, steps[i], {}};
    a += steps[i] * AmxBf16Path::GROUP;
    b += steps[i] * b_step;
  }
  multiply_rows<AmxBf16Path, 0>(rows)(runs, num_runs, a_stride, b_step, 0, c, c_stride);
}
#endif
