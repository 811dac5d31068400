// 16 lanes in one register of AVX-512.
#pragma once

#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstring>

#include "kernels/kernels.hpp"
#include "kernels/mathematics.hpp"

namespace tformer::kernels {
namespace {

struct Avx512Lanes {
  using F = __m512;
  using I = __m512i;
  using Mask = __mmask16;
  using Weights = __m512i;
  struct Nibbles {
    __m512i v;
  };
  using Quad = __m512i;
  static constexpr int rows = 8, panels = 2, lines = 4, one_row_chains = 4;
  static constexpr int float_rows = 8, float_panels = 2, one_row_panels = 8;
  static constexpr int int4_rows = 8, int4_panels = 3, one_row_int4_panels = 2;
  static constexpr int columns = 4, queries = 4, key_blocks = 2, few_queries = 2, few_blocks = 2;

  static TFORMER_INLINE __mmask16 until(std::int64_t n) { return static_cast<__mmask16>((1U << n) - 1U); }
  static TFORMER_INLINE F load(const float* p) { return _mm512_loadu_ps(p); }
  /// 8 numbers, zeros behind them.
  static TFORMER_INLINE F load_half(const float* p) { return _mm512_zextps256_ps512(_mm256_loadu_ps(p)); }
  static TFORMER_INLINE F load_part(const float* p, std::int64_t n) { return _mm512_maskz_loadu_ps(until(n), p); }
  static TFORMER_INLINE void store(float* p, F x) { _mm512_storeu_ps(p, x); }
  static TFORMER_INLINE void store_part(float* p, F x, std::int64_t n) { _mm512_mask_storeu_ps(p, until(n), x); }
  static TFORMER_INLINE F load(const Bf16* p) {
    return widen(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))));
  }
  static TFORMER_INLINE F load_half(const Bf16* p) {
    const __m256i halves = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return widen(_mm512_zextsi256_si512(halves));
  }
  static TFORMER_INLINE void store(Bf16* p, F x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow(x)); }
  static TFORMER_INLINE void store_part(Bf16* p, F x, std::int64_t n) { _mm256_mask_storeu_epi16(p, until(n), narrow(x)); }
  static TFORMER_INLINE F set(float x) { return _mm512_set1_ps(x); }
  static TFORMER_INLINE F add(F a, F b) { return _mm512_add_ps(a, b); }
  static TFORMER_INLINE F sub(F a, F b) { return _mm512_sub_ps(a, b); }
  static TFORMER_INLINE F mul(F a, F b) { return _mm512_mul_ps(a, b); }
  static TFORMER_INLINE F div(F a, F b) { return _mm512_div_ps(a, b); }
  static TFORMER_INLINE F sqrt(F a) { return _mm512_sqrt_ps(a); }
  static TFORMER_INLINE F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
  static TFORMER_INLINE F fnma(F a, F b, F c) { return _mm512_fnmadd_ps(a, b, c); }
  static TFORMER_INLINE F max(F a, F b) { return _mm512_max_ps(a, b); }
  static TFORMER_INLINE F min(F a, F b) { return _mm512_min_ps(a, b); }
  static TFORMER_INLINE Mask less(F a, F b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
  static TFORMER_INLINE F select(Mask m, F a, F b) { return _mm512_mask_blend_ps(m, b, a); }
  static TFORMER_INLINE F first(F a, F b, std::int64_t n) { return select(until(n), a, b); }
  static TFORMER_INLINE F abs(F a) { return _mm512_abs_ps(a); }
  static TFORMER_INLINE F copysign(F a, F sign) {
    const I signs = _mm512_set1_epi32(INT32_MIN);
    return _mm512_castsi512_ps(_mm512_ternarylogic_epi32(signs, _mm512_castps_si512(sign), _mm512_castps_si512(a), 0xCA));
  }
  static TFORMER_INLINE F scale(F x, F t) {
    return _mm512_castsi512_ps(
        _mm512_add_epi32(_mm512_castps_si512(x), _mm512_slli_epi32(_mm512_castps_si512(t), 23)));
  }
  static TFORMER_INLINE F exponent(F x) { return _mm512_getexp_ps(x); }
  static TFORMER_INLINE F mantissa(F x) { return _mm512_getmant_ps(x, _MM_MANT_NORM_1_2, _MM_MANT_SIGN_src); }
  static TFORMER_INLINE I round(F x) { return _mm512_cvtps_epi32(x); }
  static TFORMER_INLINE F floats(I x) { return _mm512_cvtepi32_ps(x); }

  static TFORMER_INLINE I load_ints(const std::int32_t* p) { return _mm512_loadu_si512(p); }
  static TFORMER_INLINE void store_ints(std::int32_t* p, I x) { _mm512_storeu_si512(p, x); }
  static TFORMER_INLINE I set_int(std::int32_t x) { return _mm512_set1_epi32(x); }
  static TFORMER_INLINE I add_ints(I a, I b) { return _mm512_add_epi32(a, b); }
  static TFORMER_INLINE I sub_ints(I a, I b) { return _mm512_sub_epi32(a, b); }
  static TFORMER_INLINE I mul_ints(I a, I b) { return _mm512_mullo_epi32(a, b); }
  static TFORMER_INLINE void store_bytes(void* p, I x) {
    _mm_storeu_si128(static_cast<__m128i*>(p), _mm512_cvtepi32_epi8(x));
  }
  static TFORMER_INLINE void store_bytes_part(void* p, I x, std::int64_t n) {
    _mm_mask_storeu_epi8(p, until(n), _mm512_cvtepi32_epi8(x));
  }
  static TFORMER_INLINE F load_bytes(const std::int8_t* p) {
    return floats(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
  }
  static TFORMER_INLINE F load_bytes_part(const std::int8_t* p, std::int64_t n) {
    return floats(_mm512_cvtepi8_epi32(_mm_maskz_loadu_epi8(until(n), p)));
  }
  static TFORMER_INLINE F even(const void* p) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(p), 16)); }
  static TFORMER_INLINE F odd(const void* p) {
    return _mm512_castsi512_ps(_mm512_and_si512(_mm512_loadu_si512(p), _mm512_set1_epi32(-65536)));
  }

  static TFORMER_INLINE float sum(F x) {
    const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
  }
  static TFORMER_INLINE float largest(F x) { return _mm512_reduce_max_ps(x); }
  static TFORMER_INLINE std::int32_t sum_ints(I x) { return _mm512_reduce_add_epi32(x); }
  /// All 16 trees at once: each step adds two halves of two vectors.
  static TFORMER_INLINE F sums(const F* x) {
    F a[8], b[4], c[2];
    for (int i = 0; i < 8; ++i) {  // of x[i] and x[i + 8]: lanes 0 to 7, and 8 to 15
      a[i] = add(_mm512_shuffle_f32x4(x[i], x[i + 8], 0x44), _mm512_shuffle_f32x4(x[i], x[i + 8], 0xEE));
    }
    for (int i = 0; i < 4; ++i) {  // of x[i], x[i + 8], x[i + 4], x[i + 12]: lanes 0 to 3, and 4 to 7
      b[i] = add(_mm512_shuffle_f32x4(a[i], a[i + 4], 0x88), _mm512_shuffle_f32x4(a[i], a[i + 4], 0xDD));
    }
    for (int i = 0; i < 2; ++i) {
      const __m512d low = _mm512_castps_pd(b[i]), high = _mm512_castps_pd(b[i + 2]);
      c[i] = add(_mm512_castpd_ps(_mm512_unpacklo_pd(low, high)), _mm512_castpd_ps(_mm512_unpackhi_pd(low, high)));
    }
    const F y = add(_mm512_shuffle_ps(c[0], c[1], 0x88), _mm512_shuffle_ps(c[0], c[1], 0xDD));
    return _mm512_permutexvar_ps(order(), y);
  }
  static TFORMER_INLINE void transpose(F* x) {
    F a[16], b[16];
    for (int i = 0; i < 16; i += 2) {
      a[i] = _mm512_unpacklo_ps(x[i], x[i + 1]);
      a[i + 1] = _mm512_unpackhi_ps(x[i], x[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {  // columns 0 to 3 of every 4, of rows i to i + 3
      for (int j = 0; j < 2; ++j) {
        const __m512d first = _mm512_castps_pd(a[i + j]), second = _mm512_castps_pd(a[i + 2 + j]);
        b[i + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(first, second));
        b[i + 2 * j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(first, second));
      }
    }
    for (int i = 0; i < 4; ++i) {
      const F low = _mm512_shuffle_f32x4(b[i], b[i + 4], 0x88), high = _mm512_shuffle_f32x4(b[i], b[i + 4], 0xDD);
      const F low2 = _mm512_shuffle_f32x4(b[i + 8], b[i + 12], 0x88), high2 = _mm512_shuffle_f32x4(b[i + 8], b[i + 12], 0xDD);
      x[i] = _mm512_shuffle_f32x4(low, low2, 0x88);
      x[i + 8] = _mm512_shuffle_f32x4(low, low2, 0xDD);
      x[i + 4] = _mm512_shuffle_f32x4(high, high2, 0x88);
      x[i + 12] = _mm512_shuffle_f32x4(high, high2, 0xDD);
    }
  }
  static TFORMER_INLINE std::uint32_t at_least(F x, F limit) { return _mm512_cmp_ps_mask(x, limit, _CMP_GE_OQ); }

  static TFORMER_INLINE Weights weights(const void* p) { return _mm512_loadu_si512(p); }
  static TFORMER_INLINE Quad unsigned_quad(const void* p) {
    std::int32_t x;
    std::memcpy(&x, p, 4);
    return _mm512_set1_epi32(x);
  }
  /// 64 inputs of a row, and 4 of them.
  using Inputs = const std::uint8_t*;
  static TFORMER_INLINE void widen_inputs(const std::uint8_t* p, Inputs& to) { to = p; }
  static TFORMER_INLINE Quad quad(Inputs inputs, int i) { return unsigned_quad(inputs + 4 * i); }
  static TFORMER_INLINE Quad signed_quad(const void* p) { return unsigned_quad(p); }
  static TFORMER_INLINE Nibbles low(const void* p) {
    return {_mm512_and_si512(_mm512_loadu_si512(p), _mm512_set1_epi8(15))};
  }
  static TFORMER_INLINE Nibbles high(const void* p) {
    return {_mm512_and_si512(_mm512_srli_epi16(_mm512_loadu_si512(p), 4), _mm512_set1_epi8(15))};
  }
  static TFORMER_INLINE I dot(I sum, Quad x, Weights w) {
    // As an intrinsic, GCC 12 copies sums to other registers and back.
    __asm__("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(x), "v"(w));
    return sum;
  }
  static TFORMER_INLINE I dot(I sum, Quad x, Nibbles w) { return dot(sum, w.v, x); }
  /// Of 8 inputs: one sum, or two, which are added later.
  static TFORMER_INLINE void dots(I& a, I& b, Quad x, Nibbles w, Quad y, Nibbles v) {
    a = dot(a, x, w);
    b = dot(b, y, v);
  }
  static TFORMER_INLINE void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }
  static TFORMER_INLINE void prefetch_far(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T1); }

 private:
  static TFORMER_INLINE F widen(I halves) { return _mm512_castsi512_ps(_mm512_slli_epi32(halves, 16)); }
  /// To the nearest bf16.
  static TFORMER_INLINE __m256i narrow(F x) {
    const I whole = _mm512_castps_si512(x), odd = _mm512_and_si512(_mm512_srli_epi32(whole, 16), _mm512_set1_epi32(1));
    const I near = _mm512_add_epi32(_mm512_add_epi32(whole, _mm512_set1_epi32(0x7FFF)), odd);
    const I quiet = _mm512_or_si512(whole, _mm512_set1_epi32(0x400000));
    const I found = _mm512_mask_blend_epi32(_mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), near, quiet);
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(found, 16));
  }
  /// Where `sums` leaves each sum.
  static TFORMER_INLINE I order() { return _mm512_setr_epi32(0, 2, 1, 3, 8, 10, 9, 11, 4, 6, 5, 7, 12, 14, 13, 15); }
};

}  // namespace
}  // namespace tformer::kernels
