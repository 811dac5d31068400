// AMX's instructions in plain C++, as far as kernels/amx.cpp uses them: for sanitizers, which do not see what the real ones
// read and write, and for machines without AMX. Source: Intel 64 and IA-32 Architectures Software Developer's Manual.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace tformer::kernels::emulated {

/// The eight tiles of a thread.
struct Tiles {
  std::uint8_t rows[8] = {};  // 0: not configured
  std::uint16_t bytes[8] = {};
  std::uint8_t lines[8][16][64] = {};
};

inline Tiles& tiles() {
  thread_local Tiles found;
  return found;
}

/// What the processor does with instructions that it does not take.
inline void require(bool fine) {
  if (!fine) __builtin_trap();
}

inline void configure(const void* memory) {
  std::uint8_t from[64];
  std::memcpy(from, memory, sizeof from);
  require(from[0] == 1);
  tiles() = {};
  std::memcpy(tiles().bytes, from + 16, sizeof tiles().bytes);
  std::memcpy(tiles().rows, from + 48, sizeof tiles().rows);
  for (int t = 0; t < 8; ++t) require(tiles().rows[t] <= 16 && tiles().bytes[t] <= 64);
}

inline void release() { tiles() = {}; }

inline void zero(int t) {
  require(tiles().rows[t] != 0);
  std::memset(tiles().lines[t], 0, sizeof tiles().lines[t]);
}

inline void load(int t, const void* from, std::size_t stride) {
  zero(t);  // also what lies behind its rows
  for (int r = 0; r < tiles().rows[t]; ++r) {
    std::memcpy(tiles().lines[t][r], static_cast<const char*>(from) + static_cast<std::size_t>(r) * stride, tiles().bytes[t]);
  }
}

inline void store(int t, void* to, std::size_t stride) {
  require(tiles().rows[t] != 0);
  for (int r = 0; r < tiles().rows[t]; ++r) {
    std::memcpy(static_cast<char*>(to) + static_cast<std::size_t>(r) * stride, tiles().lines[t][r], tiles().bytes[t]);
  }
}

/// to += a * b: a has rows of unsigned bytes, b groups of four signed ones for each column.
inline void multiply(int to, int a, int b) {
  Tiles& all = tiles();
  require(all.rows[to] != 0 && all.rows[to] == all.rows[a] && all.bytes[a] == 4 * all.rows[b] && all.bytes[b] == all.bytes[to]);
  for (int m = 0; m < all.rows[to]; ++m) {
    for (int n = 0; n < all.bytes[to] / 4; ++n) {
      std::uint32_t sum;  // wraps, as the processor's
      std::memcpy(&sum, all.lines[to][m] + 4 * n, 4);
      for (int k = 0; k < all.bytes[a]; ++k) {
        const auto weight = static_cast<std::int8_t>(all.lines[b][k / 4][4 * n + k % 4]);
        sum += static_cast<std::uint32_t>(all.lines[a][m][k] * weight);
      }
      std::memcpy(all.lines[to][m] + 4 * n, &sum, 4);
    }
  }
}

}  // namespace tformer::kernels::emulated

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbusd
#define _tile_loadconfig tformer::kernels::emulated::configure
#define _tile_release tformer::kernels::emulated::release
#define _tile_zero tformer::kernels::emulated::zero
#define _tile_loadd tformer::kernels::emulated::load
#define _tile_stored tformer::kernels::emulated::store
#define _tile_dpbusd tformer::kernels::emulated::multiply
