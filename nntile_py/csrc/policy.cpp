// StarPU's policy of planned programs: which worker runs a task is known, so its tiles begin to travel as soon as it is
// ready, and a worker takes the most urgent of its tasks whose tiles are there. What StarPU itself does with tasks that
// name their worker is to take the most urgent, and to do nothing else until its tiles have come.
#include <array>
#include <climits>
#include <map>

#include "internal.h"

namespace nntile {
namespace {

// In a task's sched_data: its worker, from 1, and whether it was given to that.
constexpr uintptr_t kTaken = uintptr_t{1} << 32;

unsigned worker_of(const starpu_task* task) {
  return static_cast<unsigned>((reinterpret_cast<uintptr_t>(task->sched_data) & ~kTaken) - 1);
}

bool taken(const starpu_task* task) { return reinterpret_cast<uintptr_t>(task->sched_data) & kTaken; }

bool is_there(starpu_data_handle_t handle, unsigned node) {
  int valid = 0;
  starpu_data_query_status2(handle, static_cast<int>(node), nullptr, &valid, nullptr, nullptr);
  return valid;
}

class Queue {
 public:
  void push(starpu_task* task, unsigned worker) {
    Waiting waiting{task, {}};
    const unsigned node = starpu_worker_get_memory_node(worker);
    if (starpu_get_prefetch_flag()) {  // else nothing comes before the worker asks for it
      for (unsigned k = 0; k < STARPU_TASK_GET_NBUFFERS(task); ++k) {
        const auto handle = STARPU_TASK_GET_HANDLE(task, k);
        if ((STARPU_TASK_GET_MODE(task, k) & STARPU_R) && !is_there(handle, node)) waiting.missing.push_back(handle);
      }
      if (!waiting.missing.empty()) starpu_prefetch_task_input_for(task, worker);
    }
    const std::lock_guard lock(mutex_);
    starpu_push_task_end(task);
    tasks_.emplace(task->priority, std::move(waiting));
    size_ = tasks_.size();
  }

  // While a task runs, or waits on the device's stream, none is taken that would make the worker wait.
  starpu_task* pop(unsigned node) {
    if (!size_) return nullptr;
    const std::lock_guard lock(mutex_);
    auto chosen = tasks_.begin();
    while (chosen != tasks_.end() && !there(chosen->second, node)) ++chosen;
    if (chosen == tasks_.end()) {
      if (running_ || tasks_.empty()) return nullptr;
      chosen = tasks_.begin();
    }
    auto* task = chosen->second.task;
    tasks_.erase(chosen);
    size_ = tasks_.size();
    ++running_;
    return task;
  }

  void ended() { --running_; }

  size_t length() const { return size_ + running_; }

 private:
  struct Waiting {
    starpu_task* task;
    std::vector<starpu_data_handle_t> missing;  // tiles, when it became ready
  };

  static bool there(Waiting& waiting, unsigned node) {
    auto& missing = waiting.missing;
    while (!missing.empty() && is_there(missing.back(), node)) missing.pop_back();
    return missing.empty();
  }

  std::mutex mutex_;
  std::multimap<int, Waiting, std::greater<>> tasks_;  // by falling priority, then as they became ready
  std::atomic<size_t> size_{0}, running_{0};
};

std::array<Queue, STARPU_NMAXWORKERS> queues;

// Of a task without a plan: who can run it and has least to do.
unsigned any_worker(starpu_task* task) {
  unsigned best = STARPU_NMAXWORKERS;
  for (unsigned worker = 0; worker < starpu_worker_get_count(); ++worker)
    if (starpu_worker_can_execute_task_first_impl(worker, task, nullptr) &&
        (best == STARPU_NMAXWORKERS || queues[worker].length() < queues[best].length()))
      best = worker;
  return best;
}

void ended(starpu_task* task, unsigned) {
  if (taken(task)) queues[worker_of(task)].ended();
}

int push_task(starpu_task* task) {
  if (taken(task)) ended(task, 0);  // it comes back: there was no room for its tiles
  const unsigned worker = task->sched_data ? worker_of(task) : any_worker(task);
  if (worker >= starpu_worker_get_count()) return -ENODEV;
  plan(task, worker);
  queues[worker].push(task, worker);
  starpu_wake_worker_relax_light(static_cast<int>(worker));
  return 0;
}

starpu_task* pop_task(unsigned) {
  const auto worker = static_cast<unsigned>(starpu_worker_get_id_check());
  auto* task = queues[worker].pop(starpu_worker_get_memory_node(worker));
  if (task) task->sched_data = reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(task->sched_data) | kTaken);
  return task;
}

}  // namespace

void plan(starpu_task* task, unsigned worker) { task->sched_data = reinterpret_cast<void*>(uintptr_t{worker} + 1); }

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
    // Priorities are any integers.
    made.init_sched = [](unsigned) {
      starpu_sched_set_min_priority(INT_MIN);
      starpu_sched_set_max_priority(INT_MAX);
    };
    return made;
  }();
  return &policy;
}

}  // namespace nntile
