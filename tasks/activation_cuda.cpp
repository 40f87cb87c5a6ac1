#include "activation_cuda.h"

#include <ATen/ops/gelu.h>
#include <ATen/ops/gelu_backward.h>
#include <ATen/ops/hardswish.h>
#include <ATen/ops/hardswish_backward.h>
#include <ATen/ops/hardtanh.h>
#include <ATen/ops/hardtanh_backward.h>
#include <ATen/ops/leaky_relu.h>
#include <ATen/ops/leaky_relu_backward.h>
#include <ATen/ops/mish.h>
#include <ATen/ops/mish_backward.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/silu_backward.h>
#include <ATen/ops/tanh.h>
#include <ATen/ops/threshold_backward.h>

#include "activation_kinds.h"

namespace nntile {
namespace {

// Returns x in fp32, or x itself if it is fp64.
at::Tensor wide(const at::Tensor& x) { return x.scalar_type() == at::kDouble ? x : x.to(at::kFloat); }

}  // namespace

void apply_activation(int kind, const at::Tensor& pre, at::Tensor out) {
  switch (kind) {
    case kRelu: at::relu_out(out, pre); break;
    case kTanh: at::tanh_out(out, pre); break;
    case kSilu: at::silu_out(out, pre); break;
    case kQuickGelu: out.copy_(wide(pre).mul(kQuick).sigmoid_().mul_(pre)); break;
    case kRelu2: at::mul_out(out, at::relu(pre), pre); break;
    case kRelu6: at::hardtanh_out(out, pre, 0, 6); break;
    case kLeakyRelu: at::leaky_relu_out(out, pre, kLeak); break;
    case kHardswish: at::hardswish_out(out, pre); break;
    case kMish: at::mish_out(out, pre); break;
    case kSigmoid: at::sigmoid_out(out, pre); break;
    default: at::gelu_out(out, pre, kind == kGeluNew ? "tanh" : "none");
  }
}

void multiply_derivative(int kind, at::Tensor y, const at::Tensor& aux) {
  switch (kind) {
    case kRelu: at::threshold_backward_out(y, y, aux, 0); break;
    case kTanh:  // 1 - tanh^2 of a tanh rounded to bf16 or fp16 would be inaccurate
      y.mul_(wide(aux).tanh().square_().neg_().add_(1));
      break;
    case kSilu: at::silu_backward_out(y, y, aux); break;
    case kQuickGelu: {
      const auto x = wide(aux).mul(kQuick), gate = x.sigmoid();
      y.mul_(gate.neg().add_(1).mul_(x).add_(1).mul_(gate));
      break;
    }
    case kRelu2: y.mul_(at::relu(aux).mul_(2)); break;
    case kRelu6: at::hardtanh_backward_out(y, y, aux, 0, 6); break;
    case kLeakyRelu: at::leaky_relu_backward_out(y, y, aux, kLeak, false); break;
    case kHardswish: y.copy_(at::hardswish_backward(y, aux)); break;
    case kMish: y.copy_(at::mish_backward(y, aux)); break;
    case kSigmoid: {
      const auto gate = wide(aux).sigmoid();
      y.mul_(gate.neg().add_(1).mul_(gate));
      break;
    }
    default: at::gelu_backward_out(y, y, aux, kind == kGeluNew ? "tanh" : "none");
  }
}

}  // namespace nntile
