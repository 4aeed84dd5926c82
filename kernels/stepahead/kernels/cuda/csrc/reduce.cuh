// Reductions over a warp and a block in one fixed order: the order depends on the number of threads alone, so a
// row's result cannot depend on what else is in the launch.
#pragma once
#include "scalar.cuh"

#define ALL_LANES 0xffffffffu
#define WARP 32
#define MAX_WARPS 32

struct Sum {
  template <class T>
  __device__ __forceinline__ T operator()(T a, T b) const {
    return a + b;
  }
};
struct Max {
  template <class T>
  __device__ __forceinline__ T operator()(T a, T b) const {
    return a < b ? b : a;
  }
};
struct Or {
  __device__ __forceinline__ u32 operator()(u32 a, u32 b) const { return a | b; }
};

// Every lane gets the result; lanes of `width` neighbours reduce among themselves.
template <int width, class T, class Operation>
__device__ __forceinline__ T reduce_lanes(T value, Operation operation) {
#pragma unroll
  for (int distance = width / 2; distance > 0; distance /= 2) {
    value = operation(value, __shfl_xor_sync(ALL_LANES, value, distance));
  }
  return value;
}

// Every thread gets the result. `scratch` holds MAX_WARPS values of at least sizeof(T); it may be used again at once.
// blockDim.x must be a multiple of WARP.
template <class T, class Operation>
__device__ __forceinline__ T reduce_block(T value, Operation operation, T* scratch) {
  const int warp = threadIdx.x / WARP, num_warps = blockDim.x / WARP;
  value = reduce_lanes<WARP>(value, operation);
  if (threadIdx.x % WARP == 0) scratch[warp] = value;
  __syncthreads();
  T result = scratch[0];
  for (int other = 1; other < num_warps; other++) result = operation(result, scratch[other]);
  __syncthreads();
  return result;
}
