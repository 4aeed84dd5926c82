// The library's own threads: one job per step, phases inside it, and work units shared within a phase.
//
//   run(job)                     wakes all threads, sleeps until the job is done
//     next_phase(units)          waits until the phase before is complete; units are dealt out, a run of them to each
//     take() take() take() ...   a thread's own units from the front, then others' units from the back
//     overdue() ...              units that another thread took and has not finished
//
// Why not OpenMP: a second OpenMP runtime beside torch's ruins both (idle workers of one spin on the cores of the
// other). Why runs of units: a thread walks through neighbouring weights. Who computes a unit changes no bit of it.
// Why the caller does not compute: its threads can then be tied to cores without touching the caller's affinity,
// which threads started later (torch's) would inherit.
//
// A phase is complete when its units are, not when all threads have come to it: the system takes threads off their cores
// for hundreds of microseconds, many phases long. Units are of two kinds. A kept one is its thread's until it is done. An
// open one is computed into the thread's own memory, and only the thread that then wins the right to `commit` writes the
// result where it belongs; what is overdue, another thread computes again and commits:
//
//     thread 0   |unit 1|unit 3|unit 2, again|commit|next phase|...
//     thread 1   |unit 2 .......off its core................|commit: lost|this phase is past|so is this|joins
//
// The loser has read memory that may have changed meanwhile, and threw away what it made of it. It catches up: of a
// phase that is past, `next_phase` says so at once. All threads leave a job before `run` returns.
//
// Why threads move apart by themselves: once two share a core they take turns at every phase, and the system, which sees
// one of them runnable at a time, leaves both there for several milliseconds while another core is free.
#pragma once
#include <pthread.h>
#include <sched.h>

#include <cstdint>

namespace step {

class Pool {
 public:
  static constexpr int64_t MAX_UNITS = int64_t(1) << 22;  // of a phase

  // cpus: one core number per thread, or null to leave placement to the system. Returns null if a thread cannot start.
  static Pool* create(int num_threads, const int* cpus);
  ~Pool();
  void run(void (*job)(void* argument, int thread), void* argument);
  // The halves of `run`, for a caller that does something else meanwhile. `start` joins the job before it first.
  void start(void (*job)(void* argument, int thread), void* argument);
  void join();
  int size() const { return num_threads_; }

  // Whether the phase has work; else others have completed it already.
  bool next_phase(int thread, int64_t num_units);
  int64_t take(int thread, bool open);  // a unit of the phase, -1 when none is left
  bool commit(int thread);              // of the open unit taken last: whether the result is this thread's to write
  void complete(int thread);            // the unit is done, its result written

  // Once none is left to take: an open unit that its thread does not finish, -1 if there is none; waits a little for
  // those in time. `take_over` is its `commit`, `complete` follows.
  struct Overdue {
    int64_t unit;
    int owner;
    uint64_t claim;
  };
  Overdue overdue(int thread);
  bool take_over(const Overdue& unit);

 private:
  struct alignas(64) Lane {  // of a thread
    uint64_t range;      // units dealt to it and not taken: phase, begin, end, which change in one exchange
    uint64_t claim;      // the open unit it computes: phase, unit, and whether it is still open
    uint64_t completed;  // the phase it completed a unit in last, and how many in that phase
    uint32_t phase;      // that it has come to
    int core;            // where it came to that phase
    uint64_t began, shortest;  // when it took its unit, and its shortest unit of the phase, in cycles
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
  static void publish(Signal& signal, uint32_t word);
  bool is_complete(uint32_t phase) const;
  void deal(uint32_t phase, int64_t num_units);
  void leave_shared_core(int thread);

  int num_threads_ = 0, num_started_ = 0;
  bool stop_ = false;
  bool roaming_ = false;  // nothing ties threads to cores, and there is a core for each
  cpu_set_t allowed_;     // cores of the process when the pool was made
  void (*job_)(void*, int) = nullptr;
  void* argument_ = nullptr;
  uint32_t first_phase_ = 0;  // the one before the job's first
  pthread_t* threads_ = nullptr;
  Start* starts_ = nullptr;
  Lane* lanes_ = nullptr;
  bool running_ = false;  // a job was started and not joined
  uint32_t seen_ = 0;     // of done_, before the job
  Signal work_ = {}, done_ = {};
  Signal phase_ = {};                 // the phase under way
  alignas(64) uint32_t dealing_ = 0;  // the phase under way, or the next one, which somebody deals out
  int64_t num_units_ = 0;
  alignas(64) int finished_ = 0;
};

}  // namespace step
