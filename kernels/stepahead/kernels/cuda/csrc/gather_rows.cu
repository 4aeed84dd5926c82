// Rows of a table by ids that are on the device: embeddings of tokens, or the activations that need logits.
//
// Work: one block per row, one thread per 16 bytes. Traffic: every row read and written once.
// Values are moved, not interpreted, so one module serves every storage type.
#include "scalar.cuh"

#define THREADS 256

// out: [num_rows, row_pieces] pieces of 16 bytes; table: [table_rows, row_pieces]; ids: [num_rows], a negative one
// (the token of a hole) gives zeros. Grid: (num_rows).
KERNEL(THREADS, 32)
gather_rows(uint4* out, const uint4* table, const i64* ids, int row_pieces) {
  const i64 id = ids[blockIdx.x];
  for (int piece = threadIdx.x; piece < row_pieces; piece += THREADS) {
    out[i64(blockIdx.x) * row_pieces + piece] = id < 0 ? make_uint4(0, 0, 0, 0) : table[id * row_pieces + piece];
  }
}
