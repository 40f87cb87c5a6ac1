// Arguments that change from run to run, as parameters of graph nodes (CUDA driver API, graph management).
#include "graph_params.h"

#include <c10/cuda/CUDAException.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <limits>

#include "on_cuda.h"
#include "runtime.h"

namespace nntile {

void Changing::refuse() const {
  if (!slots_.empty())
    throw TaskError(body_->name + ": its kernel in C++ takes a number that differs from run to run, so it cannot be in a graph");
}

void Changing::add(const Launch& launch, const Parameter* parameters, CUstream stream) {
  std::vector<Number> numbers;
  bool maps = false;
  for (size_t k = 0; k < launch.arguments.size(); ++k) {
    const auto& a = launch.arguments[k];
    maps = maps || a.kind == Launch::matrix;
    if (a.kind != Launch::fp32_of_task && a.kind != Launch::int64_of_task) continue;
    const auto position = static_cast<int64_t>(body_->first_float) + a.whole;
    const auto found = std::find_if(slots_.begin(), slots_.end(), [&](const auto& of) { return of.first == position; });
    if (found != slots_.end())
      numbers.push_back({k, a.kind == Launch::int64_of_task, static_cast<size_t>(found->second),
                         std::numeric_limits<double>::quiet_NaN()});
  }
  if (numbers.empty()) return;
  if (maps) throw TaskError(body_->name + ": a kernel with a tensor map and a number that differs from run to run cannot be in a graph");
  CUstreamCaptureStatus status;
  const CUgraphNode* last = nullptr;
  size_t count = 0;
#if CUDA_VERSION >= 13000
  require(cuStreamGetCaptureInfo(stream, &status, nullptr, nullptr, &last, nullptr, &count), "cuStreamGetCaptureInfo");
#else
  require(cuStreamGetCaptureInfo(stream, &status, nullptr, nullptr, &last, &count), "cuStreamGetCaptureInfo");
#endif
  if (count != 1) throw TaskError(body_->name + ": its kernel is not the last of the graph");
  kernels_.push_back({*last, {}, {parameters, parameters + launch.arguments.size()}, std::move(numbers)});
}

void* Changing::constant(const std::vector<int64_t>& words) {
  struct Relaxed {  // a capture forbids its thread to allocate device memory, and to copy before the graph runs
    Relaxed() { C10_CUDA_CHECK(cudaThreadExchangeStreamCaptureMode(&mode)); }
    ~Relaxed() { cudaThreadExchangeStreamCaptureMode(&mode); }
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  } const relaxed;
  void* made = nullptr;
  C10_CUDA_CHECK(cudaMalloc(&made, words.size() * sizeof(int64_t)));
  constants_.emplace_back(made, [](void* memory) { cudaFree(memory); });
  const auto stream = starpu_cuda_get_local_stream();
  C10_CUDA_CHECK(cudaMemcpyAsync(made, words.data(), words.size() * sizeof(int64_t), cudaMemcpyHostToDevice, stream));
  C10_CUDA_CHECK(cudaStreamSynchronize(stream));
  return made;
}

void Changing::finish() {
  for (auto& kernel : kernels_) require(cuGraphKernelNodeGetParams(kernel.node, &kernel.how), "cuGraphKernelNodeGetParams");
}

void Changing::set(CUgraphExec graph, const std::vector<double>& slots) {
  for (auto& kernel : kernels_) {
    bool same = true;
    for (auto& number : kernel.numbers) {
      const double value = slots.at(number.slot);
      if (value == number.now) continue;
      same = false;
      number.now = value;
      auto& parameter = kernel.parameters.at(number.parameter);
      if (number.whole) parameter.int64 = static_cast<int64_t>(value);
      else parameter.fp32 = static_cast<float>(value);
    }
    if (same) continue;
    std::vector<void*> pointers;
    for (auto& parameter : kernel.parameters) pointers.push_back(&parameter);
    auto how = kernel.how;
    how.kernelParams = pointers.data();
    how.extra = nullptr;
    require(cuGraphExecKernelNodeSetParams(graph, kernel.node, &how), "cuGraphExecKernelNodeSetParams");
  }
}

}  // namespace nntile
