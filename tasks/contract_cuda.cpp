// Contraction of tiles on CUDA: one product by cuBLASLt with its epilogue where that can do it, else the parts one by one.
#include <ATen/Context.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/baddbmm.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/gelu_backward.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/silu_backward.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/tanh.h>
#include <ATen/ops/threshold_backward.h>

#include <map>
#include <optional>
#include <sstream>
#include <utility>

#include "activation_kinds.h"
#include "choices.h"
#include "contract.h"
#include "cublaslt.h"
#include "runtime.h"

namespace nntile {
namespace {

void apply_activation(int kind, const at::Tensor& pre, at::Tensor out) {
  if (kind == kRelu) at::relu_out(out, pre);
  else if (kind == kTanh) at::tanh_out(out, pre);
  else if (kind == kSilu) at::silu_out(out, pre);
  else at::gelu_out(out, pre, kind == kGeluNew ? "tanh" : "none");
}

void multiply_derivative(int kind, at::Tensor y, const at::Tensor& aux) {
  if (kind == kRelu) at::threshold_backward_out(y, y, aux, 0);
  else if (kind == kTanh)  // 1 - tanh^2 of a tanh in bf16 would be mostly rounding
    y.mul_(aux.to(at::kFloat).tanh().square_().neg_().add_(1));
  else if (kind == kSilu) at::silu_backward_out(y, y, aux);
  else at::gelu_backward_out(y, y, aux, kind == kGeluNew ? "tanh" : "none");
}

// The plain product, by ATen: batches, fp64, what cuBLASLt does not take. Never in tf32, which PyTorch may have on.
void plain(const at::Tensor& out, const at::Tensor& a, const at::Tensor& b, double beta, double alpha) {
  const at::NoTF32Guard exact;
  auto target = out;
  if (a.scalar_type() != out.scalar_type()) {
    const auto product = out.dim() == 2 ? a.mm(b) : at::bmm(a, b);
    if (beta == 0) target.copy_(alpha == 1 ? product : product.mul(alpha));
    else target.add_(product, alpha);
  } else if (out.dim() == 2) {
    at::addmm_out(target, out, a, b, beta, alpha);
  } else {
    at::baddbmm_out(target, out, a, b, beta, alpha);
  }
}

// A target whose rows and columns (its first m axes, its last n) do not lie as in a matrix, as blocks that do:
// [outer rows, rows, outer columns, columns]. None if that takes more axes.
std::optional<at::Tensor> blocks(const at::Tensor& target, size_t m, size_t n) {
  const auto sizes = target.sizes();
  for (size_t outer_m = 0; outer_m < m; ++outer_m)
    for (size_t outer_n = 0; outer_n < n; ++outer_n) {
      const std::vector<int64_t> shape{extent(sizes, 0, outer_m), extent(sizes, outer_m, m - outer_m),
                                       extent(sizes, m, outer_n), extent(sizes, m + outer_n, n - outer_n)};
      if (at::detail::computeStride(sizes, target.strides(), shape)) return target.view(shape);
    }
  return {};
}

// to = alpha a b, each block written where it belongs: a batch of products over the blocks of a row, or of a column.
void into_blocks(const at::Tensor& to, const at::Tensor& a_matrix, const at::Tensor& b_matrix, double alpha, bool by_row) {
  const auto k = a_matrix.size(1);
  const auto a = a_matrix.view({to.size(0), to.size(1), k});
  const auto b = b_matrix.view({k, to.size(2), to.size(3)}).permute({1, 0, 2});
  if (by_row) {
    for (int64_t i = 0; i < a.size(0); ++i)
      plain(to.select(0, i).permute({1, 0, 2}), a.select(0, i).expand({b.size(0), -1, -1}), b, 0, alpha);
  } else {
    for (int64_t j = 0; j < b.size(0); ++j)
      plain(to.select(2, j), a, b.select(0, j).expand({a.size(0), -1, -1}), 0, alpha);
  }
}

// target = alpha a b, in another order of axes than the product has: that product and a copy, or a product for each
// block. Which is faster depends on how wide blocks are, so it is measured, but not where a step fills a part of the rows.
void permuted(const at::Tensor& target, const at::Tensor& a, const at::Tensor& b, double alpha, size_t m, size_t n,
              bool tf32, const Sizes& most) {
  const auto product_and_copy = [&] {
    const auto product = at::empty(target.sizes(), target.options());
    matmul(matrix(product, 0, m, n), a, b, alpha, Fused(), tf32, most);
    copy(target, product);
  };
  if (most != Sizes{a.size(0), b.size(1), a.size(1)}) return product_and_copy();
  // Batches are not in tf32, nor of mixed types.
  if (a.scalar_type() != target.scalar_type() || (tf32 && a.scalar_type() == at::kFloat)) return product_and_copy();
  std::vector<int64_t> key{static_cast<int64_t>(a.scalar_type()), static_cast<int64_t>(m)};
  for (const auto part : {target.sizes(), target.strides(), a.sizes(), a.strides(), b.strides()})
    key.insert(key.end(), part.begin(), part.end());
  thread_local std::map<std::vector<int64_t>, int> known;
  auto found = known.find(key);
  if (found == known.end()) {
    int way = 0;
    if (const auto to = blocks(target, m, n)) {
      std::ostringstream text("blocks ", std::ios::ate);
      for (const auto value : key) text << value << ' ';
      way = fastest_of(products_file(), text.str(), {product_and_copy, [&] { into_blocks(*to, a, b, alpha, true); },
                                                    [&] { into_blocks(*to, a, b, alpha, false); }});
    }
    found = known.emplace(std::move(key), way).first;
  }
  if (found->second == 0) product_and_copy();
  else into_blocks(*blocks(target, m, n), a, b, alpha, found->second == 1);
}

void contract(Args& t) {
  const ContractArgs args(t);
  const auto& e = args.epilogue;
  const Plan plan(args.plan);
  size_t next = 3;
  const auto target = t[0];
  auto bias = e.bias_axes >= 0 ? t[next++] : at::Tensor();
  auto residual = e.residual ? t[next++] : at::Tensor();
  const bool activates = e.activation >= 0 && !e.aux;
  const auto aux = e.aux ? t[next++] : at::Tensor();
  const auto out = activates && e.keep_pre ? t[next++] : target;  // with an activation `target` is what comes before
  auto column_sum = e.colsum >= 0 ? t[next] : at::Tensor();
  const bool sum_adds = e.colsum >= 0 && t.accumulates(next);

  auto a = t[1], b = t[2];
  if (plan.swap) std::swap(a, b);
  const auto a_matrix = matrix(a.permute(plan.a), plan.batch, plan.m, plan.k);
  const auto b_matrix = matrix(b.permute(plan.b), plan.batch, plan.k, plan.n);
  const bool first = (e.colsum == 0) != plan.swap;  // the operand that is summed is a_matrix

  const auto most_of = [&](size_t tile, at::IntArrayRef order, size_t from, size_t count) {
    int64_t size = 1;
    for (const auto axis : order.slice(from, count)) size *= t.most(tile)[static_cast<size_t>(axis)];
    return size;
  };
  const size_t first_operand = plan.swap ? 2 : 1;
  const Sizes most{most_of(first_operand, plan.a, plan.batch, plan.m), b_matrix.size(-1),
                   most_of(first_operand, plan.a, plan.batch + plan.m, plan.k)};

  const bool lt = !plan.batch && (a.scalar_type() == at::kBFloat16 || a.scalar_type() == at::kFloat);
  bool activated = false;
  if (lt && !plan.permuted_out) {
    const auto shaped = [&](const at::Tensor& x) { return matrix(x, 0, plan.m, plan.n); };
    Fused f;
    at::Tensor summed;
    if (t.accumulates(0)) f.c = shaped(target);
    if (residual.defined() && !f.c.defined()) {
      f.c = shaped(residual);
      residual = at::Tensor();
    }
    const bool vector = bias.defined() && trailing(e.bias_axes, target.dim()) && bias.numel() == b_matrix.size(1);
    const bool late = residual.defined() || (bias.defined() && !vector);  // something to add before the activation
    if (vector) f.bias = std::exchange(bias, {});
    // What accumulates in the tile that is to hold the value before the activation cannot be read and written at once.
    const bool gelu = e.activation == kGeluNew && !late && !(e.keep_pre && t.accumulates(0));
    if (gelu && e.aux) {
      f.epilogue = CUBLASLT_EPILOGUE_DGELU;
      f.aux = aux;
    } else if (gelu && e.keep_pre) {
      f.epilogue = f.bias.defined() ? CUBLASLT_EPILOGUE_GELU_AUX_BIAS : CUBLASLT_EPILOGUE_GELU_AUX;
      f.aux = target;  // out of the epilogue; out is D
    } else if (gelu) {
      f.epilogue = f.bias.defined() ? CUBLASLT_EPILOGUE_GELU_BIAS : CUBLASLT_EPILOGUE_GELU;
    } else if (f.bias.defined()) {
      f.epilogue = CUBLASLT_EPILOGUE_BIAS;
    } else if (column_sum.defined() && e.activation < 0) {
      // Column-major, b comes first: the sum of b's columns is that of the library's A.
      f.epilogue = first ? CUBLASLT_EPILOGUE_BGRADB : CUBLASLT_EPILOGUE_BGRADA;
      summed = sum_adds ? at::empty(column_sum.sizes(), column_sum.options()) : column_sum;
      f.bias = summed;
    }
    try {
      matmul(shaped(gelu && e.keep_pre ? out : target), a_matrix, b_matrix, args.scale, f, t.tf32(), most);
      activated = gelu;
      if (summed.defined() && sum_adds) column_sum.add_(summed);
      if (summed.defined()) column_sum.reset();
    } catch (const Unsupported&) {  // some epilogues are not there for some shapes: the parts one by one
      if (f.bias.defined() && !summed.defined()) bias = f.bias;
      Fused bare;
      bare.c = f.c;
      matmul(shaped(target), a_matrix, b_matrix, args.scale, bare, t.tf32(), most);
    }
  } else if (!plan.permuted_out) {
    plain(matrix(target, plan.batch, plan.m, plan.n), a_matrix, b_matrix, t.accumulates(0) ? 1 : 0, args.scale);
  } else if (const auto direct = in_place(target.permute(plan.out), plan.batch, plan.m, plan.n)) {
    plain(*direct, a_matrix, b_matrix, t.accumulates(0) ? 1 : 0, args.scale);
  } else {
    const auto view = target.permute(plan.out);
    if (lt && !t.accumulates(0)) {
      permuted(view, a_matrix, b_matrix, args.scale, plan.m, plan.n, t.tf32(), most);
    } else {
      const auto product = at::empty(view.sizes(), target.options());
      const auto whole = matrix(product, plan.batch, plan.m, plan.n);
      if (lt) matmul(whole, a_matrix, b_matrix, args.scale, Fused(), t.tf32(), most);
      else plain(whole, a_matrix, b_matrix, 0, args.scale);
      if (t.accumulates(0)) view.add_(product);
      else copy(view, product);
    }
  }
  if (residual.defined()) target.add_(residual);
  if (bias.defined()) target.add_(broadcastable(bias, e.bias_axes, target));
  if (e.aux && !activated) multiply_derivative(e.activation, target, aux);
  else if (activates && !activated) apply_activation(e.activation, target, out);
  if (column_sum.defined()) {
    const bool of_output = e.colsum == 2;  // over its rows, which `swap` makes columns
    const auto summed = of_output ? matrix(target.permute(plan.out), 0, plan.m, plan.n) : first ? a_matrix : b_matrix;
    const int64_t axis = (of_output ? plan.swap : first) ? 1 : 0;
    const auto total = at::sum(summed, {axis}, false, column_sum.scalar_type()).view(column_sum.sizes());
    if (sum_adds) column_sum.add_(total);
    else column_sum.copy_(total);
  }
}

void contract_epilogue(Args& t) {
  const EpilogueArgs epilogue(t);
  const auto target = t[0];
  if (epilogue.aux) multiply_derivative(epilogue.activation, target, t[1]);
  else apply_activation(epilogue.activation, target, epilogue.keep_pre ? t[1] : target);
}

NNTILE_CUDA_KERNEL(contract, contract);
NNTILE_CUDA_KERNEL(contract_epilogue, contract_epilogue);

}  // namespace
}  // namespace nntile
