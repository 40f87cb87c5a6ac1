#include "common.h"
#include "embedding_args.h"

namespace nntile {
namespace {

void embedding(Args& t) {
  const EmbeddingArgs args(t);
  const auto out = t[0], ids = t[1], table = t[2];
  dispatch(out, [&](auto zero) {
    using T = decltype(zero);
    const int64_t width = table.size(1), first = args.first, last = first + table.size(0);
    auto* y = out.data_ptr<T>();
    const auto* id = ids.data_ptr<int64_t>();
    const auto* rows = table.data_ptr<T>();
    for (int64_t k = 0; k < ids.numel(); ++k, y += width) {
      if (id[k] < 0 || id[k] >= args.rows)
        throw std::out_of_range("id " + std::to_string(id[k]) + " is not in the table of " + std::to_string(args.rows) +
                                " rows");
      if (id[k] >= first && id[k] < last) std::copy_n(rows + (id[k] - first) * width, width, y);
      else if (!t.accumulates(0)) std::fill_n(y, width, T(0));
    }
  });
}

void embedding_grad(Args& t) {
  const EmbeddingGradArgs args(t);
  const auto out = t[0], ids = t[1], dy = t[2];
  if (!t.accumulates(0)) out.zero_();
  dispatch(out, [&](auto zero) {
    using T = decltype(zero);
    const int64_t width = out.size(1), first = args.first, last = first + out.size(0);
    auto* rows = out.data_ptr<T>();
    const auto* id = ids.data_ptr<int64_t>();
    const auto* grad = dy.data_ptr<T>();
    const int64_t padding = args.padding.empty() ? -1 : args.padding[0];
    for (int64_t k = 0; k < ids.numel(); ++k, grad += width) {
      if (id[k] < first || id[k] >= last || id[k] == padding) continue;
      auto* row = rows + (id[k] - first) * width;
      add_rows(row, row, grad, width);
    }
  });
}

NNTILE_KERNEL(embedding, embedding);
NNTILE_KERNEL(embedding_grad, embedding_grad);

}  // namespace
}  // namespace nntile
