// Fills in "the token this row sampled last step" from the slots' cells, and finds the holes.
//
// A cell is (token, position it will be fed at), written by `sample`. A row that asks for its cell's token and finds
// another position there is a hole: it must write nothing, so its token becomes -1 (an embedding of zeros), its
// kv_slot -1, its length 0 and its status POSITION_MISMATCH.
// Work: one thread per token; only rows of one token ask for a cell. Traffic: a few bytes a token.
#include "scalar.cuh"

#define THREADS 128
#define LAST_SAMPLE -1
#define POSITION_MISMATCH 2

// token_ids, positions, slot_mapping: [num_tokens]; rows: [num_tokens], the row of each token; slots: [num_rows];
// cell_tokens, cell_positions: [num_slots]; seq_lens: [num_rows]. Written: resolved_ids, resolved_mapping
// [num_tokens], visible_lens: [num_tokens], keys each token may see when it attends alone, row_lens: [num_rows] and
// row_status: [num_rows], both of holes only (the caller has filled them with seq_lens and 0).
// Grid: (ceil(num_tokens / THREADS)).
KERNEL(THREADS, 40)
resolve_inputs(i64* resolved_ids, i64* resolved_mapping, int* visible_lens, int* row_lens, u8* row_status,
               const i64* token_ids, const i64* positions, const i64* slot_mapping, const int* rows, const int* slots,
               const i64* cell_tokens, const i64* cell_positions, int num_tokens) {
  const int token = blockIdx.x * THREADS + threadIdx.x;
  if (token >= num_tokens) return;
  const i64 position = positions[token];
  i64 id = token_ids[token];
  bool hole = false;
  if (id == LAST_SAMPLE) {
    const int slot = slots[rows[token]];
    hole = cell_positions[slot] != position;
    id = cell_tokens[slot];
  }
  resolved_ids[token] = hole ? -1 : id;
  resolved_mapping[token] = hole ? -1 : slot_mapping[token];
  visible_lens[token] = hole ? 0 : int(position) + 1;
  if (hole) {
    row_lens[rows[token]] = 0;
    row_status[rows[token]] = POSITION_MISMATCH;
  }
}

// Cells of slots that were released or admitted hold nothing. Grid: (ceil(num_invalid / THREADS)).
KERNEL(THREADS, 24)
invalidate_cells(i64* cell_positions, const int* invalid_slots, int num_invalid) {
  const int index = blockIdx.x * THREADS + threadIdx.x;
  if (index < num_invalid) cell_positions[invalid_slots[index]] = -1;
}
