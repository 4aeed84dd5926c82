// The C ABI of the CPU step library: what `library.py` declares again in ctypes. Plain C types only.
//
// Every function expects checked arguments (`decoder_step.py` checks them) and is called by one thread at a time per
// model, but `step_follow`, `step_check` and `step_passed`, which another thread may call meanwhile. Functions that
// return int return 0, or ERROR_MEMORY where the system gave no memory or no thread.
#pragma once
#include <cstdint>

#define STEP_ABI_VERSION 10
#define STEP_EXPORT extern "C" __attribute__((visibility("default")))

namespace step {

enum Isa : int32_t { ISA_AVX2 = 0, ISA_AVX512_BF16 = 1, ISA_AMX_BF16 = 2 };
enum { ERROR_MEMORY = 1 };

// Tensors of `step_set`. Matrices are row-major [outputs][inputs] in the model's weight type, vectors are float32.
enum TensorKind : int32_t {
  EMBEDDING = 0,  // matrix; not given where the head is tied to it
  HEAD,           // matrix
  QUERY,
  KEY,
  VALUE,
  OUTPUT,
  GATE,  // of an expert, if the layer is a mixture; so are UP and DOWN
  UP,
  DOWN,
  ROUTER,
  QUERY_BIAS,  // vectors from here on
  KEY_BIAS,
  VALUE_BIAS,
  OUTPUT_BIAS,
  GATE_BIAS,
  UP_BIAS,
  DOWN_BIAS,
  ATTENTION_NORM,
  MLP_NORM,
  FINAL_NORM,
  QUERY_NORM,
  KEY_NORM,
  POST_ATTENTION_NORM,  // only with post norms
  POST_MLP_NORM,
};

// What a step's time goes to, for `step_profile`.
enum Phase : int32_t {
  PHASE_EMBED = 0,
  PHASE_QKV,
  PHASE_PLACE,  // rotation, and writing keys and values
  PHASE_ATTENTION,
  PHASE_OUTPUT,
  PHASE_NORM,
  PHASE_GATE_UP,
  PHASE_DOWN,
  PHASE_ROUTE,  // of a mixture: which experts, and moving rows to them and back
  PHASE_HEAD,
  PHASE_WAIT,  // at the barriers
  NUM_PHASES
};

// What the machine gives at most, for `step_probe`.
enum Probe : int32_t { PROBE_READ = 0, PROBE_MULTIPLY };

// In what layers differ.
struct LayerDims {
  int32_t window;  // keys a query sees, its own included; 0: all before it
  int32_t rope;    // which of the tables queries and keys turn by; -1: they do not turn
  int32_t mixture;  // 0: an MLP
};

struct Dims {
  int32_t isa, bf16_weights;
  int32_t num_layers, hidden_size, intermediate_size, num_heads, num_kv_heads, head_dim, vocab_size;
  int32_t tied_head, num_threads, pin_threads;
  int32_t coded_weights;  // bfloat16 weights may be stored in 12 bits, without loss
  int32_t num_ropes;
  int32_t post_norms;  // attention's and the MLP's results are normed before they join the residual
  int32_t gelu;        // the MLP's activation: 0 silu, 1 gelu in its tanh form
  // Of layers that are mixtures: experts in all, for each token, their intermediate size, and whether the weights of a
  // token's experts are made to sum to 1.
  int32_t num_experts, experts_per_token, expert_size, normalized;
  float norm_eps, attention_scale, embedding_scale;
  float attention_cap, logit_cap;  // bounds on scores and logits, cap * tanh(x / cap); 0: none
  const LayerDims* layers;         // [num_layers], read by `step_create` only
};

// Layers that keep the same positions of a sequence form a group: they share blocks and block tables.
struct CacheDims {
  const int64_t* num_blocks;  // [num_groups]; the caller keeps it
  const int64_t* windows;     // [num_groups], positions that a query sees at most, 0: all; the caller keeps it
  const int32_t* groups;      // [num_layers], the group of each layer, read by `step_allocate` only
  int32_t num_groups, block_size, max_tokens, max_positions;
  const float *cos, *sin;  // [num_ropes][max_positions][head_dim / 2]
};

// One step. Tokens of a row are neighbours; positions of a row are consecutive and end at seq_lens - 1. Entries of a
// block table in front of the window of the row's first token, or of its floor, are not read.
struct Batch {
  int32_t num_rows, num_tokens, table_width, num_logits;
  const int64_t* token_ids;        // [num_tokens]
  const int64_t* positions;        // [num_tokens]
  const int64_t* slot_mapping;     // [num_groups][num_tokens], -1: the token's key and value are not kept
  const int32_t* query_start_loc;  // [num_rows + 1]
  const int32_t* seq_lens;         // [num_rows]
  const int32_t* block_tables;     // [num_groups][num_rows][table_width]
  const int32_t* floors;           // [num_groups][num_rows], positions in front are not seen: the first of a block and
                                   // at most the row's own first; null: 0 everywhere
  const int64_t* logit_tokens;     // [num_logits], indexes of tokens
  float* logits;                   // [num_logits][vocab_size], or null: nobody reads them
  int64_t* best_ids;               // [num_logits], the lowest id of the largest logit
  float* best_logits;              // [num_logits], NaN where any logit is NaN
};

static constexpr int64_t LAST_SAMPLE = -1;  // a token id: what the row's slot sampled last
static constexpr int64_t NO_POSITION = -1;  // of an empty cell

enum StepState : uint32_t {
  STEP_WAITS = 0,  // for the step before it, or to be started
  STEP_RUNS,
  STEP_DONE,
  STEP_DROPPED,  // it cannot run as it is: a cell it feeds from holds nothing for it
};

// A step that may begin as soon as the one before it has ended, without its caller: see chain.h. Kept in place by the
// caller until `step_passed` reaches its ordinal.
struct ChainedStep {
  Batch batch;  // token_ids are written; logits may be null where `greedy`
  int64_t *cell_tokens, *cell_positions;  // [num_slots], what each slot sampled last and where it is fed
  const int32_t* slots;                   // [num_rows]
  const int32_t* sample_rows;             // [num_logits], the row of each logit token
  const int32_t* emptied_slots;           // [num_emptied], their cells are emptied first
  int32_t num_emptied;
  int32_t greedy;  // every row takes its largest logit: cells are written by the step itself
  // Of the library:
  uint32_t state;  // StepState
  int64_t ordinal;               // among all steps that ran, from 1; 0: it has not begun
  int64_t started_ns, ended_ns;  // CLOCK_MONOTONIC
  ChainedStep *follower, *next;  // attached; and begun, once this one has ended
};

// Rows to draw a token of, each by its own parameters: `reference.sampling`, steps 7a to 7e.
struct Draws {
  const float* logits;       // [any][vocab_size]
  const int64_t* rows;       // [num_draws], rows of logits
  const float* largest;      // [num_draws], each row's largest logit, finite
  const float* temperature;  // [num_draws], 1e-5 or more
  const float* top_p;        // [num_draws]
  const int32_t* top_k;      // [num_draws]
  const float* min_p;        // [num_draws]
  const double* uniform;     // [num_draws]
  int64_t* token_ids;        // [num_draws], written
  int64_t num_draws;
};

}  // namespace step
