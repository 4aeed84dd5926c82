// Applies grammar masks and suppressed ids: what may not be sampled becomes -infinity.
//
// NaN and +infinity stay, so that `sample` still sees a row that is not finite. A finite row without an id left gets
// the status NOTHING_ALLOWED here, before the difference between "masked" and "never finite" is gone.
// Work: one block per row. Traffic: a row of logits read once or twice and written where it changes.
#include "reduce.cuh"

#define THREADS 512
#define NOTHING_ALLOWED 3

// logits: [num_rows, vocab_size]; masks: [num_masks, mask_words], bit i % 32 of word i / 32 allows id i; mask_index:
// [num_rows], -1 is none; suppressed_ids: of row r those from suppressed_start[r] to suppressed_start[r + 1];
// row_status: [num_rows], 0 or why the row is not sampled. Grid: (num_rows).
KERNEL(THREADS, 40)
mask_logits(float* logits, u8* row_status, const u32* masks, const int* mask_index, const int* suppressed_ids,
            const int* suppressed_start, int vocab_size, int mask_words) {
  SHARED(u32, scratch, MAX_WARPS);
  const int row = blockIdx.x, mask = mask_index[row];
  const int first = suppressed_start[row], end = suppressed_start[row + 1];
  if (row_status[row] != 0 || (mask < 0 && first == end)) return;
  float* values = logits + i64(row) * vocab_size;
  const u32 finite_bit = 1, bad_bit = 2;
  u32 seen = 0;
  for (int id = threadIdx.x; id < vocab_size; id += THREADS) {
    const float value = values[id];
    if (!(value < infinity())) seen |= bad_bit;  // NaN or +infinity
    else if (value > -infinity()) seen |= finite_bit;
    if (mask < 0) continue;
    const bool allowed = masks[i64(mask) * mask_words + id / 32] >> (id % 32) & 1;
    if (!allowed && value < infinity()) values[id] = -infinity();
  }
  seen = reduce_block(seen, Or(), scratch);
  for (int entry = first + threadIdx.x; entry < end; entry += THREADS) {
    float* value = values + suppressed_ids[entry];
    if (*value < infinity()) *value = -infinity();
  }
  if (seen != finite_bit) return;  // `sample` says why
  __syncthreads();
  u32 left = 0;
  for (int id = threadIdx.x; id < vocab_size; id += THREADS) left |= values[id] > -infinity() ? 1 : 0;
  left = reduce_block(left, Or(), scratch);
  if (threadIdx.x == 0 && left == 0) row_status[row] = NOTHING_ALLOWED;
}
