// Attention of the query tokens of a chunk over the paged cache, on tensor cores (GQA packed, window, soft cap).
//
// Work: a row's queries are packed token by token, the query heads of one KV head as neighbours; a block takes
// TILE_QUERIES of them for one KV head, a warp 16. Tiles of TILE_KEYS keys and values are copied asynchronously one
// tile ahead into two stages; scores, online softmax and the weighted sum stay in registers (FlashAttention-2, Dao
// 2023). Key tiles begin at multiples of TILE_KEYS from position 0 and a masked key weighs exactly 0, so a token's
// bits do not depend on how its prompt was cut into chunks.
// Traffic: a block reads the keys and values its queries may see once, in 16-byte pieces.
// Shared rows are padded by 8 values: 8 rows of one ldmatrix then fall into different banks.
// Versions: this one. Not timed on a GPU yet.
//
// Module constants: SCALAR (f16 or bf16), HEAD_DIM (multiple of 16, at most 256), BLOCK_SIZE.
#include "reduce.cuh"
#include "tensor_core.cuh"

#define THREADS 128
#define TILE_QUERIES 64

constexpr int TILE_KEYS = HEAD_DIM > 128 ? 32 : 64;
constexpr int STRIDE = HEAD_DIM + 8;
constexpr int PIECES = HEAD_DIM / 8;
constexpr int KEY_STEPS = TILE_KEYS / 16;
constexpr int DIM_STEPS = HEAD_DIM / 16;
constexpr float LOG2_E = 1.4426950408889634f;

// What a block's queries are and which keys they see.
struct QueryTile {
  int first, end, group, first_head, first_token, num_tokens, seq_len;

  __device__ __forceinline__ int token(int packed) const { return packed / group; }
  __device__ __forceinline__ int head(int packed) const { return first_head + packed % group; }
  __device__ __forceinline__ int position(int packed) const { return seq_len - num_tokens + token(packed); }
};

__device__ __forceinline__ void copy_queries(SCALAR* shared, const SCALAR* queries, i64 stride, const QueryTile& tile) {
  for (int piece = threadIdx.x; piece < TILE_QUERIES * PIECES; piece += THREADS) {
    const int row = piece / PIECES, packed = tile.first + row;
    const bool valid = packed < tile.end;
    const SCALAR* source = queries;
    if (valid) source += (tile.first_token + tile.token(packed)) * stride + tile.head(packed) * HEAD_DIM;
    copy_async(shared + row * STRIDE + piece % PIECES * 8, source + piece % PIECES * 8, valid);
  }
}

// Keys outside [begin, end) become zeros: their weight is 0, and 0 times whatever lay there could be NaN.
__device__ __forceinline__ void copy_keys_and_values(SCALAR* keys, SCALAR* values, const SCALAR* cache,
                                                     const int* table, int kv_head, int num_kv_heads, int tile,
                                                     int begin, int end) {
  for (int piece = threadIdx.x; piece < TILE_KEYS * PIECES; piece += THREADS) {
    const int row = piece / PIECES, key = tile + row;
    const bool valid = key >= begin && key < end;
    const SCALAR *key_source = cache, *value_source = cache;
    if (valid) {
      const i64 block = table[key / BLOCK_SIZE];
      const i64 run = i64(BLOCK_SIZE) * HEAD_DIM, place = key % BLOCK_SIZE * HEAD_DIM + piece % PIECES * 8;
      key_source += (block * 2 * num_kv_heads + kv_head) * run + place;
      value_source += ((block * 2 + 1) * num_kv_heads + kv_head) * run + place;
    }
    copy_async(keys + row * STRIDE + piece % PIECES * 8, key_source, valid);
    copy_async(values + row * STRIDE + piece % PIECES * 8, value_source, valid);
  }
}

// scores[n][..] = queries (16 of this warp) times keys 8 n .. 8 n + 7.
__device__ __forceinline__ void score(float (&scores)[2 * KEY_STEPS][4], const SCALAR* queries, const SCALAR* keys) {
  const int lane = threadIdx.x % WARP;
#pragma unroll
  for (int n = 0; n < 2 * KEY_STEPS; n++) {
#pragma unroll
    for (int i = 0; i < 4; i++) scores[n][i] = 0.0f;
  }
#pragma unroll
  for (int step = 0; step < DIM_STEPS; step++) {
    u32 a[4];
    load_matrices(a, queries + lane % 16 * STRIDE + step * 16 + lane / 16 * 8);
#pragma unroll
    for (int pair = 0; pair < KEY_STEPS; pair++) {
      u32 b[4];
      load_matrices(b, keys + (pair * 16 + lane / 16 * 8 + lane % 8) * STRIDE + step * 16 + lane / 8 % 2 * 8);
      mma_16x8x16<SCALAR>(scores[2 * pair], a, b[0], b[1]);
      mma_16x8x16<SCALAR>(scores[2 * pair + 1], a, b[2], b[3]);
    }
  }
}

// sums += weights (16 queries x TILE_KEYS) times values.
__device__ __forceinline__ void add_values(float (&sums)[2 * DIM_STEPS][4], const float (&weights)[2 * KEY_STEPS][4],
                                           const SCALAR* values) {
  const int lane = threadIdx.x % WARP;
#pragma unroll
  for (int step = 0; step < KEY_STEPS; step++) {
    const u32 a[4] = {packed_pair<SCALAR>(weights[2 * step][0], weights[2 * step][1]),
                      packed_pair<SCALAR>(weights[2 * step][2], weights[2 * step][3]),
                      packed_pair<SCALAR>(weights[2 * step + 1][0], weights[2 * step + 1][1]),
                      packed_pair<SCALAR>(weights[2 * step + 1][2], weights[2 * step + 1][3])};
#pragma unroll
    for (int pair = 0; pair < DIM_STEPS; pair++) {
      u32 b[4];
      load_matrices_transposed(b, values + (step * 16 + lane % 16) * STRIDE + pair * 16 + lane / 16 * 8);
      mma_16x8x16<SCALAR>(sums[2 * pair], a, b[0], b[1]);
      mma_16x8x16<SCALAR>(sums[2 * pair + 1], a, b[2], b[3]);
    }
  }
}

// tiles: [num_tiles, 2] (row, first packed query); query_start_loc: [num_rows + 1]; seq_lens: [num_rows], last
// position + 1; block_tables: [num_rows, table_width]; queries: [num_tokens, query_stride]; cache: [num_blocks, 2,
// num_kv_heads, BLOCK_SIZE, HEAD_DIM]; out: [num_tokens, num_heads, HEAD_DIM]. soft_cap and window: 0 is none.
// Grid: (num_tiles, num_kv_heads). Shared: (TILE_QUERIES + 4 * TILE_KEYS) * STRIDE values.
KERNEL(THREADS, 255)
paged_chunk(SCALAR* out, const SCALAR* queries, const SCALAR* cache, const int* tiles, const int* query_start_loc,
            const int* seq_lens, const int* block_tables, i64 query_stride, int table_width, int num_heads,
            int num_kv_heads, float scale, float soft_cap, int window) {
  DYNAMIC_SHARED(SCALAR, shared);
  SCALAR* const query_rows = shared;
  SCALAR* const stages = shared + TILE_QUERIES * STRIDE;

  const int row = tiles[2 * blockIdx.x], kv_head = blockIdx.y;
  QueryTile tile;
  tile.group = num_heads / num_kv_heads;
  tile.first_head = kv_head * tile.group;
  tile.first = tiles[2 * blockIdx.x + 1];
  tile.first_token = query_start_loc[row];
  tile.num_tokens = query_start_loc[row + 1] - tile.first_token;
  tile.seq_len = seq_lens[row];
  tile.end = min(tile.num_tokens * tile.group, tile.first + TILE_QUERIES);
  const int lowest = tile.position(tile.first), end = tile.position(tile.end - 1) + 1;
  const int begin = window > 0 ? max(lowest - window + 1, 0) : 0;
  const int* table = block_tables + i64(row) * table_width;

  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
  // A thread's two queries, and the first and last key each may see.
  const int packed[2] = {tile.first + warp * 16 + lane / 4, tile.first + warp * 16 + lane / 4 + 8};
  int first_key[2], last_key[2];
#pragma unroll
  for (int half = 0; half < 2; half++) {
    last_key[half] = packed[half] < tile.end ? tile.position(packed[half]) : -1;
    first_key[half] = window > 0 ? last_key[half] - window + 1 : 0;
  }

  float sums[2 * DIM_STEPS][4];
#pragma unroll
  for (int n = 0; n < 2 * DIM_STEPS; n++) {
#pragma unroll
    for (int i = 0; i < 4; i++) sums[n][i] = 0.0f;
  }
  float row_max[2] = {-infinity(), -infinity()}, row_sum[2] = {0.0f, 0.0f};

  copy_queries(query_rows, queries, query_stride, tile);
  int first = begin / TILE_KEYS * TILE_KEYS, stage = 0;
  copy_keys_and_values(stages, stages + TILE_KEYS * STRIDE, cache, table, kv_head, num_kv_heads, first, begin, end);
  commit_copies();
  for (; first < end; first += TILE_KEYS, stage ^= 1) {
    SCALAR* const keys = stages + stage * 2 * TILE_KEYS * STRIDE;
    SCALAR* const values = keys + TILE_KEYS * STRIDE;
    if (first + TILE_KEYS < end) {
      SCALAR* const next = stages + (stage ^ 1) * 2 * TILE_KEYS * STRIDE;
      copy_keys_and_values(next, next + TILE_KEYS * STRIDE, cache, table, kv_head, num_kv_heads, first + TILE_KEYS,
                           begin, end);
      commit_copies();
      wait_copies<1>();
    } else {
      wait_copies<0>();
    }
    __syncthreads();
    float scores[2 * KEY_STEPS][4];
    score(scores, query_rows + warp * 16 * STRIDE, keys);
    float tile_max[2] = {-infinity(), -infinity()};
#pragma unroll
    for (int n = 0; n < 2 * KEY_STEPS; n++) {
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int key = first + n * 8 + lane % 4 * 2 + i % 2, half = i / 2;
        float value = scores[n][i] * scale;
        if (soft_cap > 0.0f) value = soft_cap * tanhf(value / soft_cap);
        scores[n][i] = key >= first_key[half] && key <= last_key[half] ? value * LOG2_E : -infinity();
        tile_max[half] = fmaxf(tile_max[half], scores[n][i]);
      }
    }
    float base[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const float new_max = fmaxf(row_max[half], reduce_lanes<4>(tile_max[half], Max()));
      // Nothing seen yet: subtract 0 rather than -infinity from -infinity.
      base[half] = new_max == -infinity() ? 0.0f : new_max;
      const float factor = exp2f(row_max[half] - base[half]);
      row_max[half] = new_max;
      row_sum[half] *= factor;
#pragma unroll
      for (int n = 0; n < 2 * DIM_STEPS; n++) {
        sums[n][2 * half] *= factor;
        sums[n][2 * half + 1] *= factor;
      }
    }
#pragma unroll
    for (int n = 0; n < 2 * KEY_STEPS; n++) {
#pragma unroll
      for (int i = 0; i < 4; i++) {
        scores[n][i] = exp2f(scores[n][i] - base[i / 2]);
        row_sum[i / 2] += scores[n][i];
      }
    }
    add_values(sums, scores, values);
    __syncthreads();
  }

#pragma unroll
  for (int half = 0; half < 2; half++) {
    const float total = reduce_lanes<4>(row_sum[half], Sum());
    if (packed[half] >= tile.end) continue;
    const i64 token = tile.first_token + tile.token(packed[half]);
    SCALAR* target = out + (token * num_heads + tile.head(packed[half])) * HEAD_DIM + lane % 4 * 2;
#pragma unroll
    for (int n = 0; n < 2 * DIM_STEPS; n++) {
      *reinterpret_cast<u32*>(target + n * 8) =
          packed_pair<SCALAR>(sums[n][2 * half] / total, sums[n][2 * half + 1] / total);
    }
  }
}
