// Attention by cuDNN without copies of tiles. Unlike ATen's functions, cuDNN can write results into slices of packed
// tensors.
#pragma once
#include <ATen/core/Tensor.h>

#include <string>

#include "attention.h"

namespace nntile::cudnn {

// Compute attention and its gradient. Both functions return false, without effect, if the build has no cuDNN frontend,
// or if cuDNN has no kernel for these operands.
// lse: [b, h, s], natural logarithm, fp32.
// bias: added to the scores, [b, 1, q, k]; undefined: no bias. k and v may have fewer heads than q.
bool attention(const Triple& x, const at::Tensor& out, const at::Tensor& lse, const at::Tensor& bias, bool causal,
               double scale);
bool attention_grad(const Triple& x, const at::Tensor& out, const at::Tensor& lse, const at::Tensor& d_out,
                    const Triple& grads, const at::Tensor& bias, bool causal, double scale);

// Compute attention and its gradient within the segments of a mask, without a bias. Results of tokens outside all
// segments are zero. Both functions return the reason why cuDNN does not support the case; an empty text if it does.
// most: capacity of the tiles in tokens.
std::string attention_of_segments(const Triple& x, const PairMask& mask, const at::Tensor& out, const at::Tensor& lse,
                                  int64_t most, double scale);
std::string attention_of_segments_grad(const Triple& x, const PairMask& mask, const at::Tensor& out,
                                       const at::Tensor& lse, const at::Tensor& d_out, const Triple& grads,
                                       int64_t most, double scale);

size_t version();  // version of the cuDNN library; 0: the build has no cuDNN

}  // namespace nntile::cudnn
