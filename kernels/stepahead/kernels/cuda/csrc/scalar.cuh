// Storage types, their conversions, and how a kernel is declared. Arithmetic is float32 whatever memory holds.
//
// The same text is compiled by NVRTC for a GPU and by g++ for the host (host/csrc/cuda_on_host.h stands in for the
// compiler's built-ins then), so nothing here needs a CUDA header. SCALAR names the storage type of a module:
// float, f16 or bf16.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#ifndef CUDA_ON_HOST
// A kernel of at most `threads` threads a block and a budget of `registers` registers a thread, which
// stepahead.kernels.cuda.gates reads and checks. The compiler is told how many blocks then fit the 65536 registers of
// a multiprocessor: left to itself it has spilled at 40 registers where 64 were free (decode, sm_90).
#define KERNEL(threads, registers) \
  extern "C" __global__ void __launch_bounds__(threads, 65536 / ((threads) * (registers)))
#define SHARED(type, name, count) __shared__ __align__(16) type name[count]
// The launch says how many bytes there are; at most one in a kernel.
#define DYNAMIC_SHARED(type, name)                     \
  extern __shared__ __align__(16) u8 dynamic_shared[]; \
  type* const name = reinterpret_cast<type*>(dynamic_shared)
#endif

struct f16 {
  u16 bits;
};
struct bf16 {
  u16 bits;
};

// g++ has no INFINITY without a header and NVRTC has none at all.
__device__ __forceinline__ float infinity() { return __uint_as_float(0x7f800000u); }

__device__ __forceinline__ float widen(float value) { return value; }
__device__ __forceinline__ float widen(bf16 value) { return __uint_as_float(u32(value.bits) << 16); }
#ifndef CUDA_ON_HOST
__device__ __forceinline__ float widen(f16 value) {
  float wide;
  asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(value.bits));
  return wide;
}
__device__ __forceinline__ void narrow(float wide, f16& value) {
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(value.bits) : "f"(wide));
}
__device__ __forceinline__ void narrow(float wide, bf16& value) {
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(value.bits) : "f"(wide));
}
#endif
__device__ __forceinline__ void narrow(float wide, float& value) { value = wide; }

template <class T>
__device__ __forceinline__ T narrowed(float wide) {
  T value;
  narrow(wide, value);
  return value;
}

// Two values in one 32-bit register, the lower-numbered one in the lower half: what a tensor core takes.
template <class T>
__device__ __forceinline__ u32 packed_pair(float low, float high) {
  return u32(narrowed<T>(low).bits) | u32(narrowed<T>(high).bits) << 16;
}

// 16 bytes, the widest access a thread has: 4 floats or 8 halves.
template <class T>
struct Vector {
  static constexpr int size = 16 / sizeof(T);
  float values[size];

  __device__ __forceinline__ void load(const T* source) {
    const uint4 raw = *reinterpret_cast<const uint4*>(source);
    unpack(raw.x, 0);
    unpack(raw.y, 1);
    unpack(raw.z, 2);
    unpack(raw.w, 3);
  }

  __device__ __forceinline__ void store(T* target) const {
    uint4 raw;
    raw.x = pack(0);
    raw.y = pack(1);
    raw.z = pack(2);
    raw.w = pack(3);
    *reinterpret_cast<uint4*>(target) = raw;
  }

 private:
  __device__ __forceinline__ void unpack(u32 word, int index) {
    if constexpr (sizeof(T) == 4) {
      values[index] = __uint_as_float(word);
    } else {
      values[2 * index] = widen(T{u16(word & 0xffffu)});
      values[2 * index + 1] = widen(T{u16(word >> 16)});
    }
  }
  __device__ __forceinline__ u32 pack(int index) const {
    if constexpr (sizeof(T) == 4) {
      return __float_as_uint(values[index]);
    } else {
      return packed_pair<T>(values[2 * index], values[2 * index + 1]);
    }
  }
};
