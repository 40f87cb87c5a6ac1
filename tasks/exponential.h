// Exponentials and reciprocals on vectors: in fp32 about twice as fast as exp_u20 and the division of ATen's vectors.
#pragma once
#include "common.h"

namespace nntile {

constexpr double kLog2E = 1.4426950408889634;

#if defined(CPU_CAPABILITY_AVX512)
// Returns x within the limits; NaN if x is NaN.
inline Vec<float> within(const Vec<float>& x, float least, float most) {
  return _mm512_min_ps(Vec<float>(most), _mm512_max_ps(Vec<float>(least), x));
}
// Returns x 2^n for whole n; 0 where `from` is less than `least`.
inline Vec<float> times_power(const Vec<float>& x, const Vec<float>& n, const Vec<float>& from, float least) {
  return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(from, Vec<float>(least), _CMP_NLT_UQ), x, n);
}
// Returns 1 / x with a relative error of 2^-11 or less.
inline Vec<float> rough_reciprocal(const Vec<float>& x) { return _mm512_rcp14_ps(x); }
#elif defined(CPU_CAPABILITY_AVX2)
inline Vec<float> within(const Vec<float>& x, float least, float most) {
  return _mm256_min_ps(Vec<float>(most), _mm256_max_ps(Vec<float>(least), x));
}
inline Vec<float> times_power(const Vec<float>& x, const Vec<float>& n, const Vec<float>& from, float least) {
  const auto power = _mm256_add_epi32(_mm256_castps_si256(x), _mm256_slli_epi32(_mm256_cvtps_epi32(n), 23));
  return _mm256_and_ps(_mm256_castsi256_ps(power), _mm256_cmp_ps(from, Vec<float>(least), _CMP_NLT_UQ));
}
inline Vec<float> rough_reciprocal(const Vec<float>& x) { return _mm256_rcp_ps(x); }
#endif

// Returns 2^x. In fp32 results below 2^-126 become 0, results above 2^126 become 2^126, and other relative errors are
// at most 2e-7: a polynomial of degree 5 (minimax on [-1/2, 1/2]) for the fraction, and the exponent by bits.
template <class T>
inline Vec<T> exp2_of(const Vec<T>& x) {
#if defined(CPU_CAPABILITY_AVX512) || defined(CPU_CAPABILITY_AVX2)
  if constexpr (std::is_same_v<T, float>) {
    constexpr float most = 126.0f;
    const auto y = within(x, -most, most), whole = y.round(), r = y - whole;
    auto p = at::vec::fmadd(Vec<T>(1.3264727e-3f), r, Vec<T>(9.671513e-3f));
    p = at::vec::fmadd(p, r, Vec<T>(5.5507336e-2f));
    p = at::vec::fmadd(p, r, Vec<T>(2.4022242e-1f));
    p = at::vec::fmadd(p, r, Vec<T>(6.93147e-1f));
    return times_power(at::vec::fmadd(p, r, Vec<T>(1.0f)), whole, x, -most);
  }
#endif
  return (x * Vec<T>(static_cast<T>(1 / kLog2E))).exp_u20();
}

// Returns e^x, with the limits of exp2_of. In fp32 the relative error is about 1e-7 + |x| 6e-8, because x log2(e) is
// rounded.
template <class T>
inline Vec<T> exp_of(const Vec<T>& x) {
  return exp2_of(x * Vec<T>(static_cast<T>(kLog2E)));
}

// Returns 1 / x. In fp32 the relative error is at most 2e-7 for x from 2^-125 to 2^125.
template <class T>
inline Vec<T> reciprocal_of(const Vec<T>& x) {
#if defined(CPU_CAPABILITY_AVX512) || defined(CPU_CAPABILITY_AVX2)
  if constexpr (std::is_same_v<T, float>) {  // a step of Newton's method doubles the number of right bits
    const auto rough = rough_reciprocal(x);
    return rough * (Vec<T>(2.0f) - x * rough);
  }
#endif
  return Vec<T>(T(1)) / x;
}

}  // namespace nntile
