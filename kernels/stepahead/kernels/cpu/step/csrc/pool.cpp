// See pool.h. Waiting is a short spin, then a futex: on a busy machine the core goes to whoever is waited for.
#include "pool.h"

#include <x86intrin.h>

#include <new>

#include "futex.h"

namespace step {

// Pauses of 15 to 60 ns. Between phases the wait is one unit long at most (a few us in a decode step); between steps
// the caller's own work takes far longer than any spin worth its power.
static const int PHASE_SPINS = 1500;
static const int STEP_SPINS = 600;
// Reading another thread's lane takes it out of that thread's cache: between two looks at it, so many pauses.
static const int LANE_PAUSES = 32;
// A thread so many phases behind (some 300 us in a step of one row) may be waiting for this one's core.
static const uint32_t LAG = 8;

// Words of a lane: the phase in the upper bits, of which 20 suffice (no thread stands still for a million phases), then
// two numbers of a unit, or one and a state.
static const int PHASE_SHIFT = 44, HIGH_SHIFT = 22;
static const uint64_t LOW_MASK = (uint64_t(1) << HIGH_SHIFT) - 1;
static const uint64_t OPEN = 1;
static_assert(Pool::MAX_UNITS == 1 << HIGH_SHIFT, "a lane's words hold the units of a phase");

static uint64_t pack(uint32_t phase, uint64_t high, uint64_t low) {
  return uint64_t(phase) << PHASE_SHIFT | high << HIGH_SHIFT | low;
}
static uint64_t high_of(uint64_t word) { return word >> HIGH_SHIFT & LOW_MASK; }
static uint64_t low_of(uint64_t word) { return word & LOW_MASK; }
static bool is_of(uint64_t word, uint32_t phase) { return word >> PHASE_SHIFT == pack(phase, 0, 0) >> PHASE_SHIFT; }

void Pool::wait_until_changed(Signal& signal, uint32_t seen, int num_spins) {
  for (int i = 0; i < num_spins; i++) {
    if (__atomic_load_n(&signal.word, __ATOMIC_ACQUIRE) != seen) return;
    _mm_pause();
  }
  // Counted as a sleeper before the word is read again: `publish` either sees the sleeper, or is seen by it.
  __atomic_add_fetch(&signal.sleepers, 1, __ATOMIC_SEQ_CST);
  while (__atomic_load_n(&signal.word, __ATOMIC_SEQ_CST) == seen) futex_wait(&signal.word, seen);
  __atomic_sub_fetch(&signal.sleepers, 1, __ATOMIC_SEQ_CST);
}

void Pool::publish(Signal& signal, uint32_t word) {
  __atomic_store_n(&signal.word, word, __ATOMIC_SEQ_CST);
  if (__atomic_load_n(&signal.sleepers, __ATOMIC_SEQ_CST))
    futex_wake(&signal.word);
}

Pool* Pool::create(int num_threads, const int* cpus) {
  Pool* pool = new (std::nothrow) Pool;
  if (!pool) return nullptr;
  pool->num_threads_ = num_threads;
  pool->threads_ = new (std::nothrow) pthread_t[num_threads];
  pool->starts_ = new (std::nothrow) Start[num_threads];
  pool->lanes_ = new (std::nothrow) Lane[num_threads]();
  bool ok = pool->threads_ && pool->starts_ && pool->lanes_;
  pool->roaming_ = !cpus && num_threads > 1 && sched_getaffinity(0, sizeof pool->allowed_, &pool->allowed_) == 0 &&
                   CPU_COUNT(&pool->allowed_) >= num_threads;
  for (int thread = 0; ok && thread < num_threads; thread++) {
    pool->starts_[thread] = {pool, thread};
    ok = pthread_create(&pool->threads_[thread], nullptr, thread_main, &pool->starts_[thread]) == 0;
    if (!ok) break;
    pool->num_started_++;
    if (!cpus) continue;
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(cpus[thread], &set);
    // A core may have gone since it was listed; the thread then runs wherever the system lets it.
    (void)pthread_setaffinity_np(pool->threads_[thread], sizeof set, &set);
  }
  if (ok) return pool;
  delete pool;
  return nullptr;
}

Pool::~Pool() {
  join();
  stop_ = true;
  publish(work_, work_.word + 1);
  for (int thread = 0; thread < num_started_; thread++) pthread_join(threads_[thread], nullptr);
  delete[] threads_;
  delete[] starts_;
  delete[] lanes_;
}

void* Pool::thread_main(void* argument) {
  const Start start = *static_cast<Start*>(argument);
  Pool& pool = *start.pool;
  _mm_setcsr(_mm_getcsr() | 0x8040);  // denormals are zero, as vdpbf16ps has it; these threads do nothing else
  for (uint32_t seen = 0;; seen++) {
    wait_until_changed(pool.work_, seen, STEP_SPINS);
    if (pool.stop_) return nullptr;
    __atomic_store_n(&pool.lanes_[start.thread].phase, pool.first_phase_, __ATOMIC_RELAXED);
    pool.job_(pool.argument_, start.thread);
    if (__atomic_add_fetch(&pool.finished_, 1, __ATOMIC_ACQ_REL) == pool.num_threads_) {
      __atomic_store_n(&pool.finished_, 0, __ATOMIC_RELAXED);
      publish(pool.done_, pool.done_.word + 1);
    }
  }
}

void Pool::run(void (*job)(void*, int), void* argument) {
  start(job, argument);
  join();
}

void Pool::join() {
  if (running_) wait_until_changed(done_, seen_, 0);
  running_ = false;
}

void Pool::start(void (*job)(void*, int), void* argument) {
  join();
  job_ = job;
  argument_ = argument;
  first_phase_ = phase_.word;  // not to be read by the threads: the first may begin a phase before the last wakes
  seen_ = done_.word;
  running_ = true;
  publish(work_, work_.word + 1);
}

bool Pool::is_complete(uint32_t phase) const {
  int64_t count = 0;
  for (int thread = 0; thread < num_threads_; thread++) {
    const uint64_t completed = __atomic_load_n(&lanes_[thread].completed, __ATOMIC_ACQUIRE);
    if (completed >> 32 == phase) count += completed & 0xffffffff;
  }
  // While the next phase is dealt out this may be its number, and a wrong yes, which then finds it being dealt out.
  return count == __atomic_load_n(&num_units_, __ATOMIC_RELAXED);
}

void Pool::deal(uint32_t phase, int64_t num_units) {
  __atomic_store_n(&num_units_, num_units, __ATOMIC_RELAXED);
  for (int64_t thread = 0; thread < num_threads_; thread++) {
    const uint64_t begin = num_units * thread / num_threads_, end = num_units * (thread + 1) / num_threads_;
    __atomic_store_n(&lanes_[thread].range, pack(phase, begin, end), __ATOMIC_RELAXED);
  }
}

// For the thread that deals out a phase. Threads it shares its core with sleep, or would like to run: they stay.
void Pool::leave_shared_core(int thread) {
  const int core = lanes_[thread].core;
  const uint32_t phase = lanes_[thread].phase;
  bool shared = false, lags = false;
  cpu_set_t free = allowed_;
  for (int other = 0; other < num_threads_; other++) {
    const int its_core = __atomic_load_n(&lanes_[other].core, __ATOMIC_RELAXED);
    shared |= other != thread && its_core == core;
    lags |= phase - __atomic_load_n(&lanes_[other].phase, __ATOMIC_RELAXED) >= LAG;
    CPU_CLR(its_core, &free);
  }
  if (lags && phase % LAG == 0) sched_yield();  // if it is here, it says so when it comes to a phase
  if (!shared || CPU_COUNT(&free) == 0) return;
  // Away at once, then free to go anywhere again. If cores were taken from the process since, either may fail: the
  // thread then runs where it is allowed to.
  (void)sched_setaffinity(0, sizeof free, &free);
  (void)sched_setaffinity(0, sizeof allowed_, &allowed_);
  __atomic_store_n(&lanes_[thread].core, sched_getcpu(), __ATOMIC_RELAXED);
}

bool Pool::next_phase(int thread, int64_t num_units) {
  Lane& lane = lanes_[thread];
  const uint32_t last = lane.phase;
  __atomic_store_n(&lane.phase, last + 1, __ATOMIC_RELAXED);
  lane.began = 0;
  lane.shortest = ~uint64_t(0);
  for (int spins = 0;; spins++) {
    const uint32_t ahead = __atomic_load_n(&phase_.word, __ATOMIC_ACQUIRE) - last;
    if (ahead > 1) return false;
    if (roaming_ && spins == 0) __atomic_store_n(&lane.core, sched_getcpu(), __ATOMIC_RELAXED);
    if (ahead == 1) return true;
    uint32_t expected = last;
    if (spins % LANE_PAUSES == 0 && is_complete(last) &&
        __atomic_compare_exchange_n(&dealing_, &expected, last + 1, false, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED)) {
      if (roaming_) leave_shared_core(thread);
      deal(last + 1, num_units);
      publish(phase_, last + 1);
      return true;
    }
    if (spins < PHASE_SPINS)
      _mm_pause();
    else
      wait_until_changed(phase_, last, 0);
  }
}

int64_t Pool::take(int thread, bool open) {
  Lane& lane = lanes_[thread];
  const uint64_t now = __rdtsc();
  if (lane.began && now - lane.began < lane.shortest) lane.shortest = now - lane.began;
  lane.began = now;
  for (int i = 0; i < num_threads_; i++) {
    uint64_t* range = &lanes_[(thread + i) % num_threads_].range;
    uint64_t word = __atomic_load_n(range, __ATOMIC_RELAXED);
    while (is_of(word, lane.phase) && high_of(word) < low_of(word)) {
      const uint64_t rest = i == 0 ? word + (uint64_t(1) << HIGH_SHIFT) : word - 1;
      // Units are published with the phase, not by this word: relaxed is enough.
      if (!__atomic_compare_exchange_n(range, &word, rest, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) continue;
      const uint64_t unit = i == 0 ? high_of(word) : low_of(word) - 1;
      if (open) __atomic_store_n(&lane.claim, pack(lane.phase, unit, OPEN), __ATOMIC_RELEASE);
      return static_cast<int64_t>(unit);
    }
  }
  return -1;
}

bool Pool::commit(int thread) {
  uint64_t* claim = &lanes_[thread].claim;
  uint64_t word = __atomic_load_n(claim, __ATOMIC_RELAXED);
  return low_of(word) == OPEN &&
         __atomic_compare_exchange_n(claim, &word, word - OPEN, false, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED);
}

void Pool::complete(int thread) {
  Lane& lane = lanes_[thread];
  const bool first = lane.completed >> 32 != lane.phase;
  const uint64_t before = first ? uint64_t(lane.phase) << 32 : lane.completed;
  __atomic_store_n(&lane.completed, before + 1, __ATOMIC_RELEASE);
}

Pool::Overdue Pool::overdue(int thread) {
  const Lane& lane = lanes_[thread];
  const uint64_t patience = lane.shortest == ~uint64_t(0) ? 1 << 16 : 2 * lane.shortest, begin = __rdtsc();
  for (;;) {
    Overdue found = {-1, 0, 0};
    for (int other = 0; other < num_threads_; other++) {
      const uint64_t claim = __atomic_load_n(&lanes_[other].claim, __ATOMIC_ACQUIRE);
      if (is_of(claim, lane.phase) && low_of(claim) == OPEN) found = {int64_t(high_of(claim)), other, claim};
    }
    if (found.unit < 0 || __rdtsc() - begin > patience) return found;
    for (int i = 0; i < LANE_PAUSES; i++) _mm_pause();
  }
}

bool Pool::take_over(const Overdue& unit) {
  uint64_t word = unit.claim;
  return __atomic_compare_exchange_n(&lanes_[unit.owner].claim, &word, word - OPEN, false, __ATOMIC_ACQ_REL,
                                     __ATOMIC_RELAXED);
}

}  // namespace step
