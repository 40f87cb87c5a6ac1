// Queues of CUDA devices. Kernels run on a stream of this package. A task ends for StarPU when the task g.ahead
// positions earlier on the stream has ended, so that StarPU releases, schedules and launches further tasks meanwhile,
// which takes about 1 us per tile. Kernels of later tasks follow on the same stream. StarPU's copies do not, so they
// wait here for the last task that wrote their source, and for the last task that used their destination.
//
// In a profile, CUDA events on the stream measure when the kernels of each task start and end.
#include <array>
#include <map>

#include "on_cuda.h"
#include "internal.h"
#include "profile.h"

namespace nntile {
namespace {

void require(cudaError_t status) {
  if (status != cudaSuccess) fail("CUDA", cudaGetErrorString(status));
}

class Queue {
 public:
  Queue() {
    for (auto* one : {&stream, &key}) require(cudaStreamCreateWithFlags(one, cudaStreamNonBlocking));
    for (auto& event : events_) require(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
  }

  void begin_task() {
    if (profile::on()) begun_ = mark();
  }

  void end_task(void** buffers, size_t count, bool all, size_t ahead) {
    auto* task = starpu_task_get_current();
    if (auto* begun = std::exchange(begun_, nullptr)) {
      // With `all`, this is a fill with zeros, which StarPU also starts within or outside of other tasks.
      if (all) require(cudaEventDestroy(begun));
      else marks_.push_back({task->callback_arg, begun, mark()});
    }
    const std::lock_guard lock(mutex_);
    require(cudaEventRecord(event(tasks_), stream));
    for (size_t k = 0; k < count; ++k)
      note(address(buffers[k]), STARPU_VARIABLE_GET_ELEMSIZE(buffers[k]), all || writes(STARPU_TASK_GET_MODE(task, k)));
    if (tasks_ > ahead) require(cudaStreamWaitEvent(starpu_cuda_get_local_stream(), event(tasks_ - ahead)));
    ++tasks_;
  }

  // Calls wait(event) for each task that may still write to this memory; with `any`, also for each task that may still
  // read it.
  template <class Wait>
  void uses(uintptr_t begin, size_t bytes, bool any, Wait wait) {
    const std::lock_guard lock(mutex_);
    bool looked = false;
    for (auto use = first(begin); use != uses_.end() && use->first < begin + bytes; ++use) {
      const size_t task = any ? use->second.task : use->second.wrote;
      if (task >= ended_ && !looked) look(), looked = true;
      if (task >= ended_) wait(event(task));
    }
  }

  // Begins a profile: records the event whose time on the profile's clock is zero_.
  void begin_marks() {
    require(cudaStreamSynchronize(stream));
    base_ = mark();
    require(cudaEventSynchronize(base_));
    zero_ = profile::now();
  }

  // Appends the times of all tasks since `begin_marks` to `spans`, and destroys their events.
  void take(std::vector<Span>& spans) {
    const auto time = [&](cudaEvent_t event) {
      float ms = 0;
      require(cudaEventSynchronize(event));
      require(cudaEventElapsedTime(&ms, base_, event));
      return zero_ + static_cast<int64_t>(static_cast<double>(ms) * 1e6);
    };
    for (const auto& [task, start, end] : marks_) {
      spans.push_back({task, time(start), time(end)});
      for (auto* event : {start, end}) require(cudaEventDestroy(event));
    }
    marks_.clear();
    if (base_) require(cudaEventDestroy(std::exchange(base_, nullptr)));
  }

  static uintptr_t address(void* buffer) { return STARPU_VARIABLE_GET_PTR(buffer); }

  cudaStream_t stream = nullptr, key = nullptr;

 private:
  cudaEvent_t mark() const {
    cudaEvent_t made = nullptr;
    require(cudaEventCreate(&made));
    require(cudaEventRecord(made, stream));
    return made;
  }

  struct Marked {
    void* task;
    cudaEvent_t start, end;
  };
  // While tasks run, only the worker's thread uses these members.
  std::vector<Marked> marks_;
  cudaEvent_t begun_ = nullptr, base_ = nullptr;
  int64_t zero_ = 0;

  // Number of events, more than `ahead`. Events are reused in rotation. A wait for a reused event is too long, never
  // too short.
  static constexpr size_t kEvents = 64;
  struct Use {
    uintptr_t end;
    size_t task, wrote;  // numbers of the last task that used the memory and of the last task that wrote it; 0: no task
  };

  static bool writes(starpu_data_access_mode mode) { return mode & (STARPU_W | STARPU_REDUX); }

  cudaEvent_t event(size_t task) const { return events_[task % kEvents]; }

  // Advances `ended_` past the tasks whose events have completed; tasks end in order. Called only where needed, because
  // each query is a CUDA call. Begins at the last kEvents - 1 tasks: the events of older tasks have been reused.
  void look() {
    for (auto task = std::max(ended_, tasks_ + 1 - std::min(tasks_ + 1, kEvents));
         task < tasks_ && cudaEventQuery(event(task)) == cudaSuccess; ++task)
      ended_ = task + 1;
  }

  std::map<uintptr_t, Use>::iterator first(uintptr_t begin) {
    auto use = uses_.upper_bound(begin);
    return use != uses_.begin() && std::prev(use)->second.end > begin ? std::prev(use) : use;
  }

  // Records that the newest task uses a range of memory. The memory may have been freed and allocated again with other
  // bounds: the new range is widened to include the overlapping ranges that earlier tasks may still use.
  void note(uintptr_t begin, size_t bytes, bool writes) {
    uintptr_t end = begin + bytes;
    auto use = first(begin);
    if (use != uses_.end() && use->first == begin && use->second.end == end) {
      use->second.task = tasks_;
      if (writes) use->second.wrote = tasks_;
      return;
    }
    size_t wrote = writes ? tasks_ : 0;
    if (use != uses_.end() && use->first < end) look();
    for (; use != uses_.end() && use->first < end; use = uses_.erase(use)) {
      wrote = std::max(wrote, use->second.wrote);
      if (use->second.task < ended_) continue;
      begin = std::min(begin, use->first);
      end = std::max(end, use->second.end);
    }
    uses_[begin] = {end, tasks_, wrote};
  }

  std::mutex mutex_;
  std::array<cudaEvent_t, kEvents> events_{};
  size_t tasks_ = 1, ended_ = 1;  // number of the next task; all tasks before ended_ have ended
  std::map<uintptr_t, Use> uses_;
};

// Returns the queue of a device: null until a runtime uses the device, then for the lifetime of the process.
Queue*& of_device(int device) {
  static std::array<Queue*, STARPU_MAXCUDADEVS> queues{};
  return queues.at(static_cast<size_t>(device));
}

Queue& mine() { return *of_device(starpu_worker_get_devid(starpu_worker_get_id())); }

template <class Wait>
void at_both_ends(void* from, unsigned from_node, void* to, unsigned to_node, Wait wait) {
  // A copy need not wait for other readers of its source: several devices may read the source at the same time.
  for (const auto& [buffer, node, any] : {std::tuple{from, from_node, false}, std::tuple{to, to_node, true}})
    if (starpu_node_get_kind(node) == STARPU_CUDA_RAM)
      of_device(starpu_memory_node_get_devid(node))
          ->uses(Queue::address(buffer), STARPU_VARIABLE_GET_ELEMSIZE(buffer), any, wait);
}

template <cudaMemcpyKind kind>
int copy_async(void* from, unsigned from_node, void* to, unsigned to_node, cudaStream_t stream) {
  at_both_ends(from, from_node, to, to_node, [&](cudaEvent_t event) { require(cudaStreamWaitEvent(stream, event)); });
  return starpu_cuda_copy_async_sync(pointer(from), from_node, pointer(to), to_node, STARPU_VARIABLE_GET_ELEMSIZE(from),
                                     stream, kind);
}

template <cudaMemcpyKind kind>
int copy(void* from, unsigned from_node, void* to, unsigned to_node) {
  at_both_ends(from, from_node, to, to_node, [](cudaEvent_t event) { require(cudaEventSynchronize(event)); });
  return starpu_cuda_copy_async_sync(pointer(from), from_node, pointer(to), to_node, STARPU_VARIABLE_GET_ELEMSIZE(from),
                                     nullptr, kind);
}

}  // namespace

void start_queue() {
  auto& queue = of_device(starpu_worker_get_devid(starpu_worker_get_id()));
  if (!queue) queue = new Queue;
}

cudaStream_t task_stream() { return mine().stream; }

cudaStream_t key_of_tiles(int device) { return of_device(device)->key; }

void end_task(void** buffers, size_t count, bool writes) {
  mine().end_task(buffers, count, writes, g.reduces ? 0 : static_cast<size_t>(g.ahead));
}

void begin_task() { mine().begin_task(); }

namespace {

template <class F>
void each_queue(F call) {
  for (int device = 0; device < STARPU_MAXCUDADEVS; ++device)
    if (auto* queue = of_device(device)) {
      const c10::cuda::CUDAGuard guard(static_cast<c10::DeviceIndex>(device));
      call(*queue);
    }
}

}  // namespace

void begin_spans() { each_queue([](Queue& queue) { queue.begin_marks(); }); }

std::vector<Span> take_spans() {
  std::vector<Span> spans;
  each_queue([&](Queue& queue) { queue.take(spans); });
  return spans;
}

bool queues_empty() {
  for (int device = 0; device < STARPU_MAXCUDADEVS; ++device)
    if (of_device(device) && cudaStreamQuery(of_device(device)->stream) == cudaErrorNotReady) return false;
  return true;
}

const starpu_data_copy_methods* tile_copies() {
  static starpu_data_copy_methods methods = *starpu_interface_variable_ops.copy_methods;
  methods.ram_to_cuda = copy<cudaMemcpyHostToDevice>;
  methods.cuda_to_ram = copy<cudaMemcpyDeviceToHost>;
  methods.cuda_to_cuda = copy<cudaMemcpyDeviceToDevice>;
  methods.ram_to_cuda_async = copy_async<cudaMemcpyHostToDevice>;
  methods.cuda_to_ram_async = copy_async<cudaMemcpyDeviceToHost>;
  methods.cuda_to_cuda_async = copy_async<cudaMemcpyDeviceToDevice>;
  return &methods;
}

}  // namespace nntile
