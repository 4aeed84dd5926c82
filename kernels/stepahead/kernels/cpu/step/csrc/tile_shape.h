// The 64 bytes that LDTILECFG reads (Intel SDM, volume 2, LDTILECFG), and the largest tile.
#pragma once
#include <cstdint>

namespace {

static constexpr int MAX_TILE_ROWS = 16, MAX_TILE_BYTES = 64;  // palette 1

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  void set(int tile, int num_rows, int num_bytes) {
    rows[tile] = static_cast<uint8_t>(num_rows);
    row_bytes[tile] = static_cast<uint16_t>(num_bytes);
  }
};
static_assert(sizeof(TileConfig) == 64, "as the instruction reads it");

}  // namespace
