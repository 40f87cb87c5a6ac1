#include "runtime.h"

#include <ATen/Parallel.h>
#include <ATen/ops/exp.h>
#include <ATen/ops/zeros.h>
#include <malloc.h>
#include <pthread.h>
#include <unistd.h>

#include <condition_variable>

#include "on_cuda.h"
#include "internal.h"

namespace nntile {

Shared g;

namespace {

struct {
  std::mutex mutex;
  std::atomic<bool> failed{false};
  std::string message;
  Cause cause;
  std::atomic<uint64_t> count{0};
} g_error;

}  // namespace

constexpr auto kForked =
    "this process was forked while a runtime was running, which is its parent's: use it there, or start a new process "
    "(subprocess, or multiprocessing with 'spawn')";

void require_running() {
  if (g.forked) throw TaskError(kForked);
  if (!g.running) throw TaskError("no runtime is running: use `with nntile_py.Runtime(...):`");
}

void require_main_thread() {
  if (starpu_worker_get_id() >= 0) throw TaskError("a task must not wait for tasks: it would wait for itself");
}

namespace {
std::mutex g_sleep_mutex;
bool g_asleep = false;
}  // namespace

void wake() {
  if (g.forked) return;
  const std::lock_guard lock(g_sleep_mutex);
  if (g_asleep) starpu_resume();
  g_asleep = false;
}

void sleep_if_idle() {
  if (g.forked) return;
  const std::lock_guard lock(g_sleep_mutex);
  if (g_asleep || g.shared || starpu_task_nsubmitted() || g.leaving || g.messages) return;
  starpu_pause();
  g_asleep = true;
}

void share_workers() {
  g.shared = true;
  wake();
}

namespace {
std::atomic<uint64_t> g_announced{0};
std::atomic<int> g_awaiting{0};
std::mutex g_announce_mutex;
std::condition_variable g_announcement;
}  // namespace

// The counters are sequentially consistent: either the announcement sees that a thread waits, or the thread sees the
// announcement before it sleeps.
void announce() {
  ++g_announced;
  if (!g_awaiting) return;
  const std::lock_guard lock(g_announce_mutex);
  g_announcement.notify_all();
}

uint64_t announcements() { return g_announced; }

void await_announcement(uint64_t seen, std::chrono::nanoseconds most) {
  ++g_awaiting;
  {
    std::unique_lock lock(g_announce_mutex);
    g_announcement.wait_for(lock, most, [&] { return g_announced != seen; });
  }
  --g_awaiting;
}

void wait_for_tasks() {
  wait_until([] { return starpu_task_nsubmitted() == 0 && g.leaving == 0 && g.messages == 0; });
  starpu_task_wait_for_all();
  wait_until(queues_empty);
}

std::vector<std::string> schedulers() {
  std::vector<std::string> names;
  for (auto** policy = starpu_sched_get_predefined_policies(); *policy; ++policy) names.push_back((*policy)->policy_name);
  return names;
}

void on_idle(std::function<void()> hook) { g.idle = std::move(hook); }

// Marks the runtime as unusable in forked child processes. A fork copies no threads, so a child would wait for workers
// for ever; and the folder on the disk belongs to the parent.
void watch_forks() {
  [[maybe_unused]] static const int watching = pthread_atfork(nullptr, nullptr, [] {
    if (!g.running && !g.stuck) return;
    g.forked = g.stuck = true;
    g.running = false;
  });
}

void start(const RuntimeOptions& options) {
  if (g.forked) throw TaskError(kForked);
  watch_forks();
  if (g.running) throw TaskError("a runtime is running already: one at a time in a process");
  if (g.stuck) throw TaskError("a runtime of this process stopped making progress and cannot be replaced: start a new process");
  advise("");
  starpu_conf conf;
  starpu_conf_init(&conf);
  conf.ncpus = options.cpus;
  conf.ncuda = options.cuda;
#ifndef NNTILE_CUDA
  if (options.cuda) throw TaskError("runtime.cuda: this build of nntile_py has no CUDA; use 0");
#endif
  conf.nopencl = 0;
  if (options.scheduler == planned_policy()->policy_name) conf.sched_policy = planned_policy();
  else conf.sched_policy_name = options.scheduler.c_str();
  conf.catch_signals = 0;
  conf.calibrate = options.calibrate;
  // Tiles are large and short-lived: without these settings glibc returns their memory to the kernel, and every step
  // has the page faults again.
  mallopt(M_MMAP_THRESHOLD, 1 << 30);
  mallopt(M_TRIM_THRESHOLD, 2147483647);
  starpu_malloc_set_align(64);  // MKL's results may depend on alignment
  // MKL's vector functions initialise themselves in the first call. Two concurrent first calls gave inaccurate values
  // (exp off by 4e-3) in 3 of 4500 processes; after a first call by one thread, in none of 12000.
  at::exp(at::zeros({64}));
  g.shared = starpu_is_initialized();  // if true, starpu_init only counts one user more
  if (!g.shared) starpu_disk_swap_node = -1;
  const int status = starpu_init(&conf);
  if (status) throw TaskError(std::string("StarPU did not start: ") + std::strerror(-status));
  if (options.disk && starpu_disk_swap_node < 0) {
    starpu_shutdown();
    throw TaskError("runtime.disk: StarPU could not use the folder");
  }
  g.window = options.window;
  g.cpus = static_cast<int>(starpu_cpu_worker_get_count());
  g.cuda = static_cast<int>(starpu_cuda_worker_get_count());
  g.limit = options.memory;
  g.pinned = options.pinned;
  g.page = options.page;
  ++g.generation;
  starpu_execute_on_each_worker(
      [](void*) {
        at::internal::lazy_init_num_threads();  // otherwise the first parallel region would reset the number
        at::set_num_threads(1);
      },
      nullptr, STARPU_CPU);
#ifdef NNTILE_CUDA
  if (g.cuda) start_cuda();
#endif
  g_error.failed = false;
  const std::string policy = starpu_sched_get_sched_policy()->policy_name;
  g.models = policy.starts_with("dm") || policy.find("heft") != std::string::npos;
  g.ahead = g.models ? 0 : options.ahead;  // performance models need the times of tasks
  g.reduces = g.dropping = false;
  g.running = true;
  sleep_if_idle();
}

void stop() {
  if (!g.running) return;
  wake();
  if (!g.stuck) {
    try {
      wait_for_tasks();
    } catch (const TaskError&) {  // stuck: handled below
    }
  }
  if (g.stuck) {  // the workers wait for memory for ever: they end with the process
    g.running = false;
    return;
  }
  let_go_of_all();
  let_go_of_residents();
  forget_tiles();
  g.running = false;
  free_spare_copies();
  forget_not_finite();
#ifdef NNTILE_CUDA
  free_kept_memory();
#endif
  starpu_shutdown();
}

bool running() { return g.running; }

bool failed() { return g_error.failed.load(std::memory_order_relaxed); }

void fail(const std::string& task, const std::string& what, Cause cause) {
  const std::lock_guard lock(g_error.mutex);
  if (g_error.failed) return;  // the first failure is the cause
  g_error.message = task + ": " + what;
  g_error.cause.swap(cause);
  g_error.failed = true;
  ++g_error.count;
}

uint64_t failure_count() { return g_error.count; }

std::string last_failure() {
  const std::lock_guard lock(g_error.mutex);
  return g_error.message;
}

void drop_python_tasks() { g.dropping = true; }

void wait_all() {
  require_running();
  require_main_thread();
  wait_for_tasks();
  sleep_if_idle();
  check();
}

void check() {
  if (!failed()) return;
  require_main_thread();
  wait_for_tasks();
  const std::lock_guard lock(g_error.mutex);
  g_error.failed = false;
  throw TaskError(g_error.message, std::exchange(g_error.cause, {}));
}

size_t memory_used() { return g.running ? starpu_memory_get_used(STARPU_MAIN_RAM) : 0; }

int cpu_workers() { return g.running ? g.cpus : 0; }

#ifndef NNTILE_CUDA
void reserve_for_tiles() {}
#endif

int cuda_workers() { return g.running ? g.cuda : 0; }

}  // namespace nntile
