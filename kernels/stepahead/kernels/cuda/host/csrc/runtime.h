// What a kernel compiled for the host asks of its run time: threads as fibers, barriers, exchanges, shared memory.
//
// Blocks run one after another, the threads of a block as fibers on one OS thread. A thread runs until it waits; the
// order in which ready threads go on is ascending for seed 0 and a new permutation every round for other seeds, so a
// missing barrier shows as a wrong result. With CHECKED every access of the kernel is also held against the bounds
// of what it was given and against the accesses of other threads (see checks.h).
#pragma once
#include <cstddef>
#include <cstdint>

struct Index3 {
  unsigned x, y, z;
};
extern Index3 threadIdx, blockIdx, blockDim, gridDim;

namespace on_host {

constexpr int MAX_THREADS = 1024;
constexpr int LANES = 32;

// A place in the source that orders memory; a launch may leave one out to see whether anybody notices.
struct Site {
  const char* file;
  int line;
};

enum Access : uint8_t { READ, WRITE, ATOMIC };

struct Copy {
  void* to;
  const void* from;
  bool valid;
};

// Ends the launch with a message; does not return to the kernel.
[[noreturn]] void fault(const char* message);

void sync_block(Site site);
void sync_warp(uint32_t mask, Site site);

// Lanes of `mask` meet at operation `kind`; each gives 8 bytes and gets those of lane `source`.
uint64_t exchange(uint32_t mask, uint64_t value, int source, int kind);
uint32_t ballot(uint32_t mask, bool value);

// Memory of this block, one array per place in the source; poisoned when the block starts.
void* shared_array(const void* place, size_t num_bytes);
void* dynamic_shared();

// Asynchronous copies of this thread. They land when they are waited for, the latest moment they may.
void queue_copy(const Copy& copy);
void commit_copies();
bool next_landed(int pending, Copy& copy);  // whether there was one
bool is_skipped(Site site);

// operands: a[4], b[2] of this lane; all: those of all lanes of its warp, valid until `leave_warp`.
const uint32_t (*enter_warp(const uint32_t (&operands)[6]))[6];
void leave_warp();
int lane();

#ifdef CHECKED
void note(const void* address, size_t num_bytes, Access access);
#else
inline void note(const void*, size_t, Access) {}
#endif

typedef void (*Body)(void** arguments);

// Returns null or what went wrong. grid_block: six sizes; sizes: bytes of each argument as the caller packed them.
const char* launch(Body body, const int* wanted_sizes, int num_wanted, const unsigned* grid_block, size_t shared_bytes,
                   unsigned seed, void** arguments, const int* sizes, int num_arguments);

}  // namespace on_host
