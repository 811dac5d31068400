// AMX: products of 8-bit integers in tiles of 16 rows, 64 inputs and 16 outputs. The rest is AVX-512.
#include "kernels/avx512_lanes.hpp"
#include "kernels/output.hpp"
#include "kernels/product.hpp"
#include "kernels/sets.hpp"
#include "kernels/table.hpp"

namespace tformer::kernels {
namespace {

using V = Avx512Lanes;

constexpr std::int64_t tile_rows = 16, tile_inputs = 64, tile_bytes = 1024;
constexpr std::int64_t fewest_rows = 5;  // below it VNNI is as fast

/// What `ldtilecfg` reads.
struct alignas(64) Configuration {
  std::uint8_t palette = 1, start = 0, reserved[14] = {};
  std::uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};  // of a row of each tile
  std::uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

/// Configures the tiles while it lives.
class Tiles {
 public:
  Tiles() {
    static const Configuration configuration;
    // GCC 12 does not see that the next instruction reads it.
    __asm__ volatile("" : : "r"(&configuration) : "memory");
    _tile_loadconfig(&configuration);
  }
  ~Tiles() { _tile_release(); }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;
};

/// A block's sums, 2 panels of 2 tiles; the epilogue runs while the next block is multiplied.
struct Block {
  alignas(64) std::int32_t sums[2][2 * tile_rows][lanes];
  std::int64_t row = 0, rows = 0, panel = 0, panels = 0, done = 0;  // done: rows of the first panel, then of the second

  TFORMER_INLINE std::int64_t all() const { return rows * panels; }
  /// Apply the epilogue to rows up to `end`.
  TFORMER_INLINE void finish(const Columns<V>& columns, std::int64_t end) {
    while (done < end) {
      const std::int64_t second = done >= rows, r = done - (second ? rows : 0), count = least(rows - r, end - done);
      columns(sums[second][r], row + r, count, panel + second);
      done += count;
    }
  }
};

/// Prefetches the next weights, some cache lines at every step.
struct Fetch {
  const char *at = nullptr, *end = nullptr;
  std::int64_t each = 0;  // bytes

  TFORMER_INLINE void step() {
    const char* until = at + each < end ? at + each : end;
    for (; at < until; at += 64) _mm_prefetch(at, _MM_HINT_T1);  // the nearest cache holds the inputs
  }
};

/// Multiply up to 32 rows and 2 panels, interleaved with the epilogue of the block before.
template <bool two_rows, bool two_panels>
TFORMER_INLINE void multiply(const std::uint8_t* x, std::int64_t ld, const char* w, std::int64_t panel_bytes,
                             Fetch& fetch, Block& block, Block& before, const Columns<V>& columns) {
  _tile_zero(0);
  if (two_panels) _tile_zero(1);
  if (two_rows) _tile_zero(2);
  if (two_rows && two_panels) _tile_zero(3);
  const std::int64_t steps = panel_bytes / tile_bytes, all = before.all(), each = (all + steps - 1) / steps;
  const auto stride = static_cast<std::size_t>(ld);
  std::int64_t finished = 0;
  for (std::int64_t k = 0; k < steps; ++k, x += tile_inputs, w += tile_bytes) {
    fetch.step();
    _tile_loadd(4, x, stride);
    _tile_loadd(6, w, 64);
    _tile_dpbusd(0, 4, 6);
    if (two_panels) {
      _tile_loadd(7, w + panel_bytes, 64);
      _tile_dpbusd(1, 4, 7);
    }
    if (two_rows) {
      _tile_loadd(5, x + tile_rows * ld, stride);
      _tile_dpbusd(2, 5, 6);
      if (two_panels) _tile_dpbusd(3, 5, 7);
    }
    before.finish(columns, finished = least(finished + each, all));
  }
  _tile_stored(0, block.sums[0], 64);
  if (two_panels) _tile_stored(1, block.sums[1], 64);
  if (two_rows) _tile_stored(2, block.sums[0][tile_rows], 64);
  if (two_rows && two_panels) _tile_stored(3, block.sums[1][tile_rows], 64);
}

void product_tiles(const Product& product, const Piece& piece) {
  const Tiles tiles;
  const Matrix& m = product.matrix;
  const Columns<V> columns(product);
  const std::int64_t bytes = padded(m.inputs, tile_inputs) * lanes, ld = product.x.ld;
  const auto* from = static_cast<const std::uint8_t*>(product.x.integers);
  const std::int64_t end = piece.row + piece.rows, last = piece.panel + piece.panels;
  const std::int64_t row_blocks = (piece.rows + 2 * tile_rows - 1) / (2 * tile_rows);
  constexpr std::int64_t nearest = 16384;  // least prefetch distance in bytes
  Block blocks[2];
  int at = 0;
  for (std::int64_t panel = piece.panel; panel < last; panel += 2) {
    const char* w = static_cast<const char*>(m.weights) + panel * bytes;
    const std::int64_t panels = least(2, last - panel);
    const char* far = w + (2 * bytes > nearest ? 2 * bytes : nearest);
    Fetch fetch{far, far + 2 * bytes, padded(2 * tile_bytes / row_blocks, 64)};
    for (std::int64_t row = piece.row; row < end; row += 2 * tile_rows) {
      Block &block = blocks[at], &before = blocks[at ^ 1];
      block.row = row;
      block.rows = least(2 * tile_rows, end - row);
      block.panel = panel;
      block.panels = panels;
      block.done = 0;
      const std::uint8_t* x = from + row * ld;
      if (block.rows > tile_rows) {
        if (panels == 2) {
          multiply<true, true>(x, ld, w, bytes, fetch, block, before, columns);
        } else {
          multiply<true, false>(x, ld, w, bytes, fetch, block, before, columns);
        }
      } else if (panels == 2) {
        multiply<false, true>(x, ld, w, bytes, fetch, block, before, columns);
      } else {
        multiply<false, false>(x, ld, w, bytes, fetch, block, before, columns);
      }
      at ^= 1;
    }
  }
  blocks[at ^ 1].finish(columns, blocks[at ^ 1].all());
}

void product_amx(const Product& work, const Piece& piece) {
  if (work.matrix.numbers == Numbers::int8 && piece.rows >= fewest_rows) {
    product_tiles(work, piece);
  } else {
    avx512.product(work, piece);
  }
}

}  // namespace

// A constant, as the others: nothing of this file may run before the processor has been asked.
const Kernels amx = table_of<V, product_amx>("amx");

}  // namespace tformer::kernels
