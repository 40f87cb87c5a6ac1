// Shared declarations of the CUDA attention kernels.
#pragma once
#include "attention.h"

namespace nntile {

// dst <- src. Slices of packed tensors have strided rows, which ATen would copy element by element.
void copy_rows(const at::Tensor& dst, const at::Tensor& src);

namespace packed {

// The kernel for segments: the fastest by measurement, or a fixed kernel.
enum class Way { fastest, varlen, cudnn };

// Operands are bf16 or fp16; most: capacity of the tiles in tokens. Tokens of no segment become zeros. Throws TaskError
// if a fixed kernel does not support the case.
void attention(Way way, const Triple& x, const PairMask& mask, const at::Tensor& out, const at::Tensor& lse,
               int64_t most, double scale);
void attention_grad(Way way, const Triple& x, const PairMask& mask, const at::Tensor& out, const at::Tensor& lse,
                    const at::Tensor& d_out, const Triple& grads, int64_t most, double scale);

}  // namespace packed
}  // namespace nntile
