// What the CUDA kernels of attention share.
#pragma once
#include "attention.h"

namespace nntile {

// dst <- src. Slices of packed tensors are rows at a distance, which ATen copies element by element.
void copy_rows(const at::Tensor& dst, const at::Tensor& src);

namespace packed {

// Which kernel attends over segments: the one that was the fastest where it was measured, or the one that is named.
enum class Way { fastest, varlen, cudnn };

// Operands in bf16 or fp16; most: tokens that fit into the tiles. What belongs to no segment becomes zeros. TaskError:
// the kernel that is named cannot compute this.
void attention(Way way, const Triple& x, const PairMask& mask, const at::Tensor& out, const at::Tensor& lse,
               int64_t most, double scale);
void attention_grad(Way way, const Triple& x, const PairMask& mask, const at::Tensor& out, const at::Tensor& lse,
                    const at::Tensor& d_out, const Triple& grads, int64_t most, double scale);

}  // namespace packed
}  // namespace nntile
