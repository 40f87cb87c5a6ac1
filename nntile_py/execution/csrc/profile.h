// Times of tasks and workers. While profiling is off, each task costs one test.
//
// A full profile uses StarPU's task profiling: 1 to 1.4 us per task, two thirds of it in StarPU, which allocates a
// record per task and reads the clock about fifteen times. In a light profile StarPU's profiling and callbacks stay
// off, and only submission, start and end are recorded here. A light profile is for CPU tasks so short that the cost of
// a full profile would matter.
#pragma once
namespace pybind11 __attribute__((visibility("hidden"))) {
class module_;
}

#include <atomic>
#include <cstdint>

struct starpu_task;

namespace nntile::profile {

extern std::atomic<bool> g_on, g_light;
inline bool on() { return g_on.load(std::memory_order_relaxed); }
inline bool light() { return g_light.load(std::memory_order_relaxed); }
int64_t now();

// Begins a replay of a program; returns its number from 1, or 0 while profiling is off.
uint32_t begin_run();
// One end of a message between ranks. The order of members is that of PASSAGE in nntile_py/profiling/recorder.py; run
// 0: not profiled.
struct Passage {
  int64_t run, index, peer, sends, tag, bytes, posted, ended;
};
// Returns the record of a send or a receive that is posted now.
Passage passage(uint32_t run, uint32_t index, int peer, bool sends, int64_t tag, int64_t bytes);
void note(Passage passage);  // records one end of a message, which has ended now

// Prepares a task for submission: its times are recorded at its end, as task `index` of this replay.
void watch(starpu_task* task, uint32_t run, uint32_t index);

// Records the lifetime of this object as the running time of a task. Of::starpu: a task of StarPU itself, such as a
// reduction; its run is 0. Of::program: a watched task, which is recorded here only in a light profile.
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
