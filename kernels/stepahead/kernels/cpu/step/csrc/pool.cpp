// See pool.h. Waiting is a short spin, then a futex: on a busy machine the core goes to whoever is waited for.
#include "pool.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#include <xmmintrin.h>

#include <new>

namespace step {

// Pauses of 15 to 60 ns. Between phases the wait is one unit long at most (a few us in a decode step); between steps
// the caller's own work takes far longer than any spin worth its power.
static const int PHASE_SPINS = 1500;
static const int STEP_SPINS = 600;

static void futex_wait(uint32_t* word, uint32_t seen) {
  syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
}

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
    syscall(SYS_futex, &signal.word, FUTEX_WAKE_PRIVATE, 0x7fffffff, nullptr, nullptr, 0);
}

Pool* Pool::create(int num_threads, const int* cpus) {
  Pool* pool = new (std::nothrow) Pool;
  if (!pool) return nullptr;
  pool->num_threads_ = num_threads;
  pool->threads_ = new (std::nothrow) pthread_t[num_threads];
  pool->starts_ = new (std::nothrow) Start[num_threads];
  pool->ranges_ = new (std::nothrow) Range[num_threads];
  bool ok = pool->threads_ && pool->starts_ && pool->ranges_;
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
  stop_ = true;
  publish(work_, work_.word + 1);
  for (int thread = 0; thread < num_started_; thread++) pthread_join(threads_[thread], nullptr);
  delete[] threads_;
  delete[] starts_;
  delete[] ranges_;
}

void* Pool::thread_main(void* argument) {
  const Start start = *static_cast<Start*>(argument);
  Pool& pool = *start.pool;
  _mm_setcsr(_mm_getcsr() | 0x8040);  // denormals are zero, as vdpbf16ps has it; these threads do nothing else
  for (uint32_t seen = 0;; seen++) {
    wait_until_changed(pool.work_, seen, STEP_SPINS);
    if (pool.stop_) return nullptr;
    pool.job_(pool.argument_, start.thread);
    if (__atomic_add_fetch(&pool.finished_, 1, __ATOMIC_ACQ_REL) == pool.num_threads_) {
      __atomic_store_n(&pool.finished_, 0, __ATOMIC_RELAXED);
      publish(pool.done_, pool.done_.word + 1);
    }
  }
}

void Pool::run(void (*job)(void*, int), void* argument) {
  job_ = job;
  argument_ = argument;
  const uint32_t seen = done_.word;
  publish(work_, work_.word + 1);
  wait_until_changed(done_, seen, 0);
}

// For the last to arrive at a phase. Threads it shares its core with sleep, or would like to run: they stay.
void Pool::leave_shared_core(int thread) {
  const int core = ranges_[thread].core;
  bool shared = false;
  for (int other = 0; other < num_threads_; other++) shared |= other != thread && ranges_[other].core == core;
  if (!shared) return;
  cpu_set_t free = allowed_;
  for (int other = 0; other < num_threads_; other++) CPU_CLR(ranges_[other].core, &free);
  if (CPU_COUNT(&free) == 0) return;
  // Away at once, then free to go anywhere again. If cores were taken from the process since, either may fail: the
  // thread then runs where it is allowed to.
  (void)sched_setaffinity(0, sizeof free, &free);
  (void)sched_setaffinity(0, sizeof allowed_, &allowed_);
  ranges_[thread].core = sched_getcpu();
}

void Pool::next_phase(int thread, int64_t num_units) {
  const uint32_t seen = __atomic_load_n(&phase_.word, __ATOMIC_RELAXED);
  if (roaming_) __atomic_store_n(&ranges_[thread].core, sched_getcpu(), __ATOMIC_RELAXED);
  if (__atomic_add_fetch(&arrived_, 1, __ATOMIC_ACQ_REL) < num_threads_) {
    wait_until_changed(phase_, seen, PHASE_SPINS);
    return;
  }
  if (roaming_) leave_shared_core(thread);
  // The last to arrive deals out: nobody takes units now.
  for (int64_t thread = 0; thread < num_threads_; thread++) {
    const uint64_t begin = num_units * thread / num_threads_, end = num_units * (thread + 1) / num_threads_;
    __atomic_store_n(&ranges_[thread].bounds, begin << 32 | end, __ATOMIC_RELAXED);
  }
  __atomic_store_n(&arrived_, 0, __ATOMIC_RELAXED);
  publish(phase_, seen + 1);
}

int64_t Pool::take(int thread) {
  for (int i = 0; i < num_threads_; i++) {
    uint64_t* bounds = &ranges_[(thread + i) % num_threads_].bounds;
    uint64_t now = __atomic_load_n(bounds, __ATOMIC_RELAXED);
    while ((now >> 32) < (now & 0xffffffff)) {
      const uint64_t rest = i == 0 ? now + (uint64_t(1) << 32) : now - 1;
      // Units are published by the barrier, not by this word: relaxed is enough.
      if (__atomic_compare_exchange_n(bounds, &now, rest, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED))
        return int64_t(i == 0 ? now >> 32 : (now & 0xffffffff) - 1);
    }
  }
  return -1;
}

}  // namespace step
