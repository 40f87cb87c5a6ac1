// For CUDA graphs: kernel arguments that change from run to run, such as the seed of dropout, and constant tables.
#pragma once
#include <cuda.h>

#include <memory>
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

  // The next captured kernels belong to this part of a task; slots: its changing slots.
  void begin(const TaskBody& body, Slots slots) { body_ = &body, slots_ = std::move(slots); }
  // Throws if the part is a C++ kernel, whose arguments the graph would fix.
  void refuse() const;
  // Records the last captured kernel of the stream and its parameters.
  void add(const Launch& launch, const Parameter* parameters, CUstream stream);
  // Copies integers to the device and returns their address there, which is valid for the lifetime of this object.
  void* constant(const std::vector<int64_t>& words);
  // Called when the graph is complete. The graph must outlive this object.
  void finish();
  // Sets the numbers for the next launches.
  void set(CUgraphExec graph, const std::vector<double>& slots);

 private:
  struct Number {
    size_t parameter;
    bool whole;  // true: int64; false: fp32
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
  std::vector<std::shared_ptr<void>> constants_;
};

inline thread_local Changing* changing = nullptr;  // of the graph that this worker captures now; null: no capture

}  // namespace nntile
