// What a task and a worker did when. Costs a test a task while it is off.
//
// In full, the dates are those of StarPU's task profiling: 1 to 1.4 us a task, two thirds of it in StarPU, which makes
// a record of each task and reads the clock some fifteen times. Light, StarPU's profiling and callbacks stay off, and
// only submission, start and end are noted, here: for tasks on CPU workers that are short beside that.
#pragma once
#include <pybind11/pybind11.h>

#include <atomic>
#include <cstdint>

struct starpu_task;

namespace nntile::profile {

extern std::atomic<bool> g_on, g_light;
inline bool on() { return g_on.load(std::memory_order_relaxed); }
inline bool light() { return g_light.load(std::memory_order_relaxed); }
int64_t now();

// A replay of a program begins: its number from 1, or 0 while profiling is off.
uint32_t begin_run();
// A message between ranks: one end of it, as this rank saw it. The order is that of PASSAGE in
// nntile_py/profiling/recorder.py; run 0: nobody profiles it.
struct Passage {
  int64_t run, index, peer, sends, tag, bytes, posted, ended;
};
Passage passage(uint32_t run, uint32_t index, int peer, bool sends, int64_t tag, int64_t bytes);  // posted now
void note(Passage passage);  // ended now

// About to be submitted: the task's dates will be kept when it ends, as those of task `index` of that replay.
void watch(starpu_task* task, uint32_t run, uint32_t index);

// While it lives a task runs: one that StarPU makes itself, such as a reduction (kept as of run 0), or a watched one,
// which is noted here only in a light profile.
class Interval {
 public:
  enum class Of { starpu, program };
  explicit Interval(Of of) : of_(of), start_((of == Of::program ? light() : on()) ? now() : -1) {}
  ~Interval() {
    if (start_ >= 0) keep();
  }
  Interval(const Interval&) = delete;
  Interval& operator=(const Interval&) = delete;

 private:
  void keep() const;
  Of of_;
  int64_t start_;
};

void bind(pybind11::module_& m);

}  // namespace nntile::profile
