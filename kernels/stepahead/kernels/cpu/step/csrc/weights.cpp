// Room for all weights in one region, in the order of use, and packing (the layout is in model.h).
#include <new>

#include "model.h"

namespace step {

static int64_t linear_bytes(const Model& m, int64_t inputs, int64_t outputs) {
  return round_up(inputs * outputs * m.kernels->weight_bytes, 64);
}

static void place_linear(Model& m, Linear& matrix, int64_t inputs, int64_t outputs, char*& at) {
  matrix.num_inputs = inputs;
  matrix.num_panels = outputs / m.panel_columns;
  matrix.panel_bytes = inputs * m.panel_columns * m.kernels->weight_bytes;
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

struct PackJob {
  Model* model;
  Placement placement;
  const void* source;
};

static constexpr int64_t PACK_ROWS = 64;

template <class Weight>
static void pack_rows(const PackJob& job, int64_t begin, int64_t end) {
  const Model& m = *job.model;
  const Placement& p = job.placement;
  const int64_t group = m.kernels->group, columns = m.panel_columns, head_dim = m.dims.head_dim;
  for (int64_t output = begin; output < end; output++) {
    const Weight* row = static_cast<const Weight*>(job.source) + output * p.num_inputs;
    const int64_t column = column_of(m, p, output);
    char* panel = p.matrix->weights + column / columns * p.matrix->panel_bytes;
    Weight* out = reinterpret_cast<Weight*>(panel) + column % columns * group;
    for (int64_t k = 0; k < p.num_inputs; k++) {
      const int64_t input = p.inputs_are_heads ? k / head_dim * m.padded_head + k % head_dim : k;
      out[input / group * columns * group + input % group] = row[k];
    }
  }
}

static void pack_job(void* argument, int thread) {
  const PackJob& job = *static_cast<PackJob*>(argument);
  Pool& pool = *job.model->pool;
  const int64_t num_outputs = job.placement.num_outputs;
  pool.next_phase(thread, (num_outputs + PACK_ROWS - 1) / PACK_ROWS);
  for (int64_t unit = pool.take(thread, false); unit >= 0; unit = pool.take(thread, false)) {
    const int64_t begin = unit * PACK_ROWS, end = begin + PACK_ROWS < num_outputs ? begin + PACK_ROWS : num_outputs;
    if (job.model->kernels->weight_bytes == 2)
      pack_rows<uint16_t>(job, begin, end);
    else
      pack_rows<float>(job, begin, end);
    pool.complete(thread);
  }
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
  PackJob job = {&m, placement_of(m, kind, l, expert), source};
  if (kind >= QUERY_BIAS) return set_bias(m, job.placement, vector);
  m.pool->run(pack_job, &job);
  return 0;
}

}  // namespace step
