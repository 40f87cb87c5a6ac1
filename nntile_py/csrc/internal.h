// Shared by runtime.cpp, tiles.cpp and program.cpp; nobody else includes it.
#pragma once
#include <ATen/ops/from_blob.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/Exception.h>
#include <starpu.h>

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
  size_t limit = 0;    // bytes that tiles may take
  bool bounded = false;  // the limit was asked for; else it is what the machine has
  std::atomic<size_t> largest{0};  // bytes of the largest tile made

  // For noticing that nothing moves any more: StarPU waits for ever for memory that nobody will give back.
  std::atomic<uint64_t> ended{0};
  std::atomic<int> active{0};
  std::atomic<bool> stuck{false};

  std::function<void()> idle = [] {};
};
extern Shared g;

// How long nothing may move.
constexpr auto kPatience = std::chrono::seconds(20);

uint64_t failure_count();  // since the process started
std::string last_failure();

void require_running();
void require(const Tile& tile);
void require_main_thread();  // a task that waits for tasks would wait for itself
void forget_tiles();         // the runtime stops: every tile loses its handle
bool short_of_memory();  // a tile may be waiting for room; otherwise the workers merely get no processor
[[noreturn]] void stuck();

// Idle workers spin on their cores and starve whoever else is there: they sleep while nothing is submitted.
void wake();
void sleep_if_idle();

// Waits until done(); throws when no task has run for a while although some are left.
template <class Done>
void wait_until(Done done) {
  using clock = std::chrono::steady_clock;
  auto last = clock::now();
  clock::duration still{};
  auto ended = g.ended.load();
  for (int turn = 0; !done(); ++turn) {
    if (g.stuck) throw TaskError("the runtime ran out of memory before");
    std::this_thread::sleep_for(std::chrono::microseconds(turn < 100 ? 20 : 200));
    if (turn % 1000) continue;
    g.idle();
    // A process that was stopped, or a machine that was paused, comes back to a clock that has run on.
    const auto now = clock::now();
    still += std::min<clock::duration>(now - last, std::chrono::seconds(1));
    last = now;
    if (g.active || g.ended != ended) still = {};
    ended = g.ended;
    if (still > kPatience && short_of_memory()) stuck();
  }
}

void wait_for_tasks();

// Runs a kernel; what it throws becomes the runtime's failure.
template <class Run>
void guarded(const std::string& name, Run run) {
  struct Active {
    Active() { ++g.active; }
    ~Active() {
      --g.active;
      ++g.ended;
    }
  } const active;
  if (failed()) return;  // tasks after a failure are drained, not executed
  try {
    c10::InferenceMode mode;
    run();
  } catch (const c10::Error& e) {
    fail(name, e.what_without_backtrace());
  } catch (const std::exception& e) {
    fail(name, e.what());
  } catch (...) {
    fail(name, "unknown exception");
  }
}

inline void* pointer(void* buffer) { return reinterpret_cast<void*>(STARPU_VARIABLE_GET_PTR(buffer)); }

inline at::Tensor wrap(void* data, at::IntArrayRef shape, at::ScalarType dtype, c10::Device device) {
  return at::for_blob(data, shape).options(at::TensorOptions(dtype).device(device)).target_device(device).make_tensor();
}

}  // namespace nntile
