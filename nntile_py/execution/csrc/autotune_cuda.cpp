// Choices between equivalent kernels by their times on this worker's stream.
#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <cctype>
#include <limits>

#include "autotune.h"

namespace nntile {
namespace {

constexpr int kTimings = 3;

struct Event {
  cudaEvent_t it;
  Event() { C10_CUDA_CHECK(cudaEventCreate(&it)); }
  ~Event() { cudaEventDestroy(it); }
  Event(const Event&) = delete;
};

}  // namespace

float least_ms(const std::function<bool()>& run) {
  float least = std::numeric_limits<float>::infinity();
  const Event start, end;
  const auto stream = c10::cuda::getCurrentCUDAStream().stream();
  for (int turn = 0; turn < kTimings; ++turn) {
    float ms = 0;
    C10_CUDA_CHECK(cudaEventRecord(start.it, stream));
    if (!run()) break;
    C10_CUDA_CHECK(cudaEventRecord(end.it, stream));
    C10_CUDA_CHECK(cudaEventSynchronize(end.it));
    C10_CUDA_CHECK(cudaEventElapsedTime(&ms, start.it, end.it));
    least = std::min(least, ms);
  }
  return least;
}

std::string choices_file(const std::string& kind, const std::string& library) {
  std::string gpu = at::cuda::getCurrentDeviceProperties()->name;
  std::replace_if(gpu.begin(), gpu.end(), [](unsigned char c) { return !std::isalnum(c); }, '-');
  int driver = 0;
  C10_CUDA_CHECK(cudaDriverGetVersion(&driver));
  return kind + "-" + gpu + "-" + library + "-driver-" + std::to_string(driver);
}

int fastest_of(const std::string& file, const std::string& key, const std::vector<std::function<void()>>& ways) {
  ways.front()();  // only this candidate may choose an algorithm itself, under the lock of `chosen`
  const int way = chosen(file, key, [&] {
    std::vector<float> times;
    for (const auto& run : ways) times.push_back(least_ms([&] { return run(), true; }));
    return static_cast<int>(std::min_element(times.begin(), times.end()) - times.begin());
  });
  return way < static_cast<int>(ways.size()) ? way : 0;
}

}  // namespace nntile
