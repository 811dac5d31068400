// Products with NEON. Those of integers differ by instruction set: `D` says how 16 inputs are added to sums.
//
//   D::rows, D::int4_rows   rows at once
//   D::less                 what `add` takes from every input, so that it fits into 8 signed bits; 0: nothing
//   D::Sums<R>              of R rows and one panel, zeros at first:
//     add(x, ld, w)           16 inputs, unsigned, of each row; 4 lines of 16 outputs and 4 inputs
//     add_nibbles(x, ld, w)   16 inputs, signed; 2 lines of 16 outputs and 8 inputs
//     row(r)                  the sums of a row
//   D::arranges             whether weights are arranged anew for many rows:
//     D::arrange(w, to), D::arrange_nibbles(w, to)   16 inputs and outputs
//     D::Sums<R>::add_arranged(x, ld, w)             as `add`, or as `add_nibbles`
#pragma once

#include <utility>

#include "kernels/neon_lanes.hpp"
#include "kernels/product.hpp"

namespace tformer::kernels {
namespace {

template <class Fn, int... i>
TFORMER_INLINE void each_of(std::integer_sequence<int, i...>, Fn fn) {
  (fn(Count<i>()), ...);
}

/// Calls fn with 0 to n - 1 as constants, which instructions need that name a lane.
template <int n, class Fn>
TFORMER_INLINE void each(Fn fn) {
  each_of(std::make_integer_sequence<int, n>(), fn);
}

TFORMER_INLINE int8x16_t load_signed(const void* p) { return vld1q_s8(static_cast<const std::int8_t*>(p)); }
/// Unsigned inputs less 128.
TFORMER_INLINE int8x16_t load_less(const std::uint8_t* p) {
  return vreinterpretq_s8_u8(veorq_u8(vld1q_u8(p), vdupq_n_u8(128)));
}
/// 16 bytes of 4-bit weights: their low, or their high halves.
TFORMER_INLINE int8x16_t low_half(uint8x16_t w) { return vreinterpretq_s8_u8(vandq_u8(w, vdupq_n_u8(15))); }
TFORMER_INLINE int8x16_t high_half(uint8x16_t w) { return vreinterpretq_s8_u8(vshrq_n_u8(w, 4)); }
TFORMER_INLINE uint8x16_t load_halves(const char* p) { return vld1q_u8(reinterpret_cast<const std::uint8_t*>(p)); }

/// Prefetches the lines of 16 inputs that are needed soon.
template <int lines>
TFORMER_INLINE void fetch_lines(const char* w) {
  TFORMER_UNROLL for (int i = 0; i < lines; ++i) NeonLanes::prefetch(w + i * 64 + ahead);
}

/// The most inputs of which a panel is arranged: half of a core's nearest cache.
constexpr std::int64_t most_arranged = 2048;

/// A panel, arranged for all rows of a piece. `lines`: of 16 inputs, 4 of 8 bits or 2 of 4.
template <class D, int lines>
class Arranged {
 public:
  Arranged(std::int64_t inputs, bool many) : inputs_(inputs), used_(D::arranges && many && inputs <= most_arranged) {}

  /// The panel for the rows of a block; null: it is to be used as it is.
  TFORMER_INLINE const char* get(const char* w, bool first_block) {
    if constexpr (D::arranges) {
      for (std::int64_t k = 0; used_ && first_block && k < inputs_; k += 16, w += lines * 64) {
        fetch_lines<lines>(w);
        if constexpr (lines == 4) {
          D::arrange(w, bytes_ + k * lanes);
        } else {
          D::arrange_nibbles(w, bytes_ + k * lanes);
        }
      }
    }
    return used_ ? bytes_ : nullptr;
  }

 private:
  alignas(64) char bytes_[D::arranges ? most_arranged * lanes : 64];
  std::int64_t inputs_;
  bool used_;
};

/// Adds `count` inputs, from weights as they are or arranged (or null).
template <class D, int lines, class Sums, class X>
TFORMER_INLINE void add_inputs(Sums& sums, const X* x, std::int64_t ld, std::int64_t count, const char* w,
                               const char* arranged) {
  if constexpr (D::arranges) {
    for (std::int64_t k = 0; arranged && k < count; k += 16) sums.add_arranged(x + k, ld, arranged + k * lanes);
  }
  if (arranged) return;
  for (std::int64_t k = 0; k < count; k += 16, w += lines * 64) {
    fetch_lines<lines>(w);
    if constexpr (lines == 4) {
      sums.add(x + k, ld, w);
    } else {
      sums.add_nibbles(x + k, ld, w);
    }
  }
}

template <class D>
void product_neon_int8(const Product& product, const Piece& piece) {
  const Matrix& m = product.matrix;
  const std::int64_t whole = padded(m.inputs, 64), ld = product.x.ld;
  Product seen = product;  // inputs are as far from the zero point as before
  seen.x.zero -= D::less;
  const Columns<NeonLanes> finish(seen);
  Arranged<D, 4> arranged(whole, piece.rows > D::rows);
  const auto* x = static_cast<const std::uint8_t*>(product.x.integers);
  blocks<D::rows, 1>(piece, [&](std::int64_t row, auto rows, std::int64_t panel, auto) TFORMER_LAMBDA {
    constexpr int R = decltype(rows)::value;
    const char* w = static_cast<const char*>(m.weights) + panel * whole * lanes;
    typename D::template Sums<R> sums;
    add_inputs<D, 4>(sums, x + row * ld, ld, whole, w, arranged.get(w, row == piece.row));
    alignas(64) std::int32_t found[R][lanes];
    TFORMER_UNROLL for (int r = 0; r < R; ++r) NeonLanes::store_ints(found[r], sums.row(r));
    finish(found[0], row, R, panel);
  });
}

template <class D>
void product_neon_int4(const Product& product, const Piece& piece) {
  using V = NeonLanes;
  const Matrix& m = product.matrix;
  const std::int64_t whole = padded(m.inputs, m.group), groups = whole / m.group, ld = product.x.ld;
  const Columns<V> finish(product);
  Arranged<D, 2> arranged(whole, piece.rows > D::int4_rows);
  const auto* x = static_cast<const std::int8_t*>(product.x.integers);
  blocks<D::int4_rows, 1>(piece, [&](std::int64_t row, auto rows, std::int64_t panel, auto) TFORMER_LAMBDA {
    constexpr int R = decltype(rows)::value;
    const char* w = static_cast<const char*>(m.weights) + panel * whole * lanes / 2;
    const char* own = arranged.get(w, row == piece.row);
    V::F y[R];
    TFORMER_UNROLL for (int r = 0; r < R; ++r) y[r] = V::set(0.0F);
    for (std::int64_t g = 0; g < groups; ++g) {
      const std::int64_t k = g * m.group;
      typename D::template Sums<R> sums;
      add_inputs<D, 2>(sums, x + row * ld + k, ld, m.group, w + k * lanes / 2, own ? own + k * lanes : nullptr);
      const V::F scales = V::load(m.scales + (panel * groups + g) * lanes);
      TFORMER_UNROLL for (int r = 0; r < R; ++r) {
        const std::int64_t i = (row + r) * groups + g;
        const V::I sum = V::sub_ints(sums.row(r), V::set_int(8 * product.x.sums[i]));
        y[r] = V::fma(V::floats(sum), V::mul(V::set(product.x.scales[i]), scales), y[r]);
      }
    }
    alignas(64) float found[R][lanes];
    TFORMER_UNROLL for (int r = 0; r < R; ++r) V::store(found[r], y[r]);
    finish(found[0], row, R, panel);
  });
}

template <class D>
void product_neon(const Product& work, const Piece& piece) {
  switch (work.matrix.numbers) {
    case Numbers::fp32:
      return product_floats<NeonLanes, true>(work, piece);
    case Numbers::bf16:
      return product_floats<NeonLanes, false>(work, piece);
    case Numbers::int8:
      return product_neon_int8<D>(work, piece);
    case Numbers::int4:
      return product_neon_int4<D>(work, piece);
  }
}

}  // namespace
}  // namespace tformer::kernels
