// StarPU policy for planned programs. The worker of each task is known, so transfers of its tiles begin as soon as the
// task is ready. A worker takes its first submitted task whose tiles are present, except tasks with a delay. StarPU's
// own handling of tasks with a fixed worker takes the task of highest priority and idles until its tiles arrive. By
// priority, sums needed only at the end of the step all ran last, each waiting for another GPU's data.
#include <algorithm>
#include <array>
#include <climits>
#include <deque>
#include <map>

#include "internal.h"

namespace nntile {
namespace {

// Bits of a task's sched_data: number of the planned worker plus 1; kTaken: this worker has taken the task; from
// kNumber on, the task's number in submission order plus its delay. sched_data is null for a task without a plan.
constexpr uintptr_t kWorkers = 0xffff, kTaken = kWorkers + 1;
constexpr int kNumber = 17;  // first bit of the number

uintptr_t data_of(const starpu_task* task) { return reinterpret_cast<uintptr_t>(task->sched_data); }

unsigned worker_of(const starpu_task* task) { return static_cast<unsigned>((data_of(task) & kWorkers) - 1); }

bool is_there(starpu_data_handle_t handle, unsigned node) {
  int valid = 0;
  starpu_data_query_status2(handle, static_cast<int>(node), nullptr, &valid, nullptr, nullptr);
  return valid;
}

// The ready tasks that are planned for one worker.
class Queue {
 public:
  void push(starpu_task* task, unsigned worker) {
    Waiting waiting{task, {}};
    const unsigned node = starpu_worker_get_memory_node(worker);
    // Prefetch only to GPUs: a transfer to main memory may wait for free memory, and no memory is freed while this
    // worker waits.
    if (starpu_get_prefetch_flag() && starpu_node_get_kind(node) == STARPU_CUDA_RAM) {
      for (unsigned k = 0; k < STARPU_TASK_GET_NBUFFERS(task); ++k) {
        const auto handle = STARPU_TASK_GET_HANDLE(task, k);
        if ((STARPU_TASK_GET_MODE(task, k) & STARPU_R) && !is_there(handle, node)) waiting.missing.push_back(handle);
      }
      // If all tiles are present, skip the prefetch: it costs 0.2 us per tile.
      const auto number = static_cast<int>(data_of(task) >> kNumber & INT_MAX);
      if (!waiting.missing.empty()) starpu_prefetch_task_input_for_prio(task, worker, INT_MAX - number);
    }
    const std::lock_guard lock(mutex_);
    starpu_push_task_end(task);
    tasks_.emplace(data_of(task) >> kNumber, std::move(waiting));
    size_ = tasks_.size();
  }

  // Returns the first task whose tiles are all on the node. Without such a task, returns null while tasks of this
  // worker are running, and for kPatience after the last of them; then returns the first task, for whose tiles the
  // worker waits.
  starpu_task* pop(unsigned node) {
    if (!size_) return nullptr;
    const std::lock_guard lock(mutex_);
    auto chosen = tasks_.begin();
    while (chosen != tasks_.end() && !there(chosen->second, node)) ++chosen;
    if (chosen == tasks_.end()) {
      if (running_ || tasks_.empty()) return nullptr;
      const double now = starpu_timing_now();
      if (!idle_since_) idle_since_ = now;
      if (now < idle_since_ + kPatience) return nullptr;
      chosen = tasks_.begin();  // do not wait longer: with little memory, transfers may not have begun
    }
    idle_since_ = 0;
    auto* task = chosen->second.task;
    tasks_.erase(chosen);
    size_ = tasks_.size();
    ++running_;
    task->sched_data = reinterpret_cast<void*>(data_of(task) | kTaken);
    return task;
  }

  void ended() { --running_; }

  void begin() { running_ = 0, idle_since_ = 0; }

 private:
  struct Waiting {
    starpu_task* task;
    std::vector<starpu_data_handle_t> missing;  // tiles that were not on the node when last checked
  };

  static bool there(Waiting& waiting, unsigned node) {
    auto& missing = waiting.missing;
    while (!missing.empty() && is_there(missing.back(), node)) missing.pop_back();
    return missing.empty();
  }

#ifdef STARPU_NON_BLOCKING_DRIVERS
  static constexpr double kPatience = 200;  // us for which an idle worker waits for the tiles of its tasks
#else
  static constexpr double kPatience = 0;  // a worker without a task sleeps until there is one
#endif

  std::mutex mutex_;
  std::multimap<uintptr_t, Waiting> tasks_;  // by number
  std::atomic<size_t> size_{0}, running_{0};
  double idle_since_ = 0;  // us; 0: not idle
};

// Tasks without a plan: Python tasks and StarPU's own. A worker takes them before its planned tasks.
class Others {
 public:
  void push(starpu_task* task) {
    const std::lock_guard lock(mutex_);
    starpu_push_task_end(task);
    tasks_.push_back(task);
    size_ = tasks_.size();
  }

  starpu_task* pop(unsigned worker) {
    if (!size_) return nullptr;
    const std::lock_guard lock(mutex_);
    const auto chosen = std::find_if(tasks_.begin(), tasks_.end(), [worker](starpu_task* task) {
      return starpu_worker_can_execute_task_first_impl(worker, task, nullptr);
    });
    if (chosen == tasks_.end()) return nullptr;
    auto* task = *chosen;
    tasks_.erase(chosen);
    size_ = tasks_.size();
    return task;
  }

 private:
  std::mutex mutex_;
  std::deque<starpu_task*> tasks_;
  std::atomic<size_t> size_{0};
};

// Never destroyed, as workers of a stuck runtime live until the process ends.
auto& queues = *new std::array<Queue, STARPU_NMAXWORKERS>;
auto& others = *new Others;

void wake(unsigned worker) { starpu_wake_worker_relax_light(static_cast<int>(worker)); }

int push_task(starpu_task* task) {
  if (task->sched_data) {
    const unsigned worker = worker_of(task);
    queues[worker].push(task, worker);
    wake(worker);
  } else {
    others.push(task);
    for (unsigned worker = 0; worker < starpu_worker_get_count(); ++worker) wake(worker);
  }
  return 0;
}

starpu_task* pop_task(unsigned) {
  const auto worker = static_cast<unsigned>(starpu_worker_get_id_check());
  auto* task = others.pop(worker);
  return task ? task : queues[worker].pop(starpu_worker_get_memory_node(worker));
}

void ended(starpu_task* task, unsigned) {
  if (data_of(task) & kTaken) queues[worker_of(task)].ended();
}

}  // namespace

void plan(starpu_task* task, const TaskRecord& record) {
  static std::atomic<uintptr_t> number{0};
  static_assert(STARPU_NMAXWORKERS < kWorkers);
  const auto place = ++number + static_cast<uintptr_t>(record.delay);
  task->sched_data = reinterpret_cast<void*>(place << kNumber | static_cast<uintptr_t>(record.worker + 1));
}

starpu_sched_policy* planned_policy() {
  static starpu_sched_policy policy = [] {
    starpu_sched_policy made{};
    made.push_task = push_task;
    made.pop_task = pop_task;
    made.post_exec_hook = ended;
    made.prefetches = 1;
    made.policy_name = "planned";
    made.policy_description = "each task on the worker of its plan";
    made.worker_type = STARPU_WORKER_LIST;
    made.init_sched = [](unsigned) {  // any integer is a priority
      starpu_sched_set_min_priority(INT_MIN);
      starpu_sched_set_max_priority(INT_MAX);
      for (auto& queue : queues) queue.begin();
    };
    return made;
  }();
  return &policy;
}

}  // namespace nntile
