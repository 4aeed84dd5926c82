// Eight floats of AVX2 with FMA, and the two ways to multiply by weights with them.
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace {

struct Avx2 {
  static constexpr bool CODED = false;
  using F = __m256;
  static constexpr int WIDTH = 8;
  static constexpr int ROWS = 6;  // 6 x 2 accumulators, 2 weights and a broadcast fill 15 of 16 registers
  static constexpr int ROW_BLOCK = 1;
  static constexpr int ATTENTION_ROWS = ROWS;
  static constexpr int PACED_ROWS = 3;
  static constexpr int STEPS = 1;
  static constexpr bool TILES = false;
  static constexpr int PROBE_VECTORS = 24;
  struct Session {};
  using Activation = float;
  using Left = __m256;
  using Right = __m256;
  static constexpr int GROUP = 1;

  static F zero() { return _mm256_setzero_ps(); }
  static F all(float x) { return _mm256_set1_ps(x); }
  static F load(const float* p) { return _mm256_loadu_ps(p); }
  static void store(float* p, F v) { _mm256_storeu_ps(p, v); }
  static F add(F a, F b) { return _mm256_add_ps(a, b); }
  static F sub(F a, F b) { return _mm256_sub_ps(a, b); }
  static F mul(F a, F b) { return _mm256_mul_ps(a, b); }
  static F div(F a, F b) { return _mm256_div_ps(a, b); }
  static F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
  static F negative_fma(F a, F b, F c) { return _mm256_fnmadd_ps(a, b, c); }
  // The second operand is the result if either is NaN.
  static F max(F a, F b) { return _mm256_max_ps(a, b); }
  static F min(F a, F b) { return _mm256_min_ps(a, b); }
  static float sum(F v) {
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
  }
  static float largest(F v) {
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps(two, two, 1)));
  }
  static F round(F v) { return _mm256_round_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  static F power_of_two(F n) {
    const __m256i biased = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
    return _mm256_castsi256_ps(_mm256_slli_epi32(biased, 23));
  }
  // Lanes below `count` of v, the others of `rest`; count may be anything.
  static F first(int count, F v, F rest) {
    const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    const __m256i mask = _mm256_cmpgt_epi32(_mm256_set1_epi32(count), lanes);
    return _mm256_blendv_ps(rest, v, _mm256_castsi256_ps(mask));
  }
  static uint32_t equal(F a, F b) {
    return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_EQ_OQ)));
  }
  // x in the lanes where v >= bound, 0 in the others.
  static F at_least(F v, F bound, F x) { return _mm256_and_ps(_mm256_cmp_ps(v, bound, _CMP_GE_OQ), x); }
  static bool has_nan(F v) { return _mm256_movemask_ps(_mm256_cmp_ps(v, v, _CMP_UNORD_Q)) != 0; }

  static Left spread(const Activation* p) { return _mm256_broadcast_ss(p); }
  static F multiply(F sum, Left left, Right right) { return _mm256_fmadd_ps(left, right, sum); }
  static void store_activation(Activation* p, F v) { store(p, v); }
};

struct Avx2FloatPath : Avx2 {
  using Weight = float;

  static Right weights(const Weight* p) { return load(p); }
  static void store_weight(Weight* p, F v) { store(p, v); }
  static float weight(Weight w) { return w; }
};

// bf16 in memory, float32 in arithmetic: half the bytes of a float32 model, and the same sums for activations.
struct Avx2Bf16Path : Avx2 {
  using Weight = uint16_t;

  static Right weights(const Weight* p) {
    const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
  }
  static void store_weight(Weight* p, F v) {  // to nearest, ties to even; NaN stays NaN
    const __m256i bits = _mm256_castps_si256(v);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i high = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
    high = _mm256_blendv_epi8(high, _mm256_set1_epi32(0x7fc00000), nan);
    high = _mm256_srli_epi32(high, 16);
    const __m128i packed = _mm_packus_epi32(_mm256_castsi256_si128(high), _mm256_extracti128_si256(high, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), packed);
  }
  static float weight(Weight w) {
    const uint32_t bits = static_cast<uint32_t>(w) << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
  }
};

}  // namespace
