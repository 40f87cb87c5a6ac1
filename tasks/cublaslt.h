// Products by cuBLASLt, with its epilogues; the algorithm is chosen by measurement once for each shape and kind of GPU.
#pragma once
#include <cublasLt.h>

#include <stdexcept>
#include <string>

#include "view.h"

namespace nntile {

// Where choices for this kind of GPU, library and driver are kept.
std::string products_file();

struct Sizes {
  int64_t m, n, k;
  bool operator==(const Sizes&) const = default;
};

struct Fused {
  const void* c = nullptr;  // added to the product
  void* bias = nullptr;     // of each column, or where the epilogue sums an operand: what is written
  void* aux = nullptr;
  cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_DEFAULT;
};

struct Unsupported : std::runtime_error {
  Unsupported() : std::runtime_error("cuBLASLt has no algorithm for this contraction") {}
};

// out = epilogue(alpha a b + c + bias), row-major matrices, of `most` rows and summed products at most. Throws
// Unsupported.
void matmul(const View& out, const View& a_matrix, const View& b_matrix, double alpha, const Fused& f, bool tf32,
            const Sizes& most);

}  // namespace nntile
