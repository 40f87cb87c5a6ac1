// Contraction of tiles on CUDA: by cuBLASLt with its epilogue where possible, else one operation after the other.
#include <ATen/Context.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/baddbmm.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/sum.h>

#include <algorithm>
#include <map>
#include <optional>
#include <sstream>
#include <utility>

#include "activation_cuda.h"
#include "activation_kinds.h"
#include "autotune.h"
#include "contract.h"
#include "cublaslt.h"
#include "quantize.h"
#include "runtime.h"

namespace nntile {
namespace {

// Computes out = beta out + alpha a b by ATen: for batches, fp64, and cases that cuBLASLt does not support. Never in
// tf32, even if PyTorch allows tf32.
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

// Returns a view of a target whose first m axes (rows) and last n axes (columns) do not form one matrix. In the view,
// [outer rows, rows, outer columns, columns], each block [rows, columns] is a matrix. nullopt if four axes do not
// suffice.
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

// Computes to = alpha a b by blocks; to: a view from `blocks`. One batch of products computes all blocks of a row
// (by_row) or of a column.
void into_blocks(const at::Tensor& to, const at::Tensor& a_matrix, const at::Tensor& b_matrix, double alpha,
                 bool by_row) {
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

// Returns an operand of a product, with its axes in the order `order`, and with its scales if it has 8 bits. rows: the
// part of `order` over which the product does not sum. If the rows are not in the order of the tile, their scales are
// applied here.
View operand(const Args& t, size_t tile, at::IntArrayRef order, at::IntArrayRef rows) {
  auto x = t.view(tile);
  x.scale = scale_of_tile(t, tile);
  x.by_row = x.scale && t.scales(tile) > 1;
  const bool ordered = rows.size() < order.size() && std::is_sorted(rows.begin(), rows.end());
  if (x.by_row && !ordered) x = View(dequantized(x.tensor(), scales_of_tile(t, tile), at::kBFloat16));
  return x.permuted(order);
}

// Converts the operands of 8 bits to bf16, which is exact. If the summed axes are contiguous, zeros behind them make
// their sizes and the distances between rows multiples of kUnit: cuBLASLt has no algorithm for some other sizes. The
// distances are the same for each part of a tile that a step fills, so all steps use the same choice of an algorithm.
void widen(View& a, View& b) {
  const bool pads = a.scale && b.scale && a.sizes.size() == 2 && a.strides[1] == 1 && b.strides[0] == 1;
  const auto converted = [&](View& x, size_t rows, size_t summed) {  // axes of the matrix
    if (!x.scale) return;
    at::DimVector sizes(x.sizes.size(), 1), strides = x.strides;
    if (x.by_row) sizes[rows] = x.sizes[rows];
    const auto scales = scale_tensor(x.scale, sizes, x.device), values = x.tensor();
    sizes = x.sizes;
    if (pads) {
      sizes[summed] = up_to_unit(x.sizes[summed]);
      strides[rows] = up_to_unit(x.sizes[rows] == 1 ? x.sizes[summed] : x.strides[rows]);
    }
    const auto kept = at::empty_strided(sizes, strides, at::TensorOptions(at::kBFloat16).device(x.device));
    if (pads) kept.zero_();
    const auto axis = static_cast<int64_t>(summed);
    kept.narrow(axis, 0, x.sizes[summed]).copy_(values).mul_(scales);
    x = View(kept);
  };
  converted(a, a.sizes.size() - 2, a.sizes.size() - 1);
  converted(b, b.sizes.size() - 1, b.sizes.size() - 2);
}

// Prepares 8-bit operands for cuBLASLt. If a step fills only a part of the summed axis, the sums also cover the zeros
// behind this part, up to a multiple of kUnit (see Quantize). Converts the operands to bf16 if cuBLASLt cannot multiply
// them. cuBLASLt needs a GPU with FP8 units, contiguous summed axes, numbers of columns and of summed elements that are
// multiples of kUnit, and at most one operand in e5m2. The number of rows may be any. Not all GPUs with FP8 units
// support scales of rows.
void pad_or_widen(View& a, View& b) {
  if (a.sizes.size() == 2 && a.sizes[1] == 1) a.strides[1] = b.strides[0] = 1;  // an axis of one element has any stride
  const auto k = up_to_unit(a.sizes.back());
  const bool precise = a.dtype == at::kFloat8_e4m3fn || b.dtype == at::kFloat8_e4m3fn;
  const bool matrices = a.sizes.size() == 2 && a.strides[1] == 1 && b.strides[0] == 1;
  const auto has_room = [&](int64_t count, int64_t stride) {
    return count == 1 ? k == a.sizes[1] : stride >= k && stride % kUnit == 0;
  };
  const bool scales = a.scale && b.scale && a.by_row == b.by_row && (!a.by_row || has_scales_of_rows(a.device));
  if (!(scales && precise && matrices && has_fp8(a.device) && b.sizes[1] % kUnit == 0 &&
        has_room(a.sizes[0], a.strides[0]) && has_room(b.sizes[1], b.strides[1])))
    return widen(a, b);
  a.sizes[1] = b.sizes[0] = k;
}

// Returns an operand as matrices [batch, rows, columns] (without batch: [rows, columns]): a view if the strides allow
// it, else a copy.
View as_matrix(const View& x, size_t batch, size_t rows, size_t columns) {
  at::DimVector shape;
  if (batch) shape.push_back(extent(x.sizes, 0, batch));
  shape.push_back(extent(x.sizes, batch, rows));
  shape.push_back(extent(x.sizes, batch + rows, columns));
  if (auto found = x.reshaped(shape)) return *std::move(found);
  View copied(matrix(x.tensor(), batch, rows, columns));
  copied.scale = x.scale, copied.by_row = x.by_row;
  return copied;
}

struct Product {
  ContractArgs args;
  Plan plan;
  View a, b;  // matrices, or batches of them
  Sizes most;
  bool lt;     // cuBLASLt supports the product
  bool first;  // if the epilogue sums an operand: true for a, false for b

  explicit Product(const Args& t) : Product(t, ContractArgs(t)) {}

  // Computes target = epilogue(alpha a b + c + bias) by cuBLASLt. Without an algorithm for a product of 8 bits,
  // computes it in bf16.
  void multiply(const View& target, Fused f, bool tf32) const {
    f.fast = args.fast;
    try {
      matmul(target, a, b, args.scale, f, tf32, most);
    } catch (const Unsupported&) {
      if (!a.scale || f.epilogue != CUBLASLT_EPILOGUE_DEFAULT) throw;
      View wide_a = a, wide_b = b;
      widen(wide_a, wide_b);
      matmul(target, wide_a, wide_b, args.scale, f, tf32, most);
    }
  }

 private:
  Product(const Args& t, const ContractArgs& args_)
      : args(args_), plan(args.plan),
        a(as_matrix(operand(t, tile_of_a(), plan.a, plan.a.slice(0, plan.batch + plan.m)), plan.batch, plan.m, plan.k)),
        b(as_matrix(operand(t, 3 - tile_of_a(), plan.b, plan.b.slice(plan.batch + plan.k)), plan.batch, plan.k,
                    plan.n)),
        most{most_of(t, plan.batch, plan.m), b.sizes.back(), most_of(t, plan.batch + plan.m, plan.k)},
        lt(!plan.batch && a.dtype != at::kDouble),
        first((args.epilogue.colsum == 0) != plan.swap) {
    if (a.scale || b.scale) pad_or_widen(a, b), most.k = up_to_unit(most.k);
  }

  size_t tile_of_a() const { return plan.swap ? 2 : 1; }

  int64_t most_of(const Args& t, size_t from, size_t count) const {  // largest size of some axes of a together
    int64_t size = 1;
    for (const auto axis : plan.a.slice(from, count)) size *= t.most(tile_of_a())[static_cast<size_t>(axis)];
    return size;
  }
};

// Computes target = alpha a b + bias for a target with another order of axes than the product, by a product and a copy,
// or by one product per block. The faster way depends on the width of the blocks and is measured. If steps fill
// different parts of the rows, nothing is measured: a product and a copy are used. bias: one number for each
// column, contiguous; undefined: no bias.
void permuted(const at::Tensor& target, const Product& p, const at::Tensor& bias, bool tf32) {
  const auto &a = p.a, &b = p.b;
  const auto m = p.plan.m, n = p.plan.n;
  const auto product_and_copy = [&] {
    const auto product = at::empty(target.sizes(), target.options());
    const auto whole = matrix(product, 0, m, n);
    Fused f;
    if (bias.defined()) f.bias = bias.data_ptr(), f.epilogue = CUBLASLT_EPILOGUE_BIAS;
    try {
      p.multiply(whole, f, tf32);
    } catch (const Unsupported&) {
      if (!bias.defined()) throw;
      p.multiply(whole, Fused(), tf32);
      whole.add_(bias);
    }
    copy(target, product);
  };
  const auto by_blocks = [&](const at::Tensor& to, bool by_row) {
    into_blocks(to, a.tensor(), b.tensor(), p.args.scale, by_row);
    if (bias.defined()) target.add_(bias.view(target.sizes().slice(m)));
  };
  if (p.most != Sizes{a.sizes[0], b.sizes[1], a.sizes[1]}) return product_and_copy();
  // The batches of `into_blocks` support neither tf32 nor a target of another dtype than the operands.
  if (a.dtype != target.scalar_type() || (tf32 && a.dtype == at::kFloat)) return product_and_copy();
  std::vector<int64_t> key{static_cast<int64_t>(a.dtype), static_cast<int64_t>(m)};
  for (const auto part : {target.sizes(), target.strides(), at::IntArrayRef(a.sizes), at::IntArrayRef(a.strides),
                          at::IntArrayRef(b.strides)})
    key.insert(key.end(), part.begin(), part.end());
  if (bias.defined()) key.push_back(1);
  thread_local std::map<std::vector<int64_t>, int> known;
  auto found = known.find(key);
  if (found == known.end()) {
    int way = 0;
    if (const auto to = blocks(target, m, n)) {
      std::ostringstream text("blocks ", std::ios::ate);
      for (const auto value : key) text << value << ' ';
      way = fastest_of(products_file(), text.str(),
                       {product_and_copy, [&] { by_blocks(*to, true); }, [&] { by_blocks(*to, false); }});
    }
    found = known.emplace(std::move(key), way).first;
  }
  if (found->second == 0) product_and_copy();
  else by_blocks(*blocks(target, m, n), found->second == 1);
}

// The part of the epilogue that is still to be computed: numbers of its tiles among the task's tiles. 0: the epilogue
// has no such tile, or its term is computed. target: tile of the value before the activation. out: tile of the result,
// which is `target` if the value before the activation is not kept.
struct Rest {
  size_t target, bias = 0, residual = 0, aux = 0, out, column_sum = 0;
  bool activation;

  Rest(const EpilogueArgs& e, size_t target_, size_t next)
      : target(target_), out(target_), activation(e.activation >= 0) {
    if (e.bias_axes >= 0) bias = next++;
    if (e.residual) residual = next++;
    if (e.aux) aux = next++;
    if (e.keep_pre && activation && !e.aux) out = next++;
    if (e.colsum >= 0) column_sum = next;
  }
};

// Runs cuBLASLt with as much of the epilogue as it supports; returns the remaining epilogue.
Rest fused(Args& t, const Product& p, const EpilogueArgs& e, Rest left) {
  const auto shaped = [&](size_t tile) { return as_matrix(t.view(tile), 0, p.plan.m, p.plan.n); };
  const auto target = shaped(0);
  Fused f;
  std::optional<View> residual;
  if (t.accumulates(0)) f.c = target.data;
  else if (left.residual) f.c = residual.emplace(shaped(std::exchange(left.residual, 0))).data;
  bool vector = false;
  if (left.bias) {
    const auto bias = t.view(left.bias);
    vector = trailing(e.bias_axes, static_cast<int64_t>(t.most(0).size())) && bias.numel() == p.b.sizes[1];
    if (vector) f.bias = bias.data;
  }
  const bool late = left.residual || (left.bias && !vector);  // an addition before the activation remains
  // The tile of the value before the activation cannot be read and written by one call.
  const bool gelu = e.activation == kGeluNew && !late && !(e.keep_pre && t.accumulates(0));
  const bool sums = left.column_sum && e.activation < 0 && !vector;
  at::Tensor spare;  // holds the sum of an operand before it is added to the task's tile
  if (gelu && e.aux) {
    f.epilogue = CUBLASLT_EPILOGUE_DGELU;
    f.aux = t.view(left.aux).data;
  } else if (gelu && e.keep_pre) {
    f.epilogue = vector ? CUBLASLT_EPILOGUE_GELU_AUX_BIAS : CUBLASLT_EPILOGUE_GELU_AUX;
    f.aux = target.data;  // cuBLASLt writes the value before the activation to aux, and the result to `out`
  } else if (gelu) {
    f.epilogue = vector ? CUBLASLT_EPILOGUE_GELU_BIAS : CUBLASLT_EPILOGUE_GELU;
  } else if (vector) {
    f.epilogue = CUBLASLT_EPILOGUE_BIAS;
  } else if (sums) {
    // cuBLASLt is column-major, so the operands are swapped: BGRADA sums our b, BGRADB sums our a.
    f.epilogue = p.first ? CUBLASLT_EPILOGUE_BGRADB : CUBLASLT_EPILOGUE_BGRADA;
    if (t.accumulates(left.column_sum)) spare = at::empty_like(t[left.column_sum]);
    f.bias = spare.defined() ? spare.data_ptr() : t.view(left.column_sum).data;
  }
  try {
    p.multiply(gelu && left.out != left.target ? shaped(left.out) : target, f, t.tf32());
    if (spare.defined()) t[left.column_sum].add_(spare);
    if (sums) left.column_sum = 0;
    if (vector) left.bias = 0;
    if (gelu) left.activation = false;
  } catch (const Unsupported&) {  // not all epilogues exist for all shapes: one operation after the other
    Fused bare;
    bare.c = f.c;
    p.multiply(target, bare, t.tf32());
  }
  return left;
}

// Returns the bias as one number per column if its axes are exactly the columns of the product, in order; else an
// undefined tensor.
at::Tensor of_columns(Args& t, const Product& p, const EpilogueArgs& e, size_t bias) {
  if (!bias) return {};
  int64_t mask = 0;
  const auto columns = p.plan.out.slice(p.plan.m);
  for (const auto axis : columns) mask |= int64_t{1} << axis;
  if (mask != e.bias_axes || !std::is_sorted(columns.begin(), columns.end())) return {};
  return t[bias].view(-1);
}

// Computes batches, fp64, and targets with another order of axes. Returns the remaining epilogue.
Rest unfused(Args& t, const Product& p, const EpilogueArgs& e, Rest left) {
  const auto& plan = p.plan;
  const auto target = t[0];
  const double beta = t.accumulates(0) ? 1 : 0;
  if (!plan.permuted_out) {
    plain(matrix(target, plan.batch, plan.m, plan.n), p.a.tensor(), p.b.tensor(), beta, p.args.scale);
    return left;
  }
  const auto view = target.permute(plan.out);
  if (const auto direct = in_place(view, plan.batch, plan.m, plan.n))
    return plain(*direct, p.a.tensor(), p.b.tensor(), beta, p.args.scale), left;
  if (p.lt && beta == 0) {
    const auto bias = left.residual ? at::Tensor() : of_columns(t, p, e, left.bias);
    permuted(view, p, bias, t.tf32());
    if (bias.defined()) left.bias = 0;
    return left;
  }
  const auto product = at::empty(view.sizes(), target.options());
  const auto whole = matrix(product, plan.batch, plan.m, plan.n);
  if (p.lt) p.multiply(whole, Fused(), t.tf32());
  else plain(whole, p.a.tensor(), p.b.tensor(), 0, p.args.scale);
  if (beta != 0) view.add_(product);
  else copy(view, product);
  return left;
}

// Computes the part of the epilogue that remains.
void finish(Args& t, const EpilogueArgs& e, const Rest& left) {
  const auto target = t[left.target];
  if (left.residual) target.add_(t[left.residual]);
  if (left.bias) target.add_(broadcastable(t[left.bias], e.bias_axes, target));
  if (left.activation && e.aux) multiply_derivative(e.activation, target, t[left.aux]);
  else if (left.activation) apply_activation(e.activation, target, t[left.out]);
}

void contract(Args& t) {
  const Product p(t);
  const auto& e = p.args.epilogue;
  const auto run = p.lt && !p.plan.permuted_out ? fused : unfused;
  Rest left(e, 0, 3);
  if (p.plan.reshape.empty()) {
    left = run(t, p, e, left);
  } else {  // the last partial product: tile 0 holds the sum, tile 3 is the target
    const auto bare = without_epilogue(e);
    run(t, p, bare, Rest(bare, 0, 3));
    left = Rest(e, 3, 4);
    copy(t[3], t[0].permute(p.plan.reshape));
  }
  finish(t, e, left);
  if (left.column_sum) {
    const auto sums = t[left.column_sum];
    const auto summed = (p.first ? p.a : p.b).tensor();
    const auto total = at::sum(summed, {p.first ? 1 : 0}, false, sums.scalar_type()).view(sums.sizes());
    if (t.accumulates(left.column_sum)) sums.add_(total);
    else sums.copy_(total);
  }
}

void contract_epilogue(Args& t) {
  const ContractArgs args(t);
  const Plan plan(args.plan);
  const bool moves = !plan.reshape.empty();
  if (moves) copy(t[1], t[0].permute(plan.reshape));
  finish(t, args.epilogue, Rest(args.epilogue, moves ? 1 : 0, moves ? 2 : 1));
}

NNTILE_CUDA_KERNEL(contract, contract);
NNTILE_CUDA_KERNEL(contract_epilogue, contract_epilogue);

}  // namespace
}  // namespace nntile
