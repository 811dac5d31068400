// Products of rows and packed weights, in blocks of a few rows and panels.
#pragma once

#include "kernels/rows.hpp"

namespace tformer::kernels {
namespace {

/// Bytes that weights are fetched ahead of their use.
constexpr std::int64_t ahead = 4096;

template <int n>
struct Count {
  static constexpr int value = n;
};

/// Calls fn with how many there are, up to `most`, as a constant.
template <int most, class Fn>
TFORMER_INLINE void with_count(std::int64_t count, Fn fn) {
  if constexpr (most == 1) {
    fn(Count<1>());
  } else if (count >= most) {
    fn(Count<most>());
  } else {
    with_count<most - 1>(count, fn);
  }
}

/// Calls fn(row, rows, panel, panels) for every block of a piece; rows and panels are constants.
template <int most_rows, int most_panels, class Fn>
TFORMER_INLINE void blocks(const Piece& piece, Fn fn) {
  const std::int64_t end = piece.row + piece.rows, last = piece.panel + piece.panels;
  for (std::int64_t p = piece.panel; p < last;) {
    with_count<most_panels>(last - p, [&](auto panels) TFORMER_LAMBDA {
      for (std::int64_t r = piece.row; r < end;) {
        with_count<most_rows>(end - r, [&](auto rows) TFORMER_LAMBDA {
          fn(r, rows, p, panels);
          r += decltype(rows)::value;
        });
      }
      p += decltype(panels)::value;
    });
  }
}

/// Finishes the numbers of one row and panel.
template <class V>
struct Columns {
  const Product& product;
  Finisher<V> finish;

  explicit Columns(const Product& from) : product(from), finish(from.finish) {}

  TFORMER_INLINE void operator()(typename V::F y, std::int64_t row, std::int64_t panel) const {
    const std::int64_t i = panel * lanes;
    finish(y, row, i, least(lanes, product.matrix.outputs - i));
  }
  /// Of int8: the integers' sum, less what the zero point adds, times both scales, plus the bias.
  TFORMER_INLINE void operator()(typename V::I sum, std::int64_t row, std::int64_t panel) const {
    const Matrix& m = product.matrix;
    const std::int64_t i = panel * lanes;
    const typename V::I zeros = V::mul_ints(V::load_ints(m.sums + i), V::set_int(product.x.zero));
    const typename V::F scale = V::mul(V::load(m.scales + i), V::set(product.x.step));
    const typename V::F y = V::floats(V::sub_ints(sum, zeros));
    (*this)(V::fma(y, scale, m.bias ? V::load(m.bias + i) : V::set(0.0F)), row, panel);
  }
};

/// The bias is added last, as runtimes do.
template <class V>
TFORMER_INLINE typename V::F biased(const Matrix& m, typename V::F y, std::int64_t panel) {
  return m.bias ? V::add(y, V::load(m.bias + panel * lanes)) : y;
}

/// fp32 and bf16. A step is one input, or two of bf16.
template <class V, bool wide>
void product_floats(const Product& product, const Piece& piece) {
  constexpr int one = V::one_row_panels, step = wide ? 1 : 2;
  const Matrix& m = product.matrix;
  const std::int64_t inputs = m.inputs, line = 64, panel_bytes = padded(inputs, step) / step * line;
  const Columns<V> finish(product);
  const auto block = [&](std::int64_t row, auto rows, std::int64_t panel, auto panels) TFORMER_LAMBDA {
    constexpr int R = decltype(rows)::value, P = decltype(panels)::value;
    const float* x = product.x.floats + row * product.x.ld;
    const char* w = static_cast<const char*>(m.weights) + panel * panel_bytes;
    typename V::F sums[R][P];
    for (int r = 0; r < R; ++r) {
      for (int p = 0; p < P; ++p) sums[r][p] = V::set(0.0F);
    }
    std::int64_t k = 0;
    for (; k + step <= inputs; k += step, w += line) {
      typename V::F even[P], odd[P];
      for (int p = 0; p < P; ++p) {
        const char* at = w + p * panel_bytes;
        V::prefetch(at + ahead);
        even[p] = wide ? V::load(reinterpret_cast<const float*>(at)) : V::even(at);
        if (!wide) odd[p] = V::odd(at);
      }
      for (int r = 0; r < R; ++r) {
        const typename V::F first = V::set(x[r * product.x.ld + k]);
        for (int p = 0; p < P; ++p) sums[r][p] = V::fma(first, even[p], sums[r][p]);
        if (wide) continue;
        const typename V::F second = V::set(x[r * product.x.ld + k + 1]);
        for (int p = 0; p < P; ++p) sums[r][p] = V::fma(second, odd[p], sums[r][p]);
      }
    }
    if (k < inputs) {  // the last one of an odd number
      for (int r = 0; r < R; ++r) {
        const typename V::F first = V::set(x[r * product.x.ld + k]);
        for (int p = 0; p < P; ++p) sums[r][p] = V::fma(first, V::even(w + p * panel_bytes), sums[r][p]);
      }
    }
    for (int r = 0; r < R; ++r) {
      for (int p = 0; p < P; ++p) finish(biased<V>(m, sums[r][p], panel + p), row + r, panel + p);
    }
  };
  if (piece.rows == 1) {
    blocks<1, one>(piece, block);
  } else {
    blocks<V::float_rows, V::float_panels>(piece, block);
  }
}

template <class V>
void product_int8(const Product& product, const Piece& piece) {
  const Matrix& m = product.matrix;
  const std::int64_t bytes = padded(m.inputs, 64) * lanes;
  const Columns<V> finish(product);
  const auto* x = static_cast<const std::uint8_t*>(product.x.integers);
  const std::int64_t ld = product.x.ld;
  // `chains` sums for every output, as one instruction waits for the one before it: integers may be added in any order.
  const auto block = [&](auto chains, std::int64_t row, auto rows, std::int64_t panel, auto panels) TFORMER_LAMBDA {
    constexpr int C = decltype(chains)::value, R = decltype(rows)::value, P = decltype(panels)::value;
    const char* w = static_cast<const char*>(m.weights) + panel * bytes;
    const std::uint8_t* from = x + row * ld;
    typename V::Sum sums[C][R][P];
    for (int i = 0; i < C * R * P; ++i) sums[i / (R * P)][i / P % R][i % P] = V::no_sum();
    for (std::int64_t k = 0; k < bytes; k += 64 * C) {  // 16 lines at least
      for (int c = 0; c < C; ++c) {
        typename V::Weights line[P];
        for (int p = 0; p < P; ++p) {
          const char* at = w + p * bytes + k + c * 64;
          V::prefetch(at + ahead);
          line[p] = V::weights(at);
        }
        for (int r = 0; r < R; ++r) {
          const typename V::Quad quad = V::unsigned_quad(from + r * ld + k / lanes + c * 4);
          for (int p = 0; p < P; ++p) sums[c][r][p] = V::dot(sums[c][r][p], quad, line[p]);
        }
      }
    }
    for (int r = 0; r < R; ++r) {
      for (int p = 0; p < P; ++p) {
        typename V::Sum sum = sums[0][r][p];
        for (int c = 1; c < C; ++c) sum = V::add_sums(sum, sums[c][r][p]);
        finish(V::total(sum), row + r, panel + p);
      }
    }
  };
  if (piece.rows == 1) {
    blocks<1, 1>(piece, [&](std::int64_t row, auto rows, std::int64_t panel, auto panels) TFORMER_LAMBDA {
      block(Count<V::one_row_chains>(), row, rows, panel, panels);
    });
  } else {
    blocks<V::rows, V::panels>(piece, [&](std::int64_t row, auto rows, std::int64_t panel, auto panels) TFORMER_LAMBDA {
      block(Count<1>(), row, rows, panel, panels);
    });
  }
}

template <class V>
void product_int4(const Product& product, const Piece& piece) {
  const Matrix& m = product.matrix;
  const std::int64_t whole = padded(m.inputs, m.group), groups = whole / m.group, bytes = whole * lanes / 2;
  const Columns<V> finish(product);
  const auto* x = static_cast<const std::int8_t*>(product.x.integers);
  const std::int64_t ld = product.x.ld;
  const auto block = [&](std::int64_t row, auto rows, std::int64_t panel, auto panels) TFORMER_LAMBDA {
    constexpr int R = decltype(rows)::value, P = decltype(panels)::value;
    const char* w = static_cast<const char*>(m.weights) + panel * bytes;
    typename V::F y[R][P];
    for (int i = 0; i < R * P; ++i) y[i / P][i % P] = V::set(0.0F);
    for (std::int64_t g = 0; g < groups; ++g) {
      typename V::Sum low[R][P], high[R][P];
      for (int i = 0; i < R * P; ++i) low[i / P][i % P] = high[i / P][i % P] = V::no_sum();
      for (std::int64_t k = g * m.group; k < (g + 1) * m.group; k += 8) {
        for (int p = 0; p < P; ++p) {
          const char* at = w + p * bytes + k * 8;
          V::prefetch(at + ahead);
          const typename V::Nibbles first = V::low(at), second = V::high(at);
          for (int r = 0; r < R; ++r) {
            const std::int8_t* from = x + (row + r) * ld + k;
            low[r][p] = V::dot(low[r][p], V::signed_quad(from), first);
            high[r][p] = V::dot(high[r][p], V::signed_quad(from + 4), second);
          }
        }
      }
      for (int r = 0; r < R; ++r) {
        const std::int64_t i = (row + r) * groups + g;
        const typename V::I eights = V::set_int(8 * product.x.sums[i]);
        for (int p = 0; p < P; ++p) {
          const typename V::I sum = V::sub_ints(V::total(V::add_sums(low[r][p], high[r][p])), eights);
          const typename V::F scales = V::load(m.scales + ((panel + p) * groups + g) * lanes);
          y[r][p] = V::fma(V::floats(sum), V::mul(V::set(product.x.scales[i]), scales), y[r][p]);
        }
      }
    }
    for (int i = 0; i < R * P; ++i) finish(biased<V>(m, y[i / P][i % P], panel + i % P), row + i / P, panel + i % P);
  };
  if (piece.rows == 1) {
    blocks<1, V::one_row_int4_panels>(piece, block);
  } else {
    blocks<V::int4_rows, 1>(piece, block);
  }
}

template <class V>
void product(const Product& work, const Piece& piece) {
  switch (work.matrix.numbers) {
    case Numbers::fp32:
      return product_floats<V, true>(work, piece);
    case Numbers::bf16:
      return product_floats<V, false>(work, piece);
    case Numbers::int8:
      return product_int8<V>(work, piece);
    case Numbers::int4:
      return product_int4<V>(work, piece);
  }
}

}  // namespace
}  // namespace tformer::kernels
