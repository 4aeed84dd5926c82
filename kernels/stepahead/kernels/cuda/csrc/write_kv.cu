// Stores the keys and values of a step's tokens in the paged cache.
//
// Work: one block per token, one thread per 16 bytes. Traffic: every byte read and written once.
// Values are moved, not interpreted, so one module serves every storage type.
#include "scalar.cuh"

#define THREADS 256

// cache: [num_blocks, 2, num_kv_heads, block_size, head_pieces] pieces of 16 bytes; keys_values: token t's keys, then
// its values, [2, num_kv_heads, head_pieces], token_stride pieces from one token to the next; slot_mapping:
// [num_tokens] block * block_size + offset, or -1 for a token that writes nothing (a hole). Grid: (num_tokens).
KERNEL(THREADS, 40)
write_kv(uint4* cache, const uint4* keys_values, const i64* slot_mapping, i64 token_stride, int num_kv_heads,
         int block_size, int head_pieces) {
  const i64 slot = slot_mapping[blockIdx.x];
  if (slot < 0) return;
  const i64 block = slot / block_size, offset = slot % block_size;
  const uint4* source = keys_values + blockIdx.x * token_stride;
  for (int piece = threadIdx.x; piece < 2 * num_kv_heads * head_pieces; piece += THREADS) {
    const int vector = piece / head_pieces;  // keys of all heads, then values of all heads
    cache[((block * 2 * num_kv_heads + vector) * block_size + offset) * head_pieces + piece % head_pieces] =
        source[piece];
  }
}
