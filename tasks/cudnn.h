// Attention by cuDNN on tiles where they are: its operands may be slices of packed tensors, ATen's results may not.
#pragma once
#include <ATen/core/Tensor.h>

#include <string>

#include "attention.h"

namespace nntile::cudnn {

// Both return false where this build has no cuDNN frontend or cuDNN no kernel for these operands: nothing was done.
// lse: [b, h, s], natural logarithm, fp32.
// bias: what is added to the scores, [b, 1, q, k]; undefined: nothing. k and v may have fewer heads than q.
bool attention(const Triple& x, const at::Tensor& out, const at::Tensor& lse, const at::Tensor& bias, bool causal,
               double scale);
bool attention_grad(const Triple& x, const at::Tensor& out, const at::Tensor& lse, const at::Tensor& d_out,
                    const Triple& grads, const at::Tensor& bias, bool causal, double scale);

// The same over the segments of a mask, without a bias; most: tokens that fit into the tiles. They return why they
// cannot; empty: done, with zeros for what belongs to no segment.
std::string attention_of_segments(const Triple& x, const PairMask& mask, const at::Tensor& out, const at::Tensor& lse,
                                  int64_t most, double scale);
std::string attention_of_segments_grad(const Triple& x, const PairMask& mask, const at::Tensor& out,
                                       const at::Tensor& lse, const at::Tensor& d_out, const Triple& grads,
                                       int64_t most, double scale);

size_t version();  // of the library; 0: there is none

}  // namespace nntile::cudnn
