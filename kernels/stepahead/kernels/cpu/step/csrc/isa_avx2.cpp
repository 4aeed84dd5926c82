// The step for AVX2 with FMA. Compiled with those flags: nothing here may have external linkage but the table.
#include "forward.h"
#include "vector_avx2.h"

const step::Kernels* step::avx2_kernels(bool bf16) {
  static constexpr Kernels narrow = kernels_of<Avx2Bf16Path>(), wide = kernels_of<Avx2FloatPath>();
  return bf16 ? &narrow : &wide;
}
