// A model as every instruction set sees it: sizes, packed weights, KV cache, activations. Plain pointers and inline
// code with internal linkage only: a function compiled for AVX512 must never be linked in where AVX2 runs.
//
// Packed matrix ("panels"): output columns in panels of two vectors, inputs in groups of `group` (bf16: 2, the depth
// of vdpbf16ps; float32: 1)
//
//     [num_panels][num_inputs / group][2 * vector_width][group]
//
// so a panel is one forward run through memory. Inputs and outputs are padded with zeros. Weights in bfloat16 can be
// coded in three quarters of that (coded.h).
//
// KV cache, per layer, block and KV head, in tiles of 16 tokens (a block of another size is padded to whole tiles):
//
//     keys   [tiles][padded_head / group][16 tokens][group]
//     values [tiles][16 / group][padded_head][group]
//
// Both are operands of the same multiplication as a panel, where they lie. Heads are padded by halves to vectors of
// 16, so rotation never crosses a vector.
#pragma once
#include <cstddef>
#include <cstdint>

#include "abi.h"
#include "pool.h"

namespace step {

static constexpr int TILE_TOKENS = 16;
static constexpr int PART_TILES = 8;    // KV tiles that share one maximum; parts begin at fixed positions
static constexpr int PART_KEYS = PART_TILES * TILE_TOKENS;
static constexpr int TASK_QUERIES = 48;  // query rows (token x head of a group) of an attention task

static constexpr int DRAW_TILE = 256;  // ids whose masses are summed first, as `reference.sampling` does
static constexpr int DRAW_BYTES_PER_ID = 4 + 12 + 1;  // a mass, a candidate, a share of the tiles' sums

static inline int64_t round_up(int64_t value, int64_t step) { return (value + step - 1) / step * step; }

struct Model;

// What an instruction set brings.
struct Kernels {
  int vector_width;      // floats
  int group;             // inputs per column and multiplication step
  int weight_bytes;      // per weight and per KV element
  int activation_bytes;  // per input of a matrix
  bool coded;            // multiplies by coded panels, too
  int probe_vectors;     // multiplied in a round of PROBE_MULTIPLY
  void (*forward)(Model& model, const Batch& batch, int thread);
  void (*draw)(const Model& model, const Draws& draws, int64_t index, int thread);
  void (*probe)(const Model& model, Probe kind, int64_t amount, int thread);
};

const Kernels* avx2_kernels(bool bf16);
const Kernels* avx512_kernels(bool bf16);
const Kernels* amx_kernels();  // bf16 only; null where the compiler does not know the instructions

// Null if this library was built without them.
const Kernels* kernels_for(Isa isa, bool bf16);

struct Linear {
  int64_t num_inputs, num_panels, panel_bytes;
  char* weights;
  bool coded;   // the panels are as in coded.h
  float* bias;  // [num_panels * 2 * vector_width] or null
};

struct Expert {
  Linear gate_up, down;
};

struct Layer {
  Linear qkv, output, gate_up, down;  // gate_up: a panel is one vector of gate columns, then the same ones of up
  Linear router;                      // of a mixture, which has experts in place of gate_up and down
  Expert* experts;                    // [num_experts] or null
  float *attention_norm, *mlp_norm;   // [padded_hidden]
  float *query_norm, *key_norm;       // [padded_head] or null
  float *post_attention_norm, *post_mlp_norm;  // [padded_hidden] or null
  int64_t window;                              // 0: all
  int rope;                                    // -1: none
  int64_t group, first_block;                  // of the KV cache: which tables, and where its blocks begin
};

// One (row, KV head, run of query rows) of attention.
struct AttentionTask {
  int32_t row, kv_head, first_query, num_queries;
};

// Where a step's tokens go in a mixture; an entry is a token at one of its experts. Entries are sorted by expert.
struct Routing {
  float* logits;            // [max_tokens][padded experts]
  int32_t* experts;         // [max_tokens][experts_per_token], best first
  float* weights;           // likewise
  int32_t* entries;         // likewise: where it is among the sorted ones
  int32_t* tokens;          // [max_tokens * experts_per_token], of each sorted entry
  int32_t* first_entry;     // [num_experts + 1]
  int64_t* first_row_unit;  // [num_experts + 1], an expert's entries in units of rows
  char* inputs;             // [entries][padded_hidden], activations
  float* results;           // [entries][padded_hidden]
};

struct Region {  // memory from the system, freed with the model
  char* base;
  size_t num_bytes;
  Region* next;
};

struct Model {
  Dims dims;
  const Kernels* kernels;
  Pool* pool;
  Region* regions;

  int64_t half, padded_head, group_heads, query_columns, kv_columns, padded_hidden, padded_inner, panel_columns;
  int64_t padded_experts, padded_expert;  // experts, and the intermediate size of one
  Layer* layers;
  Linear head;
  char* weights;  // all packed matrices
  size_t weight_bytes;  // of them, as placed
  int64_t stored_bytes;  // of all matrices, wherever they lie now
  char* panel_room;      // [num_threads][panel_room_bytes], a decoded panel each
  int64_t panel_room_bytes;
  float* final_norm;
  char* embedding;  // [vocab_size][hidden_size], or null: rows are read from the packed head

  CacheDims cache;
  int64_t tiles_per_block, tile_elements;
  char *keys, *values;
  float *cos, *sin;  // [num_ropes][max_positions][half]

  // Activations of a step, a row per token.
  float *residual, *qkv;                         // [padded_hidden], [query_columns + 2 * kv_columns]
  float* branch;                                 // [padded_hidden], with post norms: what has yet to join the residual
  char *normed, *queries, *attended, *inner;     // queries: [kv_head][token][head of group][padded_head]
  Routing routing;
  char* scratch;                                 // [num_threads][scratch_bytes]
  int64_t scratch_bytes;
  AttentionTask* tasks;
  int64_t num_tasks, max_tasks;
  float* best_logits;  // [num_threads][max_tokens]
  int64_t* best_ids;
  char* draw_scratch;  // [num_threads][draw_bytes]
  int64_t draw_bytes;
  uint64_t* cycles;  // [num_threads][NUM_PHASES], the caller's, or null
  struct Chain* chain;
};

// Element offset of a block's first tile, in `keys` or `values`.
static inline int64_t block_offset(const Model& model, int layer, int64_t block, int64_t kv_head) {
  const int64_t blocks = model.layers[layer].first_block + block;
  return (blocks * model.dims.num_kv_heads + kv_head) * model.tiles_per_block * model.tile_elements;
}

// The first position that a row sees in a group's layers, whatever their window.
static inline int64_t floor_of(const Batch& batch, int64_t group, int64_t row) {
  return batch.floors ? batch.floors[group * batch.num_rows + row] : 0;
}

char* allocate(Model& model, size_t num_bytes);  // zeroed, 2 MiB aligned; null if the system has none
bool make_weights(Model& model);
int set_tensor(Model& model, TensorKind kind, int layer, int expert, const void* source);

}  // namespace step
