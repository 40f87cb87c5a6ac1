// Products by cuBLASLt with its epilogues. The algorithm is chosen by measurement, once for each shape and GPU model.
#pragma once
#include <cublasLt.h>

#include <stdexcept>
#include <string>

#include "view.h"

namespace nntile {

// Returns the file of the algorithms chosen for this GPU model, library and driver.
std::string products_file();

// Returns whether the GPU multiplies 8-bit numbers.
bool has_fp8(c10::Device device);

// Returns whether 8-bit products on this GPU may have a scale for each row and each column.
bool has_scales_of_rows(c10::Device device);

struct Sizes {
  int64_t m, n, k;
  bool operator==(const Sizes&) const = default;
};

struct Fused {
  const void* c = nullptr;  // added to the product
  void* bias = nullptr;     // one number per column; if the epilogue sums an operand: the output of this sum
  void* aux = nullptr;
  cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_DEFAULT;
  bool fast = false;  // for 8-bit operands: partial sums may have fewer bits than fp32
};

struct Unsupported : std::runtime_error {
  Unsupported() : std::runtime_error("cuBLASLt has no algorithm for this contraction") {}
};

// Computes out = epilogue(alpha a b + c + bias). `out` is row-major. most: largest m and k of this product in any step,
// for packed sequences. Throws Unsupported if cuBLASLt has no algorithm.
void matmul(const View& out, const View& a_matrix, const View& b_matrix, double alpha, const Fused& f, bool tf32,
            const Sizes& most);

// Computes a product by one call of cuBLASLt. Arguments: as for matmul.
void direct_matmul(const View& out, const View& a_matrix, const View& b_matrix, double alpha, const Fused& f, bool tf32,
                   const Sizes& most);

// Rounds up a size that varies with packing, to a multiple of a step of at least 128, but not above `most`. So at most
// about 16 sizes need a choice of an algorithm.
int64_t rounded(int64_t size, int64_t most);

inline constexpr int64_t kRowAlignment = 16;  // bytes; cuBLASLt is faster if all rows begin at multiples of this

}  // namespace nntile
