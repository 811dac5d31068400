// 16 lanes in plain C++: what the other sets must equal to the last bit.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "kernels/kernels.hpp"

namespace tformer::kernels {
namespace {

struct PortableLanes {
  struct F {
    float v[16];
  };
  struct I {
    std::int32_t v[16];
  };
  struct Mask {
    bool v[16];
  };
  using Weights = const std::uint8_t*;  // of 4 inputs and 16 outputs
  struct Nibbles {
    std::uint8_t v[64];
  };
  struct Quad {               // 4 inputs
    std::uint8_t v[4];
  };
  // How much is worked on at once, see product.hpp and attention.hpp.
  static constexpr int rows = 2, panels = 1, lines = 1, one_row_chains = 1;
  static constexpr int float_rows = 2, float_panels = 1, one_row_panels = 1;
  static constexpr int int4_rows = 2, int4_panels = 1, one_row_int4_panels = 1;
  static constexpr int columns = 1, queries = 1, key_blocks = 1, few_queries = 1, few_blocks = 1;

  template <class Fn>
  static F each(Fn fn) {
    F y;
    for (int i = 0; i < 16; ++i) y.v[i] = fn(i);
    return y;
  }
  template <class Fn>
  static I ints(Fn fn) {
    I y;
    for (int i = 0; i < 16; ++i) y.v[i] = fn(i);
    return y;
  }

  static F load(const float* p) { return each([&](int i) { return p[i]; }); }
  /// 8 numbers, zeros behind them.
  static F load_half(const float* p) { return load_part(p, 8); }
  static F load_part(const float* p, std::int64_t n) { return each([&](int i) { return i < n ? p[i] : 0.0F; }); }
  static void store(float* p, F x) { std::memcpy(p, x.v, sizeof x.v); }
  static void store_part(float* p, F x, std::int64_t n) { std::memcpy(p, x.v, static_cast<std::size_t>(n) * 4); }
  static F load(const Bf16* p) { return each([&](int i) { return widened(p[i]); }); }
  static F load_half(const Bf16* p) { return each([&](int i) { return i < 8 ? widened(p[i]) : 0.0F; }); }
  static void store(Bf16* p, F x) { store_part(p, x, 16); }
  static void store_part(Bf16* p, F x, std::int64_t n) {
    for (int i = 0; i < n; ++i) p[i] = narrow(x.v[i]);
  }
  static F set(float x) { return each([&](int) { return x; }); }
  static F add(F a, F b) { return each([&](int i) { return a.v[i] + b.v[i]; }); }
  static F sub(F a, F b) { return each([&](int i) { return a.v[i] - b.v[i]; }); }
  static F mul(F a, F b) { return each([&](int i) { return a.v[i] * b.v[i]; }); }
  static F div(F a, F b) { return each([&](int i) { return a.v[i] / b.v[i]; }); }
  static F sqrt(F a) { return each([&](int i) { return std::sqrt(a.v[i]); }); }
  /// a * b + c, and c - a * b.
  static F fma(F a, F b, F c) { return each([&](int i) { return std::fma(a.v[i], b.v[i], c.v[i]); }); }
  static F fnma(F a, F b, F c) { return each([&](int i) { return std::fma(-a.v[i], b.v[i], c.v[i]); }); }
  /// b where either is NaN, as the processor's instructions do.
  static F max(F a, F b) { return each([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; }); }
  static F min(F a, F b) { return each([&](int i) { return a.v[i] < b.v[i] ? a.v[i] : b.v[i]; }); }
  static Mask less(F a, F b) {
    Mask m;
    for (int i = 0; i < 16; ++i) m.v[i] = a.v[i] < b.v[i];
    return m;
  }
  static F select(Mask m, F a, F b) { return each([&](int i) { return m.v[i] ? a.v[i] : b.v[i]; }); }
  /// b in the lanes from n on.
  static F first(F a, F b, std::int64_t n) { return each([&](int i) { return i < n ? a.v[i] : b.v[i]; }); }
  static F abs(F a) { return each([&](int i) { return std::fabs(a.v[i]); }); }
  static F copysign(F a, F sign) { return each([&](int i) { return std::copysign(a.v[i], sign.v[i]); }); }
  /// x times 2^n, where t = 1.5 * 2^23 + n.
  static F scale(F x, F t) {
    return each([&](int i) { return number(bits(x.v[i]) + (bits(t.v[i]) << 23U)); });
  }
  /// The exponent of a positive normal number, and the number over 2^exponent, within 1 and 2.
  static F exponent(F x) {
    return each([&](int i) { return static_cast<float>(static_cast<std::int32_t>(bits(x.v[i]) >> 23U) - 127); });
  }
  static F mantissa(F x) {
    return each([&](int i) { return number((bits(x.v[i]) & 0x7FFFFFU) | 0x3F800000U); });
  }
  /// To the nearest integer, of two the even one; |x| below 2^22.
  static I round(F x) {
    return ints([&](int i) { return static_cast<std::int32_t>((x.v[i] + 12582912.0F) - 12582912.0F); });
  }
  static F floats(I x) { return each([&](int i) { return static_cast<float>(x.v[i]); }); }

  static I load_ints(const std::int32_t* p) { return ints([&](int i) { return p[i]; }); }
  static void store_ints(std::int32_t* p, I x) { std::memcpy(p, x.v, sizeof x.v); }
  static I set_int(std::int32_t x) { return ints([&](int) { return x; }); }
  static I add_ints(I a, I b) { return ints([&](int i) { return wrap(bits(a.v[i]) + bits(b.v[i])); }); }
  static I sub_ints(I a, I b) { return ints([&](int i) { return wrap(bits(a.v[i]) - bits(b.v[i])); }); }
  static I mul_ints(I a, I b) { return ints([&](int i) { return wrap(bits(a.v[i]) * bits(b.v[i])); }); }
  /// The low byte of every lane.
  static void store_bytes(void* p, I x) { store_bytes_part(p, x, 16); }
  static void store_bytes_part(void* p, I x, std::int64_t n) {
    for (int i = 0; i < n; ++i) static_cast<std::uint8_t*>(p)[i] = static_cast<std::uint8_t>(x.v[i]);
  }
  static F load_bytes(const std::int8_t* p) { return each([&](int i) { return static_cast<float>(p[i]); }); }
  static F load_bytes_part(const std::int8_t* p, std::int64_t n) {
    return each([&](int i) { return i < n ? static_cast<float>(p[i]) : 0.0F; });
  }
  /// bf16 of 2 inputs and 16 outputs: those of the first, or of the second input.
  static F even(const void* p) { return half(p, 0); }
  static F odd(const void* p) { return half(p, 1); }

  /// The tree of sums: lanes i and i + 8, then 4, 2, 1.
  static float sum(F x) {
    for (int n = 8; n; n /= 2) {
      for (int i = 0; i < n; ++i) x.v[i] = x.v[i] + x.v[i + n];
    }
    return x.v[0];
  }
  static float largest(F x) {
    float y = x.v[0];
    for (int i = 1; i < 16; ++i) y = x.v[i] > y ? x.v[i] : y;
    return y;
  }
  static std::int32_t sum_ints(I x) {
    std::int32_t y = 0;
    for (const std::int32_t each : x.v) y += each;
    return y;
  }
  /// Lane i: the sum of x[i].
  static F sums(const F* x) { return each([&](int i) { return sum(x[i]); }); }
  /// Lane j of x[i] and lane i of x[j] change places.
  static void transpose(F* x) {
    for (int i = 0; i < 16; ++i) {
      for (int j = 0; j < i; ++j) {
        const float kept = x[i].v[j];
        x[i].v[j] = x[j].v[i];
        x[j].v[i] = kept;
      }
    }
  }
  /// A bit for every lane that is at least the limit.
  static std::uint32_t at_least(F x, F limit) {
    std::uint32_t found = 0;
    for (std::uint32_t i = 0; i < 16; ++i) found |= x.v[i] >= limit.v[i] ? 1U << i : 0U;
    return found;
  }

  static Weights weights(const void* p) { return static_cast<const std::uint8_t*>(p); }
  static Quad unsigned_quad(const void* p) {
    Quad x;
    std::memcpy(x.v, p, 4);
    return x;
  }
  /// 64 inputs of a row, and 4 of them.
  using Inputs = const std::uint8_t*;
  static void widen_inputs(const std::uint8_t* p, Inputs& to) { to = p; }
  static Quad quad(Inputs inputs, int i) { return unsigned_quad(inputs + 4 * i); }
  static Quad signed_quad(const void* p) { return unsigned_quad(p); }
  static Nibbles low(const void* p) { return halves(p, 0); }
  static Nibbles high(const void* p) { return halves(p, 4); }
  /// Adds unsigned inputs times signed weights.
  static I dot(I sum, Quad x, Weights w) {
    for (int i = 0; i < 64; ++i) sum.v[i / 4] += x.v[i % 4] * static_cast<std::int8_t>(w[i]);
    return sum;
  }
  /// Adds signed inputs times unsigned weights.
  static I dot(I sum, Quad x, const Nibbles& w) {
    for (int i = 0; i < 64; ++i) sum.v[i / 4] += static_cast<std::int8_t>(x.v[i % 4]) * w.v[i];
    return sum;
  }
  /// Of 8 inputs: one sum, or two, which are added later.
  static void dots(I& a, I& b, Quad x, const Nibbles& w, Quad y, const Nibbles& v) {
    a = dot(a, x, w);
    b = dot(b, y, v);
  }
  static void prefetch(const void*) {}
  static void prefetch_far(const void*) {}

 private:
  static std::uint32_t bits(float x) {
    std::uint32_t y;
    std::memcpy(&y, &x, 4);
    return y;
  }
  static std::uint32_t bits(std::int32_t x) { return static_cast<std::uint32_t>(x); }
  static std::int32_t wrap(std::uint32_t x) { return static_cast<std::int32_t>(x); }
  static float number(std::uint32_t x) {
    float y;
    std::memcpy(&y, &x, 4);
    return y;
  }
  static Bf16 narrow(float x) {
    const std::uint32_t whole = bits(x), quiet = 0x400000U;
    const std::uint32_t near = std::isnan(x) ? whole | quiet : whole + 0x7FFFU + (whole >> 16U & 1U);
    return {static_cast<std::uint16_t>(near >> 16U)};
  }
  static F half(const void* p, int which) {
    return each([&](int i) {
      std::uint16_t x;
      std::memcpy(&x, static_cast<const char*>(p) + i * 4 + which * 2, 2);
      return number(static_cast<std::uint32_t>(x) << 16U);
    });
  }
  static Nibbles halves(const void* p, unsigned shift) {
    Nibbles y;
    for (int i = 0; i < 64; ++i) {
      y.v[i] = static_cast<std::uint8_t>((static_cast<const std::uint8_t*>(p)[i] >> shift) & 15U);
    }
    return y;
  }
};

}  // namespace
}  // namespace tformer::kernels
