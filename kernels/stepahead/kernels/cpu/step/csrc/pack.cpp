// Packing: from a row-major matrix to panels, plain (model.h) or coded (coded.h).
#include "pack.h"

#include <sys/mman.h>

#include <cstring>
#include <new>

namespace step {

struct PackJob {
  Model* model;
  Linear* matrix;
  const char* source;          // [outputs][num_inputs]
  int64_t num_inputs;
  bool inputs_are_heads;
  const int32_t* outputs;      // [columns of the matrix], -1: none of this tensor
  int result;                  // 0, ERROR_MEMORY or NOT_CODABLE
};

static constexpr int NOT_CODABLE = -1;

// Copies the outputs of `num_columns` columns into a panel or vector of that many; the others stay as they are.
template <class Weight>
static void copy_columns(const PackJob& job, int64_t first_column, int64_t num_columns, char* memory) {
  const Model& m = *job.model;
  const int64_t group = m.kernels->group, head_dim = m.dims.head_dim;
  for (int64_t column = 0; column < num_columns; column++) {
    const int64_t output = job.outputs[first_column + column];
    if (output < 0) continue;
    const Weight* row = reinterpret_cast<const Weight*>(job.source) + output * job.num_inputs;
    Weight* out = reinterpret_cast<Weight*>(memory) + column * group;
    for (int64_t k = 0; k < job.num_inputs; k++) {
      const int64_t input = job.inputs_are_heads ? k / head_dim * m.padded_head + k % head_dim : k;
      out[input / group * num_columns * group + input % group] = row[k];
    }
  }
}

static bool has_outputs(const PackJob& job, int64_t first_column, int64_t num_columns) {
  for (int64_t column = first_column; column < first_column + num_columns; column++)
    if (job.outputs[column] >= 0) return true;
  return false;
}

// The 16 most frequent high bytes, and their codes; 0xff: none.
static void choose_codes(const uint16_t* weights, int64_t count, uint8_t* high_bytes, uint8_t* codes) {
  int64_t counts[256] = {};
  for (int64_t i = 0; i < count; i++) counts[weights[i] >> 8]++;
  memset(codes, 0xff, 256);
  for (int code = 0; code < 16; code++) {
    int best = 0;
    for (int high = 1; high < 256; high++)
      if (counts[high] > counts[best]) best = high;
    high_bytes[code] = static_cast<uint8_t>(best);
    if (counts[best]) codes[best] = static_cast<uint8_t>(code);
    counts[best] = 0;
  }
}

static bool add_patch(CodedHeader& header, int64_t room, int64_t position, uint16_t weight) {
  if (header.num_patches == room) return false;
  Patch* at = header.patches + header.num_patches++;
  for (; at > header.patches && at[-1].position > position; at--) *at = at[-1];
  *at = {static_cast<uint32_t>(position), weight, 0};
  return true;
}

// Codes one vector of a panel, [num_inputs / 2][16][2] weights, all of it. False: too many patches.
static bool code_vector(char* panel, int64_t num_inputs, int64_t vector, const uint16_t* weights) {
  CodedHeader& header = *reinterpret_cast<CodedHeader*>(panel);
  uint8_t codes[256];
  choose_codes(weights, num_inputs * 16, header.high_bytes[vector], codes);
  uint32_t kept = 0;  // patches of the other vector
  for (uint32_t i = 0; i < header.num_patches; i++)
    if (header.patches[i].position / 32 % 2 != vector) header.patches[kept++] = header.patches[i];
  header.num_patches = kept;
  uint8_t* pair = reinterpret_cast<uint8_t*>(panel) + coded_header_bytes(num_inputs);
  for (int64_t step = 0; step < num_inputs / 2; step++) {
    for (int64_t word = 0; word < 32; word++) {
      const uint16_t weight = *weights++;
      const int64_t byte = coded_byte(step, word);
      const uint8_t code = codes[weight >> 8];
      pair[64 * vector + byte] = static_cast<uint8_t>(weight);
      uint8_t& both = pair[128 + byte];
      both = static_cast<uint8_t>((both & 0xf0 >> 4 * vector) | (code & 15) << 4 * vector);
      if (code == 0xff && !add_patch(header, patch_room(num_inputs), (step * 2 + vector) * 32 + word, weight))
        return false;
    }
    if (step % 2) pair += PAIR_BYTES;
  }
  return true;
}

static int code_panel(const PackJob& job, int64_t panel, char* vector_memory) {
  const Linear& matrix = *job.matrix;
  const int64_t width = job.model->kernels->vector_width;
  for (int64_t vector = 0; vector < 2; vector++) {
    const int64_t first = panel * job.model->panel_columns + vector * width;
    if (!has_outputs(job, first, width)) continue;
    memset(vector_memory, 0, matrix.num_inputs * width * sizeof(uint16_t));
    copy_columns<uint16_t>(job, first, width, vector_memory);
    const auto* weights = reinterpret_cast<const uint16_t*>(vector_memory);
    char* memory = matrix.weights + panel * matrix.panel_bytes;
    if (code_vector(memory, matrix.num_inputs, vector, weights)) continue;
    // Half a code would decode to weights of padding that are not zero, and nobody writes those again.
    memset(vector_memory, 0, matrix.num_inputs * width * sizeof(uint16_t));
    code_vector(memory, matrix.num_inputs, vector, weights);
    return NOT_CODABLE;
  }
  return 0;
}

static void pack_panel(const PackJob& job, int64_t panel) {
  const int64_t columns = job.model->panel_columns;
  char* memory = job.matrix->weights + panel * job.matrix->panel_bytes;
  if (job.model->kernels->weight_bytes == 2)
    copy_columns<uint16_t>(job, panel * columns, columns, memory);
  else
    copy_columns<float>(job, panel * columns, columns, memory);
}

static void pack_job(void* argument, int thread) {
  PackJob& job = *static_cast<PackJob*>(argument);
  Pool& pool = *job.model->pool;
  const Linear& matrix = *job.matrix;
  const int64_t vector_bytes = matrix.num_inputs * job.model->kernels->vector_width * sizeof(uint16_t);
  char* vector_memory = matrix.coded ? new (std::nothrow) char[vector_bytes] : nullptr;
  if (matrix.coded && !vector_memory) __atomic_store_n(&job.result, int(ERROR_MEMORY), __ATOMIC_RELAXED);
  pool.next_phase(thread, matrix.num_panels);
  for (int64_t panel = pool.take(thread, false); panel >= 0; panel = pool.take(thread, false)) {
    if (!matrix.coded)
      pack_panel(job, panel);
    else if (vector_memory)
      if (const int result = code_panel(job, panel, vector_memory))
        __atomic_store_n(&job.result, result, __ATOMIC_RELAXED);
    pool.complete(thread);
  }
  delete[] vector_memory;
}

// Moves a matrix to memory of its own, plain. Its coded memory goes back to the system but for the edges.
static int make_plain(Model& m, Linear& matrix) {
  const int64_t panel_weights = matrix.num_inputs * m.panel_columns, panel_bytes = panel_weights * sizeof(uint16_t);
  char* plain = allocate(m, matrix.num_panels * panel_bytes + 4096);
  if (!plain) return ERROR_MEMORY;
  for (int64_t panel = 0; panel < matrix.num_panels; panel++) {
    auto* out = reinterpret_cast<uint16_t*>(plain + panel * panel_bytes);
    const char* coded = matrix.weights + panel * matrix.panel_bytes;
    for (int64_t position = 0; position < panel_weights; position++)
      out[position] = unpatched_weight(coded, matrix.num_inputs, position);
    const CodedHeader& header = *reinterpret_cast<const CodedHeader*>(coded);
    for (uint32_t i = 0; i < header.num_patches; i++) out[header.patches[i].position] = header.patches[i].weight;
  }
  const int64_t old_bytes = matrix.num_panels * matrix.panel_bytes;
  const intptr_t begin = round_up(reinterpret_cast<intptr_t>(matrix.weights), 4096);
  const intptr_t end = (reinterpret_cast<intptr_t>(matrix.weights) + old_bytes) & ~intptr_t(4095);
  if (begin < end) (void)madvise(reinterpret_cast<void*>(begin), end - begin, MADV_DONTNEED);
  m.stored_bytes += matrix.num_panels * panel_bytes - old_bytes;
  matrix.weights = plain;
  matrix.panel_bytes = panel_bytes;
  matrix.coded = false;
  return 0;
}

int pack(Model& m, Linear& matrix, const void* source, int64_t num_inputs, bool inputs_are_heads,
         const int32_t* outputs) {
  PackJob job = {&m, &matrix, static_cast<const char*>(source), num_inputs, inputs_are_heads, outputs, 0};
  m.pool->run(pack_job, &job);
  if (job.result != NOT_CODABLE) return job.result;
  if (const int result = make_plain(m, matrix)) return result;
  job.result = 0;
  m.pool->run(pack_job, &job);
  return job.result;
}

}  // namespace step
