// A mixture of experts: which experts a token goes to, and the experts' matrices over the tokens that chose them.
//
// Tokens are grouped by expert, so an expert's weights are read once for all of its tokens. A token's bits depend on
// itself only: its row of an expert's product is the same whoever stands beside it (tile.h), and the results of its
// experts are added best first.
#pragma once
#include <cstring>

#include "linear.h"
#include "model.h"
#include "tile.h"

namespace {

// A token's softmax over all experts in float32 and its largest probabilities, the lower expert first on a tie. A NaN
// chooses some experts, and makes their weights NaN.
template <class P>
void choose_experts(step::Model& m, int64_t token) {
  const int32_t num_experts = m.dims.num_experts, num_chosen = m.dims.experts_per_token;
  float* probabilities = m.routing.logits + token * m.padded_experts;
  const auto low = P::all(-3e38f);
  auto top = low, total = P::zero();
  for (int32_t i = 0; i < num_experts; i += P::WIDTH)
    top = P::max(top, P::first(num_experts - i, P::load(probabilities + i), low));
  const auto largest = P::all(P::largest(top));
  for (int32_t i = 0; i < num_experts; i += P::WIDTH) {
    const auto e = exponential<P>(P::sub(P::load(probabilities + i), largest));
    P::store(probabilities + i, e);
    total = P::add(total, P::first(num_experts - i, e, P::zero()));
  }
  const float sum = P::sum(total);
  int32_t* experts = m.routing.experts + token * num_chosen;
  float* weights = m.routing.weights + token * num_chosen;
  float chosen_sum = 0;
  for (int32_t place = 0; place < num_chosen; place++) {
    int32_t best = -1;
    for (int32_t expert = 0; expert < num_experts; expert++)
      if (probabilities[expert] >= 0 && (best < 0 || probabilities[expert] > probabilities[best])) best = expert;
    experts[place] = best < 0 ? place : best;  // only NaN is left
    weights[place] = probabilities[experts[place]] / sum;
    chosen_sum += weights[place];
    if (best >= 0) probabilities[best] = -1;  // taken
  }
  if (!m.dims.normalized) return;
  for (int32_t place = 0; place < num_chosen; place++) weights[place] /= chosen_sum;
}

// Sorts the entries of all tokens by expert, tokens in order.
inline void sort_entries(step::Model& m, int64_t num_tokens) {
  step::Routing& r = m.routing;
  const int64_t num_chosen = m.dims.experts_per_token, num_entries = num_tokens * num_chosen;
  const int32_t num_experts = m.dims.num_experts;
  memset(r.first_entry, 0, (num_experts + 1) * sizeof *r.first_entry);
  for (int64_t i = 0; i < num_entries; i++) r.first_entry[r.experts[i] + 1]++;
  r.first_row_unit[0] = 0;
  for (int32_t expert = 0; expert < num_experts; expert++) {
    r.first_row_unit[expert + 1] = r.first_row_unit[expert] + (r.first_entry[expert + 1] + UNIT_ROWS - 1) / UNIT_ROWS;
    r.first_entry[expert + 1] += r.first_entry[expert];
  }
  for (int64_t i = 0; i < num_entries; i++) {
    const int32_t entry = r.first_entry[r.experts[i]]++;
    r.entries[i] = entry;
    r.tokens[entry] = static_cast<int32_t>(i / num_chosen);
  }
  for (int32_t expert = num_experts; expert > 0; expert--) r.first_entry[expert] = r.first_entry[expert - 1];
  r.first_entry[0] = 0;
}

template <class P>
void gather_input(step::Model& m, int64_t entry) {
  const int64_t bytes = m.padded_hidden * sizeof(typename P::Activation);
  memcpy(m.routing.inputs + entry * bytes, m.normed + m.routing.tokens[entry] * bytes, bytes);
}

// `linear` over the experts' matrices: an expert's rows are its entries. Its units are kept: which rows they are is read
// from the step's routing, and who comes late finds another layer's.
template <class P, class Finish>
void expert_linear(const Thread& thread, step::Phase phase, const step::Model& m, const step::Layer& layer,
                   step::Linear step::Expert::*which, const typename P::Activation* input, int64_t stride,
                   const Target& target, Finish finish) {
  const step::Routing& r = m.routing;
  const int64_t num_panels = (layer.experts[0].*which).num_panels;
  share(thread, phase, r.first_row_unit[m.dims.num_experts] * num_panels, [&](int64_t unit) {
    int32_t low = 0, high = m.dims.num_experts;  // the expert whose units hold this one
    while (high - low > 1) {
      const int32_t middle = (low + high) / 2;
      if (r.first_row_unit[middle] * num_panels <= unit)
        low = middle;
      else
        high = middle;
    }
    const int64_t row_units = r.first_row_unit[low + 1] - r.first_row_unit[low];
    const int64_t inside = unit - r.first_row_unit[low] * num_panels, part = inside % row_units;
    const int64_t first = r.first_entry[low], num_rows = r.first_entry[low + 1] - first;
    const step::Linear& matrix = layer.experts[low].*which;
    const PanelUnit rows = {inside / row_units, first + num_rows * part / row_units,
                            first + num_rows * (part + 1) / row_units, part == row_units - 1};
    alignas(64) float sums[UNIT_ROWS * 2 * P::WIDTH];
    multiply_unit<P>(thread, matrix, input, stride, rows, target, sums);
    finish_unit<P>(matrix, rows, sums, finish);
  });
}

// The residual (with post norms: what has yet to join it) takes the token's experts, weighted, best first.
template <class P>
void combine_experts(step::Model& m, int64_t token) {
  const step::Routing& r = m.routing;
  const int64_t num_chosen = m.dims.experts_per_token;
  float* out = (m.dims.post_norms ? m.branch : m.residual) + token * m.padded_hidden;
  for (int64_t i = 0; i < m.padded_hidden; i += P::WIDTH) {
    auto sum = P::zero();
    for (int64_t place = token * num_chosen; place < (token + 1) * num_chosen; place++)
      sum = P::fma(P::load(r.results + r.entries[place] * m.padded_hidden + i), P::all(r.weights[place]), sum);
    P::store(out + i, m.dims.post_norms ? sum : P::add(P::load(out + i), sum));
  }
}

}  // namespace
