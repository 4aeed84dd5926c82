// Faults that the host back end must see, what it must let pass (good_...), and what it must compute right.
#include "reduce.cuh"
#include "tensor_core.cuh"
#define THREADS 64

KERNEL(THREADS, 32)
divergent(float* x) {
  if (threadIdx.x < 40) __syncthreads();
  else x[0] = __shfl_xor_sync(ALL_LANES, x[0], 1);
}
KERNEL(THREADS, 32)
two_barriers(float* x) {
  if (threadIdx.x < 32) __syncthreads();
  else
    __syncthreads();
}
KERNEL(THREADS, 32)
disagreeing_lanes(float* x) {
  if (threadIdx.x % 2) __syncwarp();
  else __ballot_sync(ALL_LANES, true);
}
KERNEL(THREADS, 32)
past_shared(float* x) {
  SHARED(float, values, 64);
  values[threadIdx.x + 1] = 1.0f;
}
KERNEL(THREADS, 32)
never_written(float* x) {
  SHARED(float, values, 64);
  if (threadIdx.x) values[threadIdx.x] = 1.0f;
  __syncthreads();
  x[threadIdx.x] = values[threadIdx.x];
}
KERNEL(THREADS, 32)
past_global(float* x) { x[threadIdx.x + 1] = 1.0f; }
KERNEL(THREADS, 32)
before_global(float* x) { x[threadIdx.x] = x[int(threadIdx.x) - 1]; }
KERNEL(THREADS, 32)
unsynchronized_lanes(float* x) {
  SHARED(float, values, 64);
  values[threadIdx.x] = x[threadIdx.x];
  x[threadIdx.x] = values[threadIdx.x ^ 1];
}
KERNEL(THREADS, 32)
shuffle_orders_no_memory(float* x) {
  SHARED(float, values, 64);
  values[threadIdx.x] = x[threadIdx.x];
  __shfl_xor_sync(ALL_LANES, x[threadIdx.x], 1);
  x[threadIdx.x] = values[threadIdx.x ^ 1];
}
KERNEL(THREADS, 32)
warp_barrier_between_warps(float* x) {
  SHARED(float, values, 64);
  values[threadIdx.x] = x[threadIdx.x];
  __syncwarp();
  x[threadIdx.x] = values[threadIdx.x ^ 32];
}
KERNEL(THREADS, 32)
blocks_write_one_place(float* x) { x[threadIdx.x] = float(blockIdx.x); }
KERNEL(THREADS, 32)
count_without_atomic(float* x) { x[0] += 1.0f; }
KERNEL(THREADS, 32)
atomic_and_plain(u32* x) {
  atomicAdd(x, 1u);
  x[1] = x[0];
}
KERNEL(THREADS, 32)
copies_left(uint4* x) {
  SHARED(uint4, values, 64);
  copy_async(values + threadIdx.x, x + threadIdx.x, true);
  commit_copies();
}
KERNEL(THREADS, 32)
copy_without_barrier(uint4* x) {
  SHARED(uint4, values, 64);
  copy_async(values + threadIdx.x, x + threadIdx.x, true);
  commit_copies();
  wait_copies<0>();
  x[threadIdx.x] = values[threadIdx.x ^ 32];
}

KERNEL(THREADS, 32)
good_lanes(float* x) {
  SHARED(float, values, 64);
  values[threadIdx.x] = x[threadIdx.x];
  __syncwarp();
  x[threadIdx.x] = values[threadIdx.x ^ 1];
}
KERNEL(THREADS, 32)
good_early_end(float* x) {
  if (threadIdx.x >= 32) return;
  __syncthreads();
  x[threadIdx.x] = reduce_lanes<32>(float(threadIdx.x), Sum());
}
KERNEL(THREADS, 32)
good_atomics(float* x) { atomicAdd(reinterpret_cast<u32*>(x), 1u); }

KERNEL(THREADS, 40)
convert(u16* halves, u16* brains, float* from_halves, float* from_brains, const float* x, int n) {
  const int i = blockIdx.x * THREADS + threadIdx.x;
  if (i >= n) return;
  halves[i] = narrowed<f16>(x[i]).bits;
  brains[i] = narrowed<bf16>(x[i]).bits;
  from_halves[i] = widen(f16{halves[i]});
  from_brains[i] = widen(bf16{brains[i]});
}
// c[16, 16] = a[16, 32] b[16, 32]^T, and = a[16, 32] d[32, 16].
KERNEL(32, 64)
multiply(float* c, float* e, const uint4* a, const uint4* b, const uint4* d) {
  SHARED(uint4, rows, 16 * 4 + 16 * 4 + 32 * 2);
  const int lane = threadIdx.x;
  for (int i = lane; i < 64; i += 32) {
    copy_async(rows + i, a + i, true);
    copy_async(rows + 64 + i, b + i, true);
    copy_async(rows + 128 + i, d + i, true);
  }
  commit_copies();
  wait_copies<0>();
  __syncthreads();
  float sums[4][4] = {};
  for (int step = 0; step < 2; step++) {
    u32 left[4], right[4], below[4];
    load_matrices(left, rows + lane % 16 * 4 + step * 2 + lane / 16);
    load_matrices(right, rows + 64 + (lane / 16 * 8 + lane % 8) * 4 + step * 2 + lane / 8 % 2);
    load_matrices_transposed(below, rows + 128 + (step * 16 + lane % 16) * 2 + lane / 16);
    for (int n = 0; n < 2; n++) {
      mma_16x8x16<f16>(sums[n], left, right[2 * n], right[2 * n + 1]);
      mma_16x8x16<f16>(sums[2 + n], left, below[2 * n], below[2 * n + 1]);
    }
  }
  for (int n = 0; n < 4; n++) {
    for (int i = 0; i < 4; i++) {
      const int row = lane / 4 + i / 2 * 8, column = n % 2 * 8 + lane % 4 * 2 + i % 2;
      (n < 2 ? c : e)[row * 16 + column] = sums[n][i];
    }
  }
}
