// Kinds of activations, numbered as ACTIVATIONS in activation.py.
#pragma once

namespace nntile {

inline constexpr int kRelu = 0, kGelu = 1, kGeluNew = 2, kTanh = 3, kSilu = 4, kQuickGelu = 5;
inline constexpr int kRelu2 = 6, kRelu6 = 7, kLeakyRelu = 8, kHardswish = 9, kMish = 10, kSigmoid = 11;

inline constexpr double kQuick = 1.702;  // quick_gelu is x sigmoid(kQuick x)
inline constexpr double kLeak = 0.01;  // slope of leaky_relu for negative x

}  // namespace nntile
