// Activations on CUDA by ATen: activations that are not fused into a product.
#pragma once
#include <ATen/core/Tensor.h>

namespace nntile {

// Computes out = activation(pre). kind: see activation_kinds.h.
void apply_activation(int kind, const at::Tensor& pre, at::Tensor out);

// Multiplies y by the derivative of the activation at aux.
void multiply_derivative(int kind, at::Tensor y, const at::Tensor& aux);

}  // namespace nntile
