// 16 lanes in four registers of NEON, which every ARM64 processor has.
#pragma once

#include <arm_neon.h>

#include <cmath>
#include <cstdint>
#include <cstring>

#include "kernels/kernels.hpp"
#include "kernels/mathematics.hpp"

namespace tformer::kernels {
namespace {

/// All but products of integers, see neon_product.hpp.
struct NeonLanes {
  struct F {
    float32x4_t a, b, c, d;
  };
  struct I {
    int32x4_t a, b, c, d;
  };
  struct Mask {
    uint32x4_t a, b, c, d;
  };
  // How much is worked on at once, see product.hpp and attention.hpp: of 32 registers, 16 to 24 are sums.
  static constexpr int float_rows = 5, float_panels = 1, one_row_panels = 4;
  static constexpr int columns = 1, queries = 4, key_blocks = 1, few_queries = 1, few_blocks = 1;

  static TFORMER_INLINE F load(const float* p) { return {vld1q_f32(p), vld1q_f32(p + 4), vld1q_f32(p + 8), vld1q_f32(p + 12)}; }
  /// 8 numbers, zeros behind them.
  static TFORMER_INLINE F load_half(const float* p) {
    return {vld1q_f32(p), vld1q_f32(p + 4), vdupq_n_f32(0), vdupq_n_f32(0)};
  }
  static TFORMER_INLINE F load_part(const float* p, std::int64_t n) {
    float numbers[16] = {};
    std::memcpy(numbers, p, static_cast<std::size_t>(n) * sizeof(float));
    return load(numbers);
  }
  static TFORMER_INLINE void store(float* p, F x) {
    vst1q_f32(p, x.a);
    vst1q_f32(p + 4, x.b);
    vst1q_f32(p + 8, x.c);
    vst1q_f32(p + 12, x.d);
  }
  static TFORMER_INLINE void store_part(float* p, F x, std::int64_t n) {
    float numbers[16];
    store(numbers, x);
    std::memcpy(p, numbers, static_cast<std::size_t>(n) * sizeof(float));
  }
  static TFORMER_INLINE F load(const Bf16* p) { return {widen(p), widen(p + 4), widen(p + 8), widen(p + 12)}; }
  static TFORMER_INLINE F load_half(const Bf16* p) { return {widen(p), widen(p + 4), vdupq_n_f32(0), vdupq_n_f32(0)}; }
  static TFORMER_INLINE void store(Bf16* p, F x) {
    auto* to = reinterpret_cast<std::uint16_t*>(p);
    vst1q_u16(to, vcombine_u16(narrow(x.a), narrow(x.b)));
    vst1q_u16(to + 8, vcombine_u16(narrow(x.c), narrow(x.d)));
  }
  static TFORMER_INLINE void store_part(Bf16* p, F x, std::int64_t n) {
    Bf16 numbers[16];
    store(numbers, x);
    std::memcpy(p, numbers, static_cast<std::size_t>(n) * sizeof(Bf16));
  }
  static TFORMER_INLINE F set(float x) { return {vdupq_n_f32(x), vdupq_n_f32(x), vdupq_n_f32(x), vdupq_n_f32(x)}; }
  static TFORMER_INLINE F add(F x, F y) {
    return {vaddq_f32(x.a, y.a), vaddq_f32(x.b, y.b), vaddq_f32(x.c, y.c), vaddq_f32(x.d, y.d)};
  }
  static TFORMER_INLINE F sub(F x, F y) {
    return {vsubq_f32(x.a, y.a), vsubq_f32(x.b, y.b), vsubq_f32(x.c, y.c), vsubq_f32(x.d, y.d)};
  }
  static TFORMER_INLINE F mul(F x, F y) {
    return {vmulq_f32(x.a, y.a), vmulq_f32(x.b, y.b), vmulq_f32(x.c, y.c), vmulq_f32(x.d, y.d)};
  }
  static TFORMER_INLINE F div(F x, F y) {
    return {vdivq_f32(x.a, y.a), vdivq_f32(x.b, y.b), vdivq_f32(x.c, y.c), vdivq_f32(x.d, y.d)};
  }
  static TFORMER_INLINE F sqrt(F x) { return {vsqrtq_f32(x.a), vsqrtq_f32(x.b), vsqrtq_f32(x.c), vsqrtq_f32(x.d)}; }
  static TFORMER_INLINE F fma(F x, F y, F z) {
    return {vfmaq_f32(z.a, x.a, y.a), vfmaq_f32(z.b, x.b, y.b), vfmaq_f32(z.c, x.c, y.c), vfmaq_f32(z.d, x.d, y.d)};
  }
  static TFORMER_INLINE F fnma(F x, F y, F z) {
    return {vfmsq_f32(z.a, x.a, y.a), vfmsq_f32(z.b, x.b, y.b), vfmsq_f32(z.c, x.c, y.c), vfmsq_f32(z.d, x.d, y.d)};
  }
  /// Not NEON's own: of a NaN and a number those make NaN, and of zeros they look at the sign.
  static TFORMER_INLINE F max(F x, F y) { return {larger(x.a, y.a), larger(x.b, y.b), larger(x.c, y.c), larger(x.d, y.d)}; }
  static TFORMER_INLINE F min(F x, F y) {
    return {smaller(x.a, y.a), smaller(x.b, y.b), smaller(x.c, y.c), smaller(x.d, y.d)};
  }
  static TFORMER_INLINE Mask less(F x, F y) {
    return {vcltq_f32(x.a, y.a), vcltq_f32(x.b, y.b), vcltq_f32(x.c, y.c), vcltq_f32(x.d, y.d)};
  }
  static TFORMER_INLINE F select(Mask m, F x, F y) {
    return {vbslq_f32(m.a, x.a, y.a), vbslq_f32(m.b, x.b, y.b), vbslq_f32(m.c, x.c, y.c), vbslq_f32(m.d, x.d, y.d)};
  }
  static TFORMER_INLINE F first(F x, F y, std::int64_t n) { return select(until(n), x, y); }
  static TFORMER_INLINE F abs(F x) { return {vabsq_f32(x.a), vabsq_f32(x.b), vabsq_f32(x.c), vabsq_f32(x.d)}; }
  static TFORMER_INLINE F copysign(F x, F from) {
    const uint32x4_t sign = vdupq_n_u32(0x80000000U);
    return select({sign, sign, sign, sign}, from, x);
  }
  static TFORMER_INLINE F scale(F x, F t) {
    return {scaled(x.a, t.a), scaled(x.b, t.b), scaled(x.c, t.c), scaled(x.d, t.d)};
  }
  static TFORMER_INLINE F exponent(F x) { return {power(x.a), power(x.b), power(x.c), power(x.d)}; }
  static TFORMER_INLINE F mantissa(F x) { return {fraction(x.a), fraction(x.b), fraction(x.c), fraction(x.d)}; }
  static TFORMER_INLINE I round(F x) {
    return {vcvtnq_s32_f32(x.a), vcvtnq_s32_f32(x.b), vcvtnq_s32_f32(x.c), vcvtnq_s32_f32(x.d)};
  }
  static TFORMER_INLINE F floats(I x) {
    return {vcvtq_f32_s32(x.a), vcvtq_f32_s32(x.b), vcvtq_f32_s32(x.c), vcvtq_f32_s32(x.d)};
  }

  static TFORMER_INLINE I load_ints(const std::int32_t* p) {
    return {vld1q_s32(p), vld1q_s32(p + 4), vld1q_s32(p + 8), vld1q_s32(p + 12)};
  }
  static TFORMER_INLINE void store_ints(std::int32_t* p, I x) {
    vst1q_s32(p, x.a);
    vst1q_s32(p + 4, x.b);
    vst1q_s32(p + 8, x.c);
    vst1q_s32(p + 12, x.d);
  }
  static TFORMER_INLINE I set_int(std::int32_t x) { return {vdupq_n_s32(x), vdupq_n_s32(x), vdupq_n_s32(x), vdupq_n_s32(x)}; }
  static TFORMER_INLINE I add_ints(I x, I y) {
    return {vaddq_s32(x.a, y.a), vaddq_s32(x.b, y.b), vaddq_s32(x.c, y.c), vaddq_s32(x.d, y.d)};
  }
  static TFORMER_INLINE I sub_ints(I x, I y) {
    return {vsubq_s32(x.a, y.a), vsubq_s32(x.b, y.b), vsubq_s32(x.c, y.c), vsubq_s32(x.d, y.d)};
  }
  static TFORMER_INLINE I mul_ints(I x, I y) {
    return {vmulq_s32(x.a, y.a), vmulq_s32(x.b, y.b), vmulq_s32(x.c, y.c), vmulq_s32(x.d, y.d)};
  }
  static TFORMER_INLINE void store_bytes(void* p, I x) { vst1q_u8(static_cast<std::uint8_t*>(p), low_bytes(x)); }
  static TFORMER_INLINE void store_bytes_part(void* p, I x, std::int64_t n) {
    std::uint8_t bytes[16];
    vst1q_u8(bytes, low_bytes(x));
    std::memcpy(p, bytes, static_cast<std::size_t>(n));
  }
  static TFORMER_INLINE F load_bytes(const std::int8_t* p) {
    const int8x16_t bytes = vld1q_s8(p);
    const int16x8_t low = vmovl_s8(vget_low_s8(bytes)), high = vmovl_high_s8(bytes);
    return floats({vmovl_s16(vget_low_s16(low)), vmovl_high_s16(low), vmovl_s16(vget_low_s16(high)), vmovl_high_s16(high)});
  }
  static TFORMER_INLINE F load_bytes_part(const std::int8_t* p, std::int64_t n) {
    std::int8_t bytes[16] = {};
    std::memcpy(bytes, p, static_cast<std::size_t>(n));
    return load_bytes(bytes);
  }
  static TFORMER_INLINE F even(const void* p) { return {even_of(p, 0), even_of(p, 1), even_of(p, 2), even_of(p, 3)}; }
  static TFORMER_INLINE F odd(const void* p) { return {odd_of(p, 0), odd_of(p, 1), odd_of(p, 2), odd_of(p, 3)}; }

  static TFORMER_INLINE float sum(F x) {
    const float32x4_t four = fours(x);
    const float32x2_t two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
    return vget_lane_f32(two, 0) + vget_lane_f32(two, 1);
  }
  static TFORMER_INLINE float largest(F x) {
    const float32x4_t four = larger(larger(x.a, x.c), larger(x.b, x.d));
    const float32x4_t two = larger(four, vextq_f32(four, four, 2));
    const float first = vgetq_lane_f32(two, 0), second = vgetq_lane_f32(two, 1);
    return first > second ? first : second;
  }
  static TFORMER_INLINE std::int32_t sum_ints(I x) { return vaddvq_s32(vaddq_s32(vaddq_s32(x.a, x.b), vaddq_s32(x.c, x.d))); }
  /// All 16 trees: the last two steps of four at once.
  static TFORMER_INLINE F sums(const F* x) { return {four_sums(x), four_sums(x + 4), four_sums(x + 8), four_sums(x + 12)}; }
  static TFORMER_INLINE void transpose(F* x) {
    float32x4_t parts[16][4];
    TFORMER_UNROLL for (int i = 0; i < 4; ++i) {  // of four rows, all columns
      transpose_four(x[4 * i].a, x[4 * i + 1].a, x[4 * i + 2].a, x[4 * i + 3].a, parts, 0, i);
      transpose_four(x[4 * i].b, x[4 * i + 1].b, x[4 * i + 2].b, x[4 * i + 3].b, parts, 4, i);
      transpose_four(x[4 * i].c, x[4 * i + 1].c, x[4 * i + 2].c, x[4 * i + 3].c, parts, 8, i);
      transpose_four(x[4 * i].d, x[4 * i + 1].d, x[4 * i + 2].d, x[4 * i + 3].d, parts, 12, i);
    }
    TFORMER_UNROLL for (int i = 0; i < 16; ++i) x[i] = {parts[i][0], parts[i][1], parts[i][2], parts[i][3]};
  }
  static TFORMER_INLINE std::uint32_t at_least(F x, F limit) {
    const uint32x4_t bits = {1, 2, 4, 8};
    const uint32x4_t a = vandq_u32(vcgeq_f32(x.a, limit.a), bits), b = vandq_u32(vcgeq_f32(x.b, limit.b), vshlq_n_u32(bits, 4));
    const uint32x4_t c = vandq_u32(vcgeq_f32(x.c, limit.c), vshlq_n_u32(bits, 8));
    const uint32x4_t d = vandq_u32(vcgeq_f32(x.d, limit.d), vshlq_n_u32(bits, 12));
    return vaddvq_u32(vorrq_u32(vorrq_u32(a, b), vorrq_u32(c, d)));
  }
  static TFORMER_INLINE void prefetch(const void* p) { __builtin_prefetch(p, 0, 3); }
  static TFORMER_INLINE void prefetch_far(const void* p) { __builtin_prefetch(p, 0, 2); }

 private:
  static TFORMER_INLINE Mask until(std::int64_t n) {
    const int32x4_t end = vdupq_n_s32(static_cast<std::int32_t>(n)), a = {0, 1, 2, 3}, four = vdupq_n_s32(4);
    const int32x4_t b = vaddq_s32(a, four), c = vaddq_s32(b, four), d = vaddq_s32(c, four);
    return {vcgtq_s32(end, a), vcgtq_s32(end, b), vcgtq_s32(end, c), vcgtq_s32(end, d)};
  }
  static TFORMER_INLINE float32x4_t larger(float32x4_t x, float32x4_t y) { return vbslq_f32(vcgtq_f32(x, y), x, y); }
  static TFORMER_INLINE float32x4_t smaller(float32x4_t x, float32x4_t y) { return vbslq_f32(vcltq_f32(x, y), x, y); }
  static TFORMER_INLINE float32x4_t scaled(float32x4_t x, float32x4_t t) {
    return vreinterpretq_f32_u32(vaddq_u32(vreinterpretq_u32_f32(x), vshlq_n_u32(vreinterpretq_u32_f32(t), 23)));
  }
  static TFORMER_INLINE float32x4_t power(float32x4_t x) {
    const int32x4_t bits = vreinterpretq_s32_u32(vshrq_n_u32(vreinterpretq_u32_f32(x), 23));
    return vcvtq_f32_s32(vsubq_s32(bits, vdupq_n_s32(127)));
  }
  static TFORMER_INLINE float32x4_t fraction(float32x4_t x) {
    const uint32x4_t low = vandq_u32(vreinterpretq_u32_f32(x), vdupq_n_u32(0x7FFFFFU));
    return vreinterpretq_f32_u32(vorrq_u32(low, vdupq_n_u32(0x3F800000U)));
  }
  static TFORMER_INLINE float32x4_t widen(const Bf16* p) {
    return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(reinterpret_cast<const std::uint16_t*>(p)), 16));
  }
  /// To the nearest bf16.
  static TFORMER_INLINE uint16x4_t narrow(float32x4_t x) {
    const uint32x4_t whole = vreinterpretq_u32_f32(x), odd = vandq_u32(vshrq_n_u32(whole, 16), vdupq_n_u32(1));
    const uint32x4_t near = vaddq_u32(vaddq_u32(whole, vdupq_n_u32(0x7FFF)), odd);
    const uint32x4_t quiet = vorrq_u32(whole, vdupq_n_u32(0x400000));
    return vshrn_n_u32(vbslq_u32(vceqq_f32(x, x), near, quiet), 16);
  }
  static TFORMER_INLINE uint8x16_t low_bytes(I x) {
    const int16x8_t low = vuzp1q_s16(vreinterpretq_s16_s32(x.a), vreinterpretq_s16_s32(x.b));
    const int16x8_t high = vuzp1q_s16(vreinterpretq_s16_s32(x.c), vreinterpretq_s16_s32(x.d));
    return vuzp1q_u8(vreinterpretq_u8_s16(low), vreinterpretq_u8_s16(high));
  }
  static TFORMER_INLINE uint32x4_t four_words(const void* p, int i) {
    return vld1q_u32(static_cast<const std::uint32_t*>(p) + 4 * i);
  }
  static TFORMER_INLINE float32x4_t even_of(const void* p, int i) {
    return vreinterpretq_f32_u32(vshlq_n_u32(four_words(p, i), 16));
  }
  static TFORMER_INLINE float32x4_t odd_of(const void* p, int i) {
    return vreinterpretq_f32_u32(vandq_u32(four_words(p, i), vdupq_n_u32(0xFFFF0000U)));
  }
  /// The first two steps of a tree.
  static TFORMER_INLINE float32x4_t fours(F x) { return vaddq_f32(vaddq_f32(x.a, x.c), vaddq_f32(x.b, x.d)); }
  static TFORMER_INLINE float32x4_t twos(float32x4_t x, float32x4_t y) {
    const float64x2_t first = vreinterpretq_f64_f32(x), second = vreinterpretq_f64_f32(y);
    return vaddq_f32(vreinterpretq_f32_f64(vzip1q_f64(first, second)), vreinterpretq_f32_f64(vzip2q_f64(first, second)));
  }
  static TFORMER_INLINE float32x4_t four_sums(const F* x) {
    return vpaddq_f32(twos(fours(x[0]), fours(x[1])), twos(fours(x[2]), fours(x[3])));
  }
  /// Column i of four rows becomes parts[column + i][to].
  static TFORMER_INLINE void transpose_four(float32x4_t p, float32x4_t q, float32x4_t r, float32x4_t s,
                                            float32x4_t (&parts)[16][4], int column, int to) {
    const float64x2_t pq = vreinterpretq_f64_f32(vtrn1q_f32(p, q)), pq2 = vreinterpretq_f64_f32(vtrn2q_f32(p, q));
    const float64x2_t rs = vreinterpretq_f64_f32(vtrn1q_f32(r, s)), rs2 = vreinterpretq_f64_f32(vtrn2q_f32(r, s));
    parts[column][to] = vreinterpretq_f32_f64(vzip1q_f64(pq, rs));
    parts[column + 1][to] = vreinterpretq_f32_f64(vzip1q_f64(pq2, rs2));
    parts[column + 2][to] = vreinterpretq_f32_f64(vzip2q_f64(pq, rs));
    parts[column + 3][to] = vreinterpretq_f32_f64(vzip2q_f64(pq2, rs2));
  }
};

}  // namespace
}  // namespace tformer::kernels
