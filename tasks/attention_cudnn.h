// Attention by cuDNN without copies of tiles: unlike ATen, results may be slices of packed tensors.
#pragma once
#include <ATen/core/Tensor.h>

#include <string>

#include "attention.h"

namespace nntile::cudnn {

// Both return false, without effect, if the build has no cuDNN frontend or cuDNN no kernel for these operands.
// lse: [b, h, s], natural logarithm, fp32.
// bias: added to the scores, [b, 1, q, k]; undefined: no bias. k and v may have fewer heads than q.
bool attention(const Triple& x, const at::Tensor& out, const at::Tensor& lse, const at::Tensor& bias, bool causal,
               double scale);
bool attention_grad(const Triple& x, const at::Tensor& out, const at::Tensor& lse, const at::Tensor& d_out,
                    const Triple& grads, const at::Tensor& bias, bool causal, double scale);

// The same over the segments of a mask, without a bias; most: capacity of the tiles in tokens. Both return the reason
// if cuDNN does not support the case, else an empty text; tokens of no segment become zeros.
std::string attention_of_segments(const Triple& x, const PairMask& mask, const at::Tensor& out, const at::Tensor& lse,
                                  int64_t most, double scale);
std::string attention_of_segments_grad(const Triple& x, const PairMask& mask, const at::Tensor& out,
                                       const at::Tensor& lse, const at::Tensor& d_out, const Triple& grads,
                                       int64_t most, double scale);

size_t version();  // of the library; 0: no cuDNN

}  // namespace nntile::cudnn
