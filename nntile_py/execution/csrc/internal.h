// Shared by the files of this folder; kernels include kernel.h only.
#pragma once
#include <ATen/ops/from_blob.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/Exception.h>
#include <starpu.h>
#include <starpu_scheduler.h>

#include <algorithm>
#include <chrono>
#include <thread>

#include "runtime.h"

namespace nntile {

struct Shared {
  bool running = false;
  unsigned generation = 0;  // of the runtime: what belongs to an earlier one is of no use
  bool models = false;      // keeping a model up to date costs about 1 us a task: only where the policy asks it
  int window = 0;
  int cpus = 0, cuda = 0;  // workers
  int ahead = 0;           // tasks that a CUDA worker goes on before one has ended
  std::atomic<bool> reduces{false};  // there are tiles for REDUX: StarPU ends that with a copy that waits for nothing
  size_t limit = 0;  // bytes that tiles may take
  size_t page = 1;   // handles have a multiple of so many bytes

  std::atomic<uint64_t> ended{0};  // tasks, and copies from and to the program
  std::atomic<int> active{0};
  std::atomic<int> leaving{0};  // tiles on their way to main memory, also from the program: StarPU counts no task for them
  std::atomic<int> messages{0};  // between ranks, under way
  std::atomic<bool> stuck{false};
  bool forked = false;  // this is a child of a process whose runtime is running: it has no workers
  std::atomic<bool> dropping{false};  // tasks in Python that have not begun are not run

  std::function<void()> idle = [] {};
};
extern Shared g;

uint64_t failure_count();  // since the process started
std::string last_failure();

void require_running();
void require(const Tile& tile);
void require_main_thread();  // a task that waits for tasks would wait for itself
void forget_tiles();         // the runtime stops: every tile loses its handle
size_t smallest_waiting(unsigned node);  // bytes of a tile that was asked for there and has no place yet; 0: none

// Of a bus, since the process started.
struct Transfers {
  int64_t bytes = 0;
  int count = 0;
};
Transfers transfers(int bus);

// Of one wait: throws when nothing has moved for long.
class Watchdog {
 public:
  void look();

 private:
  using clock = std::chrono::steady_clock;
  clock::time_point last_ = clock::now();
  clock::duration still_{}, in_vain_{};
  std::chrono::nanoseconds queued_{};  // as it was a second after what moved last
  uint64_t ended_ = g.ended;
  std::vector<size_t> moved_;
};

// Idle workers spin on their cores and starve whoever else is there: they sleep while nothing is submitted.
void wake();
void sleep_if_idle();

// Waits until done(); throws when nothing moves although tasks are left.
template <class Done>
void wait_until(Done done) {
  using clock = std::chrono::steady_clock;  // on a loaded machine a sleep takes many times what was asked
  Watchdog watchdog;
  const auto begun = clock::now();
  auto next = begun;
  // The shortest sleep takes some 70 us, a fifth of a short forward pass. GPU workers leave cores to look from; where CPU
  // workers have all of them, five looks a ms take 8 % of one.
  const bool free = g.cuda && !g.cpus;
  const clock::duration least = std::chrono::microseconds(20), most = std::chrono::microseconds(free ? 200 : 1000);
  const auto asleep = next + std::chrono::milliseconds(free ? 1 : 0);
  for (; clock::now() < asleep && !g.stuck; std::this_thread::yield())
    if (done()) return;
  while (!done()) {
    if (g.stuck) throw TaskError("the runtime came to a standstill before");
    std::this_thread::sleep_for(std::clamp((clock::now() - begun) / 64, least, most));
    if (clock::now() < next) continue;
    next = clock::now() + std::chrono::milliseconds(100);
    g.idle();
    watchdog.look();
  }
}

// Of planned programs (policy.cpp); `plan` comes before a task is submitted.
starpu_sched_policy* planned_policy();
void plan(starpu_task* task, const TaskRecord& record);

inline bool reads(int mode) { return mode & STARPU_R; }

// Of a task: its tiles, with how it accesses each.
void set_tiles(starpu_task* task, const std::vector<std::shared_ptr<Tile>>& tiles, const std::vector<int>& modes);
void submit(starpu_task* task, const std::string& name);
void wait_for_window();  // until there is room in it

void add_by_reduction(Tile& tile, Monoid monoid);  // from now on it may be accessed in REDUX mode

void wait_for_tasks();
void free_spare_copies();  // the runtime stops
// Notes a task of a checked program whose part `body` has written what is not finite.
void check_finite(const TaskInstance& instance, size_t body, void** buffers, c10::Device device);
void forget_not_finite();
#ifdef NNTILE_CUDA
bool queues_empty();  // of CUDA devices: what StarPU takes for ended has ended
bool lacks_room(unsigned node, size_t bytes);  // the card has none for a tile, whatever the limit says
void let_go_of_all();           // whoever holds tiles on a device; see cuda_graph.h
void before_write(Tile& tile);  // whoever holds it on a device lets go of it
#else
inline bool queues_empty() { return true; }
inline bool lacks_room(unsigned, size_t) { return false; }
inline void let_go_of_all() {}
inline void before_write(Tile&) {}
#endif

// Runs a kernel; what it throws becomes the runtime's failure. After one it runs no more, unless `always`.
template <class Run>
void guarded(const std::string& name, Run run, bool always = false) {
  struct Active {
    Active() { ++g.active; }
    ~Active() {
      --g.active;
      ++g.ended;
    }
  } const active;
  if (failed() && !always) return;  // tasks after a failure are drained, not executed
  try {
    c10::InferenceMode mode;
    run();
  } catch (const c10::Error& e) {
    fail(name, e.what_without_backtrace());
  } catch (const PythonError& e) {
    fail(name, e.what(), e.cause);
  } catch (const std::exception& e) {
    fail(name, e.what());
  } catch (...) {
    fail(name, "unknown exception");
  }
}

inline void* pointer(void* buffer) { return reinterpret_cast<void*>(STARPU_VARIABLE_GET_PTR(buffer)); }

// What a body sees of its tile number k.
View filled_part(const TaskBody& body, size_t k, const double* floats, void* data, c10::Device device);

inline at::Tensor wrap(void* data, at::IntArrayRef shape, at::ScalarType dtype, c10::Device device) {
  return at::for_blob(data, shape).options(at::TensorOptions(dtype).device(device)).target_device(device).make_tensor();
}

}  // namespace nntile
