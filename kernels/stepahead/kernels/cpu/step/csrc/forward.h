// The whole step, as every thread runs it: phases with a barrier before each, units shared inside.
#pragma once
#include "attention.h"
#include "draw.h"
#include "linear.h"
#include "mixture.h"
#include "model.h"
#include "probe.h"
#include "rows.h"

namespace {

static constexpr int ROW_UNIT = 4;  // rows of a unit in phases that go row by row

template <class P>
class Step {
 public:
  Step(step::Model& model, const step::Batch& batch, int thread)
      : m(model),
        batch(batch),
        num_tokens(batch.num_tokens),
        ahead(model, batch, thread),
        room{model.panel_room + thread * model.panel_room_bytes, nullptr},
        thread{*model.pool, thread, cycles_of(model, thread), &ahead, &room},
        scratch(model.scratch + thread * model.scratch_bytes) {}

  void run() {
    const int64_t hidden = m.padded_hidden;
    rows(step::PHASE_EMBED, batch.num_tokens, [&](int64_t t) {
      embed_row<P>(m, batch.token_ids[t], m.residual + t * hidden);
      norm(m.residual + t * hidden, m.layers[0].attention_norm, t);
    });
    for (int layer = 0; layer < m.dims.num_layers; layer++) {
      attention(layer);
      mlp(layer);
    }
    if (const float* post_norm = m.layers[m.dims.num_layers - 1].post_mlp_norm)
      rows(step::PHASE_NORM, num_tokens, [&](int64_t t) { join(t, post_norm); });
    if (batch.num_logits) head();
  }

 private:
  using Activation = typename P::Activation;
  step::Model& m;
  const step::Batch& batch;
  int64_t num_tokens;  // that have a row among the activations: all, and in the end those whose logits are wanted
  CacheAhead ahead;
  PanelRoom room;
  const Thread thread;
  char* const scratch;

  static uint64_t* cycles_of(const step::Model& model, int thread) {
    return model.cycles ? model.cycles + thread * step::NUM_PHASES : nullptr;
  }

  static Activation* as_input(char* memory) { return reinterpret_cast<Activation*>(memory); }

  // Float32 results, a row of `columns`.
  static Target sums_at(float* memory, int64_t columns) {
    return {reinterpret_cast<char*>(memory), columns * int64_t(sizeof *memory), 2 * P::WIDTH * sizeof *memory};
  }

  // Inputs of the next matrix, a row of `columns`; a panel gives one vector of them.
  static Target inputs_at(char* memory, int64_t columns) {
    return {memory, columns * int64_t(sizeof(Activation)), P::WIDTH * sizeof(Activation)};
  }

  template <class Work>
  void rows(step::Phase phase, int64_t num_rows, Work work) {
    share(thread, phase, (num_rows + ROW_UNIT - 1) / ROW_UNIT, [&](int64_t unit) {
      for (int64_t row = unit * ROW_UNIT; row < num_rows && row < (unit + 1) * ROW_UNIT; row++) work(row);
    });
  }

  void norm(const float* x, const float* weight, int64_t row) {
    norm_row<P>(m, x, weight, as_input(m.normed) + row * m.padded_hidden);
  }

  // With post norms: the last result, normed, joins the residual.
  void join(int64_t row, const float* post_norm) {
    add_normed<P>(m, m.branch + row * m.padded_hidden, post_norm, m.residual + row * m.padded_hidden);
  }

  void add_to_residual(step::Phase phase, const step::Linear& matrix, char* input, int64_t stride) {
    if (m.dims.post_norms) {
      linear<P>(thread, phase, matrix, as_input(input), stride, num_tokens, sums_at(m.branch, m.padded_hidden),
                [&](int64_t row, int64_t panel, auto a, auto b) {
                  float* x = m.branch + row * m.padded_hidden + panel * 2 * P::WIDTH;
                  P::store(x, a);
                  P::store(x + P::WIDTH, b);
                });
      return;
    }
    linear<P>(thread, phase, matrix, as_input(input), stride, num_tokens, sums_at(m.residual, m.padded_hidden),
              [&](int64_t row, int64_t panel, auto a, auto b) {
                float* x = m.residual + row * m.padded_hidden + panel * 2 * P::WIDTH;
                P::store(x, P::add(P::load(x), a));
                P::store(x + P::WIDTH, P::add(P::load(x + P::WIDTH), b));
              });
  }

  void attention(int layer) {
    const step::Layer& weights = m.layers[layer];
    const int64_t columns = m.query_columns + 2 * m.kv_columns;
    if (layer) norm_all(m.layers[layer - 1].post_mlp_norm, weights.attention_norm);
    linear<P>(thread, step::PHASE_QKV, weights.qkv, as_input(m.normed), m.padded_hidden, num_tokens,
              sums_at(m.qkv, columns), [&](int64_t row, int64_t panel, auto a, auto b) {
                float* out = m.qkv + row * columns + panel * 2 * P::WIDTH;
                P::store(out, a);
                P::store(out + P::WIDTH, b);
              });
    rows(step::PHASE_PLACE, num_tokens, [&](int64_t t) { place_token<P>(m, batch, layer, t, scratch); });
    const bool fewer = layer + 1 == m.dims.num_layers && fewer_are_wanted();
    share(thread, step::PHASE_ATTENTION, m.num_tasks, [&](int64_t task) {
      if (!fewer || is_wanted(m.tasks[task])) attend<P>(m, batch, layer, m.tasks[task], scratch);
    });
    if (fewer) keep_wanted();
    ahead.begin(layer + 1);
    add_to_residual(step::PHASE_OUTPUT, weights.output, m.attended, m.query_columns);
  }

  // Once the last layer's keys and values are placed, tokens without logits are of no more use. In ascending order a
  // token's row never moves backwards over one that is still wanted.
  bool fewer_are_wanted() const {
    for (int64_t i = 1; i < batch.num_logits; i++)
      if (batch.logit_tokens[i] <= batch.logit_tokens[i - 1]) return false;
    return batch.num_logits < batch.num_tokens;
  }

  bool is_wanted(const step::AttentionTask& task) const {
    const int64_t begin = batch.query_start_loc[task.row] + task.first_query / m.group_heads;
    const int64_t last = batch.query_start_loc[task.row] + (task.first_query + task.num_queries - 1) / m.group_heads;
    for (int64_t i = 0; i < batch.num_logits; i++)
      if (batch.logit_tokens[i] >= begin) return batch.logit_tokens[i] <= last;
    return false;
  }

  // Moves the rows of tokens with logits to the front.
  void keep_wanted() {
    const int64_t row_bytes = m.query_columns * sizeof(Activation), hidden = m.padded_hidden;
    share(thread, step::PHASE_PLACE, 1, [&](int64_t) {
      for (int64_t i = 0; i < batch.num_logits; i++) {
        const int64_t token = batch.logit_tokens[i];
        if (token == i) continue;
        memcpy(m.attended + i * row_bytes, m.attended + token * row_bytes, row_bytes);
        memcpy(m.residual + i * hidden, m.residual + token * hidden, hidden * sizeof(float));
      }
    });
    num_tokens = batch.num_logits;
  }

  // Begins a half of a layer; `post_norm` of the half before it, or null.
  void norm_all(const float* post_norm, const float* weight) {
    rows(step::PHASE_NORM, num_tokens, [&](int64_t t) {
      if (post_norm) join(t, post_norm);
      norm(m.residual + t * m.padded_hidden, weight, t);
    });
  }

  void mlp(int layer) {
    const step::Layer& weights = m.layers[layer];
    norm_all(weights.post_attention_norm, weights.mlp_norm);
    if (weights.experts) {
      mixture(weights);
      return;
    }
    const bool gelu = m.dims.gelu;
    linear<P>(thread, step::PHASE_GATE_UP, weights.gate_up, as_input(m.normed), m.padded_hidden, num_tokens,
              inputs_at(m.inner, m.padded_inner), [&](int64_t row, int64_t panel, auto gate, auto up) {
                P::store_activation(as_input(m.inner) + row * m.padded_inner + panel * P::WIDTH,
                                    gated<P>(gate, up, gelu));
              });
    add_to_residual(step::PHASE_DOWN, weights.down, m.inner, m.padded_inner);
  }

  void mixture(const step::Layer& weights) {
    step::Routing& r = m.routing;
    const int64_t entries = int64_t(num_tokens) * m.dims.experts_per_token;
    linear<P>(thread, step::PHASE_ROUTE, weights.router, as_input(m.normed), m.padded_hidden, num_tokens,
              sums_at(r.logits, m.padded_experts), [&](int64_t row, int64_t panel, auto a, auto b) {
                float* out = r.logits + row * m.padded_experts + panel * 2 * P::WIDTH;
                P::store(out, a);
                P::store(out + P::WIDTH, b);
              });
    rows(step::PHASE_ROUTE, num_tokens, [&](int64_t t) { choose_experts<P>(m, t); });
    share(thread, step::PHASE_ROUTE, 1, [&](int64_t) { sort_entries(m, num_tokens); });
    rows(step::PHASE_ROUTE, entries, [&](int64_t entry) { gather_input<P>(m, entry); });
    const bool gelu = m.dims.gelu;
    expert_linear<P>(thread, step::PHASE_GATE_UP, m, weights, &step::Expert::gate_up, as_input(r.inputs),
                     m.padded_hidden, inputs_at(m.inner, m.padded_expert),
                     [&](int64_t entry, int64_t panel, auto gate, auto up) {
                       P::store_activation(as_input(m.inner) + entry * m.padded_expert + panel * P::WIDTH,
                                           gated<P>(gate, up, gelu));
                     });
    expert_linear<P>(thread, step::PHASE_DOWN, m, weights, &step::Expert::down, as_input(m.inner), m.padded_expert,
                     sums_at(r.results, m.padded_hidden), [&](int64_t entry, int64_t panel, auto a, auto b) {
                       float* out = r.results + entry * m.padded_hidden + panel * 2 * P::WIDTH;
                       P::store(out, a);
                       P::store(out + P::WIDTH, b);
                     });
    rows(step::PHASE_ROUTE, num_tokens, [&](int64_t t) { combine_experts<P>(m, t); });
  }

  void head() {
    const int64_t max_tokens = m.cache.max_tokens;
    float* best = m.best_logits + thread.index * max_tokens;
    int64_t* best_ids = m.best_ids + thread.index * max_tokens;
    rows(step::PHASE_NORM, batch.num_logits, [&](int64_t i) {
      norm(m.residual + row_of(i) * m.padded_hidden, m.final_norm, i);
      for (int t = 0; t < thread.pool.size(); t++) {
        m.best_logits[t * max_tokens + i] = -__builtin_inff();
        m.best_ids[t * max_tokens + i] = INT64_MAX;
      }
    });
    linear<P>(thread, step::PHASE_HEAD, m.head, as_input(m.normed), m.padded_hidden, batch.num_logits,
              sums_at(batch.logits, m.dims.vocab_size), [&](int64_t row, int64_t panel, auto a, auto b) {
                if (m.dims.logit_cap > 0) a = softcap<P>(a, m.dims.logit_cap), b = softcap<P>(b, m.dims.logit_cap);
                if (batch.logits) store_logits(row, panel, a, b);
                keep_best(panel, a, b, best + row, best_ids + row);
              });
    share(thread, step::PHASE_HEAD, 1, [&](int64_t) { merge_best(); });
  }

  // The row of the i-th token with logits.
  int64_t row_of(int64_t i) const { return num_tokens < batch.num_tokens ? i : batch.logit_tokens[i]; }

  int columns_of(int64_t panel) const {
    const int64_t rest = m.dims.vocab_size - panel * 2 * P::WIDTH;
    return static_cast<int>(rest < 2 * P::WIDTH ? rest : 2 * P::WIDTH);
  }

  template <class F>
  void store_logits(int64_t row, int64_t panel, F a, F b) const {
    float* out = batch.logits + row * m.dims.vocab_size + panel * 2 * P::WIDTH;
    const int columns = columns_of(panel);
    if (columns == 2 * P::WIDTH) {
      P::store(out, a);
      P::store(out + P::WIDTH, b);
      return;
    }
    alignas(64) float both[2 * P::WIDTH];
    P::store(both, a);
    P::store(both + P::WIDTH, b);
    for (int i = 0; i < columns; i++) out[i] = both[i];
  }

  // Units come in any order, so equal values are settled by id. A NaN, once met, stays.
  template <class F>
  void keep_best(int64_t panel, F a, F b, float* best, int64_t* best_id) const {
    const int columns = columns_of(panel);
    const auto low = P::all(-__builtin_inff());
    if (columns < 2 * P::WIDTH) {
      a = P::first(columns, a, low);
      b = P::first(columns - P::WIDTH, b, low);
    }
    if (P::has_nan(a) || P::has_nan(b)) *best = __builtin_nanf("");
    const float largest = P::largest(P::max(a, b));
    if (!(largest >= *best)) return;
    const auto level = P::all(largest);
    const uint32_t first = P::equal(a, level), second = P::equal(b, level);
    const int column = first ? __builtin_ctz(first) : P::WIDTH + __builtin_ctz(second | 1u << 31);
    const int64_t id = panel * 2 * P::WIDTH + column;
    if (largest > *best || id < *best_id) *best_id = id;
    *best = largest;
  }

  void merge_best() {
    for (int64_t i = 0; i < batch.num_logits; i++) {
      batch.best_logits[i] = m.best_logits[i];
      batch.best_ids[i] = m.best_ids[i];
      for (int t = 1; t < thread.pool.size(); t++) {
        const float value = m.best_logits[t * static_cast<int64_t>(m.cache.max_tokens) + i];
        const int64_t id = m.best_ids[t * static_cast<int64_t>(m.cache.max_tokens) + i];
        const float best = batch.best_logits[i];
        if (value > best || value != value || (value == best && id < batch.best_ids[i])) {
          if (best == best) batch.best_logits[i] = value;
          batch.best_ids[i] = id;
        }
      }
    }
  }
};

template <class P>
void forward(step::Model& model, const step::Batch& batch, int thread) {
  [[maybe_unused]] typename P::Session session;
  Step<P>(model, batch, thread).run();
}

template <class P>
constexpr step::Kernels kernels_of() {
  return {P::WIDTH, P::GROUP,         sizeof(typename P::Weight), sizeof(typename P::Activation),
          P::CODED, P::PROBE_VECTORS, forward<P>,                 draw<P>,
          probe<P>};
}

}  // namespace
