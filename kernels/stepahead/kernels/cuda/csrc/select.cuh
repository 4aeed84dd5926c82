// The largest of a row of floats without sorting it: radix selection, eight bits at a time.
//
// The order is (value descending, id ascending). Keys are the floats' bits made monotonic, so that "the n largest"
// is "every key above a threshold, and the lowest ids among those equal to it". Weights are integers: adding them
// with atomics gives the same sum in every order.
#pragma once
#include "reduce.cuh"

#define RADIX 256

// Larger floats have larger keys; -0 and 0 are equal; NaN is above everything.
__device__ __forceinline__ u32 key_of(float value) {
  if (value != value) return 0xffffffffu;
  const u32 bits = __float_as_uint(value + 0.0f);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float value_of(u32 key) {
  return __uint_as_float(key >> 31 ? key & 0x7fffffffu : ~key);
}

struct SelectScratch {
  u64 weight[RADIX];
  u64 above;
  u32 digit;
};

struct Selection {
  u32 key;    // weight(keys > key) < target <= weight(keys >= key)
  u64 above;  // weight(keys > key)
};

// Warp 0: the highest digit at which the weight from the top reaches `target`; the lowest digit of all if none does.
__device__ __forceinline__ void find_digit(SelectScratch& scratch, u64 above, u64 target) {
  const int lane = threadIdx.x, first = (WARP - 1 - lane) * (RADIX / WARP);  // lane 0 has the highest digits
  u64 own = 0;
#pragma unroll
  for (int i = 0; i < RADIX / WARP; i++) own += scratch.weight[first + i];
  u64 through = own;
#pragma unroll
  for (int distance = 1; distance < WARP; distance *= 2) {
    const u64 other = __shfl_up_sync(ALL_LANES, through, distance);
    if (lane >= distance) through += other;
  }
  const u32 reached = __ballot_sync(ALL_LANES, above + through >= target);
  const int finder = reached ? __ffs(int(reached)) - 1 : WARP - 1;
  if (lane != finder) return;
  u64 sum = above + through - own;
  int digit = first + RADIX / WARP - 1;
  while (digit > first && sum + scratch.weight[digit] < target) sum += scratch.weight[digit--];
  scratch.digit = u32(digit);
  scratch.above = sum;
}

// weight_of(key) gives an id's weight; the whole block calls this and gets the same answer.
template <class WeightOf>
__device__ __forceinline__ Selection select(const float* values, int size, u64 target, const WeightOf& weight_of,
                                            SelectScratch& scratch) {
  Selection found = {0, 0};
#pragma unroll 1
  for (int shift = 24; shift >= 0; shift -= 8) {
    for (int digit = threadIdx.x; digit < RADIX; digit += blockDim.x) scratch.weight[digit] = 0;
    __syncthreads();
    for (int id = threadIdx.x; id < size; id += blockDim.x) {
      const u32 key = key_of(values[id]);
      // At the first digit every key is in; a shift by 32 would be undefined.
      if (shift == 24 || (key ^ found.key) >> (shift + 8) == 0) {
        const u64 weight = weight_of(key);
        if (weight) atomicAdd(&scratch.weight[key >> shift & (RADIX - 1)], weight);
      }
    }
    __syncthreads();
    if (threadIdx.x < WARP) find_digit(scratch, found.above, target);
    __syncthreads();
    found.key |= scratch.digit << shift;
    found.above = scratch.above;
    // No barrier here: digit and above are written again only behind the next round's barriers.
  }
  return found;
}

// The id behind the `wanted`-th id whose key is `key`, in ascending order; `size` if there are no more than that.
// scratch: MAX_WARPS counts; it and result are free again behind the caller's next barrier. Every warp looks at one
// run of ids.
__device__ __forceinline__ int end_of_ties(const float* values, int size, u32 key, u64 wanted, u32* scratch,
                                           int* result) {
  const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, num_warps = blockDim.x / WARP;
  const int run = (size + num_warps * WARP - 1) / (num_warps * WARP) * WARP;
  const int begin = warp * run, end = min(begin + run, size);
  u32 count = 0;
  for (int first = begin; first < end; first += WARP) {
    const int id = first + lane;
    count += __popc(__ballot_sync(ALL_LANES, id < end && key_of(values[id]) == key));
  }
  if (lane == 0) scratch[warp] = count;
  if (threadIdx.x == 0) *result = size;
  __syncthreads();
  u64 before = 0;
  for (int other = 0; other < warp; other++) before += scratch[other];
  if (before < wanted && wanted < before + count) {
    for (int first = begin; first < end; first += WARP) {
      const int id = first + lane;
      const u32 ties = __ballot_sync(ALL_LANES, id < end && key_of(values[id]) == key);
      const u64 through = before + __popc(ties & (2u << lane) - 1u);  // 2u << 31 is 0: all lanes
      if ((ties >> lane & 1) && through == wanted) *result = id + 1;
      before += __popc(ties);
    }
  } else if (before + count == wanted && count > 0) {
    if (lane == 0) *result = end;
  }
  __syncthreads();
  return *result;
}
