// Rotary positions on tiles with axes seq and head_dim; the table's rows are cosines, then sines.
// Each row of the batch may have a table of its own.
#include "common.h"
#include "rotary_args.h"

namespace nntile {
namespace {

// Rotates n pairs: element k of the first half with element k of the second half, by angle k. sign -1: backwards.
template <class T>
void rotate(T* y, const T* x, const T* table, T sign, int64_t n) {
  for_vectors<T>(n, [&](int64_t k, int64_t count) {
    const int c = static_cast<int>(count);
    const auto a = load(x + k, count), b = load(x + n + k, count);
    const auto cos = load(table + k, count), sin = load(table + n + k, count) * Vec<T>(sign);
    (a * cos - b * sin).store(y + k, c);
    at::vec::fmadd(b, cos, a * sin).store(y + n + k, c);
  });
}

// tiles: y, x, table [seq, head_dim]
void rotary(Args& t) {
  const RotaryArgs args(t);
  const auto y = t[0], x = t[1], table = t[2];
  const int64_t width = x.size(args.head_dim), half = width / 2;
  const int64_t seq = x.size(args.seq), seq_step = x.stride(args.seq), inner = x.stride(args.head_dim);
  dispatch(x, [&](auto zero) {
    using T = decltype(zero);
    const T sign = args.inverse ? T(-1) : T(1);
    for (int64_t outer = 0; outer < x.numel(); outer += width * inner) {
      for (int64_t column = 0; column < inner; ++column) {
        const int64_t first = outer + column;
        const int64_t b = args.batch < 0 ? 0 : first / x.stride(args.batch) % x.size(args.batch);
        const auto* angles = table.data_ptr<T>() + (b * seq + first / seq_step % seq) * width;
        const auto* in = x.data_ptr<T>() + first;
        auto* out = y.data_ptr<T>() + first;
        if (inner == 1) {
          rotate(out, in, angles, sign, half);
          continue;
        }
        for (int64_t k = 0; k < half; ++k) {
          const T a = in[k * inner], b = in[(half + k) * inner], cos = angles[k], sin = angles[half + k] * sign;
          out[k * inner] = a * cos - b * sin;
          out[(half + k) * inner] = b * cos + a * sin;
        }
      }
    }
  });
}

NNTILE_KERNEL(rotary, rotary);

}  // namespace
}  // namespace nntile
