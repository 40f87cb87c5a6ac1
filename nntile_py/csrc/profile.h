// What a task and a worker did when, taken from StarPU's own dates. Costs a test a task while it is off.
#pragma once
#include <pybind11/pybind11.h>

#include <atomic>
#include <cstdint>

struct starpu_task;

namespace nntile::profile {

extern std::atomic<bool> g_on;
inline bool on() { return g_on.load(std::memory_order_relaxed); }

// A replay of a program begins: its number from 1, or 0 while profiling is off.
uint32_t begin_run();
// The task's dates will be kept when it ends, as those of task `index` of that replay.
void watch(starpu_task* task, uint32_t run, uint32_t index);

// For tasks that StarPU makes itself, such as reductions: run 0.
class Interval {
 public:
  Interval();
  ~Interval();
  Interval(const Interval&) = delete;
  Interval& operator=(const Interval&) = delete;

 private:
  int64_t start_;
};

void bind(pybind11::module_& m);

}  // namespace nntile::profile
