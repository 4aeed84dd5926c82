// Samples one token a row: reference.sampling, step by step, with the draws of reference.philox.
//
// Work: one block per row. Nothing is sorted: top-k and top-p are both a prefix of the order (logit descending, id
// ascending), and a prefix is a threshold key and a limit on the ids that equal it (select.cuh).
// Masses are exp((logit - largest) / temperature) in float32 as the reference says. expf here and NumPy's exp may
// differ in the last bit, so a token may differ from the CPU's where a draw, top_p or min_p falls within that last
// bit of a border; everything else (order, ties, sums of tiles, the uniform) is the same bit for bit.
// top-p adds masses as integers of 2^-44, exact for masses from 2^-20 up, because atomics add them in any order.
// Traffic: the row is read twice (greedy: once), four times more for top-k and five for top-p, from L2.
// Versions: this one; 64-bit shared atomics crowd on few digits in the first round of top-p. Not timed on a GPU yet.
#include "philox.cuh"
#include "select.cuh"

#define THREADS 512
#define TILE 256
#define GREEDY_BELOW 1e-5f
#define NON_FINITE 1

// Ids that stay, and the mass of each.
struct Masses {
  const float* logits;
  float largest, temperature, min_p;
  u32 threshold;
  int tie_end;

  __device__ __forceinline__ float full(float logit) const { return expf((logit - largest) / temperature); }
  __device__ __forceinline__ float kept(int id) const {
    const float logit = logits[id];
    const u32 key = key_of(logit);
    if (key < threshold || (key == threshold && id >= tie_end)) return 0.0f;
    const float mass = full(logit);
    return mass < min_p ? 0.0f : mass;  // the largest mass is 1
  }
  __device__ __forceinline__ u64 fixed(float logit) const { return u64(full(logit) * 17592186044416.0f); }
};

__device__ __forceinline__ u64 at_least_one(u64 value) { return value ? value : 1; }

// Steps 5 and 6: narrows `masses` to what top-k and top-p leave.
__device__ __forceinline__ void keep_largest(Masses& masses, int size, int top_k, float top_p, SelectScratch& scratch,
                                             u64* sums, u32* counts, int* tie_end) {
  u64 ties = u64(size);
  if (top_k > 0 && top_k < size) {
    const Selection found = select(masses.logits, size, u64(top_k), [](u32) { return u64(1); }, scratch);
    masses.threshold = found.key;
    ties = u64(top_k) - found.above;
  }
  if (top_p < 1.0f) {
    const u32 lowest = masses.threshold;
    u64 above = 0, equal = 0;
    for (int id = threadIdx.x; id < size; id += THREADS) {
      const u32 key = key_of(masses.logits[id]);
      if (key > lowest) above += masses.fixed(masses.logits[id]);
      if (key == lowest) equal = masses.fixed(masses.logits[id]);
    }
    above = reduce_block(above, Sum(), sums);
    equal = reduce_block(equal, Max(), sums);
    const double total = double(above + (lowest ? ties * equal : 0));
    const u64 target = at_least_one(u64(ceil(double(top_p) * total)));
    const auto weight_of = [&masses, lowest](u32 key) {
      return key >= lowest ? masses.fixed(value_of(key)) : u64(0);
    };
    const Selection found = select(masses.logits, size, target, weight_of, scratch);
    const u64 each = at_least_one(masses.fixed(value_of(found.key)));
    const u64 needed = at_least_one((target - found.above + each - 1) / each);
    ties = found.key == lowest && needed > ties ? ties : needed;
    masses.threshold = found.key;
  }
  if (masses.threshold == 0) return;
  masses.tie_end = end_of_ties(masses.logits, size, masses.threshold, ties, counts, tie_end);
}

// The order of NumPy's pairwise sum of 256 values: two halves, eight interleaved sums in each, then a tree.
__device__ __forceinline__ double sum_of_tile(const Masses& masses, int tile, int size) {
  const int lane = threadIdx.x % WARP, first = tile * TILE + lane / 8 * 128 + lane % 8;
  double sum = 0.0;
  if (lane < 16) {
    for (int i = 0; i < 16; i++) {
      const int id = first + 8 * i;
      if (id < size) sum += double(masses.kept(id));
    }
  }
  return reduce_lanes<16>(sum, Sum());
}

// Step 8: the first id whose cumulative mass exceeds draw * total. tile_sums: [num_tiles].
__device__ __forceinline__ int pick(const Masses& masses, int size, double draw, double* tile_sums, float* tile_masses,
                                    double* rest, int* picked) {
  const int num_tiles = (size + TILE - 1) / TILE;
  for (int tile = threadIdx.x / WARP; tile < num_tiles; tile += THREADS / WARP) {
    const double sum = sum_of_tile(masses, tile, size);
    if (threadIdx.x % WARP == 0) tile_sums[tile] = sum;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    double total = 0.0;
    for (int tile = 0; tile < num_tiles; tile++) total += tile_sums[tile];
    const double target = __dmul_rn(draw, total);
    double cumulative = 0.0;
    for (int tile = 0; tile < num_tiles; tile++) {
      if (tile_sums[tile] > 0.0) {
        *picked = tile;
        *rest = target - cumulative;
      }
      cumulative += tile_sums[tile];
      if (cumulative > target) break;
    }
  }
  __syncthreads();
  const int first = *picked * TILE;
  if (threadIdx.x < TILE) tile_masses[threadIdx.x] = first + threadIdx.x < size ? masses.kept(first + threadIdx.x) : 0.0f;
  __syncthreads();
  if (threadIdx.x != 0) return 0;
  double inside = 0.0;
  int token = first;
  for (int offset = 0; offset < TILE; offset++) {
    if (tile_masses[offset] > 0.0f) token = first + offset;  // rounding may leave `rest` at the tile's sum
    inside += double(tile_masses[offset]);
    if (inside > *rest) break;
  }
  return token;
}

// logits: [num_rows, vocab_size], masked and penalised; row_status: [num_rows], a row that is not 0 is left out and
// keeps it; slots, positions: [num_rows], the slot of a row and the position it fed last; temperature .. output_index:
// [num_rows], see reference.sampling and reference.philox. Written: token_ids, status: [num_rows]; of OK rows also
// the slot's cell: (token, position + 1). Grid: (num_rows). Shared: ceil(vocab_size / TILE) doubles.
KERNEL(THREADS, 64)
sample(i64* token_ids, u8* status, i64* cell_tokens, i64* cell_positions, const float* logits, const u8* row_status,
       const int* slots, const i64* positions, const float* temperature, const float* top_p, const int* top_k,
       const float* min_p, const u64* seed, const i64* choice_index, const i64* output_index, int vocab_size) {
  DYNAMIC_SHARED(double, tile_sums);
  SHARED(SelectScratch, scratch, 1);
  SHARED(u64, sums, MAX_WARPS);
  SHARED(u32, counts, MAX_WARPS);
  SHARED(float, tile_masses, TILE);
  SHARED(double, rest, 1);
  SHARED(int, place, 1);

  const int row = blockIdx.x;
  if (row_status[row] != 0) {
    if (threadIdx.x == 0) status[row] = row_status[row];
    return;
  }
  const float* values = logits + i64(row) * vocab_size;
  // The largest logit and, on a tie, the lowest id, as one number.
  u64 best = 0;
  for (int id = threadIdx.x; id < vocab_size; id += THREADS) {
    best = Max()(best, u64(key_of(values[id])) << 32 | (0xffffffffu - u32(id)));
  }
  best = reduce_block(best, Max(), sums);
  const u32 largest = u32(best >> 32);
  int token = int(0xffffffffu - u32(best));
  if (largest >= key_of(infinity()) || largest == key_of(-infinity())) {
    if (threadIdx.x == 0) status[row] = NON_FINITE;
    return;
  }
  if (temperature[row] >= GREEDY_BELOW) {
    Masses masses = {values, value_of(largest), temperature[row], min_p[row], 0, vocab_size};
    keep_largest(masses, vocab_size, top_k[row], top_p[row], scratch[0], sums, counts, place);
    const double draw = draw_uniform(seed[row], choice_index[row], output_index[row]);
    token = pick(masses, vocab_size, draw, tile_sums, tile_masses, rest, place);
  }
  if (threadIdx.x != 0) return;
  token_ids[row] = token;
  status[row] = 0;
  cell_tokens[slots[row]] = token;
  cell_positions[slots[row]] = positions[row] + 1;
}

// What a row was drawn from, in place: (logit - largest) / temperature of the ids that top-k, top-p and min-p leave,
// -infinity for the others; a greedy row stays as it is. Arguments as `sample`'s, behind the same masks and penalties;
// selected: [num_rows], 0 leaves the row alone. Rows whose status is not 0 are left alone. Grid: (num_rows).
KERNEL(THREADS, 64)
keep_drawable(float* logits, const u8* status, const u8* selected, const float* temperature, const float* top_p,
              const int* top_k, const float* min_p, int vocab_size) {
  SHARED(SelectScratch, scratch, 1);
  SHARED(u64, sums, MAX_WARPS);
  SHARED(u32, counts, MAX_WARPS);
  SHARED(int, place, 1);

  const int row = blockIdx.x;
  if (status[row] != 0 || selected[row] == 0 || temperature[row] < GREEDY_BELOW) return;
  float* values = logits + i64(row) * vocab_size;
  u32 best = 0;
  for (int id = threadIdx.x; id < vocab_size; id += THREADS) best = Max()(best, key_of(values[id]));
  best = reduce_block(best, Max(), counts);
  Masses masses = {values, value_of(best), temperature[row], min_p[row], 0, vocab_size};
  keep_largest(masses, vocab_size, top_k[row], top_p[row], scratch[0], sums, counts, place);
  // Each thread reads and writes ids of its own from here on: the selection ends behind a barrier.
  for (int id = threadIdx.x; id < vocab_size; id += THREADS) {
    const bool drawable = masses.kept(id) > 0.0f;
    values[id] = drawable ? (values[id] - masses.largest) / masses.temperature : -infinity();
  }
}
