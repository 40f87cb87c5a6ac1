// Activations and their derivatives on vectors.
#pragma once
#include "activation_kinds.h"
#include "common.h"

namespace nntile {

inline constexpr double kSqrt2OverPi = 0.79788456080286535588, kCubic = 0.044715;
inline constexpr double kSqrtHalf = 0.70710678118654752440, kInvSqrt2Pi = 0.39894228040143267794;

template <class T>
inline Vec<T> logistic(const Vec<T>& x) {
  const Vec<T> one(T(1));
  return one / (one + x.neg().exp_u20());
}

// (1 + tanh(u)) / 2 with u = sqrt(2/pi) (x + 0.044715 x^3), as a logistic function of 2u, with one exponential.
template <class T>
inline Vec<T> gelu_new_gate(const Vec<T>& x) {
  return logistic(Vec<T>(T(2 * kSqrt2OverPi)) * x * at::vec::fmadd(Vec<T>(T(kCubic)) * x, x, Vec<T>(T(1))));
}

template <class T>
inline Vec<T> activate(int kind, const Vec<T>& x) {
  if (kind == kRelu) return at::vec::maximum(x, Vec<T>(T(0)));
  if (kind == kGeluNew) return x * gelu_new_gate(x);
  if (kind == kTanh) return x.tanh();
  if (kind == kSilu) return x * logistic(x);
  if (kind == kQuickGelu) return x * logistic(Vec<T>(T(kQuick)) * x);
  return x * Vec<T>(T(0.5)) * (Vec<T>(T(1)) + (x * Vec<T>(T(kSqrtHalf))).erf());
}

template <class T>
inline Vec<T> derivative(int kind, const Vec<T>& x) {
  const Vec<T> one(T(1));
  if (kind == kRelu) return (x > Vec<T>(T(0))) & one;
  if (kind == kGeluNew) {
    const auto gate = gelu_new_gate(x);
    const auto du2 = Vec<T>(T(2 * kSqrt2OverPi)) * at::vec::fmadd(Vec<T>(T(3 * kCubic)) * x, x, one);
    return at::vec::fmadd(x * du2 * gate, one - gate, gate);
  }
  if (kind == kTanh) {
    const auto y = x.tanh();
    return one - y * y;
  }
  if (kind == kSilu || kind == kQuickGelu) {
    const Vec<T> slope(T(kind == kSilu ? 1 : kQuick));
    const auto gate = logistic(slope * x);
    return at::vec::fmadd(slope * x * gate, one - gate, gate);
  }
  const auto cdf = Vec<T>(T(0.5)) * (one + (x * Vec<T>(T(kSqrtHalf))).erf());
  const auto pdf = Vec<T>(T(kInvSqrt2Pi)) * (x * x * Vec<T>(T(-0.5))).exp();
  return at::vec::fmadd(x, pdf, cdf);
}

}  // namespace nntile
