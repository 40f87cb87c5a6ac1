// Contraction of tiles as (batched) GEMM, with the epilogues of FusedLinear.
#include <ATen/ops/addmm.h>
#include <ATen/ops/baddbmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/sum.h>

#include <numeric>

#include "activation.h"
#include "contract.h"
#include "product.h"

namespace nntile {
namespace {

// pre <- pre + bias (stored only if out is another tile); out <- act(pre). bias may be undefined.
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

// Product of the permuted operands as (batched) matrices: out = beta * out + alpha * a b.
void gemm(const at::Tensor& out, const at::Tensor& a, const at::Tensor& b, double beta, double alpha) {
  auto target = out;
  if (out.dim() == 2)
    at::addmm_out(target, out, a, b, beta, alpha);
  else
    at::baddbmm_out(target, out, a, b, beta, alpha);
}

// Tiles of the epilogue in order; undefined: absent.
struct Beside {
  at::Tensor target, bias, residual, aux, activated, colsum;
  double beta;  // factor of the target's content
  bool adds_colsum = false;

  Beside(const Args& t, const EpilogueArgs& args) : target(t[0]), beta(t.accumulates(0) ? 1 : 0) {
    size_t next = 3;
    if (args.bias_axes >= 0) bias = t[next++];
    if (args.residual) residual = t[next++];
    if (args.aux) aux = t[next++];
    if (args.keep_pre) activated = t[next++];
    if (args.colsum < 0) return;
    adds_colsum = t.accumulates(next);
    colsum = t[next];
  }
};

// target = beta * target + bias and residual; returns the factor of the target for the product.
double start(const at::Tensor& target, double beta, const at::Tensor& what) {
  if (beta == 0) target.copy_(what.expand_as(target));
  else target.add_(what);
  return 1;
}

void own(const ContractArgs& args, const Plan& plan, const Factors& x, const Beside& beside) {
  const auto& epilogue = args.epilogue;
  const bool transposed = x.out.stride(-1) != 1 && x.out.stride(static_cast<int64_t>(x.batch + x.rows) - 1) == 1;
  int64_t columns = 0;  // of the bias, as vectors
  for (const auto axis : transposed ? plan.out.slice(plan.batch, plan.m) : plan.out.slice(plan.batch + plan.m))
    columns |= int64_t{1} << axis;
  const bool along = epilogue.bias_axes == columns;
  double beta = beside.beta;
  if (beside.bias.defined() && !along)
    beta = start(beside.target, beta, broadcastable(beside.bias, epilogue.bias_axes, beside.target));
  product(transposed ? x.transposed() : x, {args.scale, beta, along ? beside.bias : at::Tensor(), beside.residual,
                                            beside.aux, beside.activated, static_cast<int>(epilogue.activation)});
}

void blas(const ContractArgs& args, const Plan& plan, const Factors& x, const Beside& beside) {
  const auto& epilogue = args.epilogue;
  const auto &target = beside.target, &bias = beside.bias;
  const bool activates = epilogue.activation >= 0 && !epilogue.aux;
  // With an activation, the bias is added in the activation's pass; otherwise the product is added to the bias.
  const bool late =
      bias.defined() && activates && !beside.residual.defined() && trailing(epilogue.bias_axes, target.dim());
  const auto a = matrix(x.a, plan.batch, plan.m, plan.k), b = matrix(x.b, plan.batch, plan.k, plan.n);
  double beta = beside.beta;
  if (beside.residual.defined()) beta = start(target, beta, beside.residual);
  if (bias.defined() && !late) beta = start(target, beta, broadcastable(bias, epilogue.bias_axes, target));
  if (!plan.permuted_out) {
    gemm(matrix(target, plan.batch, plan.m, plan.n), a, b, beta, args.scale);
  } else if (const auto direct = in_place(x.out, plan.batch, plan.m, plan.n)) {
    gemm(*direct, a, b, beta, args.scale);
  } else {
    const auto made = at::empty(x.out.sizes(), target.options());
    gemm(matrix(made, plan.batch, plan.m, plan.n), a, b, 0, args.scale);
    start(x.out, beta, made);
  }
  if (epilogue.aux) multiply_derivative(epilogue.activation, target, beside.aux);
  else if (activates)
    activate_tile(epilogue.activation, target, epilogue.keep_pre ? beside.activated : target,
                  late ? bias : at::Tensor());
}

// Sums an operand over the product's summed axes: the first axes of the permuted b, the last of the permuted a.
void sum_operand(const Factors& x, bool first, const at::Tensor& to, bool adds) {
  std::vector<int64_t> axes(x.depth);
  std::iota(axes.begin(), axes.end(), static_cast<int64_t>(x.batch + (first ? x.rows : 0)));
  const auto total = (first ? x.a : x.b).sum(axes).reshape(to.sizes());
  if (adds) to.add_(total);
  else to.copy_(total);
}

void contract(Args& t) {
  const ContractArgs args(t);
  const Plan plan(args.plan);
  const Beside beside(t, args.epilogue);
  const auto a = t[plan.swap ? 2 : 1], b = t[plan.swap ? 1 : 2];
  const Factors x{beside.target.permute(plan.out), a.permute(plan.a), b.permute(plan.b),
                  plan.batch, plan.m, plan.n, plan.k};
  if (own_product(x)) own(args, plan, x, beside);
  else blas(args, plan, x, beside);
  if (beside.colsum.defined())
    sum_operand(x, (args.epilogue.colsum == 0) != plan.swap, beside.colsum, beside.adds_colsum);
}

void contract_epilogue(Args& t) {
  const EpilogueArgs epilogue(t);
  const auto target = t[0];
  if (epilogue.aux) multiply_derivative(epilogue.activation, target, t[1]);
  else activate_tile(epilogue.activation, target, epilogue.keep_pre ? t[1] : target, at::Tensor());
}

NNTILE_KERNEL(contract, contract);
NNTILE_KERNEL(contract_epilogue, contract_epilogue);

}  // namespace
}  // namespace nntile
