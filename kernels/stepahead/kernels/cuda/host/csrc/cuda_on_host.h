// CUDA C++ for g++: the keywords, built-ins and wrapped instructions that the kernels use, for tests on a CPU.
//
// Only what the kernels need is here; another built-in does not compile until somebody says what it means. Included
// in front of a kernel's text, which is the text NVRTC compiles.
#pragma once
#define CUDA_ON_HOST 1
#include "runtime.h"

#define __global__
#define __device__
#define __forceinline__ inline
#define __align__(n) alignas(n)

#define KERNEL(threads, registers) static void
#define SHARED(type, name, count)                                                \
  static char name##_place;                                                      \
  type* const name = static_cast<type*>(on_host::shared_array(&name##_place, sizeof(type) * (count)))
#define DYNAMIC_SHARED(type, name) type* const name = static_cast<type*>(on_host::dynamic_shared())

struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

extern "C" {
float expf(float) noexcept;
float exp2f(float) noexcept;
float tanhf(float) noexcept;
float erfcf(float) noexcept;
float sqrtf(float) noexcept;
float fmaxf(float, float) noexcept;
double log(double) noexcept;
double ceil(double) noexcept;
}
template <class T>
inline T min(T a, T b) {
  return b < a ? b : a;
}
template <class T>
inline T max(T a, T b) {
  return a < b ? b : a;
}
inline unsigned __float_as_uint(float value) { return __builtin_bit_cast(unsigned, value); }
inline float __uint_as_float(unsigned bits) { return __builtin_bit_cast(float, bits); }
inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline int __ffs(int bits) { return __builtin_ffs(bits); }
// Nothing is contracted here (-ffp-contract=off), so the plain operator rounds once.
inline double __dmul_rn(double a, double b) { return a * b; }

#define SITE_PARAMETERS const char *file = __builtin_FILE(), int line = __builtin_LINE()
inline void __syncthreads(SITE_PARAMETERS) { on_host::sync_block({file, line}); }
inline void __syncwarp(unsigned mask = 0xffffffffu, SITE_PARAMETERS) { on_host::sync_warp(mask, {file, line}); }

namespace on_host {
enum ShuffleKind { XOR = 8, UP = 9, ROW = 10 };

template <class T>
inline T shuffle(unsigned mask, T value, int source, int kind) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8, "shuffles move 4 or 8 bytes");
  if constexpr (sizeof(T) == 8) {
    return __builtin_bit_cast(T, exchange(mask, __builtin_bit_cast(uint64_t, value), source, kind));
  } else {
    return __builtin_bit_cast(T, uint32_t(exchange(mask, __builtin_bit_cast(uint32_t, value), source, kind)));
  }
}

// One atomic operation: read, change, write, which the checks see as one.
template <class T, class Change>
__attribute__((no_sanitize("thread"), noinline)) T atomically(T* target, Change change) {
  note(target, sizeof(T), ATOMIC);
  const T old = *target;
  *target = change(old);
  return old;
}
}  // namespace on_host

template <class T>
inline T __shfl_xor_sync(unsigned mask, T value, int distance) {
  return on_host::shuffle(mask, value, on_host::lane() ^ distance, on_host::XOR);
}
template <class T>
inline T __shfl_up_sync(unsigned mask, T value, unsigned distance) {
  const int lane = on_host::lane(), source = lane - int(distance);
  return on_host::shuffle(mask, value, source < 0 ? lane : source, on_host::UP);
}
inline unsigned __ballot_sync(unsigned mask, bool value) { return on_host::ballot(mask, value); }
template <class T>
inline T atomicAdd(T* target, T value) {
  return on_host::atomically(target, [value](T old) { return T(old + value); });
}
template <class T>
inline T atomicOr(T* target, T value) {
  return on_host::atomically(target, [value](T old) { return T(old | value); });
}

#include "scalar.cuh"

inline float widen(f16 value) {
  const uint32_t sign = uint32_t(value.bits & 0x8000) << 16, exponent = value.bits >> 10 & 31;
  const uint32_t mantissa = value.bits & 0x3ff;
  if (exponent == 31) return __uint_as_float(sign | 0x7f800000u | mantissa << 13);
  if (exponent) return __uint_as_float(sign | (exponent + 112) << 23 | mantissa << 13);
  // Zero and subnormal numbers: mantissa * 2^-24 is exact.
  return __uint_as_float(sign | __float_as_uint(float(mantissa) * (1.0f / 16777216.0f)));
}
inline void narrow(float wide, bf16& value) {
  const uint32_t bits = __float_as_uint(wide);
  const bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
  value.bits = nan ? 0x7fff : uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
inline void narrow(float wide, f16& value) {
  const uint32_t all = __float_as_uint(wide), bits = all & 0x7fffffffu;
  const uint16_t sign = uint16_t(all >> 16 & 0x8000);
  if (bits > 0x7f800000u) {
    value.bits = 0x7fff;
  } else if (bits >= 0x477ff000u) {
    value.bits = uint16_t(sign | 0x7c00);  // rounds to infinity
  } else if (bits < 0x38800000u) {
    // Subnormal: adding 0.5 lets the float's own rounding cut at 2^-24.
    value.bits = uint16_t(sign | (__float_as_uint(__uint_as_float(bits) + 0.5f) - 0x3f000000u));
  } else {
    value.bits = uint16_t(sign | (((bits + 0xfff + (bits >> 13 & 1)) >> 13) - (112u << 10)));
  }
}

// c += a b in k order; a tensor core may add in another.
template <class T>
inline void mma_16x8x16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  const uint32_t operands[6] = {a[0], a[1], a[2], a[3], b0, b1};
  const uint32_t(*const warp)[6] = on_host::enter_warp(operands);
  const int group = on_host::lane() / 4, pair = on_host::lane() % 4;
  const auto value = [warp](int lane, int operand, int half) {
    return widen(T{u16(warp[lane][operand] >> 16 * half)});
  };
  for (int i = 0; i < 4; i++) {
    const int column = 2 * pair + i % 2;
    float sum = 0.0f;
    for (int k = 0; k < 16; k++) {
      const int place = k % 8 / 2;
      sum += value(group * 4 + place, i / 2 + k / 8 * 2, k % 2) * value(column * 4 + place, 4 + k / 8, k % 2);
    }
    c[i] += sum;
  }
  on_host::leave_warp();
}

namespace on_host {
inline void load_four_matrices(u32 (&r)[4], const void* row, bool transposed) {
  if (reinterpret_cast<uintptr_t>(row) & 15) fault("a row of ldmatrix is not aligned to 16 bytes");
  const int lane = on_host::lane();
  for (int matrix = 0; matrix < 4; matrix++) {
    u16 pair[2];
    for (int half = 0; half < 2; half++) {
      const int of_row = transposed ? 2 * (lane % 4) + half : lane / 4;
      const int column = transposed ? lane / 4 : 2 * (lane % 4) + half;
      const uint64_t address = exchange(0xffffffffu, reinterpret_cast<uint64_t>(row), 8 * matrix + of_row, ROW);
      pair[half] = reinterpret_cast<const u16*>(address)[column];
    }
    r[matrix] = u32(pair[0]) | u32(pair[1]) << 16;
  }
}
}  // namespace on_host
inline void load_matrices(u32 (&r)[4], const void* row) { on_host::load_four_matrices(r, row, false); }
inline void load_matrices_transposed(u32 (&r)[4], const void* row) { on_host::load_four_matrices(r, row, true); }

inline void copy_async(void* shared, const void* global, bool valid) { on_host::queue_copy({shared, global, valid}); }
inline void commit_copies() { on_host::commit_copies(); }
template <int pending>
inline void wait_copies(SITE_PARAMETERS) {
  if (on_host::is_skipped({file, line})) return;
  on_host::Copy copy;
  while (on_host::next_landed(pending, copy)) {
    uint4 value = make_uint4(0, 0, 0, 0);
    if (copy.valid) value = *static_cast<const uint4*>(copy.from);
    *static_cast<uint4*>(copy.to) = value;
  }
}

namespace on_host {
template <size_t... Place>
struct Places {};
template <size_t count, size_t... Place>
struct Counted : Counted<count - 1, count - 1, Place...> {};
template <size_t... Place>
struct Counted<0, Place...> {
  typedef Places<Place...> Type;
};
template <auto kernel>
struct Entry;
template <class... Arguments, void (*kernel)(Arguments...)>
struct Entry<kernel> {
  template <size_t... Place>
  __attribute__((no_sanitize("thread"), noinline)) static void unpack(void** arguments, Places<Place...>) {
    kernel(*static_cast<Arguments*>(arguments[Place])...);
  }
  static void body(void** arguments) { unpack(arguments, typename Counted<sizeof...(Arguments)>::Type()); }
  static constexpr int num_arguments = sizeof...(Arguments);
  static constexpr int sizes[] = {int(sizeof(Arguments))...};
};
}  // namespace on_host

#define EXPORT_KERNEL(name)                                                                                        \
  extern "C" __attribute__((visibility("default"))) const char* launch_##name(                                     \
      const unsigned* grid_block, size_t shared_bytes, unsigned seed, void** arguments, const int* sizes, int n) { \
    typedef on_host::Entry<&name> Entry;                                                                           \
    return on_host::launch(Entry::body, Entry::sizes, Entry::num_arguments, grid_block, shared_bytes, seed,        \
                           arguments, sizes, n);                                                                   \
  }
