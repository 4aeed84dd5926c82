// Attention of one task over paged keys and values, in place.
//
// A task is up to 48 query rows (token x query head of a group) of one sequence and KV head: a decode row is one group,
// a prefill chunk many. The keys are taken in parts of eight tiles; parts begin at fixed positions, and each part has
// its own maximum, sum and weighted values, which are then merged in ascending order. So a row's sums depend on its own
// position only. Keys a row must not see get the weight 0, which changes no sum. With a window, tiles before the first
// that any row of the task sees are left out: a part whose keys a row does not see yet has the largest score -3e38, sum
// and values 0, and merging it changes nothing.
#pragma once
#include <cstring>

#include "linear.h"
#include "model.h"
#include "tile.h"

namespace {

template <class P>
struct AttentionScratch {
  alignas(64) float scores[step::TASK_QUERIES * step::PART_KEYS];
  alignas(64) typename P::Activation weights[step::TASK_QUERIES * step::PART_KEYS];
  float largest[step::TASK_QUERIES], sum[step::TASK_QUERIES], part_largest[step::TASK_QUERIES];
  float part_sum[step::TASK_QUERIES];
  // Behind it: result, part result [TASK_QUERIES][padded_head] float32, the last tile's values.
};

// What a part of the keys is: its tiles, and for each the position of its first token and how many it can hold.
template <class P>
struct Part {
  const typename P::Weight *keys[step::PART_TILES], *values[step::PART_TILES];
  int64_t position[step::PART_TILES];
  int capacity[step::PART_TILES];
  int num_tiles;
};

// The tile a position lies in.
inline int64_t tile_of(const step::Model& m, int64_t position) {
  const int64_t block_size = m.cache.block_size;
  return position / block_size * m.tiles_per_block + position % block_size / step::TILE_TOKENS;
}

// Tiles of a sequence's first `count` tokens.
inline int64_t tiles_of(const step::Model& m, int64_t count) { return tile_of(m, count - 1) + 1; }

// The first position that a row sees that sees up to `visible`.
inline int64_t oldest_of(int64_t window, int64_t floor, int64_t visible) {
  return window && visible > window + floor ? visible - window : floor;
}

// The first tile that any row of a task sees: its first row's.
inline int64_t first_tile(const step::Model& m, const step::Batch& batch, int layer, const step::AttentionTask& task) {
  const int64_t window = m.layers[layer].window, floor = step::floor_of(batch, m.layers[layer].group, task.row);
  if (!window) return tile_of(m, floor);
  const int64_t count = batch.query_start_loc[task.row + 1] - batch.query_start_loc[task.row];
  const int64_t visible = batch.seq_lens[task.row] - count + task.first_query / m.group_heads + 1;
  return tile_of(m, oldest_of(window, floor, visible));
}

template <class P>
Part<P> find_part(const step::Model& m, const step::Batch& batch, int layer, const step::AttentionTask& task,
                  int64_t begin_tile, int64_t num_tiles) {
  using Weight = typename P::Weight;
  const int64_t row = m.layers[layer].group * batch.num_rows + task.row;
  const int32_t* table = batch.block_tables + row * batch.table_width;
  Part<P> part;
  const int64_t rest = num_tiles - begin_tile, room_in_part = step::PART_TILES - begin_tile % step::PART_TILES;
  part.num_tiles = static_cast<int>(rest < room_in_part ? rest : room_in_part);
  for (int i = 0; i < part.num_tiles; i++) {
    const int64_t index = (begin_tile + i) / m.tiles_per_block, inside = (begin_tile + i) % m.tiles_per_block;
    const int64_t start = step::block_offset(m, layer, table[index], task.kv_head) + inside * m.tile_elements;
    part.keys[i] = reinterpret_cast<const Weight*>(m.keys) + start;
    part.values[i] = reinterpret_cast<const Weight*>(m.values) + start;
    part.position[i] = index * m.cache.block_size + inside * step::TILE_TOKENS;
    const int64_t room = m.cache.block_size - inside * step::TILE_TOKENS;
    part.capacity[i] = static_cast<int>(room < step::TILE_TOKENS ? room : step::TILE_TOKENS);
  }
  return part;
}

// How many of tile i's tokens a row sees that sees `visible` positions.
template <class P>
STEP_INLINE int tokens_seen(const Part<P>& part, int i, int64_t visible) {
  const int64_t count = visible - part.position[i];
  return static_cast<int>(count < 0 ? 0 : count < part.capacity[i] ? count : part.capacity[i]);
}

// Calls multiply(first query, number of queries, column) for all queries and every `column_step`-th column. The queries
// of a vector path change fastest: the keys or values of a column are then at hand. Tiles are shaped for their rows:
// another number of rows comes as rarely as it can.
template <class P, class Multiply>
STEP_INLINE void for_queries(int num_queries, int64_t columns, int64_t column_step, Multiply multiply) {
  constexpr int ROWS = P::ATTENTION_ROWS;
  auto rows = [&](int q) { return num_queries - q < ROWS ? num_queries - q : ROWS; };
  if constexpr (P::TILES) {
    for (int q = 0; q < num_queries; q += ROWS)
      for (int64_t column = 0; column < columns; column += column_step) multiply(q, rows(q), column);
  } else {
    for (int64_t column = 0; column < columns; column += column_step)
      for (int q = 0; q < num_queries; q += ROWS) multiply(q, rows(q), column);
  }
}

template <class P>
void score_keys(const step::Model& m, const Part<P>& part, const typename P::Activation* queries, int num_queries,
                float* scores) {
  constexpr int PER_TILE = step::TILE_TOKENS / P::WIDTH;  // vectors of a tile
  const int64_t num_vectors = part.num_tiles * PER_TILE;
  for_queries<P>(num_queries, num_vectors, 2, [&](int q, int rows, int64_t v) {
    const int64_t w = v + 1 < num_vectors ? v + 1 : v;  // a last lone vector is multiplied twice, and masked later
    const auto* b0 = part.keys[v / PER_TILE] + v % PER_TILE * P::WIDTH * P::GROUP;
    const auto* b1 = part.keys[w / PER_TILE] + w % PER_TILE * P::WIDTH * P::GROUP;
    Run<P> run = {queries + q * m.padded_head, b0, b1, m.padded_head / P::GROUP, {}};
    float* out = scores + q * step::PART_KEYS + v * P::WIDTH;
    // The first rows fetch the values that belong to the keys: they are wanted as soon as the weights are known.
    run.ahead[0] = reinterpret_cast<const char*>(part.values[v / PER_TILE] + (b0 - part.keys[v / PER_TILE]));
    run.ahead[1] = reinterpret_cast<const char*>(part.values[w / PER_TILE] + (b1 - part.keys[w / PER_TILE]));
    (q == 0 ? multiply_rows<P, 2> : multiply_rows<P, 0>)(rows)(
        &run, 1, m.padded_head, step::TILE_TOKENS * P::GROUP,
        step::TILE_TOKENS * P::GROUP * sizeof(typename P::Weight), out, step::PART_KEYS);
  });
}

// Bounds the scores of all rows.
template <class P>
void cap_scores(const Part<P>& part, int num_queries, float cap, float* scores) {
  for (int q = 0; q < num_queries; q++)
    for (int i = 0; i < part.num_tiles * step::TILE_TOKENS; i += P::WIDTH) {
      float* at = scores + q * step::PART_KEYS + i;
      P::store(at, softcap<P>(P::load(at), cap));
    }
}

// v, but `rest` in the lanes of a row's tile i that lie outside `oldest` .. `visible`.
template <class P, class F>
STEP_INLINE F seen_lanes(const Part<P>& part, int i, int lane, int64_t oldest, int64_t visible, F v, F rest) {
  const int count = tokens_seen(part, i, visible);
  if (count == step::TILE_TOKENS && oldest <= part.position[i]) return v;
  v = P::first(count - lane, v, rest);
  if (oldest > part.position[i]) v = P::first(tokens_seen(part, i, oldest) - lane, rest, v);
  return v;
}

// Turns one row's scores into weights relative to the part's maximum; keys out of sight get 0.
template <class P>
void weigh_keys(const Part<P>& part, int64_t oldest, int64_t visible, const float* scores,
                typename P::Activation* weights, float* largest, float* sum) {
  const auto low = P::all(-3e38f);
  auto top = low, total = P::zero();
  for (int i = 0; i < part.num_tiles; i++)
    for (int lane = 0; lane < step::TILE_TOKENS; lane += P::WIDTH) {
      const auto v = P::load(scores + i * step::TILE_TOKENS + lane);
      top = P::max(top, seen_lanes<P>(part, i, lane, oldest, visible, v, low));
    }
  const float maximum = P::largest(top);
  for (int i = 0; i < part.num_tiles; i++)
    for (int lane = 0; lane < step::TILE_TOKENS; lane += P::WIDTH) {
      const int at = i * step::TILE_TOKENS + lane;
      auto e = exponential<P>(P::sub(P::load(scores + at), P::all(maximum)));
      e = seen_lanes<P>(part, i, lane, oldest, visible, e, P::zero());
      total = P::add(total, e);
      P::store_activation(weights + at, e);
    }
  *largest = maximum;
  *sum = P::sum(total);
}

// The values of a part's tokens, of which `visible` is the last, as runs of a multiplication by `weights`; returns how
// many. What lies behind a sequence's last token belongs to nobody yet: a NaN left there by a failed former owner,
// times the weight 0, would be NaN. So the last pair's values are copied to `last_values` [padded_head][GROUP], or for
// tiles, of which every one is multiplied whole (vector_amx.h), all of the last tile's to [TILE_TOKENS / GROUP] of
// those; it is zero where nothing is copied to. What lies behind a short block's last token nobody ever writes: it is
// zero.
template <class P>
int find_values(const step::Model& m, const Part<P>& part, int64_t visible, const typename P::Activation* weights,
                typename P::Weight* last_values, Run<P>* runs) {
  int num_runs = 0;
  for (int i = 0; i < part.num_tiles; i++) {
    const int count = tokens_seen(part, i, visible);
    const bool full = count == part.capacity[i];
    const int64_t whole = full ? (count + P::GROUP - 1) / P::GROUP : count / P::GROUP;
    const auto *a = weights + i * step::TILE_TOKENS, *at = part.values[i] + whole * P::GROUP * m.padded_head;
    if (P::TILES && !full && count) {
      auto* rest = last_values + (at - part.values[i]);
      memcpy(last_values, part.values[i], (at - part.values[i]) * sizeof *at);
      if (count % P::GROUP)
        for (int64_t e = 0; e < m.padded_head; e++) rest[e * P::GROUP] = at[e * P::GROUP];
      runs[num_runs++] = {a, last_values, nullptr, step::TILE_TOKENS / P::GROUP, {}};
    } else if (P::TILES) {
      if (count) runs[num_runs++] = {a, part.values[i], nullptr, step::TILE_TOKENS / P::GROUP, {}};
    } else {
      if (whole) runs[num_runs++] = {a, part.values[i], nullptr, whole, {}};
      if (full || count % P::GROUP == 0) continue;
      for (int64_t e = 0; e < m.padded_head; e++) last_values[e * P::GROUP] = at[e * P::GROUP];
      runs[num_runs++] = {a + whole * P::GROUP, last_values, nullptr, 1, {}};
    }
  }
  return num_runs;
}

// out[q] = sum over the part's tokens of weight x value. On the way it fetches keys of the next part: those are the
// first thing wanted afterwards, and nothing else would have asked memory for them.
template <class P>
void mix_values(const step::Model& m, const Part<P>& part, const Part<P>& next, int64_t visible,
                const typename P::Activation* weights, int num_queries, typename P::Weight* last_values, float* out) {
  Run<P> runs[step::PART_TILES + 1];
  const int num_runs = find_values<P>(m, part, visible, weights, last_values, runs);
  for_queries<P>(num_queries, m.padded_head, 2 * P::WIDTH, [&](int q, int rows, int64_t e) {
    Run<P> shifted[step::PART_TILES + 1];
    for (int i = 0; i < num_runs; i++) {
      const auto* b0 = runs[i].b0 + e * P::GROUP;
      const auto* keys = i < next.num_tiles ? next.keys[i] + e * step::TILE_TOKENS : b0;
      const char* ahead = reinterpret_cast<const char*>(keys);
      shifted[i] = {runs[i].a + q * step::PART_KEYS, b0, b0 + P::WIDTH * P::GROUP, runs[i].steps, {ahead, ahead + 64}};
    }
    (q == 0 ? multiply_rows<P, 2> : multiply_rows<P, 0>)(rows)(shifted, num_runs, step::PART_KEYS,
                                                               m.padded_head * P::GROUP, 128,
                                                               out + q * m.padded_head + e, m.padded_head);
  });
}

// result = result scaled to the common maximum + the part's result scaled to it.
template <class P>
void merge_part(int64_t size, float* largest, float* sum, float* result, float part_largest, float part_sum,
                const float* part_result) {
  const float top = *largest > part_largest ? *largest : part_largest;
  const auto old_factor = exponential<P>(P::all(*largest - top)), factor = exponential<P>(P::all(part_largest - top));
  const auto total = P::fma(P::all(*sum), old_factor, P::mul(P::all(part_sum), factor));
  for (int64_t e = 0; e < size; e += P::WIDTH)
    P::store(result + e, P::fma(P::load(result + e), old_factor, P::mul(P::load(part_result + e), factor)));
  alignas(64) float lanes[P::WIDTH];
  P::store(lanes, total);
  *sum = lanes[0];
  *largest = top;
}

template <class P>
void attend(step::Model& m, const step::Batch& batch, int layer, const step::AttentionTask& task, char* memory) {
  auto& scratch = *reinterpret_cast<AttentionScratch<P>*>(memory);
  float* result = reinterpret_cast<float*>(memory + sizeof scratch);
  float* part_result = result + step::TASK_QUERIES * m.padded_head;
  auto* last_values = reinterpret_cast<typename P::Weight*>(part_result + step::TASK_QUERIES * m.padded_head);
  memset(last_values, 0, (P::TILES ? m.tile_elements : m.padded_head * P::GROUP) * sizeof *last_values);

  const int64_t begin = batch.query_start_loc[task.row], end = batch.query_start_loc[task.row + 1];
  const int64_t first_position = batch.seq_lens[task.row] - (end - begin);
  auto visible = [&](int q) { return first_position + (task.first_query + q) / m.group_heads + 1; };
  const int64_t most = visible(task.num_queries - 1), num_tiles = tiles_of(m, most);
  const int64_t place = (task.kv_head * m.cache.max_tokens + begin) * m.group_heads + task.first_query;
  const auto* queries = reinterpret_cast<const typename P::Activation*>(m.queries) + place * m.padded_head;

  const int64_t window = m.layers[layer].window, floor = step::floor_of(batch, m.layers[layer].group, task.row);
  const int64_t begin_tile = first_tile(m, batch, layer, task);
  Part<P> next = find_part<P>(m, batch, layer, task, begin_tile, num_tiles);
  for (int64_t tile = begin_tile, next_tile; tile < num_tiles; tile = next_tile) {
    const Part<P> part = next;
    next_tile = tile + part.num_tiles;
    if (next_tile < num_tiles) {
      next = find_part<P>(m, batch, layer, task, next_tile, num_tiles);
    } else if (&task + 1 < m.tasks + m.num_tasks) {  // most likely this thread's next task
      const step::AttentionTask& after = (&task)[1];
      next = find_part<P>(m, batch, layer, after, first_tile(m, batch, layer, after),
                          tiles_of(m, batch.seq_lens[after.row]));
    }
    score_keys<P>(m, part, queries, task.num_queries, scratch.scores);
    if (m.dims.attention_cap > 0) cap_scores<P>(part, task.num_queries, m.dims.attention_cap, scratch.scores);
    for (int q = 0; q < task.num_queries; q++)
      weigh_keys<P>(part, oldest_of(window, floor, visible(q)), visible(q),
                    scratch.scores + q * step::PART_KEYS, scratch.weights + q * step::PART_KEYS, scratch.part_largest + q, scratch.part_sum + q);
    float* out = tile == begin_tile ? result : part_result;
    mix_values<P>(m, part, next, most, scratch.weights, task.num_queries, last_values, out);
    for (int q = 0; q < task.num_queries; q++) {
      if (tile == begin_tile) {
        scratch.largest[q] = scratch.part_largest[q];
        scratch.sum[q] = scratch.part_sum[q];
      } else if (visible(q) > part.position[0]) {  // else the part does not exist for this row
        merge_part<P>(m.padded_head, scratch.largest + q, scratch.sum + q, result + q * m.padded_head,
                      scratch.part_largest[q], scratch.part_sum[q], part_result + q * m.padded_head);
      }
    }
  }
  for (int q = 0; q < task.num_queries; q++) {
    const int64_t token = begin + (task.first_query + q) / m.group_heads;
    const int64_t head = task.kv_head * m.group_heads + (task.first_query + q) % m.group_heads;
    auto* out = reinterpret_cast<typename P::Activation*>(m.attended) + token * m.query_columns + head * m.padded_head;
    const auto inverse = P::all(1.0f / scratch.sum[q]);
    for (int64_t e = 0; e < m.padded_head; e += P::WIDTH)
      P::store_activation(out + e, P::mul(P::load(result + q * m.padded_head + e), inverse));
  }
}

}  // namespace
