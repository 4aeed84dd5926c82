// Bounds and data races, seen through the calls that g++ -fsanitize=thread puts before every access.
//
// These definitions stand in for libtsan. An access must lie in an argument's array, in shared memory, on the
// thread's own stack or in this library. Two accesses to the same byte race when one of them writes, they come
// from different threads, they are not both atomic, and nothing orders them: no block barrier between, nor, in one
// warp, a __syncwarp. Shuffles, votes and mma order no memory. Two blocks are never ordered.
// History is bounded (the last write, two reads): a report is a race, silence is no proof.
#pragma once
#include <cstdio>
#include <vector>

#include "runtime.h"

namespace on_host {

struct Moment {
  int block = -1, thread = -1;
  uint32_t block_epoch = 0, warp_epoch = 0;
};

struct History {
  Moment write, reads[2];
  bool atomic = false;
};

struct Range {
  uintptr_t begin, end;
  std::vector<History> histories;  // one per byte

  explicit Range(const void* memory, size_t num_bytes)
      : begin(reinterpret_cast<uintptr_t>(memory)), end(begin + num_bytes), histories(num_bytes) {}
};

class Checker {
 public:
  void start_launch(const uint64_t* ranges, int num_ranges) {
    ranges_.clear();
    for (int i = 0; i < num_ranges; i++) {
      ranges_.emplace_back(reinterpret_cast<const void*>(ranges[2 * i]), ranges[2 * i + 1]);
    }
    num_global_ = ranges_.size();
    last_ = 0;
  }
  void start_block(int block) {
    ranges_.erase(ranges_.begin() + num_global_, ranges_.end());
    last_ = 0;
    block_ = block;
    block_epoch_ = 1;
    for (uint32_t& epoch : warp_epoch_) epoch = 0;
  }
  void add_shared(const void* memory, size_t num_bytes) { ranges_.emplace_back(memory, num_bytes); }
  void sync_block() { block_epoch_++; }
  void sync_warp(int first_thread, uint32_t mask) {
    for (int lane = 0; lane < LANES; lane++) {
      if (mask >> lane & 1) warp_epoch_[first_thread + lane]++;
    }
  }

  // Returns null or the offence; writes the other thread of a race to `other`.
  const char* access(const void* memory, size_t num_bytes, Access kind, int thread, int* other) {
    const uintptr_t address = reinterpret_cast<uintptr_t>(memory);
    Range* range = find(address);
    if (range == nullptr || address + num_bytes > range->end) return "access out of bounds";
    const Moment now = {block_, thread, block_epoch_, warp_epoch_[thread]};
    const size_t first = address - range->begin;
    for (size_t byte = first; byte < first + num_bytes; byte++) {
      History& history = range->histories[byte];
      if (races(history.write, now) && !(kind == ATOMIC && history.atomic)) {
        *other = history.write.thread;
        return kind == READ ? "race: read after write" : "race: write after write";
      }
      if (kind == READ) {
        if (history.reads[0].thread != thread) history.reads[1] = history.reads[0];
        history.reads[0] = now;
        continue;
      }
      for (const Moment& read : history.reads) {
        if (!races(read, now)) continue;
        *other = read.thread;
        return "race: write after read";
      }
      history.write = now;
      history.atomic = kind == ATOMIC;
      history.reads[0] = history.reads[1] = Moment();
    }
    return nullptr;
  }

 private:
  bool races(const Moment& then, const Moment& now) const {
    if (then.thread < 0) return false;
    if (then.block != now.block) return true;
    if (then.thread == now.thread || then.block_epoch != now.block_epoch) return false;
    const bool same_warp = then.thread / LANES == now.thread / LANES;
    return !(same_warp && then.warp_epoch < now.warp_epoch);
  }
  Range* find(uintptr_t address) {
    if (last_ < ranges_.size() && address >= ranges_[last_].begin && address < ranges_[last_].end) {
      return &ranges_[last_];
    }
    for (last_ = 0; last_ < ranges_.size(); last_++) {
      if (address >= ranges_[last_].begin && address < ranges_[last_].end) return &ranges_[last_];
    }
    return nullptr;
  }

  std::vector<Range> ranges_;
  size_t num_global_ = 0, last_ = 0;
  int block_ = 0;
  uint32_t block_epoch_ = 1, warp_epoch_[MAX_THREADS] = {};
};

}  // namespace on_host
