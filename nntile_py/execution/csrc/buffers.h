// The memory of a task's tiles, for its kernels.
#pragma once
#include <ATen/core/Tensor.h>
#include <starpu.h>

#include <vector>

#include "kernel.h"

namespace nntile {

// The buffers of a task's tiles, in the order of the tiles: StarPU's buffers, and buffers at the addresses of
// held residents. Buffers of the scratch tiles follow.
class Buffers {
 public:
  Buffers(const TaskRecord& record, void** buffers, c10::Device device);
  void** all() { return all_.empty() ? starpu_buffers_ : all_.data(); }

 private:
  void** starpu_buffers_;
  std::vector<void*> all_;
  std::vector<starpu_variable_interface> own_;
  at::Tensor memory_;  // on CUDA workers, ATen reuses it only for later work on the same stream
};

}  // namespace nntile
