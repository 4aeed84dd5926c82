// Sixteen floats of AVX512F, and the two ways to multiply by weights with them.
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace {

struct Avx512 {
  using F = __m512;
  static constexpr int WIDTH = 16;
  static constexpr int ROWS = 12;  // 12 x 2 accumulators, 2 weights and broadcasts fill 32 registers
  static constexpr int ROW_BLOCK = 1;
  static constexpr int ATTENTION_ROWS = ROWS;
  static constexpr int PACED_ROWS = 3;
  static constexpr int STEPS = 1;
  static constexpr bool TILES = false;
  static constexpr int PROBE_VECTORS = 24;
  struct Session {};

  static F zero() { return _mm512_setzero_ps(); }
  static F all(float x) { return _mm512_set1_ps(x); }
  static F load(const float* p) { return _mm512_loadu_ps(p); }
  static void store(float* p, F v) { _mm512_storeu_ps(p, v); }
  static F add(F a, F b) { return _mm512_add_ps(a, b); }
  static F sub(F a, F b) { return _mm512_sub_ps(a, b); }
  static F mul(F a, F b) { return _mm512_mul_ps(a, b); }
  static F div(F a, F b) { return _mm512_div_ps(a, b); }
  static F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
  static F negative_fma(F a, F b, F c) { return _mm512_fnmadd_ps(a, b, c); }
  // The second operand is the result if either is NaN.
  static F max(F a, F b) { return _mm512_max_ps(a, b); }
  static F min(F a, F b) { return _mm512_min_ps(a, b); }
  static float sum(F v) { return _mm512_reduce_add_ps(v); }
  static float largest(F v) { return _mm512_reduce_max_ps(v); }
  static F round(F v) { return _mm512_roundscale_ps(v, 0); }
  static F power_of_two(F n) {
    const __m512i biased = _mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127));
    return _mm512_castsi512_ps(_mm512_slli_epi32(biased, 23));
  }
  // Lanes below `count` of v, the others of `rest`; count may be anything.
  static F first(int count, F v, F rest) {
    const uint32_t mask = count >= 16 ? 0xffff : count <= 0 ? 0 : (1u << count) - 1;
    return _mm512_mask_mov_ps(rest, static_cast<__mmask16>(mask), v);
  }
  static uint32_t equal(F a, F b) { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ); }
  // x in the lanes where v >= bound, 0 in the others.
  static F at_least(F v, F bound, F x) { return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(v, bound, _CMP_GE_OQ), x); }
  static bool has_nan(F v) { return _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q) != 0; }

  static F widen(const uint16_t* p) {
    const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
  }
};

struct Avx512Bf16Path : Avx512 {
  using Weight = uint16_t;
  using Activation = uint16_t;
  using Left = __m512i;
  using Right = __m512i;
  static constexpr int GROUP = 2;
  static constexpr bool CODED = true;

  // The high bytes that the codes of a panel's two vectors stand for.
  struct HighBytes {
    __m512i of[2];
  };
  static HighBytes high_bytes(const uint8_t (*table)[16]) {
    return {{_mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table[0]))),
             _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table[1])))}};
  }
  // The weights of one vector of a pair of steps (coded.h).
  template <int VECTOR>
  static void decode(const char* pair, const HighBytes& high_bytes, Right& first, Right& second) {
    const __m512i low = _mm512_loadu_si512(pair + 64 * VECTOR), both = _mm512_loadu_si512(pair + 128);
    const __m512i half = _mm512_set1_epi8(15);
    const __m512i codes = _mm512_and_si512(VECTOR ? _mm512_srli_epi16(both, 4) : both, half);
    const __m512i high = _mm512_shuffle_epi8(high_bytes.of[VECTOR], codes);
    first = _mm512_unpacklo_epi8(low, high);
    second = _mm512_unpackhi_epi8(low, high);
  }
  static void store_weights(Weight* p, Right weights) { _mm512_storeu_si512(p, weights); }

  static Left spread(const Activation* p) {
    int32_t pair;
    memcpy(&pair, p, 4);
    return _mm512_set1_epi32(pair);
  }
  static Right weights(const Weight* p) { return _mm512_loadu_si512(p); }
  static F multiply(F sum, Left left, Right right) { return _mm512_dpbf16_ps(sum, (__m512bh)left, (__m512bh)right); }
  static void store_activation(Activation* p, F v) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), (__m256i)_mm512_cvtneps_pbh(v));
  }
  static void store_weight(Weight* p, F v) { store_activation(p, v); }
  static float weight(Weight w) {
    const uint32_t bits = static_cast<uint32_t>(w) << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
  }
};

struct Avx512FloatPath : Avx512 {
  static constexpr bool CODED = false;
  using Weight = float;
  using Activation = float;
  using Left = __m512;
  using Right = __m512;
  static constexpr int GROUP = 1;

  static Left spread(const Activation* p) { return _mm512_set1_ps(*p); }
  static Right weights(const Weight* p) { return _mm512_loadu_ps(p); }
  static F multiply(F sum, Left left, Right right) { return _mm512_fmadd_ps(left, right, sum); }
  static void store_activation(Activation* p, F v) { store(p, v); }
  static void store_weight(Weight* p, F v) { store(p, v); }
  static float weight(Weight w) { return w; }
};

}  // namespace
