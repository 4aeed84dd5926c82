// Draws one row's token: steps 7a to 7e of `reference.sampling`, whose order, ties and sums of masses these are bit for
// bit. A mass itself may differ from NumPy's in its last bit, and one below 1e-38 is 0.
#pragma once
#include <algorithm>
#include <cstring>

#include "model.h"
#include "tile.h"

namespace {

struct Candidate {  // a type of this file: what <algorithm> makes of it is not shared with other instruction sets
  float score;
  int32_t id;
  float mass;

  // By score, largest first; of equal ones the lower id.
  bool operator<(const Candidate& other) const {
    return score > other.score || (score == other.score && id < other.id);
  }
};

template <class P>
class Draw {
 public:
  Draw(const step::Model& m, const step::Draws& draws, int64_t index, int thread)
      : draws(draws),
        index(index),
        vocab(m.dims.vocab_size),
        num_tiles((vocab + step::DRAW_TILE - 1) / step::DRAW_TILE),
        logits(draws.logits + draws.rows[index] * vocab),
        masses(reinterpret_cast<float*>(m.draw_scratch + thread * m.draw_bytes)),
        candidates(reinterpret_cast<Candidate*>(masses + num_tiles * step::DRAW_TILE)),
        cumulative(reinterpret_cast<double*>(candidates + num_tiles * step::DRAW_TILE)) {}

  int64_t token() {
    weigh();
    if (draws.top_k[index] > 0 && draws.top_k[index] < vocab) keep_largest(draws.top_k[index]);
    if (draws.top_p[index] < 1.0f) keep_nucleus();
    if (draws.min_p[index] > 0.0f) drop_small(draws.min_p[index]);  // the largest mass is exp(0) = 1
    return pick();
  }

 private:
  const step::Draws& draws;
  const int64_t index, vocab, num_tiles;
  const float* const logits;
  float* const masses;          // [num_tiles * DRAW_TILE], zeros behind the vocabulary
  Candidate* const candidates;  // likewise
  double* const cumulative;     // [num_tiles]

  typename P::F load(const float* from, int64_t i, typename P::F rest) const {
    if (i + P::WIDTH <= vocab) return P::load(from + i);
    alignas(64) float lanes[P::WIDTH];
    for (int lane = 0; lane < P::WIDTH; lane++) lanes[lane] = i + lane < vocab ? from[i + lane] : 0;
    return P::first(static_cast<int>(vocab > i ? vocab - i : 0), P::load(lanes), rest);
  }

  void weigh() {
    const auto largest = P::all(draws.largest[index]), temperature = P::all(draws.temperature[index]);
    const auto low = P::all(-__builtin_inff()), least = P::all(-87.3f);
    for (int64_t i = 0; i < num_tiles * step::DRAW_TILE; i += P::WIDTH) {
      const auto x = P::div(P::sub(load(logits, i, low), largest), temperature);
      P::store(masses + i, P::at_least(x, least, exponential<P>(x)));
    }
  }

  // Gathers the ids to take, looking only into tiles that may hold any.
  template <class Look, class Take>
  int64_t collect(Look look, Take take) {
    int64_t count = 0;
    for (int64_t tile = 0; tile < num_tiles; tile++) {
      if (!look(tile)) continue;
      const int64_t begin = tile * step::DRAW_TILE, end = begin + step::DRAW_TILE;
      for (int64_t id = begin; id < end && id < vocab; id++)
        if (take(id)) candidates[count++] = {logits[id], static_cast<int32_t>(id), masses[id]};
    }
    return count;
  }

  // Everything but the first `count` candidates goes.
  void keep(int64_t count) {
    memset(masses, 0, num_tiles * step::DRAW_TILE * sizeof *masses);
    for (int64_t i = 0; i < count; i++) masses[candidates[i].id] = candidates[i].mass;
  }

  // The k-th largest of the tiles' maxima is a lower bound of the k-th largest value.
  void keep_largest(int64_t num_kept) {
    float bound = -__builtin_inff();
    float* maxima = reinterpret_cast<float*>(cumulative);
    const bool bounded = num_kept <= num_tiles;
    if (bounded) {
      const auto low = P::all(-__builtin_inff());
      for (int64_t tile = 0; tile < num_tiles; tile++) {
        auto top = low;
        for (int64_t i = tile * step::DRAW_TILE; i < (tile + 1) * step::DRAW_TILE; i += P::WIDTH)
          top = P::max(top, load(logits, i, low));
        maxima[tile] = P::largest(top);
        candidates[tile] = {maxima[tile], static_cast<int32_t>(tile), 0};
      }
      std::nth_element(candidates, candidates + num_kept - 1, candidates + num_tiles);
      bound = candidates[num_kept - 1].score;
    }
    const int64_t count = collect([&](int64_t tile) { return !bounded || maxima[tile] >= bound; },
                                  [&](int64_t id) { return logits[id] >= bound; });
    std::nth_element(candidates, candidates + num_kept - 1, candidates + count);
    keep(num_kept);
  }

  // Few ids hold most of the mass: they are sorted first, more of them only if they do not suffice. Rounding may leave
  // the sum in order an ulp under the wanted share of the sum by tiles: then everything with mass stays.
  void keep_nucleus() {
    sum_tiles();
    const double wanted = static_cast<double>(draws.top_p[index]) * cumulative[num_tiles - 1];
    for (const float least : {1e-4f, 1e-6f, 0.0f}) {
      const auto has_mass = [&](int64_t tile) {  // half of it: the difference is rounded
        return least == 0 || cumulative[tile] - (tile ? cumulative[tile - 1] : 0) > least / 2;
      };
      const int64_t count = collect(has_mass, [&](int64_t id) { return masses[id] > least; });
      std::sort(candidates, candidates + count);
      double sum = 0;
      for (int64_t i = 0; i < count; i++) {
        sum += candidates[i].mass;
        if (sum < wanted) continue;
        keep(i + 1);
        return;
      }
    }
  }

  void drop_small(float least) {
    for (int64_t i = 0; i < num_tiles * step::DRAW_TILE; i += P::WIDTH) {
      const auto v = P::load(masses + i);
      P::store(masses + i, P::at_least(v, P::all(least), v));
    }
  }

  // A tile's sum in NumPy's order: two halves of eight running sums each.
  static double sum_half(const float* values) {
    double sums[8] = {};
    for (int i = 0; i < step::DRAW_TILE / 2; i += 8)
      for (int j = 0; j < 8; j++) sums[j] += values[i + j];
    return ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
  }

  void sum_tiles() {
    double sum = 0;
    for (int64_t tile = 0; tile < num_tiles; tile++) {
      const float* values = masses + tile * step::DRAW_TILE;
      sum += sum_half(values) + sum_half(values + step::DRAW_TILE / 2);
      cumulative[tile] = sum;
    }
  }

  int64_t pick() {
    sum_tiles();
    const double target = draws.uniform[index] * cumulative[num_tiles - 1];
    int64_t tile = 0;
    while (tile < num_tiles - 1 && cumulative[tile] <= target) tile++;
    const double rest = target - (tile ? cumulative[tile - 1] : 0.0);
    const float* values = masses + tile * step::DRAW_TILE;
    // Rounding may leave `rest` at or above the tile's own sum: the tile's last drawable id is meant then.
    double sum = 0;
    int64_t last = 0;
    for (int64_t i = 0; i < step::DRAW_TILE; i++) {
      if (values[i] > 0) last = i;
      sum += values[i];
      if (sum > rest) break;
    }
    return tile * step::DRAW_TILE + last;
  }
};

template <class P>
void draw(const step::Model& m, const step::Draws& draws, int64_t index, int thread) {
  draws.token_ids[index] = Draw<P>(m, draws, index, thread).token();
}

}  // namespace
