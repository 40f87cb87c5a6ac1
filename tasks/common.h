// Shared by CPU kernels: dispatch over dtypes, loops over vectors.
#pragma once
#include <ATen/core/Tensor.h>
#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>

#include <stdexcept>
#include <string>

#include "kernel.h"

namespace nntile {

template <class T>
using Vec = at::vec::Vectorized<T>;

// Calls run(T{}) with the floating point type of the tensor.
template <class Run>
void dispatch(const at::Tensor& tensor, Run run) {
  switch (tensor.scalar_type()) {
    case at::kFloat: run(float{}); return;
    case at::kDouble: run(double{}); return;
    default: throw std::invalid_argument("this kernel takes fp32 and fp64 tiles");
  }
}

// Calls f(offset, count) for each vector of a row of n elements. The last vector may be partial.
template <class T, class F>
inline void for_vectors(int64_t n, F f) {
  constexpr int64_t width = Vec<T>::size();
  int64_t k = 0;
  for (; k + width <= n; k += width) f(k, width);
  if (k < n) f(k, n - k);
}

// Returns the sum over vectors of f(offset, count); f must return zeros beyond count.
template <class T, class F>
inline T sum_vectors(int64_t n, F f) {
  Vec<T> total(T(0));
  for_vectors<T>(n, [&](int64_t k, int64_t count) { total = total + f(k, count); });
  return at::vec::vec_reduce_all<T>([](Vec<T>& a, Vec<T>& b) { return a + b; }, total);
}

// Sets elements beyond count to zero.
template <class T>
inline Vec<T> keep(const Vec<T>& v, int64_t count) {
  return count == Vec<T>::size() ? v : Vec<T>::set(Vec<T>(T(0)), v, count);
}

template <class T>
inline Vec<T> load(const T* p, int64_t count) {
  return count == Vec<T>::size() ? Vec<T>::loadu(p) : Vec<T>::loadu(p, count);
}

// out = a + b; out may be a or b.
template <class T>
inline void add_rows(T* out, const T* a, const T* b, int64_t n) {
  for_vectors<T>(n, [&](int64_t k, int64_t count) {
    (load(a + k, count) + load(b + k, count)).store(out + k, static_cast<int>(count));
  });
}

}  // namespace nntile
