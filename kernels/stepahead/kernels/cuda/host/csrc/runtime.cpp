// The run time of kernels compiled for the host; see runtime.h.
#include "runtime.h"

#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "fibers.h"
#ifdef CHECKED
#include "checks.h"
extern "C" __attribute__((visibility("hidden"))) char __ehdr_start[], _end[];  // this library's image
#endif

Index3 threadIdx, blockIdx, blockDim, gridDim;

namespace on_host {
namespace {

enum Wait : uint8_t { READY, AT_BLOCK_BARRIER, AT_WARP_OPERATION, ENDED };
constexpr int SYNC_WARP = 1, BALLOT = 2, MATRIX = 3;  // kinds of exchanges begin at 8
constexpr int LEAVE = 100;
constexpr uint32_t ALL = 0xffffffffu;
constexpr size_t GUARD_BYTES = 64;

struct PendingCopy {
  Copy copy;
  int group;
};

struct Fiber {
  Stack stack;
  Wait wait = ENDED;
  uint32_t mask = 0;
  int kind = 0;
  Site site = {};
  Index3 index = {};
  uint64_t given = 0;
  std::vector<PendingCopy> copies;
  int num_groups = 0;
};

struct SharedArray {
  const void* place;
  char* memory;
  size_t num_bytes;
};

std::vector<Fiber> fibers;
void* scheduler_stack;
int current, num_threads, num_live, num_at_barrier;
Body kernel_body;
void** kernel_arguments;
std::vector<SharedArray> shared_arrays;
size_t dynamic_bytes;
uint32_t operands_of[MAX_THREADS][6];
char message[512];
std::vector<Site> executed;
std::string skipped_file;
int skipped_line = 0;
std::vector<uint64_t> watched;
#ifdef CHECKED
Checker checker;
#endif

const char* base_name(const char* file) {
  const char* slash = std::strrchr(file, '/');
  return slash ? slash + 1 : file;
}

bool same(Site a, Site b) { return a.line == b.line && std::strcmp(a.file, b.file) == 0; }

void describe(const char* what) {
  if (message[0]) return;
  std::snprintf(message, sizeof message, "%s (block %u,%u,%u thread %d)", what, blockIdx.x, blockIdx.y, blockIdx.z,
                current);
}

void yield() { switch_stack(&fibers[current].stack.pointer, scheduler_stack); }

void enter() {
  kernel_body(kernel_arguments);
  if (!fibers[current].copies.empty()) describe("a thread ended with copies under way");
  fibers[current].wait = ENDED;
  num_live--;
  yield();
  __builtin_trap();
}

void wait_for_warp(uint32_t mask, int kind, Site site) {
  Fiber& self = fibers[current];
  if (!(mask >> (current % LANES) & 1)) fault("the calling lane is not in its own mask");
  self.mask = mask;
  self.kind = kind;
  self.site = site;
  self.wait = AT_WARP_OPERATION;
  yield();
}

// Lets the lanes go on that wait with fiber `index`, if all of them are there.
bool release_warp(int index) {
  const int first = index / LANES * LANES;
  const Fiber& one = fibers[index];
  for (int lane = 0; lane < LANES; lane++) {
    if (!(one.mask >> lane & 1)) continue;
    if (first + lane >= num_threads || fibers[first + lane].wait == ENDED) {
      describe("a warp operation names a lane that is not there");
      return false;
    }
    const Fiber& other = fibers[first + lane];
    if (other.wait != AT_WARP_OPERATION) return false;
    if (other.kind != one.kind || other.mask != one.mask) {
      describe("the lanes of a warp disagree about an operation");
      return false;
    }
  }
#ifdef CHECKED
  if (one.kind == SYNC_WARP) checker.sync_warp(first, one.mask);
#endif
  for (int lane = 0; lane < LANES; lane++) {
    if (one.mask >> lane & 1) fibers[first + lane].wait = READY;
  }
  return true;
}

// A thread that has ended counts as arrived, as it does on the device.
bool release_block() {
  const Fiber* one = nullptr;
  for (const Fiber& fiber : fibers) {
    if (fiber.wait != AT_BLOCK_BARRIER) continue;
    if (one != nullptr && !same(one->site, fiber.site)) {
      describe("the threads of a block wait at different barriers");
      return false;
    }
    one = &fiber;
  }
#ifdef CHECKED
  checker.sync_block();
#endif
  for (Fiber& fiber : fibers) {
    if (fiber.wait == AT_BLOCK_BARRIER) fiber.wait = READY;
  }
  num_at_barrier = 0;
  return true;
}

void shuffle(std::vector<int>& order, uint32_t& state) {
  for (int i = num_threads - 1; i > 0; i--) {
    state = state * 1664525u + 1013904223u;  // Numerical Recipes' generator
    std::swap(order[i], order[(state >> 8) % (i + 1)]);
  }
}

void run_block(uint32_t& state, bool shuffled) {
  std::vector<int> order(num_threads);
  for (int i = 0; i < num_threads; i++) {
    order[i] = i;
    Fiber& fiber = fibers[i];
    fiber.stack.prepare(enter);
    fiber.wait = READY;
    fiber.copies.clear();
    fiber.num_groups = 0;
    const unsigned index = i;
    fiber.index = {index % blockDim.x, index / blockDim.x % blockDim.y, index / (blockDim.x * blockDim.y)};
  }
  num_live = num_threads;
  num_at_barrier = 0;
  while (num_live && !message[0]) {
    if (shuffled) shuffle(order, state);
    bool moved = false;
    for (int i : order) {
      if (fibers[i].wait != READY) continue;
      current = i;
      threadIdx = fibers[i].index;
      switch_stack(&scheduler_stack, fibers[i].stack.pointer);
      moved = true;
      if (message[0]) return;
    }
    for (int i = 0; i < num_threads && !message[0]; i++) {
      current = i;
      if (fibers[i].wait == AT_WARP_OPERATION) moved |= release_warp(i);
    }
    if (num_live && num_at_barrier == num_live && !message[0]) moved |= release_block();
    if (!moved && num_live) describe("deadlock: some threads wait at a barrier that the others never reach");
  }
}

void free_shared() {
  for (SharedArray& array : shared_arrays) {
    for (size_t i = 0; i < GUARD_BYTES; i++) {
      if (static_cast<uint8_t>(array.memory[array.num_bytes + i]) != 0xff) describe("write past a shared array");
    }
    std::free(array.memory);
  }
  shared_arrays.clear();
}

}  // namespace

void fault(const char* what) {
  describe(what);
  yield();
  __builtin_trap();
}

bool is_skipped(Site site) {
  site.file = base_name(site.file);
  bool known = false;
  for (const Site& other : executed) known |= same(other, site);
  if (!known) executed.push_back(site);
  return site.line == skipped_line && skipped_file == site.file;
}

void sync_block(Site site) {
  if (is_skipped(site)) return;
  num_at_barrier++;
  fibers[current].site = site;
  fibers[current].wait = AT_BLOCK_BARRIER;
  yield();
}

void sync_warp(uint32_t mask, Site site) {
  if (!is_skipped(site)) wait_for_warp(mask, SYNC_WARP, site);
}

uint64_t exchange(uint32_t mask, uint64_t value, int source, int kind) {
  fibers[current].given = value;
  wait_for_warp(mask, kind, {});
  if (!(mask >> source & 1)) fault("a shuffle reads a lane outside its mask");
  const uint64_t got = fibers[current / LANES * LANES + source].given;
  wait_for_warp(mask, kind + LEAVE, {});
  return got;
}

uint32_t ballot(uint32_t mask, bool value) {
  fibers[current].given = value;
  wait_for_warp(mask, BALLOT, {});
  uint32_t votes = 0;
  for (int lane = 0; lane < LANES; lane++) {
    if (mask >> lane & 1) votes |= static_cast<uint32_t>(fibers[current / LANES * LANES + lane].given) << lane;
  }
  wait_for_warp(mask, BALLOT + LEAVE, {});
  return votes;
}

const uint32_t (*enter_warp(const uint32_t (&operands)[6]))[6] {
  std::memcpy(operands_of[current], operands, sizeof operands);
  wait_for_warp(ALL, MATRIX, {});
  return operands_of + current / LANES * LANES;
}

void leave_warp() { wait_for_warp(ALL, MATRIX + LEAVE, {}); }

int lane() { return current % LANES; }

void* shared_array(const void* place, size_t num_bytes) {
  for (const SharedArray& array : shared_arrays) {
    if (array.place == place) return array.memory;
  }
  const size_t room = (num_bytes + GUARD_BYTES + 127) / 128 * 128;
  char* memory = static_cast<char*>(std::aligned_alloc(128, room));
  std::memset(memory, 0xff, room);  // NaN, or -1: a read before a write shows
  shared_arrays.push_back({place, memory, num_bytes});
#ifdef CHECKED
  checker.add_shared(memory, num_bytes);
#endif
  return memory;
}

void* dynamic_shared() { return shared_array(&dynamic_bytes, dynamic_bytes); }

void queue_copy(const Copy& copy) {
  if ((reinterpret_cast<uintptr_t>(copy.to) | reinterpret_cast<uintptr_t>(copy.from)) & 15) {
    fault("an asynchronous copy is not aligned to 16 bytes");
  }
  note(copy.to, 16, WRITE);  // it may land from now on
  std::memset(copy.to, 0xff, 16);
  fibers[current].copies.push_back({copy, fibers[current].num_groups});
}

void commit_copies() { fibers[current].num_groups++; }

bool next_landed(int pending, Copy& copy) {
  Fiber& self = fibers[current];
  if (self.copies.empty() || self.copies.front().group >= self.num_groups - pending) return false;
  copy = self.copies.front().copy;
  self.copies.erase(self.copies.begin());
  return true;
}

const char* launch(Body body, const int* wanted_sizes, int num_wanted, const unsigned* grid_block, size_t shared_bytes,
                   unsigned seed, void** arguments, const int* sizes, int num_arguments) {
  message[0] = 0;
  executed.clear();
  if (num_arguments != num_wanted) {
    std::snprintf(message, sizeof message, "%d arguments, the kernel takes %d", num_arguments, num_wanted);
    return message;
  }
  for (int i = 0; i < num_wanted; i++) {
    if (sizes[i] == wanted_sizes[i]) continue;
    std::snprintf(message, sizeof message, "argument %d has %d bytes, the kernel takes %d", i, sizes[i],
                  wanted_sizes[i]);
    return message;
  }
  gridDim = {grid_block[0], grid_block[1], grid_block[2]};
  blockDim = {grid_block[3], grid_block[4], grid_block[5]};
  num_threads = static_cast<int>(blockDim.x * blockDim.y * blockDim.z);
  if (num_threads < 1 || num_threads > MAX_THREADS) return "a block has 1 to 1024 threads";
  if (shared_bytes > 227 * 1024) return "a block has at most 227 KiB of shared memory";
  if (gridDim.y > 65535 || gridDim.z > 65535) return "a grid has at most 65535 blocks in y and z";
  while (static_cast<int>(fibers.size()) > num_threads) {
    std::free(fibers.back().stack.memory);
    fibers.pop_back();
  }
  fibers.resize(num_threads);
  kernel_body = body;
  kernel_arguments = arguments;
  dynamic_bytes = shared_bytes;
#ifdef CHECKED
  checker.start_launch(watched.data(), static_cast<int>(watched.size() / 2));
#endif
  uint32_t state = seed;
  for (unsigned z = 0; z < gridDim.z; z++) {
    for (unsigned y = 0; y < gridDim.y; y++) {
      for (unsigned x = 0; x < gridDim.x; x++) {
        blockIdx = {x, y, z};
#ifdef CHECKED
        checker.start_block(static_cast<int>((z * gridDim.y + y) * gridDim.x + x));
#endif
        run_block(state, seed != 0);
        free_shared();
        if (message[0]) return message;
      }
    }
  }
  return nullptr;
}

#ifdef CHECKED
void note(const void* address, size_t num_bytes, Access access) {
  const char* memory = static_cast<const char*>(address);
  if (fibers[current].stack.holds(address) || (memory >= __ehdr_start && memory < _end)) return;
  int other = -1;
  const char* offence = checker.access(address, num_bytes, access, current, &other);
  if (offence == nullptr) return;
  char text[128];
  std::snprintf(text, sizeof text, other < 0 ? "%s" : "%s of thread %d", offence, other);
  fault(text);
}
#endif

}  // namespace on_host

#define EXPORTED extern "C" __attribute__((visibility("default")))

// Arrays the next launches may touch: [num_ranges, 2] (address, bytes).
EXPORTED void on_host_watch(const uint64_t* ranges, int num_ranges) {
  on_host::watched.assign(ranges, ranges + 2 * num_ranges);
}

// The place whose ordering the next launches leave out, as "file" and line; line 0 is none.
EXPORTED void on_host_skip(const char* file, int line) {
  on_host::skipped_file = file;
  on_host::skipped_line = line;
}

// Places that the last launch ordered memory at: the i-th as its line, its file through `file`; 0 behind the last.
EXPORTED int on_host_site(int i, const char** file) {
  if (i >= static_cast<int>(on_host::executed.size())) return 0;
  *file = on_host::executed[i].file;
  return on_host::executed[i].line;
}

#ifdef CHECKED
#define HOOK(size)                                                                               \
  EXPORTED void __tsan_read##size(void* p) { on_host::note(p, size, on_host::READ); }            \
  EXPORTED void __tsan_write##size(void* p) { on_host::note(p, size, on_host::WRITE); }          \
  EXPORTED void __tsan_unaligned_read##size(void* p) { on_host::note(p, size, on_host::READ); }  \
  EXPORTED void __tsan_unaligned_write##size(void* p) { on_host::note(p, size, on_host::WRITE); }
HOOK(1)
HOOK(2)
HOOK(4)
HOOK(8)
HOOK(16)
EXPORTED void __tsan_read_range(void* p, unsigned long size) { on_host::note(p, size, on_host::READ); }
EXPORTED void __tsan_write_range(void* p, unsigned long size) { on_host::note(p, size, on_host::WRITE); }
EXPORTED void __tsan_func_entry(void*) {}
EXPORTED void __tsan_func_exit() {}
EXPORTED void __tsan_init() {}
#endif
