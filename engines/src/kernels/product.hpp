// Matrix products of rows and packed weights, in blocks of a few rows and panels.
#pragma once

#include "kernels/rows.hpp"

namespace tformer::kernels {
namespace {

/// Prefetch distance of weights in bytes, where one block has all rows.
constexpr std::int64_t ahead = 4096;

/// The weights to prefetch while a block of rows is multiplied by some panels. If it has all rows of the piece, they are
/// those that come `ahead`. Else only the first block would read from memory, and the memory would idle during the
/// others: so each fetches its share of the next panels.
template <int most_rows>
class PanelFetch {
 public:
  std::int64_t step, apart;  // bytes between lines, and between panels

  /// bytes: of a panel.
  PanelFetch(const Piece& piece, std::int64_t bytes)
      : row_(piece.row), last_(piece.panel + piece.panels), bytes_(bytes), shared_(piece.rows > most_rows) {
    constexpr std::int64_t line = 64;
    // Divided here, once a product: a division in every block made small models 3.5 % slower.
    step = shared_ ? line / ((piece.rows + most_rows - 1) / most_rows) : line;
    apart = bytes / line * step;
    turn_ = shared_ || bytes <= ahead ? -1 : bytes - ahead;
  }

  /// Where a block at `row` begins, w: the weights of its panels.
  TFORMER_INLINE const char* start(std::int64_t row, std::int64_t panel, std::int64_t panels, const char* w) const {
    if (!shared_) return w + (panels > 1 && turn_ < 0 ? panels * bytes_ : ahead);
    const char* next = panel + panels < last_ ? w + panels * bytes_ : w;  // behind the last there is nothing to fetch
    return next + (row - row_) / most_rows * panels * apart;
  }

  /// Where `position` bytes of the block's panels are done: `ahead` of the end of a panel is not the next one, which the
  /// block has too, but the one behind the block.
  TFORMER_INLINE void turn(std::int64_t position, std::int64_t panels, const char*& next) const {
    if (position == turn_) next += (panels - 1) * bytes_;
  }

 private:
  std::int64_t row_, last_, bytes_, turn_;
  bool shared_;
};

/// Call fn with min(count, most) as a compile-time constant. Returns it.
template <int most, class Fn>
TFORMER_INLINE std::int64_t with_count(std::int64_t count, Fn fn) {
  if constexpr (most > 1) {
    if (count < most) return with_count<most - 1>(count, fn);
  }
  fn(Count<most>());
  return most;
}

/// Calls fn(row, rows, panel, panels) for every block of a piece; rows and panels are constants.
template <int most_rows, int most_panels, class Fn>
TFORMER_INLINE void blocks(const Piece& piece, Fn fn) {
  const std::int64_t end = piece.row + piece.rows, last = piece.panel + piece.panels;
  std::int64_t p = piece.panel;
  while (p < last) {
    p += with_count<most_panels>(last - p, [&](auto panels) TFORMER_LAMBDA {
      std::int64_t r = piece.row;
      while (r < end) r += with_count<most_rows>(end - r, [&](auto rows) TFORMER_LAMBDA { fn(r, rows, p, panels); });
    });
  }
}

/// Applies scales, bias and the epilogue to sums of a few rows and one panel; what all rows share is read once.
template <class V>
class Columns {
 public:
  explicit Columns(const Product& from)
      : matrix_(from.matrix), how_(from.finish), any_(from.finish), zero_(V::set_int(from.x.zero)),
        step_(V::set(from.x.step)), kind_(kind_of(from.finish)) {}

  /// sums (rows, 16), of integers or floats; row: of the first.
  template <class T>
  TFORMER_INLINE void operator()(const T* sums, std::int64_t row, std::int64_t rows, std::int64_t panel) const {
    const std::int64_t i = panel * lanes, n = least(lanes, matrix_.outputs - i);
    const Scaling<T> scaled(*this, i);
    const Kind kind = n == lanes ? kind_ : Kind::any;
    if (kind == Kind::stored) {
      float* to = how_.to.floats + row * how_.to.ld + i;
      for (std::int64_t r = 0; r < rows; ++r) V::store(to + r * how_.to.ld, scaled(sums + r * lanes));
    } else if (kind == Kind::added) {
      float* to = how_.to.floats + row * how_.to.ld + i;
      const float* residual = how_.residual + row * how_.residual_ld + i;
      for (std::int64_t r = 0; r < rows; ++r) {
        V::store(to + r * how_.to.ld, V::add(scaled(sums + r * lanes), V::load(residual + r * how_.residual_ld)));
      }
    } else if (kind == Kind::rounded) {
      std::uint8_t* to = how_.to.bytes + row * how_.to.bytes_ld + i;
      const float* shrink = how_.to.rounding.shrink;
      Rounder<V> round(how_.to.rounding);
      if (how_.activation == Activation::relu) round.low = V::set(0.0F);
      const typename V::F factor = shrink ? V::mul(V::load(shrink + i), round.inverse) : round.inverse;
      for (std::int64_t r = 0; r < rows; ++r) {
        V::store_bytes(to + r * how_.to.bytes_ld, round(scaled(sums + r * lanes), factor));
      }
    } else {
      for (std::int64_t r = 0; r < rows; ++r) any_(scaled(sums + r * lanes), row + r, i, n);
    }
  }

 private:
  enum class Kind { stored, added, rounded, any };
  Matrix matrix_;
  Finish how_;
  Finisher<V> any_;
  typename V::I zero_;
  typename V::F step_;
  Kind kind_;

  /// What a panel's sums are multiplied by and what is added. Of floats: the bias is added last, as runtimes do.
  /// Of integers: the sum less what the zero point adds, times both scales, plus the bias.
  template <class T>
  struct Scaling {
    typename V::F scale, bias;
    typename V::I zeros;

    TFORMER_INLINE Scaling(const Columns& of, std::int64_t i)
        : scale(V::set(1.0F)), bias(of.matrix_.bias ? V::load(of.matrix_.bias + i) : V::set(0.0F)), zeros(V::set_int(0)) {
      if (!integers) return;
      scale = V::mul(V::load(of.matrix_.scales + i), of.step_);
      zeros = V::mul_ints(V::load_ints(of.matrix_.sums + i), of.zero_);
    }
    TFORMER_INLINE typename V::F operator()(const float* sums) const { return V::add(V::load(sums), bias); }
    TFORMER_INLINE typename V::F operator()(const std::int32_t* sums) const {
      return V::fma(V::floats(V::sub_ints(V::load_ints(sums), zeros)), scale, bias);
    }

   private:
    static constexpr bool integers = static_cast<T>(0.5F) == T(0);
  };

  static Kind kind_of(const Finish& finish) {
    const bool simple = finish.activation == Activation::none, both = finish.to.floats && finish.to.bytes;
    if (finish.gate || both) return Kind::any;
    if (finish.to.floats) return !simple ? Kind::any : finish.residual ? Kind::added : Kind::stored;
    return !finish.residual && (simple || finish.activation == Activation::relu) ? Kind::rounded : Kind::any;
  }
};

/// Products of fp32 and bf16. A step is one input, with bf16 two.
template <class V, bool wide>
void product_floats(const Product& product, const Piece& piece) {
  constexpr int one = V::one_row_panels, step = wide ? 1 : 2;
  const Matrix& m = product.matrix;
  const std::int64_t inputs = m.inputs, line = 64, panel_bytes = padded(inputs, step) / step * line;
  const Columns<V> finish(product);
  const PanelFetch<V::float_rows> fetch(piece, panel_bytes);
  const auto block = [&](std::int64_t row, auto rows, std::int64_t panel, auto panels) TFORMER_LAMBDA {
    constexpr int R = decltype(rows)::value, P = decltype(panels)::value;
    const float* x = product.x.floats + row * product.x.ld;
    const char* w = static_cast<const char*>(m.weights) + panel * panel_bytes;
    const char* next = fetch.start(row, panel, P, w);
    typename V::F sums[R][P];
    TFORMER_UNROLL for (int r = 0; r < R; ++r) {
      TFORMER_UNROLL for (int p = 0; p < P; ++p) sums[r][p] = V::set(0.0F);
    }
    std::int64_t k = 0;
    for (; k + step <= inputs; k += step, w += line, next += fetch.step) {
      typename V::F even[P], odd[P];
      TFORMER_UNROLL for (int p = 0; p < P; ++p) {
        const char* at = w + p * panel_bytes;
        V::prefetch(next + p * fetch.apart);
        even[p] = wide ? V::load(reinterpret_cast<const float*>(at)) : V::even(at);
        if (!wide) odd[p] = V::odd(at);
      }
      TFORMER_UNROLL for (int r = 0; r < R; ++r) {
        const typename V::F first = V::set(x[r * product.x.ld + k]);
        TFORMER_UNROLL for (int p = 0; p < P; ++p) sums[r][p] = V::fma(first, even[p], sums[r][p]);
        if (wide) continue;
        const typename V::F second = V::set(x[r * product.x.ld + k + 1]);
        TFORMER_UNROLL for (int p = 0; p < P; ++p) sums[r][p] = V::fma(second, odd[p], sums[r][p]);
      }
    }
    if (k < inputs) {  // the last one of an odd number
      TFORMER_UNROLL for (int r = 0; r < R; ++r) {
        const typename V::F first = V::set(x[r * product.x.ld + k]);
        TFORMER_UNROLL for (int p = 0; p < P; ++p) sums[r][p] = V::fma(first, V::even(w + p * panel_bytes), sums[r][p]);
      }
    }
    alignas(64) float found[P][R][lanes];
    TFORMER_UNROLL for (int p = 0; p < P; ++p) {
      TFORMER_UNROLL for (int r = 0; r < R; ++r) V::store(found[p][r], sums[r][p]);
      finish(found[p][0], row, R, panel + p);
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
  const PanelFetch<V::rows> fetch(piece, bytes);
  const auto* x = static_cast<const std::uint8_t*>(product.x.integers);
  const std::int64_t ld = product.x.ld;
  // Several sums per output, as each addition waits for the one before it; integers may be added in any order.
  const auto block = [&](auto chains, std::int64_t row, auto rows, std::int64_t panel, auto panels) TFORMER_LAMBDA {
    constexpr int C = decltype(chains)::value, R = decltype(rows)::value, P = decltype(panels)::value;
    constexpr int together = C > V::lines ? C : V::lines;
    const char* w = static_cast<const char*>(m.weights) + panel * bytes;
    const char* next = fetch.start(row, panel, P, w);
    const std::uint8_t* from = x + row * ld;
    typename V::I sums[C][R][P];
    TFORMER_UNROLL for (int i = 0; i < C * R * P; ++i) sums[i / (R * P)][i / P % R][i % P] = V::set_int(0);
    for (std::int64_t k = 0; k < bytes; k += 16 * 64) {
      fetch.turn(k, P, next);
      typename V::Inputs inputs[R];
      TFORMER_UNROLL for (int r = 0; r < R; ++r) V::widen_inputs(from + r * ld + k / lanes, inputs[r]);
      for (int j = 0; j < 16; j += together) {
        TFORMER_UNROLL for (int c = 0; c < together; ++c) {
          typename V::Weights line[P];
          TFORMER_UNROLL for (int p = 0; p < P; ++p) {
            V::prefetch(next + p * fetch.apart);
            line[p] = V::weights(w + p * bytes + k + (j + c) * 64);
          }
          next += fetch.step;
          TFORMER_UNROLL for (int r = 0; r < R; ++r) {
            const auto quad = V::quad(inputs[r], j + c);
            TFORMER_UNROLL for (int p = 0; p < P; ++p) sums[c % C][r][p] = V::dot(sums[c % C][r][p], quad, line[p]);
          }
        }
      }
    }
    alignas(64) std::int32_t found[P][R][lanes];
    TFORMER_UNROLL for (int p = 0; p < P; ++p) {
      TFORMER_UNROLL for (int r = 0; r < R; ++r) {
        typename V::I sum = sums[0][r][p];
        TFORMER_UNROLL for (int c = 1; c < C; ++c) sum = V::add_ints(sum, sums[c][r][p]);
        V::store_ints(found[p][r], sum);
      }
      finish(found[p][0], row, R, panel + p);
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
  const PanelFetch<V::int4_rows> fetch(piece, bytes);
  const auto* x = static_cast<const std::int8_t*>(product.x.integers);
  const std::int64_t ld = product.x.ld;
  const auto block = [&](std::int64_t row, auto rows, std::int64_t panel, auto panels) TFORMER_LAMBDA {
    constexpr int R = decltype(rows)::value, P = decltype(panels)::value, C = R == 1 ? 2 : 1;
    const char* w = static_cast<const char*>(m.weights) + panel * bytes;
    const char* next = fetch.start(row, panel, P, w);
    typename V::F y[R][P];
    TFORMER_UNROLL for (int i = 0; i < R * P; ++i) y[i / P][i % P] = V::set(0.0F);
    for (std::int64_t g = 0; g < groups; ++g) {
      fetch.turn(g * m.group * 8, P, next);
      typename V::I sums[C][R][P];
      TFORMER_UNROLL for (int i = 0; i < C * R * P; ++i) sums[i / (R * P)][i / P % R][i % P] = V::set_int(0);
      for (std::int64_t k = g * m.group; k < (g + 1) * m.group; k += 8, next += fetch.step) {
        typename V::Nibbles low[P], high[P];
        TFORMER_UNROLL for (int p = 0; p < P; ++p) {
          const char* at = w + p * bytes + k * 8;
          V::prefetch(next + p * fetch.apart);
          low[p] = V::low(at);
          high[p] = V::high(at);
        }
        TFORMER_UNROLL for (int r = 0; r < R; ++r) {
          const std::int8_t* from = x + (row + r) * ld + k;
          const auto first = V::signed_quad(from), second = V::signed_quad(from + 4);
          TFORMER_UNROLL for (int p = 0; p < P; ++p) {
            V::dots(sums[0][r][p], sums[C - 1][r][p], first, low[p], second, high[p]);
          }
        }
      }
      TFORMER_UNROLL for (int r = 0; r < R; ++r) {
        const std::int64_t i = (row + r) * groups + g;
        const typename V::I eights = V::set_int(8 * product.x.sums[i]);
        TFORMER_UNROLL for (int p = 0; p < P; ++p) {
          const typename V::I both = C == 1 ? sums[0][r][p] : V::add_ints(sums[0][r][p], sums[C - 1][r][p]);
          const typename V::I sum = V::sub_ints(both, eights);
          const typename V::F scales = V::load(m.scales + ((panel + p) * groups + g) * lanes);
          y[r][p] = V::fma(V::floats(sum), V::mul(V::set(product.x.scales[i]), scales), y[r][p]);
        }
      }
    }
    alignas(64) float found[P][R][lanes];
    TFORMER_UNROLL for (int p = 0; p < P; ++p) {
      TFORMER_UNROLL for (int r = 0; r < R; ++r) V::store(found[p][r], y[r][p]);
      finish(found[p][0], row, R, panel + p);
    }
  };
  if (piece.rows == 1) {
    blocks<1, V::one_row_int4_panels>(piece, block);
  } else {
    blocks<V::int4_rows, V::int4_panels>(piece, block);
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
