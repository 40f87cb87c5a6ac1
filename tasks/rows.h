// Reductions and maps over one contiguous row, shared by softmax, cross-entropy and attention.
#pragma once
#include <algorithm>
#include <array>

#include "common.h"
#include "exponential.h"

namespace nntile {

template <class T>
T max_of(const T* x, int64_t n) {
  Vec<T> top(x[0]);
  for_vectors<T>(n, [&](int64_t k, int64_t count) {
    const auto v = load(x + k, count);
    top = at::vec::maximum(top, count == Vec<T>::size() ? v : Vec<T>::set(top, v, count));
  });
  return at::vec::vec_reduce_all<T>([](Vec<T>& a, Vec<T>& b) { return at::vec::maximum(a, b); }, top);
}

// Returns the sum of exp(x - top).
template <class T>
T sumexp_of(const T* x, T top, int64_t n) {
  return sum_vectors<T>(
      n, [&](int64_t k, int64_t count) { return keep(exp_of(load(x + k, count) - Vec<T>(top)), count); });
}

// Returns the sum of a[k] b[k]. Uses four partial sums, because each addition to a single sum would wait for the
// previous addition.
template <class T>
T dot_of(const T* a, const T* b, int64_t n) {
  constexpr int64_t width = Vec<T>::size(), sums = 4;
  std::array<Vec<T>, sums> total;
  total.fill(Vec<T>(T(0)));
  int64_t k = 0;
  for (; k + sums * width <= n; k += sums * width)
    for (int64_t one = 0; one < sums; ++one)
      total[one] = at::vec::fmadd(Vec<T>::loadu(a + k + one * width), Vec<T>::loadu(b + k + one * width), total[one]);
  for (; k < n; k += width) {
    const int64_t count = std::min(width, n - k);
    total[0] = total[0] + keep(load(a + k, count) * load(b + k, count), count);
  }
  const auto add = [](Vec<T>& x, Vec<T>& y) { return x + y; };
  return at::vec::vec_reduce_all<T>(add, (total[0] + total[1]) + (total[2] + total[3]));
}

// out <- exp(x - top) * scale; out may be x.
template <class T>
void exp_row(T* out, const T* x, T top, T scale, int64_t n) {
  for_vectors<T>(n, [&](int64_t k, int64_t count) {
    (exp_of(load(x + k, count) - Vec<T>(top)) * Vec<T>(scale)).store(out + k, static_cast<int>(count));
  });
}

// Returns the sum of x.
template <class T>
T sum_of(const T* x, int64_t n) {
  return sum_vectors<T>(n, [&](int64_t k, int64_t count) { return keep(load(x + k, count), count); });
}

// Returns the sum of (x - mean)^2.
template <class T>
T squares_of(const T* x, T mean, int64_t n) {
  return sum_vectors<T>(n, [&](int64_t k, int64_t count) {
    const auto d = load(x + k, count) - Vec<T>(mean);
    return keep(d * d, count);
  });
}

}  // namespace nntile
