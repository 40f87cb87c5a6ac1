// Powers of two on vectors, for exponentials of softmax and attention.
#pragma once
#include "common.h"

namespace nntile {

constexpr double kLog2E = 1.4426950408889634;

// Returns 2^x. In fp32 the relative error is at most 2e-7: a polynomial of degree 5 (minimax on [-1/2, 1/2]) for the
// fraction, and the exponent by bits. Results below 2^-126 become 2^-126.
template <class T>
inline Vec<T> exp2_of(const Vec<T>& x) {
#if defined(CPU_CAPABILITY_AVX512) || defined(CPU_CAPABILITY_AVX2)
  if constexpr (std::is_same_v<T, float>) {
#ifdef CPU_CAPABILITY_AVX512
    const Vec<T> y = _mm512_max_ps(Vec<T>(-126.0f), x);  // NaN if x is NaN
#else
    const Vec<T> y = _mm256_max_ps(Vec<T>(-126.0f), x);
#endif
    const auto whole = y.round(), r = y - whole;
    auto p = at::vec::fmadd(Vec<T>(1.3264727e-3f), r, Vec<T>(9.671513e-3f));
    p = at::vec::fmadd(p, r, Vec<T>(5.5507336e-2f));
    p = at::vec::fmadd(p, r, Vec<T>(2.4022242e-1f));
    p = at::vec::fmadd(p, r, Vec<T>(6.93147e-1f));
    p = at::vec::fmadd(p, r, Vec<T>(1.0f));
#ifdef CPU_CAPABILITY_AVX512
    return _mm512_scalef_ps(p, whole);
#else
    const __m256i exponent = _mm256_slli_epi32(_mm256_cvtps_epi32(whole), 23);
    return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(p), exponent));
#endif
  }
#endif
  return (x * Vec<T>(static_cast<T>(1 / kLog2E))).exp_u20();
}

}  // namespace nntile
