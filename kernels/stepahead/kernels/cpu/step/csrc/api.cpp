// The exported functions: life of a model, its cache, and steps. See abi.h for what callers promise.
#include <sched.h>
#include <string.h>
#include <sys/mman.h>

#include <initializer_list>
#include <new>

#include "chain.h"
#include "detect.h"
#include "model.h"

namespace step {

static constexpr size_t HUGE_PAGE = size_t(2) << 20;

// Every buffer of any size gets its own mapping: zeroed by the system, given back whole.
char* allocate(Model& model, size_t num_bytes) {
  Region* region = new (std::nothrow) Region;
  if (!region) return nullptr;
  const bool huge = num_bytes >= HUGE_PAGE;
  region->num_bytes = huge ? round_up(num_bytes, HUGE_PAGE) + HUGE_PAGE : round_up(num_bytes + 1, 4096);
  void* base = mmap(nullptr, region->num_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (base == MAP_FAILED) {
    delete region;
    return nullptr;
  }
  region->base = static_cast<char*>(base);
  region->next = model.regions;
  model.regions = region;
  if (!huge) return region->base;
  char* aligned = reinterpret_cast<char*>(round_up(reinterpret_cast<intptr_t>(base), HUGE_PAGE));
  // A request, not a need: measured 0 to 25 % of a decode step.
  (void)madvise(aligned, round_up(num_bytes, HUGE_PAGE), MADV_HUGEPAGE);
  return aligned;
}

static void free_model(Model* model) {
  delete model->pool;
  delete_chain(model->chain);
  for (int layer = 0; model->layers && layer < model->dims.num_layers; layer++) delete[] model->layers[layer].experts;
  delete[] model->layers;
  for (Region* region = model->regions; region;) {
    Region* next = region->next;
    munmap(region->base, region->num_bytes);
    delete region;
    region = next;
  }
  delete model;
}

static void derive_sizes(Model& m) {
  const Dims& d = m.dims;
  m.half = round_up(d.head_dim / 2, 16);
  m.padded_head = 2 * m.half;
  m.group_heads = d.num_heads / d.num_kv_heads;
  m.query_columns = d.num_heads * m.padded_head;
  m.kv_columns = d.num_kv_heads * m.padded_head;
  m.padded_hidden = round_up(d.hidden_size, 32);
  m.padded_inner = round_up(d.intermediate_size, 32);
  m.padded_experts = round_up(d.num_experts, 32);
  m.padded_expert = round_up(d.expert_size, 32);
  m.panel_columns = 2 * m.kernels->vector_width;
  m.tile_elements = TILE_TOKENS * m.padded_head;
}

// If asked, one core per thread where the process has exactly that many; otherwise the system places the threads.
static Pool* make_pool(const Dims& dims) {
  int cpus[CPU_SETSIZE], num_cpus = 0;
  cpu_set_t allowed;
  if (dims.pin_threads && sched_getaffinity(0, sizeof allowed, &allowed) == 0)
    for (int cpu = 0; cpu < CPU_SETSIZE; cpu++)
      if (CPU_ISSET(cpu, &allowed)) cpus[num_cpus++] = cpu;
  return Pool::create(dims.num_threads, num_cpus == dims.num_threads ? cpus : nullptr);
}

template <class T>
static bool reserve(Model& m, T*& memory, int64_t count) {
  memory = reinterpret_cast<T*>(allocate(m, count * sizeof(T)));
  return memory != nullptr;
}

static bool allocate_routing(Model& m) {
  Routing& r = m.routing;
  const int64_t tokens = m.cache.max_tokens, experts = m.dims.num_experts;
  const int64_t entries = tokens * m.dims.experts_per_token, bytes = m.kernels->activation_bytes;
  return reserve(m, r.logits, tokens * m.padded_experts) && reserve(m, r.experts, entries) &&
         reserve(m, r.weights, entries) && reserve(m, r.entries, entries) && reserve(m, r.tokens, entries) &&
         reserve(m, r.first_entry, experts + 1) && reserve(m, r.first_row_unit, experts + 1) &&
         reserve(m, r.inputs, entries * m.padded_hidden * bytes) && reserve(m, r.results, entries * m.padded_hidden);
}

static bool allocate_activations(Model& m) {
  const int64_t tokens = m.cache.max_tokens, bytes = m.kernels->activation_bytes, columns = m.query_columns;
  const int64_t last_tile = m.tile_elements * m.kernels->weight_bytes;
  const int64_t scratch = TASK_QUERIES * (PART_KEYS * 8 + 16 + 2 * m.padded_head * 4) + last_tile + 1024;
  m.scratch_bytes = round_up(scratch, 4096);
  m.max_tasks = tokens * m.dims.num_kv_heads * ((m.group_heads + TASK_QUERIES - 1) / TASK_QUERIES);
  m.residual = reinterpret_cast<float*>(allocate(m, tokens * m.padded_hidden * 4));
  m.qkv = reinterpret_cast<float*>(allocate(m, tokens * (columns + 2 * m.kv_columns) * 4));
  if (m.dims.post_norms) m.branch = reinterpret_cast<float*>(allocate(m, tokens * m.padded_hidden * 4));
  m.normed = allocate(m, tokens * m.padded_hidden * bytes);
  m.queries = allocate(m, tokens * columns * bytes);
  m.attended = allocate(m, tokens * columns * bytes);
  const int64_t inner = m.padded_inner, all_experts = m.dims.experts_per_token * m.padded_expert;
  m.inner = allocate(m, tokens * (inner > all_experts ? inner : all_experts) * bytes);
  if (m.dims.num_experts && !allocate_routing(m)) return false;
  m.scratch = allocate(m, m.scratch_bytes * m.dims.num_threads);
  int64_t inputs = m.padded_hidden > columns ? m.padded_hidden : columns;
  inputs = inputs > m.padded_inner ? inputs : m.padded_inner;
  inputs = inputs > m.padded_expert ? inputs : m.padded_expert;
  m.panel_room_bytes = round_up(inputs * m.panel_columns * m.kernels->weight_bytes, 4096);
  m.panel_room = m.kernels->coded ? allocate(m, m.panel_room_bytes * m.dims.num_threads) : m.scratch;
  m.tasks = reinterpret_cast<AttentionTask*>(allocate(m, m.max_tasks * sizeof(AttentionTask)));
  m.draw_bytes = round_up(m.dims.vocab_size, DRAW_TILE) * DRAW_BYTES_PER_ID;
  m.draw_scratch = allocate(m, m.draw_bytes * m.dims.num_threads);
  m.best_logits = reinterpret_cast<float*>(allocate(m, tokens * m.dims.num_threads * sizeof(float)));
  m.best_ids = reinterpret_cast<int64_t*>(allocate(m, tokens * m.dims.num_threads * sizeof(int64_t)));
  return m.residual && m.qkv && m.normed && m.queries && m.attended && m.inner && m.scratch && m.panel_room && m.tasks &&
         m.draw_scratch && m.best_logits && m.best_ids && (m.branch || !m.dims.post_norms);
}

// Positions consecutive and last, and every block of the tables that attention reads: from the window of the first
// position or the floor on.
static bool is_row_sound(const Model& m, const Batch& batch, int32_t row) {
  const int64_t begin = batch.query_start_loc[row], end = batch.query_start_loc[row + 1];
  const int64_t size = m.cache.block_size, length = batch.seq_lens[row], first = length - (end - begin);
  if (begin < 0 || begin >= end || end > batch.num_tokens || first < 0 || length > m.cache.max_positions) return false;
  for (int64_t t = begin; t < end; t++)
    if (batch.positions[t] != first + t - begin) return false;
  const int64_t needed = (length + size - 1) / size;
  if (needed > batch.table_width) return false;
  for (int64_t group = 0; group < m.cache.num_groups; group++) {
    const int32_t* table = batch.block_tables + (group * batch.num_rows + row) * batch.table_width;
    const int64_t window = m.cache.windows[group], floor = floor_of(batch, group, row);
    if (floor < 0 || floor > first || floor % size) return false;
    const int64_t oldest = window && first >= window + floor ? first - window + 1 : floor;
    for (int64_t column = oldest / size; column < needed; column++)
      if (table[column] < 0 || table[column] >= m.cache.num_blocks[group]) return false;
  }
  return true;
}

struct DrawJob {
  const Model* model;
  const Draws* draws;
};

static void draw_job(void* argument, int thread) {
  const DrawJob& job = *static_cast<DrawJob*>(argument);
  Pool& pool = *job.model->pool;
  pool.next_phase(thread, job.draws->num_draws);
  for (int64_t index = pool.take(thread, false); index >= 0; index = pool.take(thread, false)) {
    job.model->kernels->draw(*job.model, *job.draws, index, thread);
    pool.complete(thread);
  }
}

struct ProbeJob {
  const Model* model;
  Probe kind;
  int64_t amount;
};

static void probe_job(void* argument, int thread) {
  const ProbeJob& job = *static_cast<ProbeJob*>(argument);
  job.model->kernels->probe(*job.model, job.kind, job.amount, thread);
}

}  // namespace step

using namespace step;

STEP_EXPORT int32_t step_abi_version() { return STEP_ABI_VERSION; }

// Whether this CPU (and its system) runs the code of an instruction set, and whether the library has that code.
STEP_EXPORT int32_t step_has_isa(int32_t isa) { return has_isa(static_cast<Isa>(isa)); }

// Whether only the code is missing: the compiler did not know the instructions.
STEP_EXPORT int32_t step_left_out(int32_t isa) { return left_out(static_cast<Isa>(isa)); }

// Room for the weights; null where there is no memory or thread.
STEP_EXPORT void* step_create(const Dims* dims) {
  Model* model = new (std::nothrow) Model();
  if (!model) return nullptr;
  model->dims = *dims;
  model->kernels = kernels_for(static_cast<Isa>(dims->isa), dims->bf16_weights);
  derive_sizes(*model);
  model->pool = make_pool(*dims);
  model->chain = model->pool ? make_chain(dims->num_threads) : nullptr;
  const bool made = model->chain && make_weights(*model);
  model->dims.layers = nullptr;  // the caller's
  if (made) return model;
  free_model(model);
  return nullptr;
}

STEP_EXPORT void step_destroy(void* handle) { free_model(static_cast<Model*>(handle)); }

// Bytes of all matrices as they are stored: what a step of one row reads of them.
STEP_EXPORT int64_t step_stored_bytes(void* handle) { return static_cast<Model*>(handle)->stored_bytes; }

STEP_EXPORT int step_set(void* handle, int32_t kind, int32_t layer, int32_t expert, const void* source) {
  return set_tensor(*static_cast<Model*>(handle), static_cast<TensorKind>(kind), layer, expert, source);
}

// The cache and the activations, every byte of the cache written; returns the cache's bytes, or -1. Called once.
STEP_EXPORT int64_t step_allocate(void* handle, const CacheDims* dims) {
  Model& m = *static_cast<Model*>(handle);
  m.cache = *dims;
  m.tiles_per_block = (dims->block_size + TILE_TOKENS - 1) / TILE_TOKENS;
  int64_t num_blocks = 0;
  for (int layer = 0; layer < m.dims.num_layers; layer++) {
    m.layers[layer].group = dims->groups[layer];
    m.layers[layer].first_block = num_blocks;
    num_blocks += dims->num_blocks[dims->groups[layer]];
  }
  m.cache.groups = nullptr;
  const int64_t tiles = num_blocks * m.dims.num_kv_heads * m.tiles_per_block;
  const int64_t bytes = tiles * m.tile_elements * m.kernels->weight_bytes;
  m.keys = allocate(m, bytes);
  m.values = allocate(m, bytes);
  const int64_t table_rows = int64_t(m.dims.num_ropes) * dims->max_positions;
  m.cos = reinterpret_cast<float*>(allocate(m, table_rows * m.half * sizeof(float)));
  m.sin = reinterpret_cast<float*>(allocate(m, table_rows * m.half * sizeof(float)));
  if (!m.keys || !m.values || !m.cos || !m.sin || !allocate_activations(m)) return -1;
  // Memory that was never written is the system's zero page: the first steps would pay for the real pages.
  memset(m.keys, 0, bytes);
  memset(m.values, 0, bytes);
  const int64_t half = m.dims.head_dim / 2;
  for (int64_t row = 0; row < table_rows; row++) {
    memcpy(m.cos + row * m.half, dims->cos + row * half, half * sizeof(float));
    memcpy(m.sin + row * m.half, dims->sin + row * half, half * sizeof(float));
  }
  return 2 * bytes;
}

// Where the keys (0) or values (1) lie.
STEP_EXPORT void* step_cache_memory(void* handle, int32_t part) {
  const Model& m = *static_cast<Model*>(handle);
  return part ? m.values : m.keys;
}

// Copies blocks (source, destination), all sources read before the first write, then zeroes blocks; in all layers,
// which must be one group.
STEP_EXPORT int step_change_blocks(void* handle, const int64_t* copies, int64_t num_copies, const int64_t* zeroed,
                                   int64_t num_zeroed) {
  Model& m = *static_cast<Model*>(handle);
  const int64_t weight_bytes = m.kernels->weight_bytes;
  const size_t bytes = m.dims.num_kv_heads * m.tiles_per_block * m.tile_elements * weight_bytes;
  char* held = num_copies ? new (std::nothrow) char[num_copies * bytes] : nullptr;
  if (num_copies && !held) return ERROR_MEMORY;
  for (int layer = 0; layer < m.dims.num_layers; layer++)
    for (char* cache : {m.keys, m.values}) {
      auto block = [&](int64_t id) { return cache + block_offset(m, layer, id, 0) * weight_bytes; };
      for (int64_t i = 0; i < num_copies; i++) memcpy(held + i * bytes, block(copies[2 * i]), bytes);
      for (int64_t i = 0; i < num_copies; i++) memcpy(block(copies[2 * i + 1]), held + i * bytes, bytes);
      for (int64_t i = 0; i < num_zeroed; i++) memset(block(zeroed[i]), 0, bytes);
    }
  delete[] held;
  return 0;
}

// Whether the step reads and writes nothing else, its arrays being as long as they should be. What is wrong the caller
// finds out, who rarely needs to know. With `cells` tokens may be LAST_SAMPLE.
STEP_EXPORT int32_t step_check(void* handle, const Batch* batch, int32_t cells) {
  const Model& m = *static_cast<Model*>(handle);
  const int64_t num_tokens = batch->num_tokens;
  bool ok = num_tokens > 0 && num_tokens <= m.cache.max_tokens && batch->num_logits <= m.cache.max_tokens;
  ok = ok && batch->query_start_loc[0] == 0 && batch->query_start_loc[batch->num_rows] == num_tokens;
  for (int32_t row = 0; ok && row < batch->num_rows; row++) ok = is_row_sound(m, *batch, row);
  for (int64_t t = 0; ok && t < num_tokens; t++)
    ok = batch->token_ids[t] >= (cells ? LAST_SAMPLE : 0) && batch->token_ids[t] < m.dims.vocab_size;
  for (int32_t group = 0; ok && group < m.cache.num_groups; group++) {
    const int64_t num_slots = m.cache.num_blocks[group] * m.cache.block_size;
    const int64_t* slots = batch->slot_mapping + group * num_tokens;
    for (int64_t t = 0; ok && t < num_tokens; t++) ok = slots[t] >= -1 && slots[t] < num_slots;
  }
  for (int64_t i = 0; ok && i < batch->num_logits; i++)
    ok = batch->logit_tokens[i] >= 0 && batch->logit_tokens[i] < num_tokens;
  return ok;
}

STEP_EXPORT void step_forward(void* handle, const Batch* batch) {
  Model& m = *static_cast<Model*>(handle);
  ChainedStep alone = {};
  alone.batch = *batch;
  start_chain(m, alone);
  m.pool->join();
}

// Starts a step that follows on nothing. 0: a cell it feeds from holds nothing for it, and it was not started.
STEP_EXPORT int32_t step_start(void* handle, ChainedStep* first) {
  return start_chain(*static_cast<Model*>(handle), *first);
}

// Has `next` begin when `before` ends. 0: too late, or `before` is not greedy. From any thread.
STEP_EXPORT int32_t step_follow(void* handle, ChainedStep* before, ChainedStep* next) {
  return follow(*static_cast<Model*>(handle), *before, *next);
}

// Waits until a step that was started, or attached, has ended or was dropped; returns its state.
STEP_EXPORT uint32_t step_wait(ChainedStep* step) { return wait_for(*step); }

// The ordinal up to which no thread looks at a step any more.
STEP_EXPORT int64_t step_passed(void* handle) { return count_passed(*static_cast<Model*>(handle)); }

STEP_EXPORT void step_draw(void* handle, const Draws* draws) {
  Model& m = *static_cast<Model*>(handle);
  DrawJob job = {&m, draws};
  m.pool->run(draw_job, &job);
}

// From now on steps add the cycles of the time stamp counter that each thread spends on each part to `cycles`
// [num_threads][NUM_PHASES], the caller's memory; null: they no longer do.
STEP_EXPORT void step_profile(void* handle, uint64_t* cycles) { static_cast<Model*>(handle)->cycles = cycles; }

// The machine's bounds, for the caller to time: PROBE_READ reads all packed weights `amount` times, shared by all
// threads; PROBE_MULTIPLY has every thread multiply registers for `amount` rounds. Returns the bytes read, or the
// floating point operations, of all threads.
STEP_EXPORT int64_t step_probe(void* handle, int32_t kind, int64_t amount) {
  const Model& m = *static_cast<Model*>(handle);
  ProbeJob job = {&m, static_cast<Probe>(kind), amount};
  m.pool->run(probe_job, &job);
  if (kind == PROBE_READ) return amount * static_cast<int64_t>(m.weight_bytes);
  return amount * m.dims.num_threads * m.kernels->probe_vectors * m.kernels->vector_width * m.kernels->group * 2;
}
