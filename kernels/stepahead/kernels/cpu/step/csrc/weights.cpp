// Room for all weights in one region, in the order of use, and where each tensor goes.
#include <new>

#include "coded.h"
#include "model.h"
#include "pack.h"

namespace step {

static bool is_coded(const Model& m) { return m.kernels->coded && m.dims.coded_weights; }

static int64_t panel_bytes(const Model& m, int64_t inputs) {
  return is_coded(m) ? coded_panel_bytes(inputs) : inputs * m.panel_columns * m.kernels->weight_bytes;
}

static int64_t linear_bytes(const Model& m, int64_t inputs, int64_t outputs) {
  return outputs / m.panel_columns * panel_bytes(m, inputs);
}

static void place_linear(Model& m, Linear& matrix, int64_t inputs, int64_t outputs, char*& at) {
  matrix.num_inputs = inputs;
  matrix.num_panels = outputs / m.panel_columns;
  matrix.panel_bytes = panel_bytes(m, inputs);
  matrix.coded = is_coded(m);
  matrix.weights = at;
  matrix.bias = nullptr;
  at += linear_bytes(m, inputs, outputs);
}

static int64_t layer_bytes(const Model& m, bool mixture) {
  const int64_t hidden = m.padded_hidden, inner = mixture ? m.padded_expert : m.padded_inner;
  const int64_t mlp = linear_bytes(m, hidden, 2 * inner) + linear_bytes(m, inner, hidden);
  const int64_t attention = linear_bytes(m, hidden, m.query_columns + 2 * m.kv_columns) +
                            linear_bytes(m, m.query_columns, hidden);
  return attention + (mixture ? linear_bytes(m, hidden, m.padded_experts) + m.dims.num_experts * mlp : mlp);
}

bool make_weights(Model& m) {
  const Dims& d = m.dims;
  const int64_t columns = m.query_columns + 2 * m.kv_columns, hidden = m.padded_hidden;
  const int64_t vocab = round_up(d.vocab_size, 32);
  m.weight_bytes = linear_bytes(m, hidden, vocab);
  for (int layer = 0; layer < d.num_layers; layer++) m.weight_bytes += layer_bytes(m, d.layers[layer].mixture);
  m.stored_bytes = m.weight_bytes;
  char* at = m.weights = allocate(m, m.weight_bytes + 4096);
  m.layers = new (std::nothrow) Layer[d.num_layers]();
  if (!at || !m.layers) return false;
  for (int layer = 0; layer < d.num_layers; layer++) {
    Layer& l = m.layers[layer];
    l.window = d.layers[layer].window;
    l.rope = d.layers[layer].rope;
    place_linear(m, l.qkv, hidden, columns, at);
    place_linear(m, l.output, m.query_columns, hidden, at);
    if (!d.layers[layer].mixture) {
      place_linear(m, l.gate_up, hidden, 2 * m.padded_inner, at);
      place_linear(m, l.down, m.padded_inner, hidden, at);
      continue;
    }
    place_linear(m, l.router, hidden, m.padded_experts, at);
    l.experts = new (std::nothrow) Expert[d.num_experts];
    if (!l.experts) return false;
    for (int expert = 0; expert < d.num_experts; expert++) {
      place_linear(m, l.experts[expert].gate_up, hidden, 2 * m.padded_expert, at);
      place_linear(m, l.experts[expert].down, m.padded_expert, hidden, at);
    }
  }
  place_linear(m, m.head, hidden, vocab, at);
  if (d.tied_head) return true;
  m.embedding = allocate(m, static_cast<size_t>(d.vocab_size) * d.hidden_size * m.kernels->weight_bytes);
  return m.embedding != nullptr;
}

// Where the outputs and inputs of a source matrix go.
struct Placement {
  Linear* matrix;
  int64_t num_outputs, num_inputs;
  enum { PLAIN, HALVES, WHOLE_HEADS, GATED } outputs;
  int64_t first_column;
  bool inputs_are_heads;
};

static int64_t column_of(const Model& m, const Placement& p, int64_t output) {
  const int64_t head = output / m.dims.head_dim, element = output % m.dims.head_dim, half = m.dims.head_dim / 2;
  const int64_t width = m.kernels->vector_width;
  switch (p.outputs) {
    case Placement::HALVES:
      return p.first_column + head * m.padded_head + (element < half ? element : m.half + element - half);
    case Placement::WHOLE_HEADS:
      return p.first_column + head * m.padded_head + element;
    case Placement::GATED:
      return p.first_column + output / width * 2 * width + output % width;
    default:
      return output;
  }
}

static Placement placement_of(Model& m, TensorKind kind, Layer& l, int expert) {
  const Dims& d = m.dims;
  Linear& gate_up = l.experts ? l.experts[expert].gate_up : l.gate_up;
  Linear& down = l.experts ? l.experts[expert].down : l.down;
  const int64_t inner = l.experts ? d.expert_size : d.intermediate_size;
  const int64_t queries = int64_t(d.num_heads) * d.head_dim, keys = int64_t(d.num_kv_heads) * d.head_dim;
  switch (kind) {
    case QUERY:
    case QUERY_BIAS:
      return {&l.qkv, queries, d.hidden_size, Placement::HALVES, 0, false};
    case KEY:
    case KEY_BIAS:
      return {&l.qkv, keys, d.hidden_size, Placement::HALVES, m.query_columns, false};
    case VALUE:
    case VALUE_BIAS:
      return {&l.qkv, keys, d.hidden_size, Placement::WHOLE_HEADS, m.query_columns + m.kv_columns, false};
    case OUTPUT:
    case OUTPUT_BIAS:
      return {&l.output, d.hidden_size, queries, Placement::PLAIN, 0, true};
    case GATE:
    case GATE_BIAS:
      return {&gate_up, inner, d.hidden_size, Placement::GATED, 0, false};
    case UP:
    case UP_BIAS:
      return {&gate_up, inner, d.hidden_size, Placement::GATED, m.kernels->vector_width, false};
    case DOWN:
    case DOWN_BIAS:
      return {&down, d.hidden_size, inner, Placement::PLAIN, 0, false};
    case ROUTER:
      return {&l.router, d.num_experts, d.hidden_size, Placement::PLAIN, 0, false};
    default:
      return {&m.head, d.vocab_size, d.hidden_size, Placement::PLAIN, 0, false};
  }
}

// Which output goes to which column; -1: none of this tensor's.
static int32_t* outputs_by_column(const Model& m, const Placement& p) {
  const int64_t num_columns = p.matrix->num_panels * m.panel_columns;
  int32_t* outputs = new (std::nothrow) int32_t[num_columns];
  if (!outputs) return nullptr;
  for (int64_t column = 0; column < num_columns; column++) outputs[column] = -1;
  for (int64_t output = 0; output < p.num_outputs; output++)
    outputs[column_of(m, p, output)] = static_cast<int32_t>(output);
  return outputs;
}

static int set_matrix(Model& m, const Placement& p, const void* source) {
  int32_t* outputs = outputs_by_column(m, p);
  if (!outputs) return ERROR_MEMORY;
  const int result = pack(m, *p.matrix, source, p.num_inputs, p.inputs_are_heads, outputs);
  delete[] outputs;
  return result;
}

static int set_bias(Model& m, const Placement& p, const float* source) {
  Linear& matrix = *p.matrix;
  const int64_t num_columns = matrix.num_panels * m.panel_columns;
  if (!matrix.bias) matrix.bias = reinterpret_cast<float*>(allocate(m, num_columns * sizeof(float)));
  if (!matrix.bias) return ERROR_MEMORY;
  for (int64_t i = 0; i < p.num_outputs; i++) matrix.bias[column_of(m, p, i)] = source[i];
  return 0;
}

static int set_norm(Model& m, float*& norm, const float* source, int64_t size, bool halves) {
  if (!norm) norm = reinterpret_cast<float*>(allocate(m, round_up(size, 32) * 2 * sizeof(float)));
  if (!norm) return ERROR_MEMORY;
  for (int64_t i = 0; i < size; i++) norm[halves && i >= size / 2 ? m.half + i - size / 2 : i] = source[i];
  return 0;
}

int set_tensor(Model& m, TensorKind kind, int layer, int expert, const void* source) {
  const Dims& d = m.dims;
  Layer& l = m.layers[layer];
  const float* vector = static_cast<const float*>(source);
  switch (kind) {
    case EMBEDDING:
      __builtin_memcpy(m.embedding, source, static_cast<size_t>(d.vocab_size) * d.hidden_size * m.kernels->weight_bytes);
      return 0;
    case ATTENTION_NORM:
      return set_norm(m, l.attention_norm, vector, d.hidden_size, false);
    case MLP_NORM:
      return set_norm(m, l.mlp_norm, vector, d.hidden_size, false);
    case FINAL_NORM:
      return set_norm(m, m.final_norm, vector, d.hidden_size, false);
    case POST_ATTENTION_NORM:
      return set_norm(m, l.post_attention_norm, vector, d.hidden_size, false);
    case POST_MLP_NORM:
      return set_norm(m, l.post_mlp_norm, vector, d.hidden_size, false);
    case QUERY_NORM:
      return set_norm(m, l.query_norm, vector, d.head_dim, true);
    case KEY_NORM:
      return set_norm(m, l.key_norm, vector, d.head_dim, true);
    default:
      break;
  }
  const Placement placement = placement_of(m, kind, l, expert);
  return kind >= QUERY_BIAS ? set_bias(m, placement, vector) : set_matrix(m, placement, source);
}

}  // namespace step
