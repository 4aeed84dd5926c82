// Repetition, frequency and presence penalties and the logit bias, and the counts they are made from.
//
// Counts live on the device per slot and are updated there: the penalty of step k + 1 includes the token of step k
// although the host may not know it yet (rule J1). Order and rounding are those of reference.penalties: repetition,
// frequency and presence in float64 and rounded once, then the bias likewise, both held within +-MAX_SCORE. Logits
// that are not finite stay: -infinity means "never", and `sample` must see the others.
// Work: one thread per (row, id) for the penalties, per entry for the bias, per token for the counts.
// Traffic: a row of logits read and written once, its counts and prompt bits read once.
// Repetition penalty: Keskar et al., 2019 (CTRL); frequency and presence: as the OpenAI API documents them.
#include "scalar.cuh"

#define THREADS 256

__device__ __forceinline__ bool is_finite(float value) { return value < infinity() && value > -infinity(); }
__device__ __forceinline__ float bounded(double value) {
  const double max_score = 1e30;
  return float(value > max_score ? max_score : value < -max_score ? -max_score : value);
}

// logits: [num_rows, vocab_size], in place; slots: [num_rows], -1 leaves the row alone; output_counts: [num_slots, vocab_size]; prompt_bits:
// [num_slots, prompt_words], bit i % 32 of word i / 32; repetition (1 is neutral), frequency, presence: [num_rows].
// Grid: (ceil(vocab_size / THREADS), num_rows).
KERNEL(THREADS, 40)
apply_penalties(float* logits, const int* slots, const int* output_counts, const u32* prompt_bits,
                const float* repetition, const float* frequency, const float* presence, int vocab_size,
                int prompt_words) {
  const int id = blockIdx.x * THREADS + threadIdx.x, row = blockIdx.y;
  if (id >= vocab_size) return;
  const i64 slot = slots[row];
  if (slot < 0) return;
  const int count = output_counts[slot * vocab_size + id];
  const bool in_prompt = prompt_bits[slot * prompt_words + id / 32] >> (id % 32) & 1;
  float& logit = logits[i64(row) * vocab_size + id];
  if ((count == 0 && !in_prompt) || !is_finite(logit)) return;
  double value = logit;
  value = value > 0.0 ? value / repetition[row] : __dmul_rn(value, double(repetition[row]));
  // Each product is rounded, as in NumPy: a fused multiply-add would not.
  value -= __dmul_rn(double(frequency[row]), double(count));
  if (count > 0) value -= double(presence[row]);
  logit = bounded(value);
}

// rows, ids, values: [num_entries], each (row, id) at most once. Grid: (ceil(num_entries / THREADS)).
KERNEL(THREADS, 32)
add_bias(float* logits, const int* rows, const int* ids, const float* values, int vocab_size, int num_entries) {
  const int entry = blockIdx.x * THREADS + threadIdx.x;
  if (entry >= num_entries) return;
  float& logit = logits[i64(rows[entry]) * vocab_size + ids[entry]];
  if (is_finite(logit)) logit = bounded(double(logit) + double(values[entry]));
}

// Adds what a step sampled; slots of one launch differ, -1 counts nothing. token_ids, status: [num_rows], status 0 counts.
// Grid: (ceil(num_rows / THREADS)).
KERNEL(THREADS, 32)
count_tokens(int* output_counts, const int* slots, const i64* token_ids, const u8* status, int vocab_size,
             int num_rows) {
  const int row = blockIdx.x * THREADS + threadIdx.x;
  if (row < num_rows && slots[row] >= 0 && status[row] == 0) output_counts[i64(slots[row]) * vocab_size + token_ids[row]] += 1;
}

// A slot's counts from the history of its sequence: ids [history_len], the first num_prompt of them its prompt. The
// caller has cleared the slot's counts and bits. Grid: (ceil(history_len / THREADS)).
KERNEL(THREADS, 32)
count_history(int* slot_counts, u32* slot_bits, const i64* ids, int num_prompt, int history_len) {
  const int index = blockIdx.x * THREADS + threadIdx.x;
  if (index >= history_len) return;
  const i64 id = ids[index];
  if (index < num_prompt) {
    atomicOr(slot_bits + id / 32, 1u << (id % 32));
  } else {
    atomicAdd(slot_counts + id, 1);
  }
}
