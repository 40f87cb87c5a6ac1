// Products by cuBLASLt, with its epilogues; the algorithm is chosen by measurement once for each shape and kind of GPU.
#pragma once
#include <ATen/core/Tensor.h>
#include <cublasLt.h>

#include <stdexcept>
#include <string>

namespace nntile {

// Where choices for this kind of GPU, library and driver are kept.
std::string products_file();

struct Sizes {
  int64_t m, n, k;
  bool operator==(const Sizes&) const = default;
};

struct Fused {
  at::Tensor c;     // added to the product
  at::Tensor bias;  // of each column, or where the epilogue sums an operand: what is written
  at::Tensor aux;
  cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_DEFAULT;
};

struct Unsupported : std::runtime_error {
  Unsupported() : std::runtime_error("cuBLASLt has no algorithm for this contraction") {}
};

// out = epilogue(alpha a b + c + bias), row-major matrices, of `most` rows and summed products at most. Throws
// Unsupported.
void matmul(const at::Tensor& out, const at::Tensor& a_matrix, const at::Tensor& b_matrix, double alpha, const Fused& f,
            bool tf32, const Sizes& most);

}  // namespace nntile
