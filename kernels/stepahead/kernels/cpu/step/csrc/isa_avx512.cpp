// The step for AVX512 with BF16. Compiled with those flags: nothing here may have external linkage but the table.
#include "forward.h"
#include "vector_avx512.h"

const step::Kernels* step::avx512_kernels(bool bf16) {
  static constexpr Kernels narrow = kernels_of<Avx512Bf16Path>(), wide = kernels_of<Avx512FloatPath>();
  return bf16 ? &narrow : &wide;
}
