// Copies and clears whole blocks of the paged cache in all layers.
//
// Work: grid (chunks of a block, pairs, layers), one thread per 16 bytes. Traffic: every byte read and written once.
// A launch reads and writes in no order: a destination must not be a source of the same launch (the wrapper goes
// through a second buffer then), nor named twice.
#include "scalar.cuh"

#define THREADS 256

// Both: [num_layers, blocks, block_pieces] pieces of 16 bytes, layer strides in pieces; pairs: [num_pairs, 2] (source,
// destination). Grid: (ceil(block_pieces / THREADS), num_pairs, num_layers).
KERNEL(THREADS, 32)
copy_blocks(uint4* to, const uint4* from, const int* pairs, i64 to_layer_stride, i64 from_layer_stride,
            i64 block_pieces) {
  const i64 piece = i64(blockIdx.x) * THREADS + threadIdx.x;
  if (piece >= block_pieces) return;
  const i64 source = pairs[2 * blockIdx.y], destination = pairs[2 * blockIdx.y + 1];
  to[blockIdx.z * to_layer_stride + destination * block_pieces + piece] =
      from[blockIdx.z * from_layer_stride + source * block_pieces + piece];
}

// Sets blocks to zero. Grid: (ceil(block_pieces / THREADS), num_blocks, num_layers).
KERNEL(THREADS, 32)
zero_blocks(uint4* cache, const int* blocks, i64 layer_stride, i64 block_pieces) {
  const i64 piece = i64(blockIdx.x) * THREADS + threadIdx.x;
  if (piece >= block_pieces) return;
  cache[blockIdx.z * layer_stride + blocks[blockIdx.y] * block_pieces + piece] = make_uint4(0, 0, 0, 0);
}
