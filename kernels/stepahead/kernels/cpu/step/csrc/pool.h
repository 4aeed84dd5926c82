// The library's own threads: one job per step, phases inside it, and work units shared within a phase.
//
//   run(job)                     wakes all threads, sleeps until the job is done
//     next_phase(units)          a barrier; the units are dealt out as one contiguous range per thread
//     take() take() take() ...   a thread's own units from the front, then others' units from the back
//
// Why not OpenMP: a second OpenMP runtime beside torch's ruins both (idle workers of one spin on the cores of the
// other). Why ranges and stealing: a thread walks through neighbouring weights, and a thread that the system takes
// off its core holds up one unit, not its whole share. Who computes a unit changes no bit of it.
// Why the caller does not compute: its threads can then be tied to cores without touching the caller's affinity,
// which threads started later (torch's) would inherit.
// Why threads move apart by themselves: once two share a core they take turns at every phase, and the system, which sees
// one of them runnable at a time, leaves both there for several milliseconds while another core is free.
#pragma once
#include <pthread.h>
#include <sched.h>

#include <cstdint>

namespace step {

class Pool {
 public:
  // cpus: one core number per thread, or null to leave placement to the system. Returns null if a thread cannot start.
  static Pool* create(int num_threads, const int* cpus);
  ~Pool();
  void run(void (*job)(void* argument, int thread), void* argument);
  int size() const { return num_threads_; }

  void next_phase(int thread, int64_t num_units);
  int64_t take(int thread);  // a unit of the phase, -1 when none is left

 private:
  struct alignas(64) Range {
    uint64_t bounds;  // begin in the upper half, end in the lower: both change in one exchange
    int core;         // where the thread arrived at the last phase
  };
  struct alignas(64) Signal {  // a word to wait on, and how many threads sleep on it
    uint32_t word, sleepers;
  };
  struct Start {
    Pool* pool;
    int thread;
  };

  Pool() = default;
  static void* thread_main(void* start);
  static void wait_until_changed(Signal& signal, uint32_t seen, int num_spins);
  void leave_shared_core(int thread);
  static void publish(Signal& signal, uint32_t word);

  int num_threads_ = 0, num_started_ = 0;
  bool stop_ = false;
  bool roaming_ = false;  // nothing ties threads to cores, and there is a core for each
  cpu_set_t allowed_;     // cores of the process when the pool was made
  void (*job_)(void*, int) = nullptr;
  void* argument_ = nullptr;
  pthread_t* threads_ = nullptr;
  Start* starts_ = nullptr;
  Range* ranges_ = nullptr;
  Signal work_ = {}, done_ = {}, phase_ = {};
  alignas(64) int arrived_ = 0;
  alignas(64) int finished_ = 0;
};

}  // namespace step
