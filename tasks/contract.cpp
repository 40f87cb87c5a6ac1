// Contraction of tiles as (batched) GEMM, with the epilogues of FusedLinear.
#include <ATen/ops/addmm.h>
#include <ATen/ops/baddbmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/sum.h>

#include <numeric>

#include "activation.h"
#include "contract.h"
#include "product.h"
#include "product_rows.h"
#include "quantize.h"

namespace nntile {
namespace {

// Computes out = act(pre + bias). If out is another tile than pre, stores pre + bias in pre. bias may be undefined.
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
  if (is_few_rows(out, a, b))
    dispatch(out, [&](auto zero) { few_rows<decltype(zero)>(out, a, b, beta, alpha); });
  else if (out.dim() == 2)
    at::addmm_out(target, out, a, b, beta, alpha);
  else
    at::baddbmm_out(target, out, a, b, beta, alpha);
}

// Tiles of the epilogue. A tensor is undefined if the epilogue lacks it. next: number of the epilogue's first tile.
struct Beside {
  at::Tensor target, bias, residual, aux, activated, colsum;
  double beta = 1;  // factor of the target's content
  bool adds_colsum = false;

  Beside(const at::Tensor& target_, double beta_) : target(target_), beta(beta_) {}
  Beside(const Args& t, const EpilogueArgs& args, const at::Tensor& target_, double beta_, size_t next)
      : Beside(target_, beta_) {
    if (args.bias_axes >= 0) bias = t[next++];
    if (args.residual) residual = t[next++];
    if (args.aux) aux = t[next++];
    if (args.keep_pre) activated = t[next++];
    if (args.colsum < 0) return;
    adds_colsum = t.accumulates(next);
    colsum = t[next];
  }
};

// Copies `what` (a bias or a residual) to the target if beta is 0, else adds `what` to the target. Returns 1: the beta
// of the product that follows.
double start(const at::Tensor& target, double beta, const at::Tensor& what) {
  if (beta == 0) target.copy_(what.expand_as(target));
  else target.add_(what);
  return 1;
}

void own(const EpilogueArgs& epilogue, double scale, const Plan& plan, const Factors& x, const Beside& beside) {
  const bool transposed = x.out.stride(-1) != 1 && x.out.stride(static_cast<int64_t>(x.batch + x.rows) - 1) == 1;
  int64_t columns = 0;  // bit mask of the axes of a bias that has one number for each column
  for (const auto axis : transposed ? plan.out.slice(plan.batch, plan.m) : plan.out.slice(plan.batch + plan.m))
    columns |= int64_t{1} << axis;
  const bool along = epilogue.bias_axes == columns;
  double beta = beside.beta;
  if (beside.bias.defined() && !along)
    beta = start(beside.target, beta, broadcastable(beside.bias, epilogue.bias_axes, beside.target));
  product(transposed ? x.transposed() : x, {scale, beta, along ? beside.bias : at::Tensor(), beside.residual,
                                            beside.aux, beside.activated, static_cast<int>(epilogue.activation)});
}

void apply_activation(const EpilogueArgs& epilogue, const Beside& beside, const at::Tensor& bias = {}) {
  if (epilogue.aux) multiply_derivative(epilogue.activation, beside.target, beside.aux);
  else if (epilogue.activation >= 0)
    activate_tile(epilogue.activation, beside.target, epilogue.keep_pre ? beside.activated : beside.target, bias);
}

void blas(const EpilogueArgs& epilogue, double scale, const Plan& plan, const Factors& x, const Beside& beside) {
  const auto &target = beside.target, &bias = beside.bias;
  const bool activates = epilogue.activation >= 0 && !epilogue.aux;
  // If late, the bias is added together with the activation. Otherwise the target first gets the bias, then the product
  // is added to it.
  const bool late =
      bias.defined() && activates && !beside.residual.defined() && trailing(epilogue.bias_axes, target.dim());
  const auto a = matrix(x.a, plan.batch, plan.m, plan.k), b = matrix(x.b, plan.batch, plan.k, plan.n);
  double beta = beside.beta;
  if (beside.residual.defined()) beta = start(target, beta, beside.residual);
  if (bias.defined() && !late) beta = start(target, beta, broadcastable(bias, epilogue.bias_axes, target));
  if (!plan.permuted_out) {
    gemm(matrix(target, plan.batch, plan.m, plan.n), a, b, beta, scale);
  } else if (const auto direct = in_place(x.out, plan.batch, plan.m, plan.n)) {
    gemm(*direct, a, b, beta, scale);
  } else {
    const auto made = at::empty(x.out.sizes(), target.options());
    gemm(matrix(made, plan.batch, plan.m, plan.n), a, b, 0, scale);
    start(x.out, beta, made);
  }
  apply_activation(epilogue, beside, late ? bias : at::Tensor());
}

// Copies the sum of partial products to the target, in the output's order of axes, and computes the epilogue there.
void reshape(const EpilogueArgs& epilogue, const Plan& plan, const at::Tensor& sum, const Beside& beside) {
  const auto& target = beside.target;
  target.copy_(sum.permute(plan.reshape));
  if (beside.bias.defined()) start(target, 1, broadcastable(beside.bias, epilogue.bias_axes, target));
  if (beside.residual.defined()) start(target, 1, beside.residual);
  apply_activation(epilogue, beside);
}

// Sums operand a (`first`) or b over the product's summed axes: the last axes of the permuted a, or the axes behind the
// batch of the permuted b.
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
  const bool moves = !plan.reshape.empty();
  const auto sum = t[0];
  const double beta = t.accumulates(0) ? 1 : 0;
  const Beside beside(t, args.epilogue, moves ? t[3] : sum, beta, moves ? 4 : 3);
  const auto operand = [&](size_t k) { return dequantized(t[k], scales_of_tile(t, k), sum.scalar_type()); };
  const auto a = operand(plan.swap ? 2 : 1), b = operand(plan.swap ? 1 : 2);
  const Factors x{sum.permute(plan.out), a.permute(plan.a), b.permute(plan.b), plan.batch, plan.m, plan.n, plan.k};
  const auto epilogue = moves ? without_epilogue(args.epilogue) : args.epilogue;
  (own_product(x) ? own : blas)(epilogue, args.scale, plan, x, moves ? Beside(sum, beta) : beside);
  if (moves) reshape(args.epilogue, plan, sum, beside);
  if (beside.colsum.defined())
    sum_operand(x, (args.epilogue.colsum == 0) != plan.swap, beside.colsum, beside.adds_colsum);
}

void contract_epilogue(Args& t) {
  const ContractArgs args(t);
  const Plan plan(args.plan);
  const bool moves = !plan.reshape.empty();
  const Beside beside(t, args.epilogue, t[moves ? 1 : 0], 1, moves ? 2 : 1);
  if (moves) reshape(args.epilogue, plan, t[0], beside);
  else apply_activation(args.epilogue, beside);
}

NNTILE_KERNEL(contract, contract);
NNTILE_KERNEL(contract_epilogue, contract_epilogue);

}  // namespace
}  // namespace nntile
