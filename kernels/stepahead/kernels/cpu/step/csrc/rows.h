// What is done to one row at a time: embedding, norms, rotation, and writing keys and values.
#pragma once
#include <cstring>

#include "coded.h"
#include "model.h"
#include "tile.h"

namespace {

// Fills a row of the residual stream with a token's embedding.
template <class P>
void embed_row(const step::Model& m, int64_t token_id, float* x) {
  using Weight = typename P::Weight;
  const int64_t hidden = m.dims.hidden_size;
  if (m.embedding) {
    const Weight* row = reinterpret_cast<const Weight*>(m.embedding) + token_id * hidden;
    for (int64_t i = 0; i < hidden; i++) x[i] = P::weight(row[i]) * m.dims.embedding_scale;
  } else {  // tied: the row is a column of the head, and a second copy of the largest matrix is saved
    const int64_t panel = token_id / m.panel_columns, column = token_id % m.panel_columns;
    const char* packed = m.head.weights + panel * m.head.panel_bytes;
    for (int64_t i = 0; i < hidden; i++) {
      const int64_t position = (i / P::GROUP * m.panel_columns + column) * P::GROUP + i % P::GROUP;
      Weight element;
      if constexpr (P::CODED)
        element = m.head.coded ? step::coded_weight(packed, m.head.num_inputs, position)
                               : reinterpret_cast<const Weight*>(packed)[position];
      else
        element = reinterpret_cast<const Weight*>(packed)[position];
      x[i] = P::weight(element) * m.dims.embedding_scale;
    }
  }
  for (int64_t i = hidden; i < m.padded_hidden; i++) x[i] = 0;
}

// 1 / sqrt(mean square + eps); padding is zero and adds nothing.
template <class P>
STEP_INLINE float norm_factor(const float* x, int64_t padded, int64_t size, float eps) {
  auto squares = P::zero();
  for (int64_t i = 0; i < padded; i += P::WIDTH) {
    const auto v = P::load(x + i);
    squares = P::fma(v, v, squares);
  }
  return 1.0f / __builtin_sqrtf(P::sum(squares) / static_cast<float>(size) + eps);
}

template <class P>
void norm_row(const step::Model& m, const float* x, const float* weight, typename P::Activation* out) {
  const auto factor = P::all(norm_factor<P>(x, m.padded_hidden, m.dims.hidden_size, m.dims.norm_eps));
  for (int64_t i = 0; i < m.padded_hidden; i += P::WIDTH)
    P::store_activation(out + i, P::mul(P::mul(P::load(x + i), factor), P::load(weight + i)));
}

// x += norm of what was left aside: post norms.
template <class P>
void add_normed(const step::Model& m, const float* branch, const float* weight, float* x) {
  const auto factor = P::all(norm_factor<P>(branch, m.padded_hidden, m.dims.hidden_size, m.dims.norm_eps));
  for (int64_t i = 0; i < m.padded_hidden; i += P::WIDTH) {
    const auto normed = P::mul(P::mul(P::load(branch + i), factor), P::load(weight + i));
    P::store(x + i, P::add(P::load(x + i), normed));
  }
}

// Norm of a head (if the model has it) and rotation (if the layer turns), times `scale`, in place: [padded_head].
// cos and sin are the position's, or null.
template <class P>
STEP_INLINE void turn_head(const step::Model& m, float* head, const float* norm, const float* cos, const float* sin,
                           float scale) {
  auto factor = P::all(1.0f);
  if (norm) factor = P::all(norm_factor<P>(head, m.padded_head, m.dims.head_dim, m.dims.norm_eps));
  for (int64_t i = 0; i < m.half; i += P::WIDTH) {
    auto a = P::load(head + i), b = P::load(head + m.half + i);
    if (norm) {
      a = P::mul(P::mul(a, factor), P::load(norm + i));
      b = P::mul(P::mul(b, factor), P::load(norm + m.half + i));
    }
    const auto f = P::all(scale);
    if (!cos) {
      P::store(head + i, P::mul(f, a));
      P::store(head + m.half + i, P::mul(f, b));
      continue;
    }
    const auto c = P::load(cos + i), s = P::load(sin + i);
    P::store(head + i, P::mul(f, P::negative_fma(b, s, P::mul(a, c))));
    P::store(head + m.half + i, P::mul(f, P::fma(a, s, P::mul(b, c))));
  }
}

// Writes one token's key and value of a KV head into its place in the cache.
template <class P>
STEP_INLINE void store_kv(step::Model& m, int layer, int64_t slot, int64_t kv_head, const float* key,
                          const float* value, typename P::Weight* narrow) {
  using Weight = typename P::Weight;
  const int64_t block = slot / m.cache.block_size, offset = slot % m.cache.block_size;
  const int64_t tile = offset / step::TILE_TOKENS, token = offset % step::TILE_TOKENS;
  const int64_t start = step::block_offset(m, layer, block, kv_head) + tile * m.tile_elements;
  Weight* keys = reinterpret_cast<Weight*>(m.keys) + start + token * P::GROUP;
  for (int64_t i = 0; i < m.padded_head; i += P::WIDTH) P::store_weight(narrow + i, P::load(key + i));
  for (int64_t i = 0; i < m.padded_head; i += P::GROUP)
    memcpy(keys + i * step::TILE_TOKENS, narrow + i, P::GROUP * sizeof(Weight));
  Weight* values = reinterpret_cast<Weight*>(m.values) + start;
  values += token / P::GROUP * m.padded_head * P::GROUP + token % P::GROUP;
  for (int64_t i = 0; i < m.padded_head; i += P::WIDTH) P::store_weight(narrow + i, P::load(value + i));
  for (int64_t i = 0; i < m.padded_head; i++) values[i * P::GROUP] = narrow[i];
}

// Turns a token's queries and keys and puts all three where attention reads them.
template <class P>
void place_token(step::Model& m, const step::Batch& batch, int layer, int64_t token, char* scratch) {
  using Activation = typename P::Activation;
  const step::Layer& weights = m.layers[layer];
  const int64_t size = m.padded_head;
  const int64_t turn = (int64_t(weights.rope) * m.cache.max_positions + batch.positions[token]) * m.half;
  const float *cos = weights.rope < 0 ? nullptr : m.cos + turn, *sin = weights.rope < 0 ? nullptr : m.sin + turn;
  float* row = m.qkv + token * (m.query_columns + 2 * m.kv_columns);
  for (int64_t head = 0; head < m.dims.num_heads; head++) {
    float* query = row + head * size;
    turn_head<P>(m, query, weights.query_norm, cos, sin, m.dims.attention_scale);
    const int64_t kv_head = head / m.group_heads, member = head % m.group_heads;
    const int64_t place = (kv_head * m.cache.max_tokens + token) * m.group_heads + member;
    Activation* out = reinterpret_cast<Activation*>(m.queries) + place * size;
    for (int64_t i = 0; i < size; i += P::WIDTH) P::store_activation(out + i, P::load(query + i));
  }
  const int64_t slot = batch.slot_mapping[weights.group * batch.num_tokens + token];
  if (slot < 0) return;  // what the cache has at this position stands
  for (int64_t kv_head = 0; kv_head < m.dims.num_kv_heads; kv_head++) {
    float* key = row + m.query_columns + kv_head * size;
    turn_head<P>(m, key, weights.key_norm, cos, sin, 1.0f);
    store_kv<P>(m, layer, slot, kv_head, key, key + m.kv_columns, reinterpret_cast<typename P::Weight*>(scratch));
  }
}

}  // namespace
