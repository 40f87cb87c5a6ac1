// Reductions and maps over one contiguous row, shared by softmax, cross-entropy and attention.
#pragma once
#include "common.h"

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
      n, [&](int64_t k, int64_t count) { return keep((load(x + k, count) - Vec<T>(top)).exp_u20(), count); });
}

template <class T>
T dot_of(const T* a, const T* b, int64_t n) {
  return sum_vectors<T>(n, [&](int64_t k, int64_t count) { return keep(load(a + k, count) * load(b + k, count), count); });
}

// out <- exp(x - top) * scale; out may be x.
template <class T>
void exp_row(T* out, const T* x, T top, T scale, int64_t n) {
  for_vectors<T>(n, [&](int64_t k, int64_t count) {
    ((load(x + k, count) - Vec<T>(top)).exp_u20() * Vec<T>(scale)).store(out + k, static_cast<int>(count));
  });
}

}  // namespace nntile
