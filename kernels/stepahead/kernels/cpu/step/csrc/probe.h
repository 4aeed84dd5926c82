// What bounds a step on this machine: how fast weights are read, and how fast registers are multiplied.
#pragma once
#include "model.h"
#include "tile.h"

namespace {

// A part of the weights of a thread, read to the end in order; four streams, as fast as one core's loads go.
template <class P>
void read_weights(const step::Model& m, int64_t times, int thread) {
  const int64_t line = 64, lines = static_cast<int64_t>(m.weight_bytes) / line, threads = m.dims.num_threads;
  const char* begin = m.weights + lines * thread / threads * line;
  const int64_t count = lines * (thread + 1) / threads - lines * thread / threads;
  auto a = P::zero(), b = P::zero();
  for (int64_t round = 0; round < times; round++)
    for (int64_t i = 0; i < count; i++) {
      const float* at = reinterpret_cast<const float*>(begin + i * line);
      __builtin_prefetch(at + 1024);
      a = P::max(a, P::load(at));
      b = P::max(b, P::load(at + 16 - P::WIDTH));
    }
  volatile float keep = P::largest(P::max(a, b));
  (void)keep;
}

// As many independent sums as multiplications in flight need, nothing from memory.
template <class P>
void multiply_vectors(int64_t times) {
  alignas(64) typename P::Weight weights[P::WIDTH * P::GROUP] = {};
  alignas(64) typename P::Activation left[P::GROUP] = {};
  const auto right = P::weights(weights);
  const auto spread = P::spread(left);
  typename P::F sums[12];
#pragma GCC unroll 12
  for (int j = 0; j < 12; j++) sums[j] = P::zero();
  for (int64_t i = 0; i < times * 2; i++) {
#pragma GCC unroll 12
    for (int j = 0; j < 12; j++) {
      sums[j] = P::multiply(sums[j], spread, right);
      __asm__ volatile("" : "+x"(sums[j]));  // the compiler must neither fold nor reorder it
    }
  }
  auto total = P::zero();
#pragma GCC unroll 12
  for (int j = 0; j < 12; j++) total = P::add(total, sums[j]);
  volatile float keep = P::largest(total);
  (void)keep;
}

template <class P>
void probe(const step::Model& m, step::Probe kind, int64_t amount, int thread) {
  [[maybe_unused]] typename P::Session session;
  if (kind == step::PROBE_READ)
    read_weights<P>(m, amount, thread);
  else if constexpr (P::TILES)
    P::multiply_registers(amount);
  else
    multiply_vectors<P>(amount);
}

}  // namespace
