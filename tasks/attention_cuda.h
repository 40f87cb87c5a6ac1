// Shared declarations of the CUDA attention kernels.
#pragma once
#include "attention.h"

namespace nntile {

// Copies src to dst. Slices of packed tensors have strided rows: ATen would copy them element by element.
void copy_rows(const at::Tensor& dst, const at::Tensor& src);

namespace packed {

// The kernel for segments. fastest: the faster of the two kernels, by measurement.
enum class Way { fastest, varlen, cudnn };

// Compute attention and its gradient for bf16 or fp16. Results of tokens outside all segments are zero. most: capacity
// of the tiles in tokens. Both functions throw TaskError if a fixed kernel does not support the case.
void attention(Way way, const Triple& x, const PairMask& mask, const at::Tensor& out, const at::Tensor& lse,
               int64_t most, double scale);
void attention_grad(Way way, const Triple& x, const PairMask& mask, const at::Tensor& out, const at::Tensor& lse,
                    const at::Tensor& d_out, const Triple& grads, int64_t most, double scale);

}  // namespace packed
}  // namespace nntile
