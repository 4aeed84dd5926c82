// Fetches keys and values before attention asks for them.
//
// With more rows than one pass takes the matrices keep the cores busy and memory idle, then attention waits for memory.
// So from the end of one layer's attention on, passes over the matrices that have fetched their weights fetch what this
// thread's attention tasks of the next layer will read:
//
//     matrices   |output  gate, up  down  qkv|         |output  gate, up ...
//     attention  |                           |attention|
//     memory     |KV of the next layer.......|rest     |KV of the layer after it ...
//
// It goes through the second-level cache and waits in the third. Rows come last to first: what was fetched last is still
// in the second-level cache, and attention begins with the first row.
#pragma once
#include "model.h"

namespace {

class CacheAhead {
 public:
  // Of one thread and layer. More than this would push out its own beginning before it is used.
  static constexpr int64_t MAX_BYTES = 3 << 20;

  CacheAhead(const step::Model& m, const step::Batch& batch, int thread) : m(m), batch(batch), thread(thread) {}

  // Begins with a layer's cache; one that does not exist has none.
  void begin(int next_layer) {
    layer = next_layer;
    first_row = batch.num_rows * int64_t(thread) / m.pool->size();
    row = first_row - 1;  // becomes the last row that fits
    if (layer < m.dims.num_layers) {
      const int64_t end_row = batch.num_rows * int64_t(thread + 1) / m.pool->size();
      for (int64_t num_bytes = 0; row + 1 < end_row && num_bytes < MAX_BYTES;) {
        row++;
        find_blocks();
        num_bytes += 2 * (end_block - block) * run_bytes();
      }
    }
    left = MAX_BYTES;
    block = -1;
    rest = nullptr;
    next_run();
  }

  bool empty() const { return rest == nullptr; }

  // The next memory to fetch, at most `num_bytes`, which becomes its size. Not to be called when empty.
  const char* take(int64_t* num_bytes) {
    const char* taken = rest;
    if (*num_bytes > end - rest) *num_bytes = end - rest;
    rest += *num_bytes;
    left -= *num_bytes;
    if (rest == end) next_run();
    return taken;
  }

 private:
  // A run is what all heads keep of a block: its keys, then its values.
  void next_run() {
    if (block >= 0 && keys) {
      keys = false;
      set_run(m.values);
      return;
    }
    rest = nullptr;
    if (left <= 0) return;
    if (block >= 0 && ++block == end_block) row--, block = -1;
    if (row < first_row) return;
    if (block < 0) find_blocks();
    keys = true;
    set_run(m.keys);
  }

  // The blocks that the row's attention reads.
  void find_blocks() {
    const int64_t size = m.cache.block_size, window = m.layers[layer].window, length = batch.seq_lens[row];
    const int64_t floor = step::floor_of(batch, m.layers[layer].group, row);
    block = (window && length > window + floor ? length - window : floor) / size;
    end_block = (length + size - 1) / size;
  }

  int64_t run_bytes() const {
    return m.dims.num_kv_heads * m.tiles_per_block * m.tile_elements * m.kernels->weight_bytes;
  }

  void set_run(const char* cache) {
    const int32_t* table = batch.block_tables + (m.layers[layer].group * batch.num_rows + row) * batch.table_width;
    const int64_t element = m.kernels->weight_bytes;
    rest = cache + step::block_offset(m, layer, table[block], 0) * element;
    end = rest + run_bytes();
  }

  const step::Model& m;
  const step::Batch& batch;
  const int thread;
  int layer = 0;
  bool keys = false;
  int64_t row = 0, first_row = 0, block = -1, end_block = 0, left = 0;
  const char *rest = nullptr, *end = nullptr;
};

}  // namespace
