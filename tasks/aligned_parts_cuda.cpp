// Products of matrices whose rows are not aligned, in aligned parts.
#include <ATen/ops/empty_strided.h>

#include <map>
#include <numeric>
#include <optional>
#include <sstream>
#include <utility>
#include <vector>

#include "autotune.h"
#include "cublaslt.h"
#include "runtime.h"

namespace nntile {
namespace {

// Fast algorithms of cuBLASLt need rows that begin at multiples of 16 bytes. In logits of 50257 tokens in 16 bits, some
// rows begin elsewhere. But rows r, r + 8, r + 16, ... are a multiple of 16 bytes apart. From column -r * 50257 modulo 8
// on, these rows are aligned. So a product of such a matrix can be computed in parts: for each r, one product for the
// aligned columns, whose number is a multiple of 8, and two narrow products for the columns before and after them.
// A measurement decides between the parts and the whole.

constexpr double kLarge = 1e9;  // smallest number of multiplications of a product whose parts are measured

bool row_major(const View& x) { return x.strides[1] == 1; }

bool misaligned(const View& x) {
  const size_t other = row_major(x) ? 0 : 1;
  const auto bytes = x.strides[other] * static_cast<int64_t>(at::elementSize(x.dtype));
  return x.sizes[other] > 1 && bytes % kRowAlignment != 0;
}

// Returns the elements first, first + step, ... of an axis, `count` of them; count -1: to the end.
View every(const View& x, size_t axis, int64_t first, int64_t step = 1, int64_t count = -1) {
  View part = x;
  part.data = static_cast<char*>(x.data) + first * x.strides[axis] * static_cast<int64_t>(at::elementSize(x.dtype));
  part.sizes[axis] = count < 0 ? (x.sizes[axis] - first + step - 1) / step : count;
  part.strides[axis] *= step;
  return part;
}

enum Axis { kM, kN, kK };

// The operands of a product or of a part of it. `of` returns the part for some elements of the axis m, n or k.
struct Part {
  View out, a, b;

  Part of(Axis axis, int64_t first, int64_t step = 1, int64_t count = -1) const {
    Part made = *this;
    if (axis != kN) made.a = every(a, axis == kM ? 0 : 1, first, step, count);
    if (axis != kM) made.b = every(b, axis == kN ? 1 : 0, first, step, count);
    if (axis != kK) made.out = every(out, axis == kN ? 1 : 0, first, step, count);
    return made;
  }
};

struct Misaligned {
  Axis rows, columns;  // axes of the product that are the rows and columns of the misaligned matrix in memory
  int64_t leading, size;  // leading: elements from one row to the next; size: elements of the axis `columns`
  int64_t unit;           // elements in kRowAlignment bytes
};

// Returns the misaligned matrix. nullopt if no matrix or several matrices are misaligned, if parts of the other
// matrices would be misaligned, or if the product is small.
std::optional<Misaligned> found_misaligned(const Part& p, const Fused& f, bool tf32) {
  if (p.a.scale || (p.a.dtype == at::kFloat && !tf32)) return {};
  if (f.epilogue != CUBLASLT_EPILOGUE_DEFAULT || misaligned(p.b)) return {};
  if (static_cast<double>(p.out.numel()) * static_cast<double>(p.a.sizes[1]) < kLarge) return {};
  const bool into = misaligned(p.out);
  if (into == misaligned(p.a)) return {};
  const View& x = into ? p.out : p.a;
  const int64_t unit = kRowAlignment / static_cast<int64_t>(at::elementSize(x.dtype));
  Misaligned found{kM, into ? kN : kK, x.strides[0], x.sizes[1], unit};
  if (!into && !row_major(p.a)) found = {kK, kM, x.strides[1], x.sizes[0], unit};
  const auto rows = x.sizes[row_major(x) ? 0 : 1];
  if (found.size < 2 * unit || rows < unit) return {};  // otherwise a part could be empty
  // A part of b begins at an offset along an axis, or takes every eighth element of this axis. So b must not be
  // contiguous along the axis.
  const Axis of_b = found.rows == kK ? kK : found.columns;
  const bool offsets = row_major(p.b) == (of_b == kK) && (found.rows == kK || row_major(p.a));
  const bool exact = found.rows != kK || p.out.dtype == at::kFloat;  // the parts are added in the output
  const bool aligned = reinterpret_cast<uintptr_t>(x.data) % kRowAlignment == 0;
  return offsets && exact && aligned ? std::optional(found) : std::nullopt;
}

void by_parts(const Part& whole, const Misaligned& x, double alpha, const Fused& f, bool tf32, const Sizes& most) {
  const auto period = x.unit / std::gcd(x.leading, x.unit);
  for (int64_t row = 0; row < period; ++row) {
    const auto rows = whole.of(x.rows, row, period);
    const auto before = (x.unit - row * x.leading % x.unit) % x.unit;
    const auto wide = (x.size - before) / x.unit * x.unit, after = before + wide;
    bool adds = x.rows == kK && row > 0;  // the output holds the sum over earlier rows
    // The wide part comes last: if parts are added, the roundings before the last one are of small numbers.
    for (const auto& [first, count] : {std::pair{int64_t{0}, before}, {after, x.size - after}, {before, wide}}) {
      if (!count) continue;
      const auto part = rows.of(x.columns, first, 1, count);
      Fused fused;
      if (adds) fused.c = part.out.data;
      else if (f.c)
        fused.c =
            static_cast<const char*>(f.c) + (static_cast<char*>(part.out.data) - static_cast<char*>(whole.out.data));
      Sizes largest{part.out.sizes[0], part.out.sizes[1], part.a.sizes[1]};
      if (x.rows == kM) largest.m = (most.m + period - 1) / period;
      else largest.k = (most.k + period - 1) / period;
      direct_matmul(part.out, part.a, part.b, alpha, fused, tf32, largest);
      adds |= x.columns == kK;
    }
  }
}

// Returns how to split a product; nullopt if the whole is faster or cannot be split. Measured once for its sizes.
std::optional<Misaligned> in_parts(const Part& p, double alpha, const Fused& f, bool tf32, const Sizes& most) {
  const auto split = found_misaligned(p, f, tf32);
  if (!split) return {};
  std::vector<int64_t> key{rounded(p.out.sizes[0], most.m), p.out.sizes[1], rounded(p.a.sizes[1], most.k),
                           static_cast<int64_t>(p.a.dtype), static_cast<int64_t>(p.out.dtype), f.c != nullptr};
  for (const View* x : {&p.out, &p.a, &p.b}) key.insert(key.end(), x->strides.begin(), x->strides.end());
  thread_local std::map<std::vector<int64_t>, bool> known;
  auto found = known.find(key);
  if (found == known.end()) {
    std::ostringstream text("parts ", std::ios::ate);
    for (const auto value : key) text << value << ' ';
    Part trial = p;
    Fused into = f;
    if (f.c == p.out.data) {  // each trial would add to the target
      const auto options = at::TensorOptions(p.out.dtype).device(p.out.device);
      trial.out = View(at::empty_strided(p.out.sizes, p.out.strides, options));
      into.c = trial.out.data;
    }
    const auto whole = [&] { direct_matmul(trial.out, trial.a, trial.b, alpha, into, tf32, most); };
    const auto parts = [&] { by_parts(trial, *split, alpha, into, tf32, most); };
    bool faster = false;
    try {
      parts();
      faster = fastest_of(products_file(), text.str(), {whole, parts}) == 1;
    } catch (const std::runtime_error&) {  // the caller computes the whole, or does without the epilogue
    }
    found = known.emplace(std::move(key), faster).first;
  }
  return found->second ? split : std::nullopt;
}

}  // namespace

void matmul(const View& out, const View& a, const View& b, double alpha, const Fused& f, bool tf32, const Sizes& most) {
  const Part whole{out, a, b};
  if (const auto split = in_parts(whole, alpha, f, tf32, most)) by_parts(whole, *split, alpha, f, tf32, most);
  else direct_matmul(out, a, b, alpha, f, tf32, most);
}

}  // namespace nntile
