// Kinds of activations, numbered as ACTIVATIONS in activation.py.
#pragma once

namespace nntile {

inline constexpr int kRelu = 0, kGelu = 1, kGeluNew = 2, kTanh = 3, kSilu = 4, kQuickGelu = 5;

inline constexpr double kQuick = 1.702;  // quick_gelu is x sigmoid(kQuick x)

}  // namespace nntile
