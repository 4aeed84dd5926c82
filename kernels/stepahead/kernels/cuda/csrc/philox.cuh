// Philox-4x32-10 (Salmon et al., SC 2011): see reference.philox, whose words and uniform these are, bit for bit.
#pragma once
#include "scalar.cuh"

__device__ __forceinline__ double draw_uniform(u64 seed, i64 choice_index, i64 output_index) {
  u32 word_0 = u32(output_index), word_1 = u32(u64(output_index) >> 32);
  u32 word_2 = u32(choice_index), word_3 = u32(u64(choice_index) >> 32);
  u32 key_0 = u32(seed), key_1 = u32(seed >> 32);
#pragma unroll
  for (int round = 0; round < 10; round++) {
    const u64 product_0 = u64(word_0) * 0xD2511F53u, product_1 = u64(word_2) * 0xCD9E8D57u;
    word_0 = u32(product_1 >> 32) ^ word_1 ^ key_0;
    word_2 = u32(product_0 >> 32) ^ word_3 ^ key_1;
    word_1 = u32(product_1);
    word_3 = u32(product_0);
    key_0 += 0x9E3779B9u;
    key_1 += 0xBB67AE85u;
  }
  return (double(word_0 >> 5) * 67108864.0 + double(word_1 >> 6)) / 9007199254740992.0;
}
