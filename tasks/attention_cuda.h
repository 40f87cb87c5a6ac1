// Shared declarations of the CUDA attention kernels.
#pragma once
#include "attention.h"

namespace nntile {

// Copies src to dst, 16 bytes at a time if the layouts allow it. ATen would copy the strided rows of slices of packed
// tensors element by element.
void copy_rows(const at::Tensor& dst, const at::Tensor& src);

namespace packed {

// The kernel for segments: ATen's (varlen), cuDNN's (cudnn), or the kernel that is faster by measurement (fastest).
enum class Way { fastest, varlen, cudnn };

// Compute attention and its gradient for bf16 or fp16. Results of tokens outside all segments are zero. most: capacity
// of the tiles in tokens. Both functions throw TaskError if `way` is cudnn and cuDNN does not support the case.
void attention(Way way, const Triple& x, const PairMask& mask, const at::Tensor& out, const at::Tensor& lse,
               int64_t most, double scale);
void attention_grad(Way way, const Triple& x, const PairMask& mask, const at::Tensor& out, const at::Tensor& lse,
                    const at::Tensor& d_out, const Triple& grads, int64_t most, double scale);

}  // namespace packed
}  // namespace nntile
