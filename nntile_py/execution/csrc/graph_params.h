// The kernels of a CUDA graph that take numbers which differ from run to run, as the seed of dropout does.
#pragma once
#include <cuda.h>

#include <utility>
#include <vector>

#include "kernel.h"

namespace nntile {

union Parameter {  // of a kernel
  void* pointer;
  int32_t int32;
  int64_t int64;
  float fp32;
};

class Changing {
 public:
  using Slots = std::vector<std::pair<int, int>>;  // (position in a task's floats, slot of the program)

  // The kernels that are captured next are of this part of a task. slots: its own that change.
  void begin(const TaskBody& body, Slots slots) { body_ = &body, slots_ = std::move(slots); }
  // Throws where the part is computed by a kernel in C++, which would be given the same numbers for ever.
  void refuse() const;
  // The kernel that was captured last on the stream, and its parameters.
  void add(const Launch& launch, const Parameter* parameters, CUstream stream);
  // When the graph, which has to stay, is complete.
  void finish();
  // In launches to come.
  void set(CUgraphExec graph, const std::vector<double>& slots);

 private:
  struct Number {
    size_t parameter;
    bool whole;  // an int64, else an fp32
    size_t slot;
    double now;
  };
  struct Kernel {
    CUgraphNode node;
    CUDA_KERNEL_NODE_PARAMS how;
    std::vector<Parameter> parameters;
    std::vector<Number> numbers;
  };
  const TaskBody* body_ = nullptr;
  Slots slots_;
  std::vector<Kernel> kernels_;
};

inline thread_local Changing* changing = nullptr;  // of the graph that this worker captures

}  // namespace nntile
