// Contraction of tiles as (batched) GEMM, with the epilogues of FusedLinear.
#include <ATen/ops/addmm.h>
#include <ATen/ops/baddbmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/sum.h>

#include "activation.h"
#include "contract.h"
#include "product.h"

namespace nntile {
namespace {

// pre <- pre + bias (kept only if out is another tile); out <- act(pre). bias may be undefined.
void activate_tile(int kind, const at::Tensor& pre, const at::Tensor& out, const at::Tensor& bias) {
  dispatch(pre, [&](auto zero) {
    using T = decltype(zero);
    auto* x = pre.data_ptr<T>();
    auto* y = out.data_ptr<T>();
    const auto* b = bias.defined() ? bias.data_ptr<T>() : nullptr;
    const int64_t columns = b ? bias.numel() : pre.numel();
    for (int64_t row = 0; row < pre.numel() / columns; ++row, x += columns, y += columns)
      for_vectors<T>(columns, [&](int64_t k, int64_t count) {
        auto v = load(x + k, count);
        if (b) {
          v = v + load(b + k, count);
          if (x != y) v.store(x + k, static_cast<int>(count));
        }
        activate(kind, v).store(y + k, static_cast<int>(count));
      });
  });
}

void multiply_derivative(int kind, const at::Tensor& y, const at::Tensor& aux) {
  dispatch(y, [&](auto zero) {
    using T = decltype(zero);
    auto* out = y.data_ptr<T>();
    const auto* x = aux.data_ptr<T>();
    for_vectors<T>(y.numel(), [&](int64_t k, int64_t count) {
      (load(out + k, count) * derivative(kind, load(x + k, count))).store(out + k, static_cast<int>(count));
    });
  });
}

// The product of the permuted operands as a (batched) matrix: out = beta * out + alpha * a b.
void gemm(const at::Tensor& out, const at::Tensor& a, const at::Tensor& b, double beta, double alpha) {
  if (own_product(out, a)) return product(out, a, b, beta, alpha);
  auto target = out;
  if (out.dim() == 2)
    at::addmm_out(target, out, a, b, beta, alpha);
  else
    at::baddbmm_out(target, out, a, b, beta, alpha);
}

void contract(Args& t) {
  const ContractArgs args(t);
  const auto& epilogue = args.epilogue;
  const Plan plan(args.plan);
  size_t next = 3;
  const auto target = t[0];
  const auto bias = epilogue.bias_axes >= 0 ? t[next++] : at::Tensor();
  const auto residual = epilogue.residual ? t[next++] : at::Tensor();
  const bool activates = epilogue.activation >= 0 && !epilogue.aux;
  // With an activation the bias waits for its pass over the tile; otherwise the product is added to it.
  const bool late_bias = bias.defined() && activates && !residual.defined() && trailing(epilogue.bias_axes, target.dim());

  auto a = t[1], b = t[2];
  if (plan.swap) std::swap(a, b);
  const auto a_matrix = matrix(a.permute(plan.a), plan.batch, plan.m, plan.k);
  const auto b_matrix = matrix(b.permute(plan.b), plan.batch, plan.k, plan.n);

  double beta = t.accumulates(0) ? 1 : 0;
  const auto out_matrix = plan.permuted_out ? at::Tensor() : matrix(target, plan.batch, plan.m, plan.n);
  // Together with the product, if that can be.
  const bool along = bias.defined() && !late_bias && out_matrix.defined() && own_product(out_matrix, a_matrix) &&
                     trailing(epilogue.bias_axes, target.dim()) && bias.numel() == out_matrix.size(-1);
  if (residual.defined()) {
    if (beta == 0) target.copy_(residual);
    else target.add_(residual);
    beta = 1;
  }
  if (bias.defined() && !late_bias && !along) {
    const auto wide = broadcastable(bias, epilogue.bias_axes, target);
    if (beta == 0) target.copy_(wide.expand_as(target));
    else target.add_(wide);
    beta = 1;
  }
  if (along) {
    product(out_matrix, a_matrix, b_matrix, beta, args.scale, bias);
  } else if (!plan.permuted_out) {
    gemm(out_matrix, a_matrix, b_matrix, beta, args.scale);
  } else if (const auto direct = in_place(target.permute(plan.out), plan.batch, plan.m, plan.n)) {
    gemm(*direct, a_matrix, b_matrix, beta, args.scale);
  } else {
    const auto view = target.permute(plan.out);
    const auto product = at::empty(view.sizes(), target.options());
    gemm(matrix(product, plan.batch, plan.m, plan.n), a_matrix, b_matrix, 0, args.scale);
    if (beta == 0) view.copy_(product);
    else view.add_(product);
  }

  if (epilogue.aux) multiply_derivative(epilogue.activation, target, t[next++]);
  else if (activates) {
    const auto out = epilogue.keep_pre ? t[next++] : target;
    activate_tile(epilogue.activation, target, out, late_bias ? bias : at::Tensor());
  }
  if (epilogue.colsum >= 0) {
    // The operand's rows are the summed axes: K is first in the permuted b, last in the permuted a.
    const bool first = (epilogue.colsum == 0) != plan.swap;
    auto sum = t[next];
    const auto operand = first ? a_matrix : b_matrix;
    const auto total = operand.sum(first ? 1 : 0).view(sum.sizes());
    if (t.accumulates(next)) sum.add_(total);
    else sum.copy_(total);
  }
}

void contract_epilogue(Args& t) {
  const EpilogueArgs epilogue(t);
  size_t next = 1;
  const auto target = t[0];
  if (epilogue.bias_axes >= 0) target.add_(broadcastable(t[next++], epilogue.bias_axes, target));
  if (epilogue.residual) target.add_(t[next++]);
  if (epilogue.aux) multiply_derivative(epilogue.activation, target, t[next]);
  else if (epilogue.activation >= 0)
    activate_tile(epilogue.activation, target, epilogue.keep_pre ? t[next] : target, at::Tensor());
}

NNTILE_KERNEL(contract, contract);
NNTILE_KERNEL(contract_epilogue, contract_epilogue);

}  // namespace
}  // namespace nntile
