// Kernels over rows: rounding, epilogues of products, norms, embeddings.
#pragma once

#include "kernels/kernels.hpp"
#include "kernels/mathematics.hpp"

namespace tformer::kernels {
namespace {

template <int n>
struct Count {
  static constexpr int value = n;
};

inline std::int64_t least(std::int64_t a, std::int64_t b) { return a < b ? a : b; }

template <class V>
TFORMER_INLINE typename V::F get(const float* p, std::int64_t n) {
  return n == lanes ? V::load(p) : V::load_part(p, n);
}

template <class V, class E>
TFORMER_INLINE void put(E* p, typename V::F x, std::int64_t n) {
  if (n == lanes) {
    V::store(p, x);
  } else {
    V::store_part(p, x, n);
  }
}

/// Call fn(i, n) for every 16 elements of a row; n is less than 16 at a ragged end.
template <class Fn>
TFORMER_INLINE void over(std::int64_t width, Fn fn) {
  std::int64_t i = 0;
  for (; i + lanes <= width; i += lanes) fn(i, lanes);
  if (i < width) fn(i, width - i);
}

/// Rounds to 8 bits.
template <class V>
struct Rounder {
  typename V::F inverse, low, high;
  typename V::I zero;

  explicit TFORMER_INLINE Rounder(const Rounding& how)
      : inverse(V::set(1.0F / how.step)), low(V::set(static_cast<float>(-how.zero))),
        high(V::set(static_cast<float>(how.most - how.zero))), zero(V::set_int(how.zero)) {}

  /// factor: shrink / step.
  TFORMER_INLINE typename V::I operator()(typename V::F y, typename V::F factor) const {
    return V::add_ints(V::round(V::min(V::max(V::mul(y, factor), low), high)), zero);
  }
};

/// Stores rows of numbers.
template <class V>
struct Writer {
  Target to;
  Rounder<V> round;

  explicit Writer(const Target& target) : to(target), round(target.rounding) {}

  TFORMER_INLINE void operator()(typename V::F y, std::int64_t row, std::int64_t i, std::int64_t n) const {
    if (to.floats) put<V>(to.floats + row * to.ld + i, y, n);
    if (!to.bytes) return;
    const float* shrink = to.rounding.shrink;
    const typename V::I integers = round(y, shrink ? V::mul(get<V>(shrink + i, n), round.inverse) : round.inverse);
    if (n == lanes) {
      V::store_bytes(to.bytes + row * to.bytes_ld + i, integers);
    } else {
      V::store_bytes_part(to.bytes + row * to.bytes_ld + i, integers, n);
    }
  }
};

/// The activations that take more than one instruction.
template <class V>
__attribute__((noinline)) typename V::F curved(Activation activation, typename V::F x) {
  const typename V::F one = V::set(1.0F);
  switch (activation) {
    case Activation::gelu:
      return V::mul(V::mul(V::set(0.5F), x), V::add(one, erf<V>(V::mul(x, V::set(0.707106781F)))));
    case Activation::gelu_tanh: {  // (1 + tanh(u)) / 2 is the sigmoid of 2u
      const typename V::F cubed = V::fma(V::mul(V::mul(x, x), V::set(0.044715F)), x, x);
      return V::mul(x, sigmoid<V>(V::mul(cubed, V::set(1.59576912F))));
    }
    case Activation::gelu_sigmoid:
      return V::mul(x, sigmoid<V>(V::mul(x, V::set(1.702F))));
    case Activation::silu:
      return V::mul(x, sigmoid<V>(x));
    default:
      return x;
  }
}

/// Applies the epilogue of a `Finish`.
template <class V>
struct Finisher {
  Finish how;
  Writer<V> write;

  explicit Finisher(const Finish& finish) : how(finish), write(finish.to) {}

  TFORMER_INLINE void operator()(typename V::F y, std::int64_t row, std::int64_t i, std::int64_t n) const {
    if (how.activation == Activation::relu) {
      y = V::max(V::set(0.0F), y);
    } else if (how.activation != Activation::none) {
      y = curved<V>(how.activation, y);
    }
    if (how.gate) y = V::mul(y, get<V>(how.gate + row * how.gate_ld + i, n));
    if (how.residual) y = V::add(y, get<V>(how.residual + row * how.residual_ld + i, n));
    write(y, row, i, n);
  }
};

template <class V>
void elementwise(const Elementwise& work, std::int64_t row, std::int64_t rows) {
  const Finisher<V> finish(work.finish);
  for (std::int64_t r = row; r < row + rows; ++r) {
    const float* x = work.x + r * work.ld;
    over(work.width, [&](std::int64_t i, std::int64_t n) TFORMER_LAMBDA { finish(get<V>(x + i, n), r, i, n); });
  }
}

template <class V>
void round_groups(const Groups& work, std::int64_t row, std::int64_t rows) {
  const std::int64_t whole = padded(work.width, work.group), count = whole / work.group;
  for (std::int64_t r = row; r < row + rows; ++r) {
    for (std::int64_t g = 0; g < count; ++g) {
      const float* x = work.x + r * work.ld + g * work.group;
      const std::int64_t width = least(work.group, work.width - g * work.group);
      typename V::F most = V::set(0.0F);
      over(width, [&](std::int64_t i, std::int64_t n) TFORMER_LAMBDA { most = V::max(V::abs(get<V>(x + i, n)), most); });
      const float largest = V::largest(most);
      const typename V::F inverse = V::set(largest > 0 ? 127.0F / largest : 0.0F);
      typename V::I sum = V::set_int(0);
      std::int8_t* to = work.integers + r * whole + g * work.group;
      for (std::int64_t i = 0; i < work.group; i += lanes) {
        const std::int64_t n = least(lanes, width - i);
        const typename V::F part = n == lanes ? V::load(x + i) : n > 0 ? V::load_part(x + i, n) : V::set(0.0F);
        const typename V::F scaled = V::min(V::max(V::mul(part, inverse), V::set(-127.0F)), V::set(127.0F));
        const typename V::I integers = V::round(scaled);
        sum = V::add_ints(sum, integers);
        V::store_bytes(to + i, integers);
      }
      work.scales[r * count + g] = largest / 127.0F;
      work.sums[r * count + g] = V::sum_ints(sum);
    }
  }
}

/// R rows at a time, so that their sums overlap.
template <class V, int R>
TFORMER_INLINE void norm_rows(const Normed& work, const Writer<V>& write, std::int64_t row) {
  const std::int64_t width = work.width;
  const float* x[R];
  typename V::F mean[R], squares[R], inverse[R];
  TFORMER_UNROLL for (int r = 0; r < R; ++r) {
    x[r] = work.x + (row + r) * work.ld;
    mean[r] = squares[r] = V::set(0.0F);
  }
  if (work.norm != Norm::rms) {
    over(width, [&](std::int64_t i, std::int64_t n) TFORMER_LAMBDA {
      TFORMER_UNROLL for (int r = 0; r < R; ++r) mean[r] = V::add(mean[r], get<V>(x[r] + i, n));
    });
    TFORMER_UNROLL for (int r = 0; r < R; ++r) mean[r] = V::set(V::sum(mean[r]) / static_cast<float>(width));
  }
  over(width, [&](std::int64_t i, std::int64_t n) TFORMER_LAMBDA {
    TFORMER_UNROLL for (int r = 0; r < R; ++r) {
      typename V::F centred = V::sub(get<V>(x[r] + i, n), mean[r]);
      if (n < lanes) centred = V::first(centred, V::set(0.0F), n);
      squares[r] = V::fma(centred, centred, squares[r]);
    }
  });
  TFORMER_UNROLL for (int r = 0; r < R; ++r) {
    const float total = V::sum(squares[r]);
    if (work.norm == Norm::annotated) {  // the unbiased deviation, eps outside the root
      const typename V::F deviation = V::sqrt(V::set(total / static_cast<float>(width - 1)));
      inverse[r] = V::div(V::set(1.0F), V::add(deviation, V::set(work.eps)));
    } else {
      inverse[r] = V::div(V::set(1.0F), V::sqrt(V::set(total / static_cast<float>(width) + work.eps)));
    }
  }
  over(width, [&](std::int64_t i, std::int64_t n) TFORMER_LAMBDA {
    const typename V::F gain = get<V>(work.gain + i, n);
    TFORMER_UNROLL for (int r = 0; r < R; ++r) {
      const typename V::F scaled = V::mul(V::sub(get<V>(x[r] + i, n), mean[r]), inverse[r]);
      write(work.bias ? V::fma(scaled, gain, get<V>(work.bias + i, n)) : V::mul(scaled, gain), row + r, i, n);
    }
  });
}

template <class V>
void norm(const Normed& work, std::int64_t row, std::int64_t rows) {
  const Writer<V> write(work.to);
  std::int64_t r = row;
  for (; r + 4 <= row + rows; r += 4) norm_rows<V, 4>(work, write, r);
  for (; r < row + rows; ++r) norm_rows<V, 1>(work, write, r);
}

template <class V>
void embed(const Embedding& work, std::int64_t row, std::int64_t rows) {
  for (std::int64_t r = row; r < row + rows; ++r) {
    const std::int64_t from = work.ids[r] * work.width;
    const float* place = work.positions ? work.positions + work.places[r] * work.width : nullptr;
    const typename V::F scale = V::set(work.integers ? work.scales[work.ids[r]] : work.scale);
    over(work.width, [&](std::int64_t i, std::int64_t n) TFORMER_LAMBDA {
      typename V::F x;
      if (work.integers) {
        const std::int8_t* p = work.integers + from + i;
        x = n == lanes ? V::load_bytes(p) : V::load_bytes_part(p, n);
      } else {
        x = get<V>(work.floats + from + i, n);
      }
      x = V::mul(x, scale);
      put<V>(work.out + r * work.ld + i, place ? V::add(x, get<V>(place + i, n)) : x, n);
    });
  }
}

template <class V>
void recur(const Recurrence& work) {
  over(work.width, [&](std::int64_t i, std::int64_t n) TFORMER_LAMBDA {
    const typename V::F kept = sigmoid<V>(get<V>(work.forget + i, n));
    typename V::F state = V::mul(V::sub(V::set(1.0F), kept), get<V>(work.x + i, n));
    if (work.past) state = V::fma(kept, get<V>(work.past + i, n), state);
    put<V>(work.state + i, state, n);
    put<V>(work.out + i, V::max(V::set(0.0F), state), n);
  });
}

}  // namespace
}  // namespace tformer::kernels
