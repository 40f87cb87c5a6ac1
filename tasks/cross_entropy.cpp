// Cross-entropy on tiles of logits [rows, classes]. Labels below 0 are ignored.
#include "cross_entropy_args.h"
#include "rows.h"

namespace nntile {
namespace {

// x <- exp(x - lse) * scale; then subtracts scale at the label. label < -n: an ignored row, x <- 0.
template <class T>
void gradient(T* x, T lse, int64_t label, T scale, int64_t n) {
  if (label < -n) scale = T(0);
  exp_row(x, x, lse, scale, n);
  if (label >= 0 && label < n) x[label] -= scale;
}

void check_label(int64_t label, int64_t classes) {
  if (label >= classes)
    throw std::out_of_range("label " + std::to_string(label) + " is not one of " + std::to_string(classes) + " classes");
}

// tiles: logits, labels, lse, loss (ACC)
void cross_entropy(Args& t) {
  const CrossEntropyArgs args(t);
  const auto logits = t[0], labels = t[1], lse = t[2], loss = t[3];
  dispatch(logits, [&](auto zero) {
    using T = decltype(zero);
    const int64_t n = logits.size(-1);
    const auto* label = labels.data_ptr<int64_t>();
    auto* x = logits.data_ptr<T>();
    double total = 0;
    for (int64_t row = 0; row < labels.numel(); ++row, x += n) {
      check_label(label[row], n);
      const T top = max_of(x, n), value = top + std::log(sumexp_of(x, top, n));
      lse.data_ptr<T>()[row] = value;
      // Scale each row's loss before adding. Scaling the total would round differently when several tasks each add a
      // part.
      if (label[row] >= 0) total += (static_cast<double>(value) - static_cast<double>(x[label[row]])) * args.scale;
      if (args.gradient) gradient(x, value, label[row] < 0 ? -2 * n : label[row], static_cast<T>(args.scale), n);
    }
    auto* out = loss.data_ptr<double>();
    *out = (t.accumulates(3) ? *out : 0.0) + total;
  });
}

// tiles: state (ACC), picked (ACC), logits, labels
void cross_entropy_state(Args& t) {
  const CrossEntropyStateArgs args(t);
  const auto state = t[0], picked = t[1], logits = t[2], labels = t[3];
  const bool accumulates = t.accumulates(0);
  const auto part = accumulates ? at::Tensor(state.clone()) : state;
  if (!t.accumulates(1)) picked.zero_();
  dispatch(logits, [&](auto zero) {
    using T = decltype(zero);
    const int64_t n = logits.size(-1);
    const auto* label = labels.data_ptr<int64_t>();
    const auto* x = logits.data_ptr<T>();
    auto* s = part.data_ptr<T>();
    for (int64_t row = 0; row < labels.numel(); ++row, x += n, s += 2) {
      check_label(label[row], args.classes);
      s[0] = max_of(x, n);
      s[1] = sumexp_of(x, s[0], n);
      const int64_t at = label[row] - args.first;
      if (label[row] >= 0 && at >= 0 && at < n) picked.data_ptr<T>()[row] += x[at];
    }
  });
  if (accumulates) combine(Monoid::softmax, state, part);
}

// tiles: lse, loss (ACC), state, picked, labels
void cross_entropy_loss(Args& t) {
  const CrossEntropyLossArgs args(t);
  const auto lse = t[0], loss = t[1], state = t[2], picked = t[3], labels = t[4];
  dispatch(lse, [&](auto zero) {
    using T = decltype(zero);
    const auto* s = state.data_ptr<T>();
    double total = 0;
    for (int64_t row = 0; row < labels.numel(); ++row, s += 2) {
      const T value = s[0] + std::log(s[1]);
      lse.data_ptr<T>()[row] = value;
      if (labels.data_ptr<int64_t>()[row] >= 0)
        total += (static_cast<double>(value) - static_cast<double>(picked.data_ptr<T>()[row])) * args.scale;
    }
    auto* out = loss.data_ptr<double>();
    *out = (t.accumulates(1) ? *out : 0.0) + total;
  });
}

// tiles: logits, labels, lse
void cross_entropy_grad(Args& t) {
  const CrossEntropyGradArgs args(t);
  const auto logits = t[0], labels = t[1], lse = t[2];
  dispatch(logits, [&](auto zero) {
    using T = decltype(zero);
    const int64_t n = logits.size(-1);
    const auto* label = labels.data_ptr<int64_t>();
    for (int64_t row = 0; row < labels.numel(); ++row)
      gradient(logits.data_ptr<T>() + row * n, lse.data_ptr<T>()[row],
               label[row] < 0 ? -2 * n : std::max<int64_t>(label[row] - args.first, -1), static_cast<T>(args.scale), n);
  });
}

NNTILE_KERNEL(cross_entropy, cross_entropy);
NNTILE_KERNEL(cross_entropy_state, cross_entropy_state);
NNTILE_KERNEL(cross_entropy_loss, cross_entropy_loss);
NNTILE_KERNEL(cross_entropy_grad, cross_entropy_grad);

}  // namespace
}  // namespace nntile
