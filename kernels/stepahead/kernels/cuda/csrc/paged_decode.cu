// Attention of single query tokens over the paged cache (GQA and MQA, window, soft cap), split over the context.
//
// Work: one block per (KV head and up to GROUP of its query heads, query, split). A split is SPLIT_TOKENS positions
// counted from position 0, so where a context is cut depends on nothing else in the batch, and `merge` adds the
// splits in ascending order: a row's bits do not depend on its neighbours. Inside a block a tile of TILE keys is
// scored by 4 threads a key, weighted by an online softmax (Milakov and Gimelshein, 2018), and its values are added
// by HEAD_DIM / Vector::size threads a key.
// Traffic: each key and value is read once per GROUP query heads, in 16-byte pieces; the partial sums of splits are
// float32, written and read once.
// Versions: this one. A warp a key needs 5 shuffles per head and key, four threads 2. Not timed on a GPU yet.
//
// Module constants: SCALAR, HEAD_DIM (multiple of 8), GROUP (query heads a block), BLOCK_SIZE.
#include "reduce.cuh"

#define THREADS 128
#define TILE 64
#define SPLIT_TOKENS 512
#define KEY_THREADS 4

typedef Vector<SCALAR> Piece;
constexpr int PIECES = HEAD_DIM / Piece::size;
constexpr int VALUE_LANES = THREADS / PIECES;  // keys whose values are added at the same time
static_assert(PIECES <= THREADS, "a value is read by one thread per 16 bytes");

// Where the splits of a query lie. A query of length 0 (a hole) has none.
struct Splits {
  int first_key, first_split, count;

  __device__ __forceinline__ Splits(int seq_len, int window) {
    first_key = window > 0 && seq_len > window ? seq_len - window : 0;
    first_split = first_key / SPLIT_TOKENS;
    count = seq_len > 0 ? (seq_len - 1) / SPLIT_TOKENS - first_split + 1 : 0;
  }
};

// cache: [num_blocks, 2, num_kv_heads, BLOCK_SIZE, HEAD_DIM]; queries: [num_queries, query_stride], the heads of a
// query first; out: [num_queries, num_heads, HEAD_DIM]; query_rows: row of block_tables [.., table_width] of each
// query; seq_lens: keys it may see, 0 for a hole; partial: [num_queries, num_heads, num_splits, HEAD_DIM];
// partial_stats: [num_queries, num_heads, num_splits, 2] (max, sum). soft_cap and window: 0 is none.
// Grid: (num_kv_heads * ceil(group / GROUP), num_queries, num_splits).
KERNEL(THREADS, 128)
paged_decode(SCALAR* out, const SCALAR* queries, const SCALAR* cache, const int* query_rows, const int* seq_lens,
             const int* block_tables, float* partial, float* partial_stats, i64 query_stride, int table_width,
             int num_heads, int num_kv_heads, int num_splits, float scale, float soft_cap, int window) {
  SHARED(float, query, GROUP * HEAD_DIM);
  SHARED(float, weights, GROUP * TILE);
  SHARED(float, running_max, GROUP);
  SHARED(float, running_sum, GROUP);
  SHARED(float, rescale, GROUP);
  SHARED(float, lane_sums, VALUE_LANES * HEAD_DIM);

  const int index = blockIdx.y, split = blockIdx.z, thread = threadIdx.x;
  const int group = num_heads / num_kv_heads, tiles_of_group = (group + GROUP - 1) / GROUP;
  const int kv_head = blockIdx.x / tiles_of_group, first_in_group = blockIdx.x % tiles_of_group * GROUP;
  const int first_head = kv_head * group + first_in_group;
  const int heads = min(GROUP, group - first_in_group);  // of this block
  const int seq_len = seq_lens[index];
  const Splits splits(seq_len, window);
  if (split > 0 && split >= splits.count) return;
  const int begin = max(splits.first_key, (splits.first_split + split) * SPLIT_TOKENS);
  const int end = min(seq_len, (splits.first_split + split + 1) * SPLIT_TOKENS);
  const int* table = block_tables + i64(query_rows[index]) * table_width;

  for (int piece = thread; piece < heads * PIECES; piece += THREADS) {
    Piece values;
    values.load(queries + index * query_stride + first_head * HEAD_DIM + piece * Piece::size);
#pragma unroll
    for (int i = 0; i < Piece::size; i++) query[piece * Piece::size + i] = values.values[i];
  }
  if (thread < GROUP) {
    running_max[thread] = -infinity();
    running_sum[thread] = 0.0f;
  }
  float sums[GROUP][Piece::size];
#pragma unroll
  for (int head = 0; head < GROUP; head++) {
#pragma unroll
    for (int i = 0; i < Piece::size; i++) sums[head][i] = 0.0f;
  }
  __syncthreads();

  const i64 head_run = i64(BLOCK_SIZE) * HEAD_DIM;
  const int value_piece = thread % PIECES, value_lane = thread / PIECES;
  for (int tile = begin / TILE * TILE; tile < end; tile += TILE) {
    const int part = thread % KEY_THREADS;
#pragma unroll
    for (int pass = 0; pass < TILE * KEY_THREADS / THREADS; pass++) {
      const int place = thread / KEY_THREADS + pass * (THREADS / KEY_THREADS), key = tile + place;
      const bool visible = key >= begin && key < end;
      float dots[GROUP];
#pragma unroll
      for (int head = 0; head < GROUP; head++) dots[head] = 0.0f;
      if (visible) {
        const SCALAR* keys = cache + (i64(table[key / BLOCK_SIZE]) * 2 * num_kv_heads + kv_head) * head_run +
                             key % BLOCK_SIZE * HEAD_DIM;
        for (int piece = part; piece < PIECES; piece += KEY_THREADS) {
          Piece values;
          values.load(keys + piece * Piece::size);
#pragma unroll
          for (int head = 0; head < GROUP; head++) {
            if (head < heads) {
#pragma unroll
              for (int i = 0; i < Piece::size; i++) {
                dots[head] += values.values[i] * query[head * HEAD_DIM + piece * Piece::size + i];
              }
            }
          }
        }
      }
#pragma unroll
      for (int head = 0; head < GROUP; head++) {
        float score = reduce_lanes<KEY_THREADS>(dots[head], Sum()) * scale;
        if (soft_cap > 0.0f) score = soft_cap * tanhf(score / soft_cap);
        if (part == 0) weights[head * TILE + place] = visible ? score : -infinity();
      }
    }
    __syncthreads();
    // A tile holds at least one visible key, so the new maximum is finite for finite scores.
    for (int head = thread / WARP; head < heads; head += THREADS / WARP) {
      const int lane = thread % WARP;
      const float first = weights[head * TILE + lane], second = weights[head * TILE + lane + WARP];
      const float old_max = running_max[head];
      const float new_max = fmaxf(old_max, reduce_lanes<WARP>(fmaxf(first, second), Max()));
      const float first_weight = expf(first - new_max), second_weight = expf(second - new_max);
      const float tile_sum = reduce_lanes<WARP>(first_weight + second_weight, Sum());
      weights[head * TILE + lane] = first_weight;
      weights[head * TILE + lane + WARP] = second_weight;
      __syncwarp();  // every lane has read the old maximum
      if (lane == 0) {
        const float factor = expf(old_max - new_max);
        rescale[head] = factor;
        running_max[head] = new_max;
        running_sum[head] = running_sum[head] * factor + tile_sum;
      }
    }
    __syncthreads();
#pragma unroll
    for (int head = 0; head < GROUP; head++) {
      const float factor = head < heads ? rescale[head] : 0.0f;
#pragma unroll
      for (int i = 0; i < Piece::size; i++) sums[head][i] *= factor;
    }
    const int first_place = max(begin - tile, 0), end_place = min(end - tile, TILE);
    if (value_lane < VALUE_LANES) {
      for (int place = value_lane; place < end_place; place += VALUE_LANES) {
        if (place < first_place) continue;
        const int key = tile + place;
        Piece values;
        values.load(cache + ((i64(table[key / BLOCK_SIZE]) * 2 + 1) * num_kv_heads + kv_head) * head_run +
                    key % BLOCK_SIZE * HEAD_DIM + value_piece * Piece::size);
#pragma unroll
        for (int head = 0; head < GROUP; head++) {
          const float weight = head < heads ? weights[head * TILE + place] : 0.0f;
#pragma unroll
          for (int i = 0; i < Piece::size; i++) sums[head][i] += weight * values.values[i];
        }
      }
    }
    __syncthreads();
  }

#pragma unroll
  for (int head = 0; head < GROUP; head++) {
    if (head >= heads) break;
    if (value_lane < VALUE_LANES) {
#pragma unroll
      for (int i = 0; i < Piece::size; i++) {
        lane_sums[value_lane * HEAD_DIM + value_piece * Piece::size + i] = sums[head][i];
      }
    }
    __syncthreads();
    const i64 query_head = i64(index) * num_heads + first_head + head;
    for (int column = thread; column < HEAD_DIM; column += THREADS) {
      float sum = 0.0f;
      for (int lane = 0; lane < VALUE_LANES; lane++) sum += lane_sums[lane * HEAD_DIM + column];
      if (splits.count > 1) {
        partial[(query_head * num_splits + split) * HEAD_DIM + column] = sum;
      } else {
        const float total = running_sum[head];
        out[query_head * HEAD_DIM + column] = narrowed<SCALAR>(splits.count ? sum / total : 0.0f);
      }
    }
    if (splits.count > 1 && thread == 0) {
      partial_stats[(query_head * num_splits + split) * 2] = running_max[head];
      partial_stats[(query_head * num_splits + split) * 2 + 1] = running_sum[head];
    }
    __syncthreads();
  }
}

// Joins the splits of queries that have more than one. Grid: (num_heads, num_queries).
KERNEL(THREADS, 48)
paged_decode_merge(SCALAR* out, const float* partial, const float* partial_stats, const int* seq_lens, int num_heads,
                   int num_splits, int window) {
  const int index = blockIdx.y;
  const Splits splits(seq_lens[index], window);
  if (splits.count <= 1) return;
  const i64 query_head = i64(index) * num_heads + blockIdx.x;
  const float* stats = partial_stats + query_head * num_splits * 2;
  float largest = -infinity();
  for (int split = 0; split < splits.count; split++) largest = fmaxf(largest, stats[2 * split]);
  for (int column = threadIdx.x; column < HEAD_DIM; column += THREADS) {
    float total = 0.0f, sum = 0.0f;
    for (int split = 0; split < splits.count; split++) {
      const float factor = expf(stats[2 * split] - largest);
      total += factor * stats[2 * split + 1];
      sum += factor * partial[(query_head * num_splits + split) * HEAD_DIM + column];
    }
    out[query_head * HEAD_DIM + column] = narrowed<SCALAR>(sum / total);
  }
}
