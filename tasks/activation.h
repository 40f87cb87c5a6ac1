// Activations and their derivatives on vectors.
#pragma once
#include "activation_kinds.h"
#include "common.h"
#include "exponential.h"

namespace nntile {

inline constexpr double kSqrt2OverPi = 0.79788456080286535588, kCubic = 0.044715;
inline constexpr double kSqrtHalf = 0.70710678118654752440, kInvSqrt2Pi = 0.39894228040143267794;

// A number `value` from 0 to 1, and `rest`, which is 1 - value. `value` has the error of an approximate reciprocal.
// Derivatives multiply `rest` by large numbers, so `rest` is not computed as a difference.
template <class T>
struct Gate {
  Vec<T> value, rest;
};

template <class T>
inline Gate<T> logistic_gate(const Vec<T>& x) {
  const auto e = exp_of(x.neg()), value = reciprocal_of(Vec<T>(T(1)) + e);
  return {value, e * value};
}

template <class T>
inline Vec<T> logistic(const Vec<T>& x) {
  return logistic_gate(x).value;
}

// Returns (1 + tanh(u)) / 2 with u = sqrt(2/pi) (x + 0.044715 x^3), as a logistic function of 2u, with one exponential.
template <class T>
inline Gate<T> gelu_new_gate(const Vec<T>& x) {
  return logistic_gate(Vec<T>(T(2 * kSqrt2OverPi)) * x * at::vec::fmadd(Vec<T>(T(kCubic)) * x, x, Vec<T>(T(1))));
}

// Returns tanh(log(1 + e^x)). Computed from a = e^-|x|, which never overflows: (1 + 2a) / (1 + 2a + 2a^2) for positive
// x, else (a^2 + 2a) / (a^2 + 2a + 2).
template <class T>
inline Vec<T> mish_gate(const Vec<T>& x) {
  const Vec<T> one(T(1)), two(T(2));
  const auto a = x.abs().neg().exp(), positive = x > Vec<T>(T(0));
  const auto top = Vec<T>::blendv(at::vec::fmadd(a, a, two * a), at::vec::fmadd(two, a, one), positive);
  return top / (top + two * Vec<T>::blendv(one, a * a, positive));
}

template <class T>
inline Vec<T> activate(int kind, const Vec<T>& x) {
  const Vec<T> zero(T(0)), one(T(1));
  switch (kind) {
    case kRelu: return at::vec::maximum(x, zero);
    case kGeluNew: return x * gelu_new_gate(x).value;
    case kTanh: return x.tanh();
    case kSilu: return x * logistic(x);
    case kQuickGelu: return x * logistic(Vec<T>(T(kQuick)) * x);
    case kRelu2: return x * at::vec::maximum(x, zero);
    case kRelu6: return at::vec::clamp(x, zero, Vec<T>(T(6)));
    case kLeakyRelu: return at::vec::maximum(x, Vec<T>(T(kLeak)) * x);
    case kHardswish: return x * at::vec::clamp(x + Vec<T>(T(3)), zero, Vec<T>(T(6))) / Vec<T>(T(6));
    case kMish: return x * mish_gate(x);
    case kSigmoid: return logistic(x);
    default: return x * Vec<T>(T(0.5)) * (one + (x * Vec<T>(T(kSqrtHalf))).erf());
  }
}

template <class T>
inline Vec<T> derivative(int kind, const Vec<T>& x) {
  const Vec<T> zero(T(0)), one(T(1));
  switch (kind) {
    case kRelu: return (x > zero) & one;
    case kGeluNew: {
      const auto gate = gelu_new_gate(x);
      const auto du2 = Vec<T>(T(2 * kSqrt2OverPi)) * at::vec::fmadd(Vec<T>(T(3 * kCubic)) * x, x, one);
      return at::vec::fmadd(x * du2 * gate.value, gate.rest, gate.value);
    }
    case kTanh: {
      const auto y = x.tanh();
      return one - y * y;
    }
    case kSilu:
    case kQuickGelu: {
      const Vec<T> slope(T(kind == kSilu ? 1 : kQuick));
      const auto gate = logistic_gate(slope * x);
      return at::vec::fmadd(slope * x * gate.value, gate.rest, gate.value);
    }
    case kRelu2: return Vec<T>(T(2)) * at::vec::maximum(x, zero);
    case kRelu6: return (x > zero) & (x < Vec<T>(T(6))) & one;
    case kLeakyRelu: return Vec<T>::blendv(Vec<T>(T(kLeak)), one, x > zero);
    case kHardswish: {
      const auto middle = Vec<T>::blendv(at::vec::fmadd(x, Vec<T>(T(1.0 / 3)), Vec<T>(T(0.5))), one, x >= Vec<T>(T(3)));
      return middle & (x > Vec<T>(T(-3)));
    }
    case kMish: {
      const auto gate = mish_gate(x);
      return at::vec::fmadd(x * logistic(x), one - gate * gate, gate);
    }
    case kSigmoid: {
      const auto a = exp_of(x.abs().neg());
      return a / ((one + a) * (one + a));
    }
    default: {
      const auto cdf = Vec<T>(T(0.5)) * (one + (x * Vec<T>(T(kSqrtHalf))).erf());
      const auto pdf = Vec<T>(T(kInvSqrt2Pi)) * (x * x * Vec<T>(T(-0.5))).exp();
      return at::vec::fmadd(x, pdf, cdf);
    }
  }
}

}  // namespace nntile
