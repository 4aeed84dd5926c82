// RMS norm over the last axis, alone or behind the addition of a residual (Zhang and Sennrich, 2019).
//
// Work: one block per row; the number of threads follows from the row's size alone, and with it the order of the
// sum. Traffic: a row is read twice (the second time from cache) and written once.
//
// Module constants: SCALAR, and WEIGHT, the weight's storage type: SCALAR, or float where a family multiplies by a
// float32 weight before the result is rounded.
#include "reduce.cuh"

#define MAX_THREADS 512

typedef Vector<SCALAR> Piece;

__device__ __forceinline__ float inverse_rms(float sum_of_squares, int size, float eps, float* scratch) {
  return 1.0f / sqrtf(reduce_block(sum_of_squares, Sum(), scratch) / size + eps);
}

__device__ __forceinline__ void write_normal(SCALAR* out, Piece& values, const WEIGHT* weight, float scale) {
  constexpr int step = Vector<WEIGHT>::size;
#pragma unroll
  for (int start = 0; start < Piece::size; start += step) {
    Vector<WEIGHT> weights;
    weights.load(weight + start);
#pragma unroll
    for (int i = 0; i < step; i++) values.values[start + i] = values.values[start + i] * scale * weights.values[i];
  }
  values.store(out);
}

// Row r of x begins at (r / rows_per_token) * x_stride + r % rows_per_token * size: the rows may be the heads of a
// token. out likewise; out may be x. size is a multiple of Vector::size. Grid: (num_rows).
KERNEL(MAX_THREADS, 48)
rms_norm(SCALAR* out, const SCALAR* x, const WEIGHT* weight, i64 out_stride, i64 x_stride, int rows_per_token,
         int size, float eps) {
  SHARED(float, scratch, MAX_WARPS);
  const i64 token = blockIdx.x / rows_per_token, place = i64(blockIdx.x % rows_per_token) * size;
  const SCALAR* source = x + token * x_stride + place;
  float sum = 0.0f;
  for (int start = threadIdx.x * Piece::size; start < size; start += blockDim.x * Piece::size) {
    Piece values;
    values.load(source + start);
#pragma unroll
    for (int i = 0; i < Piece::size; i++) sum += values.values[i] * values.values[i];
  }
  const float scale = inverse_rms(sum, size, eps, scratch);
  for (int start = threadIdx.x * Piece::size; start < size; start += blockDim.x * Piece::size) {
    Piece values;
    values.load(source + start);
    write_normal(out + token * out_stride + place + start, values, weight + start, scale);
  }
}

// residual += x, rounded to SCALAR; out = rms_norm(residual). All [num_rows, size]. Grid: (num_rows).
KERNEL(MAX_THREADS, 48)
add_rms_norm(SCALAR* out, SCALAR* residual, const SCALAR* x, const WEIGHT* weight, int size, float eps) {
  SHARED(float, scratch, MAX_WARPS);
  const i64 row = i64(blockIdx.x) * size;
  float sum = 0.0f;
  for (int start = threadIdx.x * Piece::size; start < size; start += blockDim.x * Piece::size) {
    Piece values, added;
    values.load(residual + row + start);
    added.load(x + row + start);
#pragma unroll
    for (int i = 0; i < Piece::size; i++) {
      // The norm is of what the next layer will read, so the sum is rounded first.
      values.values[i] = widen(narrowed<SCALAR>(values.values[i] + added.values[i]));
      sum += values.values[i] * values.values[i];
    }
    values.store(residual + row + start);
  }
  const float scale = inverse_rms(sum, size, eps, scratch);
  for (int start = threadIdx.x * Piece::size; start < size; start += blockDim.x * Piece::size) {
    Piece values;  // each thread reads back what it wrote itself
    values.load(residual + row + start);
    write_normal(out + row + start, values, weight + start, scale);
  }
}
