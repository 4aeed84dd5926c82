// See chain.h.
#include "chain.h"

#include <pthread.h>
#include <time.h>

#include <new>

#include "futex.h"

namespace step {

struct Chain {
  pthread_mutex_t lock;
  ChainedStep* first;  // the job's
  ChainedStep* last;  // of the chain under way, attached or running; null: none is, or it takes no more
  int num_threads;
  int64_t begun;    // steps
  int64_t* passed;  // [num_threads] steps that each thread has left
};

Chain* make_chain(int num_threads) {
  Chain* chain = new (std::nothrow) Chain();
  int64_t* passed = new (std::nothrow) int64_t[num_threads]();
  if (!chain || !passed || pthread_mutex_init(&chain->lock, nullptr) != 0) {
    delete chain;
    delete[] passed;
    return nullptr;
  }
  chain->num_threads = num_threads;
  chain->passed = passed;
  return chain;
}

void delete_chain(Chain* chain) {
  if (!chain) return;
  pthread_mutex_destroy(&chain->lock);
  delete[] chain->passed;
  delete chain;
}

static int64_t now_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * int64_t(1000000000) + now.tv_nsec;
}

static void tell(ChainedStep& step, StepState state) {
  __atomic_store_n(&step.state, uint32_t(state), __ATOMIC_RELEASE);
  futex_wake(&step.state);
}

static void make_tasks(Model& m, const Batch& batch) {
  m.num_tasks = 0;
  for (int32_t row = 0; row < batch.num_rows; row++) {
    const int64_t queries = (batch.query_start_loc[row + 1] - batch.query_start_loc[row]) * m.group_heads;
    for (int32_t kv_head = 0; kv_head < m.dims.num_kv_heads; kv_head++)
      for (int64_t first = 0; first < queries; first += TASK_QUERIES) {
        const int64_t rest = queries - first;
        const int32_t count = static_cast<int32_t>(rest < TASK_QUERIES ? rest : TASK_QUERIES);
        m.tasks[m.num_tasks++] = {row, kv_head, static_cast<int32_t>(first), count};
      }
  }
}

// Fills in the tokens that come from cells; false: one is not there.
static bool resolve(ChainedStep& step) {
  Batch& batch = step.batch;
  if (!step.slots) return true;  // no cells
  for (int32_t i = 0; i < step.num_emptied; i++) step.cell_positions[step.emptied_slots[i]] = NO_POSITION;
  int64_t* token_ids = const_cast<int64_t*>(batch.token_ids);
  for (int32_t row = 0; row < batch.num_rows; row++)
    for (int64_t t = batch.query_start_loc[row]; t < batch.query_start_loc[row + 1]; t++) {
      if (token_ids[t] != LAST_SAMPLE) continue;
      if (step.cell_positions[step.slots[row]] != batch.positions[t]) return false;
      token_ids[t] = step.cell_tokens[step.slots[row]];
    }
  return true;
}

// Everything from here on that depends on the step is in place.
static void begin(Model& m, ChainedStep& step) {
  make_tasks(m, step.batch);
  step.ordinal = ++m.chain->begun;
  step.started_ns = now_ns();
  __atomic_store_n(&step.state, uint32_t(STEP_RUNS), __ATOMIC_RELEASE);
}

static void write_cells(const ChainedStep& step) {
  const Batch& batch = step.batch;
  for (int32_t i = 0; i < batch.num_logits; i++) {
    const int32_t row = step.sample_rows[i], slot = step.slots[row];
    if (!__builtin_isfinite(batch.best_logits[i])) continue;  // the row has failed: what it would feed is not there
    step.cell_tokens[slot] = batch.best_ids[i];
    step.cell_positions[slot] = batch.seq_lens[row];
  }
}

// Ends a step and begins the one behind it, if there is one.
static void settle(Model& m, ChainedStep& step) {
  Chain& chain = *m.chain;
  if (step.greedy) write_cells(step);
  step.ended_ns = now_ns();
  pthread_mutex_lock(&chain.lock);
  ChainedStep* next = step.follower;
  if (!next) chain.last = nullptr;
  if (next && !resolve(*next)) {
    chain.last = nullptr;
    for (ChainedStep* dropped = next; dropped;) {
      ChainedStep* after = dropped->follower;  // told, a step may be gone
      tell(*dropped, STEP_DROPPED);
      dropped = after;
    }
    next = nullptr;
  }
  pthread_mutex_unlock(&chain.lock);
  if (next) begin(m, *next);
  __atomic_store_n(&step.next, next, __ATOMIC_RELEASE);
}

static void chain_job(void* argument, int thread) {
  Model& m = *static_cast<Model*>(argument);
  Pool& pool = *m.pool;
  for (ChainedStep* step = m.chain->first; step;) {
    m.kernels->forward(m, step->batch, thread);
    bool settled = false;
    if (pool.next_phase(thread, 1))
      for (int64_t unit = pool.take(thread, false); unit >= 0; unit = pool.take(thread, false)) {
        settle(m, *step);
        pool.complete(thread);
        settled = true;
      }
    pool.next_phase(thread, 0);  // once it has begun, the step is settled
    ChainedStep* next = __atomic_load_n(&step->next, __ATOMIC_ACQUIRE);
    if (settled) tell(*step, STEP_DONE);  // after the others are on their way: it may cost this thread its core
    __atomic_add_fetch(&m.chain->passed[thread], 1, __ATOMIC_RELEASE);
    step = next;
  }
}

int32_t start_chain(Model& m, ChainedStep& first) {
  m.pool->join();
  if (!resolve(first)) return 0;
  first.follower = first.next = nullptr;
  begin(m, first);
  m.chain->first = &first;
  pthread_mutex_lock(&m.chain->lock);
  m.chain->last = &first;
  pthread_mutex_unlock(&m.chain->lock);
  m.pool->start(chain_job, &m);
  return 1;
}

int32_t follow(Model& m, ChainedStep& before, ChainedStep& next) {
  Chain& chain = *m.chain;
  next.follower = next.next = nullptr;
  pthread_mutex_lock(&chain.lock);
  const bool attached = chain.last == &before && before.greedy;
  if (attached) {
    before.follower = &next;
    chain.last = &next;
  }
  pthread_mutex_unlock(&chain.lock);
  return attached;
}

uint32_t wait_for(ChainedStep& step) {
  for (;;) {
    const uint32_t state = __atomic_load_n(&step.state, __ATOMIC_ACQUIRE);
    if (state == STEP_DONE || state == STEP_DROPPED) return state;
    futex_wait(&step.state, state);
  }
}

int64_t count_passed(const Model& m) {
  int64_t least = INT64_MAX;
  for (int thread = 0; thread < m.chain->num_threads; thread++) {
    const int64_t passed = __atomic_load_n(&m.chain->passed[thread], __ATOMIC_ACQUIRE);
    if (passed < least) least = passed;
  }
  return least;
}

}  // namespace step
