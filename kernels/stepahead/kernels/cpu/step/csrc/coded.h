// Bfloat16 weights in 12 bits each, without loss: how they lie in memory.
//
// The low byte of a weight (the exponent's last bit and the fraction) is as good as random, the high byte (sign and
// exponent) is not: 16 values of 256 cover all but a few in 100,000 weights of a trained matrix, and nearly all of a
// normal distribution. So a vector of columns keeps the low bytes, a code of 4 bits for each high byte, and the 16 high
// bytes the codes stand for; what has another one is patched. (DFloat11, Zhang et al. 2025, arXiv:2504.11651, and NeuZip,
// Hao et al. 2024, use that redundancy with codes of variable length; these decode in registers as fast as memory
// gives.) A step is bound by reading weights as long as its rows are few, and reads three quarters of the bytes.
//
// Coded panel, of the plain one [steps][2 vectors][16 columns][2 inputs] of model.h:
//
//     [CodedHeader and room for patches, whole lines][steps / 2 pairs of steps][192]
//
// The 192 bytes of a pair are 64 low bytes of vector 0, 64 of vector 1, and 64 pairs of codes, vector 0's in the low
// half of the byte. Byte j of each belongs to word (j / 16) * 8 + j % 8 of the pair's first step if j % 16 < 8, of
// its second otherwise: interleaving low and high bytes within 128 bits, as the CPU does, gives the plain order.
#pragma once
#include <cstddef>
#include <cstdint>

namespace step {

struct Patch {
  uint32_t position;  // of a weight in the plain panel
  uint16_t weight;
  uint16_t unused;
};

struct CodedHeader {
  uint8_t high_bytes[2][16];  // of each vector, by code
  uint32_t num_patches;
  uint32_t unused;
  Patch patches[1];  // [patch_room(num_inputs)], in ascending order of position
};

static constexpr int64_t PAIR_BYTES = 192, PAIR_WEIGHTS = 128;

// More would cost more than they save: the matrix stays plain.
static inline int64_t patch_room(int64_t num_inputs) { return num_inputs < 256 ? 8 : num_inputs / 32; }

static inline int64_t coded_header_bytes(int64_t num_inputs) {
  return (offsetof(CodedHeader, patches) + patch_room(num_inputs) * sizeof(Patch) + 63) / 64 * 64;
}

static inline int64_t coded_panel_bytes(int64_t num_inputs) {
  return coded_header_bytes(num_inputs) + num_inputs / 4 * PAIR_BYTES;
}

// Where a word of a step's vector is among the 64 bytes of its pair.
static inline int64_t coded_byte(int64_t step, int64_t word) { return word / 8 * 16 + step % 2 * 8 + word % 8; }

// A weight of a coded panel, as bits, as if there were no patches.
static inline uint16_t unpatched_weight(const char* panel, int64_t num_inputs, int64_t position) {
  const CodedHeader& header = *reinterpret_cast<const CodedHeader*>(panel);
  const int64_t step = position / 64, vector = position / 32 % 2, byte = coded_byte(step, position % 32);
  const uint8_t* pair = reinterpret_cast<const uint8_t*>(panel) + coded_header_bytes(num_inputs) + step / 2 * PAIR_BYTES;
  const int code = pair[128 + byte] >> 4 * vector & 15;
  return static_cast<uint16_t>(header.high_bytes[vector][code] << 8 | pair[64 * vector + byte]);
}

// A weight of a coded panel, as bits.
static inline uint16_t coded_weight(const char* panel, int64_t num_inputs, int64_t position) {
  const CodedHeader& header = *reinterpret_cast<const CodedHeader*>(panel);
  for (uint32_t i = 0; i < header.num_patches; i++)
    if (header.patches[i].position == position) return header.patches[i].weight;
  return unpatched_weight(panel, num_inputs, position);
}

}  // namespace step
