// The three instructions a tile of matrix products needs: asynchronous copy, ldmatrix, mma.m16n8k16.
//
// Fragment layouts are those of the PTX manual ("Matrix fragments for mma.m16n8k16"): with group = lane / 4 and
// pair = lane % 4, a holds rows group and group + 8, columns 2 pair and up; b rows 2 pair and up, column group;
// c rows group and group + 8, columns 2 pair and 2 pair + 1. On the host cuda_on_host.h emulates them.
#pragma once
#include "scalar.cuh"

#ifndef CUDA_ON_HOST
template <class T>
__device__ __forceinline__ void mma_16x8x16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1);

#define DEFINE_MMA(T, name)                                                                          \
  template <>                                                                                        \
  __device__ __forceinline__ void mma_16x8x16<T>(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) { \
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." name "." name                              \
                 ".f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"                           \
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                                    \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));                    \
  }
DEFINE_MMA(f16, "f16")
DEFINE_MMA(bf16, "bf16")
#undef DEFINE_MMA

// Four 8x8 matrices of 16-bit values; lane l names row l % 8 of matrix l / 8.
__device__ __forceinline__ void load_matrices(u32 (&r)[4], const void* row) {
  const u32 address = u32(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3},[%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

// The same, each matrix transposed.
__device__ __forceinline__ void load_matrices_transposed(u32 (&r)[4], const void* row) {
  const u32 address = u32(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3},[%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

// Copies 16 bytes to shared memory in the background; zeros, and no read of `global`, unless `valid`.
__device__ __forceinline__ void copy_async(void* shared, const void* global, bool valid) {
  const u32 address = u32(__cvta_generic_to_shared(shared)), num_bytes = valid ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0],[%1],16,%2;" ::"r"(address), "l"(global), "r"(num_bytes) : "memory");
}

// Closes a group of this thread's copies.
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most `pending` of this thread's groups are under way. A barrier must follow before other threads
// read what was copied.
template <int pending>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}
#endif
