// 16 lanes in two registers of AVX2, with or without AVX-VNNI.
#pragma once

#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstring>

#include "kernels/kernels.hpp"
#include "kernels/mathematics.hpp"

namespace tformer::kernels {
namespace {

/// What is the same with and without VNNI.
struct Avx2Base {
  struct F {
    __m256 a, b;
  };
  struct I {
    __m256i a, b;
  };
  using Mask = F;
  static constexpr int float_rows = 2, float_panels = 2, one_row_panels = 4;
  static constexpr int columns = 1, queries = 2, key_blocks = 2, few_queries = 1, few_blocks = 1;

  static TFORMER_INLINE __m256i until(std::int64_t n) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(n)), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  }
  static TFORMER_INLINE F load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
  /// 8 numbers, zeros behind them.
  static TFORMER_INLINE F load_half(const float* p) { return {_mm256_loadu_ps(p), _mm256_setzero_ps()}; }
  static TFORMER_INLINE F load_part(const float* p, std::int64_t n) {
    return {_mm256_maskload_ps(p, until(n)), _mm256_maskload_ps(p + 8, until(n - 8))};
  }
  static TFORMER_INLINE void store(float* p, F x) {
    _mm256_storeu_ps(p, x.a);
    _mm256_storeu_ps(p + 8, x.b);
  }
  static TFORMER_INLINE void store_part(float* p, F x, std::int64_t n) {
    _mm256_maskstore_ps(p, until(n), x.a);
    _mm256_maskstore_ps(p + 8, until(n - 8), x.b);
  }
  static TFORMER_INLINE F load(const Bf16* p) { return {widen(p), widen(p + 8)}; }
  static TFORMER_INLINE F load_half(const Bf16* p) { return {widen(p), _mm256_setzero_ps()}; }
  static TFORMER_INLINE void store(Bf16* p, F x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow(x)); }
  static TFORMER_INLINE void store_part(Bf16* p, F x, std::int64_t n) {
    alignas(32) Bf16 numbers[16];
    store(numbers, x);
    std::memcpy(p, numbers, static_cast<std::size_t>(n) * sizeof(Bf16));
  }
  static TFORMER_INLINE F set(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
  static TFORMER_INLINE F add(F x, F y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
  static TFORMER_INLINE F sub(F x, F y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
  static TFORMER_INLINE F mul(F x, F y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
  static TFORMER_INLINE F div(F x, F y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
  static TFORMER_INLINE F sqrt(F x) { return {_mm256_sqrt_ps(x.a), _mm256_sqrt_ps(x.b)}; }
  static TFORMER_INLINE F fma(F x, F y, F z) {
    return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
  }
  static TFORMER_INLINE F fnma(F x, F y, F z) {
    return {_mm256_fnmadd_ps(x.a, y.a, z.a), _mm256_fnmadd_ps(x.b, y.b, z.b)};
  }
  static TFORMER_INLINE F max(F x, F y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
  static TFORMER_INLINE F min(F x, F y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
  static TFORMER_INLINE Mask less(F x, F y) {
    return {_mm256_cmp_ps(x.a, y.a, _CMP_LT_OQ), _mm256_cmp_ps(x.b, y.b, _CMP_LT_OQ)};
  }
  static TFORMER_INLINE F select(Mask m, F x, F y) {
    return {_mm256_blendv_ps(y.a, x.a, m.a), _mm256_blendv_ps(y.b, x.b, m.b)};
  }
  static TFORMER_INLINE F first(F x, F y, std::int64_t n) {
    return select({_mm256_castsi256_ps(until(n)), _mm256_castsi256_ps(until(n - 8))}, x, y);
  }
  static TFORMER_INLINE F abs(F x) {
    const __m256 sign = _mm256_set1_ps(-0.0F);
    return {_mm256_andnot_ps(sign, x.a), _mm256_andnot_ps(sign, x.b)};
  }
  static TFORMER_INLINE F copysign(F x, F from) {
    const __m256 sign = _mm256_set1_ps(-0.0F);
    return {_mm256_blendv_ps(x.a, _mm256_or_ps(x.a, sign), from.a), _mm256_blendv_ps(x.b, _mm256_or_ps(x.b, sign), from.b)};
  }
  static TFORMER_INLINE F scale(F x, F t) { return {scaled(x.a, t.a), scaled(x.b, t.b)}; }
  static TFORMER_INLINE F exponent(F x) {
    const I bits = {_mm256_srli_epi32(_mm256_castps_si256(x.a), 23), _mm256_srli_epi32(_mm256_castps_si256(x.b), 23)};
    return floats(sub_ints(bits, set_int(127)));
  }
  static TFORMER_INLINE F mantissa(F x) { return {fraction(x.a), fraction(x.b)}; }
  static TFORMER_INLINE I round(F x) { return {_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)}; }
  static TFORMER_INLINE F floats(I x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }

  static TFORMER_INLINE I load_ints(const std::int32_t* p) { return {bytes32(p), bytes32(p + 8)}; }
  static TFORMER_INLINE void store_ints(std::int32_t* p, I x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x.a);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + 8), x.b);
  }
  static TFORMER_INLINE I set_int(std::int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
  static TFORMER_INLINE I add_ints(I x, I y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
  static TFORMER_INLINE I sub_ints(I x, I y) { return {_mm256_sub_epi32(x.a, y.a), _mm256_sub_epi32(x.b, y.b)}; }
  static TFORMER_INLINE I mul_ints(I x, I y) { return {_mm256_mullo_epi32(x.a, y.a), _mm256_mullo_epi32(x.b, y.b)}; }
  static TFORMER_INLINE void store_bytes(void* p, I x) { _mm_storeu_si128(static_cast<__m128i*>(p), narrow(x)); }
  static TFORMER_INLINE void store_bytes_part(void* p, I x, std::int64_t n) {
    alignas(16) char bytes[16];
    _mm_store_si128(reinterpret_cast<__m128i*>(bytes), narrow(x));
    std::memcpy(p, bytes, static_cast<std::size_t>(n));
  }
  static TFORMER_INLINE F load_bytes(const std::int8_t* p) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return floats(I{_mm256_cvtepi8_epi32(bytes), _mm256_cvtepi8_epi32(_mm_srli_si128(bytes, 8))});
  }
  static TFORMER_INLINE F load_bytes_part(const std::int8_t* p, std::int64_t n) {
    std::int8_t bytes[16] = {};
    std::memcpy(bytes, p, static_cast<std::size_t>(n));
    return load_bytes(bytes);
  }
  static TFORMER_INLINE F even(const void* p) {
    const I x = load_ints(static_cast<const std::int32_t*>(p));
    return {_mm256_castsi256_ps(_mm256_slli_epi32(x.a, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(x.b, 16))};
  }
  static TFORMER_INLINE F odd(const void* p) {
    const I x = load_ints(static_cast<const std::int32_t*>(p));
    const __m256i high = _mm256_set1_epi32(-65536);
    return {_mm256_castsi256_ps(_mm256_and_si256(x.a, high)), _mm256_castsi256_ps(_mm256_and_si256(x.b, high))};
  }

  static TFORMER_INLINE float sum(F x) {
    const __m256 eight = _mm256_add_ps(x.a, x.b);
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
  }
  static TFORMER_INLINE float largest(F x) {
    const __m256 eight = _mm256_max_ps(x.a, x.b);
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
  }
  static TFORMER_INLINE std::int32_t sum_ints(I x) {
    const __m256i eight = _mm256_add_epi32(x.a, x.b);
    __m128i four = _mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
    four = _mm_add_epi32(four, _mm_unpackhi_epi64(four, four));
    return _mm_cvtsi128_si32(four) + _mm_extract_epi32(four, 1);
  }
  static TFORMER_INLINE F sums(const F* x) { return {eight_sums(x), eight_sums(x + 8)}; }
  static TFORMER_INLINE void transpose(F* x) {
    __m256 corners[4][8];  // rows 0 to 7 and 8 to 15 of either half
    for (int i = 0; i < 8; ++i) {
      corners[0][i] = x[i].a;
      corners[1][i] = x[i].b;
      corners[2][i] = x[i + 8].a;
      corners[3][i] = x[i + 8].b;
    }
    for (auto& corner : corners) transpose_eight(corner);
    for (int i = 0; i < 8; ++i) {
      x[i] = {corners[0][i], corners[2][i]};
      x[i + 8] = {corners[1][i], corners[3][i]};
    }
  }
  static TFORMER_INLINE std::uint32_t at_least(F x, F limit) {
    return static_cast<std::uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(x.a, limit.a, _CMP_GE_OQ))) |
           static_cast<std::uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(x.b, limit.b, _CMP_GE_OQ))) << 8U;
  }
  static TFORMER_INLINE void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }
  static TFORMER_INLINE void prefetch_far(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T1); }

 protected:
  static TFORMER_INLINE __m256i bytes32(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
  static TFORMER_INLINE std::int32_t four_bytes(const void* p) {
    std::int32_t x;
    std::memcpy(&x, p, 4);
    return x;
  }
  /// 32 bytes, of each the low or the high half.
  static TFORMER_INLINE __m256i half(const void* p, bool high) {
    const __m256i x = bytes32(p);
    return _mm256_and_si256(high ? _mm256_srli_epi16(x, 4) : x, _mm256_set1_epi8(15));
  }

 private:
  static TFORMER_INLINE void transpose_eight(__m256 (&x)[8]) {
    __m256 a[8], b[8];
    for (int i = 0; i < 8; i += 2) {
      a[i] = _mm256_unpacklo_ps(x[i], x[i + 1]);
      a[i + 1] = _mm256_unpackhi_ps(x[i], x[i + 1]);
    }
    for (int i = 0; i < 8; i += 4) {
      for (int j = 0; j < 2; ++j) {
        const __m256d first = _mm256_castps_pd(a[i + j]), second = _mm256_castps_pd(a[i + 2 + j]);
        b[i + 2 * j] = _mm256_castpd_ps(_mm256_unpacklo_pd(first, second));
        b[i + 2 * j + 1] = _mm256_castpd_ps(_mm256_unpackhi_pd(first, second));
      }
    }
    for (int i = 0; i < 4; ++i) {
      x[i] = _mm256_permute2f128_ps(b[i], b[i + 4], 0x20);
      x[i + 4] = _mm256_permute2f128_ps(b[i], b[i + 4], 0x31);
    }
  }
  static TFORMER_INLINE __m256 scaled(__m256 x, __m256 t) {
    return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(x), _mm256_slli_epi32(_mm256_castps_si256(t), 23)));
  }
  static TFORMER_INLINE __m256 fraction(__m256 x) {
    const __m256i low = _mm256_and_si256(_mm256_castps_si256(x), _mm256_set1_epi32(0x7FFFFF));
    return _mm256_castsi256_ps(_mm256_or_si256(low, _mm256_set1_epi32(0x3F800000)));
  }
  static TFORMER_INLINE __m256 widen(const Bf16* p) {
    const __m256i halves = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return _mm256_castsi256_ps(_mm256_slli_epi32(halves, 16));
  }
  /// To the nearest bf16.
  static TFORMER_INLINE __m256i half_of(__m256 x) {
    const __m256i whole = _mm256_castps_si256(x), odd = _mm256_and_si256(_mm256_srli_epi32(whole, 16), _mm256_set1_epi32(1));
    const __m256i near = _mm256_add_epi32(_mm256_add_epi32(whole, _mm256_set1_epi32(0x7FFF)), odd);
    const __m256i quiet = _mm256_or_si256(whole, _mm256_set1_epi32(0x400000));
    const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    return _mm256_srli_epi32(_mm256_blendv_epi8(near, quiet, is_nan), 16);
  }
  static TFORMER_INLINE __m256i narrow(F x) {
    return _mm256_permute4x64_epi64(_mm256_packus_epi32(half_of(x.a), half_of(x.b)), 0xD8);
  }
  static TFORMER_INLINE __m128i narrow(I x) {
    const __m256i byte = _mm256_set1_epi32(255);
    const __m256i words = _mm256_packus_epi32(_mm256_and_si256(x.a, byte), _mm256_and_si256(x.b, byte));
    const __m256i ordered = _mm256_permute4x64_epi64(words, 0xD8);
    return _mm_packus_epi16(_mm256_castsi256_si128(ordered), _mm256_extracti128_si256(ordered, 1));
  }
  /// The trees of 8 vectors.
  static TFORMER_INLINE __m256 eight_sums(const F* x) {
    __m256 a[8], b[4], c[2];
    for (int i = 0; i < 8; ++i) a[i] = _mm256_add_ps(x[i].a, x[i].b);
    for (int i = 0; i < 4; ++i) {
      b[i] = _mm256_add_ps(_mm256_permute2f128_ps(a[i], a[i + 4], 0x20), _mm256_permute2f128_ps(a[i], a[i + 4], 0x31));
    }
    for (int i = 0; i < 2; ++i) {
      const __m256d low = _mm256_castps_pd(b[i]), high = _mm256_castps_pd(b[i + 2]);
      c[i] = _mm256_add_ps(_mm256_castpd_ps(_mm256_unpacklo_pd(low, high)), _mm256_castpd_ps(_mm256_unpackhi_pd(low, high)));
    }
    // Lanes of c[0] are of vectors 0, 0, 2, 2, 4, 4, 6, 6, those of c[1] of 1, 1, 3, 3, 5, 5, 7, 7.
    const __m256 y = _mm256_add_ps(_mm256_shuffle_ps(c[0], c[1], 0x88), _mm256_shuffle_ps(c[0], c[1], 0xDD));
    return _mm256_permutevar8x32_ps(y, _mm256_setr_epi32(0, 2, 1, 3, 4, 6, 5, 7));
  }
};

/// Integers by 16-bit products, which are exact: of 4 inputs 0 and 2 in one instruction, 1 and 3 in another.
struct Avx2Lanes : Avx2Base {
  /// Inputs 0 and 2, and 1 and 3: first of 8 outputs, then of the other 8.
  struct Weights {
    __m256i even[2], odd[2];
  };
  struct Nibbles {
    __m256i a, b;
  };
  struct Quad {
    __m256i even, odd;
  };
  static constexpr int rows = 4, panels = 1, lines = 1, one_row_chains = 1;
  static constexpr int int4_rows = 4, int4_panels = 1, one_row_int4_panels = 1;

  static TFORMER_INLINE Weights weights(const void* p) {
    Weights w;
    for (int i = 0; i < 2; ++i) {
      const __m256i x = bytes32(static_cast<const char*>(p) + 32 * i);
      w.even[i] = _mm256_srai_epi16(_mm256_slli_epi16(x, 8), 8);
      w.odd[i] = _mm256_srai_epi16(x, 8);
    }
    return w;
  }
  /// 64 inputs of a row in 16 bits, so that 4 of them are two loads and no more.
  struct Inputs {
    alignas(32) std::int32_t even[16], odd[16];
  };
  static TFORMER_INLINE void widen_inputs(const std::uint8_t* p, Inputs& to) {
    for (int i = 0; i < 2; ++i) {
      const __m256i x = bytes32(p + 32 * i);
      _mm256_store_si256(reinterpret_cast<__m256i*>(to.even) + i, _mm256_and_si256(x, _mm256_set1_epi16(255)));
      _mm256_store_si256(reinterpret_cast<__m256i*>(to.odd) + i, _mm256_srli_epi16(x, 8));
    }
  }
  static TFORMER_INLINE Quad quad(const Inputs& inputs, int i) {
    return {_mm256_set1_epi32(inputs.even[i]), _mm256_set1_epi32(inputs.odd[i])};
  }
  static TFORMER_INLINE I dot(I sum, Quad x, const Weights& w) {
    return {add_products(sum.a, x, w.even[0], w.odd[0]), add_products(sum.b, x, w.even[1], w.odd[1])};
  }
  using SignedQuad = __m256i;
  static TFORMER_INLINE SignedQuad signed_quad(const void* p) { return _mm256_set1_epi32(four_bytes(p)); }
  static TFORMER_INLINE Nibbles low(const void* p) { return {half(p, false), half(static_cast<const char*>(p) + 32, false)}; }
  static TFORMER_INLINE Nibbles high(const void* p) { return {half(p, true), half(static_cast<const char*>(p) + 32, true)}; }
  /// Four products of 4 by 8 bits are at most 7,680, which 16 bits hold. One sum is enough.
  static TFORMER_INLINE void dots(I& sum, I&, SignedQuad x, Nibbles w, SignedQuad y, Nibbles v) {
    sum.a = add_products(sum.a, x, w.a, y, v.a);
    sum.b = add_products(sum.b, x, w.b, y, v.b);
  }

 private:
  static TFORMER_INLINE __m256i add_products(__m256i sum, Quad x, __m256i even, __m256i odd) {
    sum = _mm256_add_epi32(sum, _mm256_madd_epi16(x.even, even));
    return _mm256_add_epi32(sum, _mm256_madd_epi16(x.odd, odd));
  }
  static TFORMER_INLINE __m256i add_products(__m256i sum, SignedQuad x, __m256i w, SignedQuad y, __m256i v) {
    const __m256i pairs = _mm256_add_epi16(_mm256_maddubs_epi16(w, x), _mm256_maddubs_epi16(v, y));
    return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
  }
};

#ifdef __AVXVNNI__
struct AvxVnniLanes : Avx2Base {
  struct Weights {
    __m256i a, b;
  };
  struct Nibbles {
    __m256i a, b;
  };
  using Quad = __m256i;
  static constexpr int rows = 4, panels = 1, lines = 1, one_row_chains = 2;
  static constexpr int int4_rows = 4, int4_panels = 1, one_row_int4_panels = 1;

  static TFORMER_INLINE Weights weights(const void* p) { return {bytes32(p), bytes32(static_cast<const char*>(p) + 32)}; }
  static TFORMER_INLINE Quad unsigned_quad(const void* p) { return _mm256_set1_epi32(four_bytes(p)); }
  /// 64 inputs of a row, and 4 of them.
  using Inputs = const std::uint8_t*;
  static TFORMER_INLINE void widen_inputs(const std::uint8_t* p, Inputs& to) { to = p; }
  static TFORMER_INLINE Quad quad(Inputs inputs, int i) { return unsigned_quad(inputs + 4 * i); }
  static TFORMER_INLINE Quad signed_quad(const void* p) { return unsigned_quad(p); }
  static TFORMER_INLINE Nibbles low(const void* p) { return {half(p, false), half(static_cast<const char*>(p) + 32, false)}; }
  static TFORMER_INLINE Nibbles high(const void* p) { return {half(p, true), half(static_cast<const char*>(p) + 32, true)}; }
  static TFORMER_INLINE I dot(I sum, Quad x, Weights w) {
    return {_mm256_dpbusd_avx_epi32(sum.a, x, w.a), _mm256_dpbusd_avx_epi32(sum.b, x, w.b)};
  }
  static TFORMER_INLINE I dot(I sum, Quad x, Nibbles w) {
    return {_mm256_dpbusd_avx_epi32(sum.a, w.a, x), _mm256_dpbusd_avx_epi32(sum.b, w.b, x)};
  }
  /// Of 8 inputs: one sum, or two, which are added later.
  static TFORMER_INLINE void dots(I& a, I& b, Quad x, Nibbles w, Quad y, Nibbles v) {
    a = dot(a, x, w);
    b = dot(b, y, v);
  }
};
#endif

}  // namespace
}  // namespace tformer::kernels
