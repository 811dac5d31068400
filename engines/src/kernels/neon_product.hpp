// Products with NEON. Those of integers differ by instruction set: `D` says how 16 inputs are added to sums.
//
//   D::rows, D::int4_rows   rows at once
//   D::less                 what `add` takes from every input, so that it fits into 8 signed bits; 0: nothing
//   D::Sums<R>              of R rows and one panel, zeros at first:
//     add(x, ld, w)           16 inputs, unsigned, of each row; 4 lines of 16 outputs and 4 inputs
//     add_nibbles(x, ld, w)   16 inputs, signed; 2 lines of 16 outputs and 8 inputs
//     row(r)                  the sums of a row
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

template <class D>
void product_neon_int8(const Product& product, const Piece& piece) {
  const Matrix& m = product.matrix;
  const std::int64_t whole = padded(m.inputs, 64), ld = product.x.ld;
  Product seen = product;  // inputs are as far from the zero point as before
  seen.x.zero -= D::less;
  const Columns<NeonLanes> finish(seen);
  const auto* x = static_cast<const std::uint8_t*>(product.x.integers);
  blocks<D::rows, 1>(piece, [&](std::int64_t row, auto rows, std::int64_t panel, auto) TFORMER_LAMBDA {
    constexpr int R = decltype(rows)::value;
    const char* w = static_cast<const char*>(m.weights) + panel * whole * lanes;
    const std::uint8_t* from = x + row * ld;
    typename D::template Sums<R> sums;
    for (std::int64_t k = 0; k < whole; k += 16, w += 4 * 64) {
      TFORMER_UNROLL for (int i = 0; i < 4; ++i) NeonLanes::prefetch(w + i * 64 + ahead);
      sums.add(from + k, ld, w);
    }
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
  const auto* x = static_cast<const std::int8_t*>(product.x.integers);
  blocks<D::int4_rows, 1>(piece, [&](std::int64_t row, auto rows, std::int64_t panel, auto) TFORMER_LAMBDA {
    constexpr int R = decltype(rows)::value;
    const char* w = static_cast<const char*>(m.weights) + panel * whole * lanes / 2;
    const std::int8_t* from = x + row * ld;
    V::F y[R];
    TFORMER_UNROLL for (int r = 0; r < R; ++r) y[r] = V::set(0.0F);
    for (std::int64_t g = 0; g < groups; ++g) {
      typename D::template Sums<R> sums;
      for (std::int64_t k = 0; k < m.group; k += 16, from += 16, w += 2 * 64) {
        TFORMER_UNROLL for (int i = 0; i < 2; ++i) V::prefetch(w + i * 64 + ahead);
        sums.add_nibbles(from, ld, w);
      }
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
