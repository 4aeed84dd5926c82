// Log probabilities of a given token, its rank, and of the most probable ids: reference.logprobs.
//
// log_softmax of log weights: for RAW values the logits as the model gave them, before penalties, masks and
// temperature. rank is 1 + the number that are strictly larger. The list is in order (log weight descending, id
// ascending) and holds no id of probability 0; values are at least LOWEST.
// Work: one block per row; radix selection instead of a sort. Traffic: the row is read seven times, mostly from L2.
#include "select.cuh"

#define THREADS 512
#define MAX_LISTED 20
#define LOWEST -1e4f

__device__ __forceinline__ float logprob(float logit, float largest, double log_total) {
  return fmaxf(float(double(logit - largest) - log_total), LOWEST);
}

// logits: [num_rows, vocab_size]; token_ids, status: [num_rows], a row whose status is not 0 gets no record;
// num_wanted: [num_rows], at most MAX_LISTED. Written: token_logprobs, ranks, num_listed: [num_rows]; listed_ids,
// listed_logprobs: [num_rows, MAX_LISTED], the first num_listed[row] of each row. Grid: (num_rows).
KERNEL(THREADS, 64)
logprobs(float* token_logprobs, int* ranks, int* num_listed, int* listed_ids, float* listed_logprobs,
         const float* logits, const i64* token_ids, const u8* status, const int* num_wanted, int vocab_size) {
  SHARED(SelectScratch, scratch, 1);
  SHARED(double, sums, MAX_WARPS);
  SHARED(u32, counts, MAX_WARPS);
  SHARED(float, listed_values, MAX_LISTED);
  SHARED(int, listed, MAX_LISTED);
  SHARED(int, place, 1);
  SHARED(u32, num_found, 1);

  const int row = blockIdx.x;
  if (status[row] != 0) return;
  const float* values = logits + i64(row) * vocab_size;
  const float own = values[token_ids[row]];
  u32 best = 0, larger = 0, possible = 0;
  for (int id = threadIdx.x; id < vocab_size; id += THREADS) {
    best = Max()(best, key_of(values[id]));
    larger += values[id] > own ? 1 : 0;
    possible += values[id] > -infinity() ? 1 : 0;
  }
  const float largest = value_of(reduce_block(best, Max(), counts));
  larger = reduce_block(larger, Sum(), counts);
  possible = reduce_block(possible, Sum(), counts);
  if (!(largest < infinity()) || possible == 0) {  // no distribution
    if (threadIdx.x == 0) {
      token_logprobs[row] = LOWEST;
      ranks[row] = 1;
      num_listed[row] = 0;
    }
    return;
  }
  double sum = 0.0;
  for (int id = threadIdx.x; id < vocab_size; id += THREADS) sum += double(expf(values[id] - largest));
  const double total = reduce_block(sum, Sum(), sums);
  const double log_total = log(total);
  if (threadIdx.x == 0) {
    token_logprobs[row] = logprob(own, largest, log_total);
    ranks[row] = int(larger) + 1;
    num_found[0] = 0;
  }
  const int wanted = min(min(num_wanted[row], MAX_LISTED), int(possible));
  if (threadIdx.x == 0) num_listed[row] = wanted;
  if (wanted == 0) return;
  const Selection found = select(values, vocab_size, u64(wanted), [](u32) { return u64(1); }, scratch[0]);
  const int tie_end = end_of_ties(values, vocab_size, found.key, u64(wanted) - found.above, counts, place);
  for (int id = threadIdx.x; id < vocab_size; id += THREADS) {
    const u32 key = key_of(values[id]);
    if (key > found.key || (key == found.key && id < tie_end)) {
      const u32 index = atomicAdd(num_found, 1u);  // in any order: each entry finds its own place below
      listed[index] = id;
      listed_values[index] = values[id];
    }
  }
  __syncthreads();
  const int entry = threadIdx.x;
  if (entry >= wanted) return;
  int before = 0;
  for (int other = 0; other < wanted; other++) {
    const bool ahead = listed_values[other] > listed_values[entry] ||
                       (listed_values[other] == listed_values[entry] && listed[other] < listed[entry]);
    before += ahead ? 1 : 0;
  }
  listed_ids[row * MAX_LISTED + before] = listed[entry];
  listed_logprobs[row * MAX_LISTED + before] = logprob(listed_values[entry], largest, log_total);
}
