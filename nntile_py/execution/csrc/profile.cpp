#include "profile.h"

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <memory>
#include <unordered_map>

#include "internal.h"
#include "on_cuda.h"

namespace py = pybind11;

namespace nntile::profile {

std::atomic<bool> g_on{false}, g_light{false};

namespace {

// Times are in nanoseconds since the start of StarPU; in a light profile, times of std::chrono::steady_clock. The order
// of members is that of COLUMNS in nntile_py/profiling/recorder.py.
struct Event {
  int64_t run, task, worker;
  int64_t submit, ready, pop, popped, fetch, fetched, start, end, released;
  int64_t memory, main_memory;  // bytes in use on the worker's memory node and in main memory
};
static_assert(sizeof(Event) == 14 * sizeof(int64_t));

// A worker writes only to its own buffer, and the main thread reads the buffers when no task is left, so no lock is
// needed. The last buffer is for threads that are not workers; a mutex protects this buffer.
struct alignas(64) Buffer {
  std::vector<Event> events;
  int64_t measured = 0, memory = 0, main_memory = 0;  // time of the last reading of the bytes in use
};
std::unique_ptr<Buffer[]> g_buffers;
std::mutex g_others;
std::atomic<uint32_t> g_runs{0};
std::vector<Transfers> g_transfers;  // transfers of each bus before the profile began
std::vector<Passage> g_passages;
std::vector<std::vector<int64_t>> g_submitted;  // in a light profile: times of submission, by run, then by task
constexpr int64_t kMemoryEvery = 20'000;  // ns

int64_t ns(const timespec& t) { return int64_t{t.tv_sec} * STARPU_NS_PER_S + t.tv_nsec; }

// Appends an event, with the bytes in use. These are read at most every kMemoryEvery ns, because each reading takes
// locks.
void keep(Buffer& buffer, Event& event) {
  if (event.end - buffer.measured >= kMemoryEvery || buffer.events.empty()) {
    const auto worker = static_cast<unsigned>(event.worker);
    const unsigned node = event.worker < 0 ? STARPU_MAIN_RAM : starpu_worker_get_memory_node(worker);
    buffer.main_memory = static_cast<int64_t>(starpu_memory_get_used(STARPU_MAIN_RAM));
    buffer.memory = node == STARPU_MAIN_RAM ? buffer.main_memory : static_cast<int64_t>(starpu_memory_get_used(node));
    buffer.measured = event.end;
  }
  event.memory = buffer.memory;
  event.main_memory = buffer.main_memory;
  buffer.events.push_back(event);
}

void keep(Event event) {
  const int worker = starpu_worker_get_id();
  if (worker >= 0) return keep(g_buffers[worker], event);
  const std::lock_guard lock(g_others);
  keep(g_buffers[STARPU_NMAXWORKERS], event);
}

// Runs on StarPU threads.
void ended(void* arg) {
  const auto* task = starpu_task_get_current();
  const auto* i = task ? task->profiling_info : nullptr;
  if (!i || !on()) return;
  const auto id = reinterpret_cast<uint64_t>(arg);
  keep({static_cast<int64_t>(id >> 32), static_cast<int64_t>(id & 0xffffffff), i->workerid, ns(i->submit_time),
        ns(i->push_end_time), ns(i->pop_start_time), ns(i->pop_end_time), ns(i->acquire_data_start_time),
        ns(i->acquire_data_end_time), ns(i->start_time), ns(i->end_time), ns(i->callback_start_time), 0, 0});
}

std::string node_name(unsigned node) {
  char name[64];
  starpu_memory_node_get_name(node, name, sizeof name);
  return name;
}

template <class Row>
py::array_t<int64_t> table(const std::vector<Row>& rows) {
  py::array_t<int64_t> made({rows.size(), sizeof(Row) / sizeof(int64_t)});
  std::memcpy(made.mutable_data(), rows.data(), rows.size() * sizeof(Row));
  return made;
}

void begin(size_t expected, bool light) {
  require_running();
  require_main_thread();
  {
    const py::gil_scoped_release nogil;
    wait_for_tasks();
  }
  g_buffers.reset(new Buffer[STARPU_NMAXWORKERS + 1]);
  for (unsigned worker = 0; worker < starpu_worker_get_count(); ++worker) {
    auto& events = g_buffers[worker].events;
    events.resize(expected);  // resize instead of reserve, so that the pages exist
    events.clear();
  }
  g_runs = 0;
  g_transfers.clear();
  for (int bus = 0; bus < starpu_bus_get_count(); ++bus) g_transfers.push_back(transfers(bus));
  g_submitted.clear();
  g_passages.clear();
  if (!light) starpu_profiling_status_set(STARPU_PROFILING_ENABLE);  // resets the workers' counters
  g_light = light;
#ifdef NNTILE_CUDA
  if (g.cuda) begin_spans();
#endif
  g_on = true;
}

// Replaces the times of CUDA tasks in `events` by times on their streams. StarPU's times are those of the host: when it
// launches a task's kernels, and when StarPU regards the task as ended, before the kernels end (queue_cuda.cpp).
void set_stream_times(std::vector<Event>& events) {
#ifdef NNTILE_CUDA
  if (!g.cuda) return;
  std::unordered_map<uint64_t, Span> spans;
  for (const auto& span : take_spans()) spans.emplace(reinterpret_cast<uint64_t>(span.task), span);
  for (auto& event : events) {
    const auto found = spans.find(static_cast<uint64_t>(event.run) << 32 | static_cast<uint64_t>(event.task));
    if (!event.run || found == spans.end()) continue;
    event.start = std::max(found->second.start, event.fetched);
    event.end = std::max(found->second.end, event.start);
    event.released = std::max(event.released, event.end);
  }
#else
  (void)events;
#endif
}

py::dict finish() {
  require_running();
  require_main_thread();
  if (!g_on) throw TaskError("no profile was begun");
  {
    const py::gil_scoped_release nogil;
    wait_for_tasks();
  }
  g_on = false;
  const bool light = g_light.exchange(false);
  py::list workers, nodes, buses;
  std::vector<Event> events;
  for (unsigned worker = 0; worker <= STARPU_NMAXWORKERS; ++worker)
    events.insert(events.end(), g_buffers[worker].events.begin(), g_buffers[worker].events.end());
  g_buffers.reset();
  set_stream_times(events);
  if (light)
    for (auto& event : events)
      if (event.run)
        event.submit = g_submitted.at(static_cast<size_t>(event.run - 1)).at(static_cast<size_t>(event.task));
  for (unsigned worker = 0; worker < starpu_worker_get_count(); ++worker) {
    char name[128];
    starpu_worker_get_name(static_cast<int>(worker), name, sizeof name);
    starpu_profiling_worker_info info;
    starpu_profiling_worker_get_info(static_cast<int>(worker), &info);
    const auto seconds = [](const timespec& t) { return static_cast<double>(ns(t)) * 1e-9; };
    const auto* kind = starpu_worker_get_type_as_string(starpu_worker_get_type(static_cast<int>(worker)));
    const auto node = starpu_worker_get_memory_node(worker);
    if (light) {  // StarPU has no counts
      workers.append(py::dict(py::arg("name") = name, py::arg("kind") = kind, py::arg("node") = node));
      continue;
    }
    workers.append(py::dict(
        py::arg("name") = name, py::arg("kind") = kind, py::arg("node") = node, py::arg("total_s") = seconds(info.total_time),
        py::arg("executing_s") = seconds(info.executing_time), py::arg("callback_s") = seconds(info.callback_time),
        py::arg("waiting_s") = seconds(info.waiting_time), py::arg("sleeping_s") = seconds(info.sleeping_time),
        py::arg("scheduling_s") = seconds(info.scheduling_time), py::arg("executed_tasks") = info.executed_tasks));
  }
  for (unsigned node = 0; node < starpu_memory_nodes_get_count(); ++node) nodes.append(node_name(node));
  for (int bus = 0; bus < starpu_bus_get_count(); ++bus) {
    const auto before = g_transfers.at(static_cast<size_t>(bus)), now = transfers(bus);
    buses.append(py::dict(py::arg("source") = starpu_bus_get_src(bus), py::arg("target") = starpu_bus_get_dst(bus),
                          py::arg("bytes") = now.bytes - before.bytes, py::arg("transfers") = now.count - before.count));
  }
  if (!light) starpu_profiling_status_set(STARPU_PROFILING_DISABLE);
  return py::dict(py::arg("events") = table(events), py::arg("messages") = table(g_passages),
                  py::arg("workers") = workers, py::arg("nodes") = nodes, py::arg("buses") = buses,
                  py::arg("light") = light);
}

}  // namespace

int64_t now() {
  if (light()) return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1);  // faster
  return static_cast<int64_t>(starpu_timing_now() * 1e3);
}

uint32_t begin_run() {
  if (!on()) return 0;
  if (light()) g_submitted.emplace_back();
  return ++g_runs;
}

// Registers a task for the profile: callback_arg identifies the task. A light profile sets no callback, because a
// callback would double the profile's cost.
void watch(starpu_task* task, uint32_t run, uint32_t index) {
  task->callback_arg = reinterpret_cast<void*>((uint64_t{run} << 32) | index);
  if (light()) g_submitted.back().push_back(now());
  else task->callback_func = ended;
}

Passage passage(uint32_t run, uint32_t index, int peer, bool sends, int64_t tag, int64_t bytes) {
  const int64_t posted = run ? now() : 0;
  if (run && light()) g_submitted.back().push_back(posted);  // messages and tasks share the numbering by `index`
  return {run, index, peer, sends, tag, bytes, posted, 0};
}

void note(Passage passage) {
  if (!passage.run || !on()) return;
  passage.ended = now();
  const std::lock_guard lock(g_others);
  g_passages.push_back(passage);
}

void Interval::keep() const {
  if (!on()) return;
  const auto* task = of_ == Of::program ? starpu_task_get_current() : nullptr;
  const auto id = task ? reinterpret_cast<uint64_t>(task->callback_arg) : 0;
  const int64_t end = now(), s = start_;
  profile::keep({static_cast<int64_t>(id >> 32), static_cast<int64_t>(id & 0xffffffff), starpu_worker_get_id(), s, s, s,
                 s, s, s, s, end, end, 0, 0});
}

void bind(py::module_& m) {
  m.def("profile_begin", begin, py::arg("expected"), py::arg("light") = false);
  m.def("profile_finish", finish);
  m.def("profile_now", now);  // on the clock of the current profile
}

}  // namespace nntile::profile
