// exp, log and erf for lanes: fused multiply-adds in one order, so that every instruction set gives the same bits.
// The coefficients are minimax fits; errors against double are tested (engines/tests/kernels.cpp).
#pragma once

#define TFORMER_INLINE inline __attribute__((always_inline))
// Sums stay in registers only if all loops over them are gone.
#ifdef __clang__
#define TFORMER_UNROLL _Pragma("clang loop unroll(full)")
#else
#define TFORMER_UNROLL _Pragma("GCC unroll 64")
#endif
#define TFORMER_LAMBDA __attribute__((always_inline))

namespace tformer::kernels {
namespace {

/// c[n-1] x^(n-1) + … + c[0].
template <class V, int n>
TFORMER_INLINE typename V::F polynomial(typename V::F x, const float (&c)[n]) {
  typename V::F y = V::set(c[n - 1]);
  for (int i = n - 2; i >= 0; --i) y = V::fma(y, x, V::set(c[i]));
  return y;
}

/// exp of numbers up to 88, where softmax needs no more. Within 2 units in the last place; 0 below -87. NaN stays.
template <class V>
TFORMER_INLINE typename V::F exp_below(typename V::F x) {
  constexpr float least = -87.0F, magic = 12582912.0F;  // 1.5 * 2^23: adding it rounds to an integer
  constexpr float c[] = {0.49999994F, 0.1666652F, 0.041668393F, 0.008368781F, 0.0013814467F};
  const typename V::F shifted = V::fma(x, V::set(1.44269504F), V::set(magic));
  const typename V::F n = V::sub(shifted, V::set(magic));
  typename V::F r = V::fnma(n, V::set(0.693359375F), x);  // log(2) in two numbers, the first with few bits
  r = V::fnma(n, V::set(-2.12194440e-4F), r);
  const typename V::F y = V::add(V::fma(polynomial<V>(r, c), V::mul(r, r), r), V::set(1.0F));
  return V::select(V::less(x, V::set(least)), V::set(0.0F), V::scale(y, shifted));
}

/// exp, e^88 above 88.
template <class V>
TFORMER_INLINE typename V::F exp(typename V::F x) {
  return exp_below<V>(V::min(V::set(88.0F), x));
}

/// Of positive normal numbers, within 2 units in the last place, or 1e-7 around 1.
template <class V>
TFORMER_INLINE typename V::F log(typename V::F x) {
  constexpr float c[] = {0.6666666F, 0.4000034F, 0.2853692F, 0.2358999F};
  typename V::F n = V::exponent(x), m = V::mantissa(x);
  const typename V::Mask low = V::less(m, V::set(1.41421356F));  // |log(m)| at most log(2) / 2
  m = V::select(low, m, V::mul(m, V::set(0.5F)));
  n = V::select(low, n, V::add(n, V::set(1.0F)));
  const typename V::F s = V::div(V::sub(m, V::set(1.0F)), V::add(m, V::set(1.0F)));  // log(m) = 2 atanh(s)
  const typename V::F z = V::mul(s, s);
  typename V::F y = V::fma(V::mul(polynomial<V>(z, c), z), s, V::add(s, s));
  y = V::fma(n, V::set(-2.12194440e-4F), y);
  return V::add(V::fma(n, V::set(0.693359375F), y), V::sub(x, x));  // NaN stays NaN, whatever its bits
}

/// Within 2e-7.
template <class V>
TFORMER_INLINE typename V::F erf(typename V::F x) {
  constexpr float near[] = {0.12837917F,  -0.37612638F,   0.11283783F,   -0.026865445F,
                            0.005221075F, -0.0008484712F, 0.00011270546F, -9.6801405e-06F};
  constexpr float far[] = {1.1285849F,    0.63547546F,     0.105547346F,    -0.022968229F,
                           0.0031084968F, -0.00011303124F, -3.3325417e-05F, 3.9467513e-06F};
  const typename V::F t = V::min(V::set(4.0F), V::abs(x));  // erf(4) is 1 in fp32
  const typename V::F small = V::fma(polynomial<V>(V::mul(x, x), near), x, x);
  const typename V::F q = V::mul(polynomial<V>(t, far), V::sub(V::set(0.0F), t));
  const typename V::F large = V::copysign(V::sub(V::set(1.0F), exp<V>(q)), x);
  return V::select(V::less(V::abs(x), V::set(1.0F)), small, large);
}

/// 1 / (1 + exp(-x))
template <class V>
TFORMER_INLINE typename V::F sigmoid(typename V::F x) {
  const typename V::F one = V::set(1.0F);
  return V::div(one, V::add(one, exp<V>(V::sub(V::set(0.0F), x))));
}

}  // namespace
}  // namespace tformer::kernels
