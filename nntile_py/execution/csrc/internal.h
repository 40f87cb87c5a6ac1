// Shared by the files of this folder; kernels include only kernel.h.
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
  unsigned generation = 0;  // number of the runtime; objects of earlier runtimes are invalid
  bool models = false;      // the policy uses performance models, whose updates cost 1 us per task
  int window = 0;
  int cpus = 0, cuda = 0;  // workers
  int ahead = 0;           // number of tasks that a CUDA worker launches before an earlier task has ended
  // Some tiles use REDUX. StarPU ends a reduction with a copy that does not wait for tasks on the stream, so a CUDA
  // worker then launches no tasks ahead.
  std::atomic<bool> reduces{false};
  size_t limit = 0;  // maximum bytes of tiles
  size_t pinned = 0;  // maximum bytes of tiles and kept buffers in main memory
  size_t page = 1;   // sizes of handles are multiples of this

  std::atomic<uint64_t> ended{0};  // number of tasks, messages and writes of tiles that have ended
  std::atomic<int> active{0};
  std::atomic<int> leaving{0};  // number of transfers of tiles to main memory, which StarPU does not count as tasks
  std::atomic<int> messages{0};  // number of messages to and from other ranks in flight
  std::atomic<bool> stuck{false};
  bool forked = false;  // child of a process with a running runtime: there are no workers
  std::atomic<bool> shared{false};  // the process has other users of StarPU, such as its Python package
  std::atomic<bool> dropping{false};  // Python tasks that have not begun are skipped

  std::function<void()> idle = [] {};
};
extern Shared g;

uint64_t failure_count();  // returns the number of failures since the process started
std::string last_failure();

void require_running();
void require(const Tile& tile);
void require_main_thread();  // throws within a task: a task that waits for all tasks would wait for itself
void forget_tiles();         // at the end of the runtime: every tile loses its handle
size_t smallest_waiting(unsigned node);  // bytes of the smallest tile that waits for memory on the node; 0: none

// Counters of a bus since the start of the process.
struct Transfers {
  int64_t bytes = 0;
  int count = 0;
};
Transfers transfers(int bus);

// Watches one wait: look() throws TaskError if nothing has moved for long.
class Watchdog {
 public:
  void look();

 private:
  using clock = std::chrono::steady_clock;
  clock::time_point last_ = clock::now();
  clock::duration still_{}, in_vain_{};
  std::chrono::nanoseconds queued_{};  // value of queued() one second after the last progress
  uint64_t ended_ = g.ended;
  std::vector<size_t> moved_;
};

// Idle workers spin and take CPU time from other processes, so they sleep while no task is submitted.
void wake();
void sleep_if_idle();
void share_workers();  // from now on, idle workers do not sleep: tasks of other users of StarPU may come

// Announcements wake the thread in wait_for at once. Without announcements the thread would poll, on a core of a CPU
// worker.
void announce();  // a condition that wait_for waits for may have become true
uint64_t announcements();
void await_announcement(uint64_t seen, std::chrono::nanoseconds most);  // returns at once after more than `seen`

// Waits until done(); throws if nothing moves although tasks are left. announced: done() becomes true only before an
// announcement.
template <class Done>
void wait_until(Done done, bool announced = false) {
  using clock = std::chrono::steady_clock;  // on a loaded machine sleeps take much longer than requested
  Watchdog watchdog;
  const auto begun = clock::now();
  auto next = begun;
  // The shortest sleep takes about 70 us, a fifth of a short forward pass. GPU workers leave cores free for polling. If
  // CPU workers use all cores, five polls per ms would take 8 % of a core, so an announcement is awaited if possible.
  const bool free = g.cuda && !g.cpus;
  const clock::duration least = std::chrono::microseconds(20), most = std::chrono::microseconds(free ? 200 : 1000);
  const auto asleep = next + std::chrono::milliseconds(free ? 1 : 0);
  for (; clock::now() < asleep && !g.stuck; std::this_thread::yield())
    if (done()) return;
  for (;;) {
    const uint64_t seen = announcements();
    if (done()) return;
    if (g.stuck) throw TaskError("the runtime has stopped making progress");
    if (announced) await_announcement(seen, free ? most : std::chrono::milliseconds(20));
    else std::this_thread::sleep_for(std::clamp((clock::now() - begun) / 64, least, most));
    if (clock::now() < next) continue;
    next = clock::now() + std::chrono::milliseconds(100);
    g.idle();
    watchdog.look();
  }
}

// Waits on the main thread until done(), which must be announced; throws TaskError if a task failed.
template <class Done>
void wait_for(Done done) {
  require_main_thread();
  wake();  // the result may need a transfer or a reduction
  wait_until(done, true);
  sleep_if_idle();
  check();
}

// Returns a codelet that lives as long as the process. cuda is null in builds without CUDA; see IF_CUDA.
inline starpu_codelet* new_codelet(const char* name, std::initializer_list<starpu_data_access_mode> modes,
                                   starpu_cpu_func_t cpu, starpu_cuda_func_t cuda) {
  auto* codelet = new starpu_codelet;
  starpu_codelet_init(codelet);
  codelet->name = name;
  codelet->cpu_funcs[0] = cpu;
  codelet->cuda_funcs[0] = cuda;
  if (cuda) codelet->cuda_flags[0] = STARPU_CUDA_ASYNC;
  std::copy(modes.begin(), modes.end(), codelet->modes);
  codelet->nbuffers = static_cast<int>(modes.size());
  return codelet;
}

#ifdef NNTILE_CUDA
#define IF_CUDA(function) function
#else
#define IF_CUDA(function) nullptr
#endif

// StarPU policy of planned programs (policy.cpp). Call `plan` before each task is submitted.
starpu_sched_policy* planned_policy();
void plan(starpu_task* task, const TaskRecord& record);

inline bool reads(int mode) { return mode & STARPU_R; }
inline bool writes(int mode) { return mode & (STARPU_W | STARPU_REDUX); }

// Sets the tiles of a task and their access modes.
void set_tiles(starpu_task* task, const std::vector<std::shared_ptr<Tile>>& tiles, const std::vector<int>& modes);
void submit(starpu_task* task, const std::string& name);
void wait_for_window(int window = 0);  // until fewer tasks are in flight than `window` and g.window; 0: no bound

void add_by_reduction(Tile& tile, Monoid monoid);  // allows REDUX access from now on

void wait_for_tasks();
void free_spare_copies();  // at the end of the runtime
// Records that part `body` of a checked program's task has written a value that is not finite.
void check_finite(const TaskInstance& instance, size_t body, void** buffers, c10::Device device);
void forget_not_finite();
void before_use(Tile& tile);  // a program that holds the tile as a resident releases its residents
void let_go_of_residents();   // of all programs
#ifdef NNTILE_CUDA
bool queues_empty();  // on all CUDA devices, the tasks that have ended for StarPU have really ended
bool lacks_room(unsigned node, size_t bytes);  // the GPU has no memory for a tile, whatever the limit is
void let_go_of_all();           // CUDA graphs release all tiles that they keep on a device; see cuda_graph.h
void before_write(Tile& tile);  // CUDA graphs that keep the tile on a device release the tile
#else
inline bool queues_empty() { return true; }
inline bool lacks_room(unsigned, size_t) { return false; }
inline void let_go_of_all() {}
inline void before_write(Tile&) {}
#endif

// Runs a kernel; an exception becomes the runtime's failure. After a failure nothing runs, unless `always`.
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

// Returns the address of a tile that is acquired on a memory node.
inline void* pointer_on(const Tile& tile, unsigned node) {
  return pointer(starpu_data_get_interface_on_node(tile.handle, node));
}

// Returns a body's tile number k.
View filled_part(const TaskBody& body, size_t k, const double* floats, void* data, c10::Device device);

inline at::Tensor wrap(void* data, at::IntArrayRef shape, at::ScalarType dtype, c10::Device device) {
  return at::for_blob(data, shape).options(at::TensorOptions(dtype).device(device)).target_device(device).make_tensor();
}

}  // namespace nntile
