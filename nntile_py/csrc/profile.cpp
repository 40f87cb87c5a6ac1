#include "profile.h"

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <memory>

#include "internal.h"

namespace py = pybind11;

namespace nntile::profile {

std::atomic<bool> g_on{false};

namespace {

// All dates in nanoseconds since StarPU started; the order is that of COLUMNS in nntile_py/profile/collect.py.
struct Event {
  int64_t run, task, worker;
  int64_t submit, ready, pop, popped, fetch, fetched, start, end, released;
  int64_t memory, main_memory;  // bytes in use on the worker's memory node and in main memory
};
static_assert(sizeof(Event) == 14 * sizeof(int64_t));

// A worker writes its own buffer only, and the main thread reads when no task is left: no lock is needed. The last
// one belongs to threads that are no workers, and has a mutex.
struct alignas(64) Buffer {
  std::vector<Event> events;
};
std::unique_ptr<Buffer[]> g_buffers;
std::mutex g_others;
uint32_t g_runs = 0;
std::vector<Transfers> g_transfers;  // of each bus, before the profile

int64_t ns(const timespec& t) { return int64_t{t.tv_sec} * STARPU_NS_PER_S + t.tv_nsec; }

void keep(const Event& event) {
  const int worker = starpu_worker_get_id();
  if (worker >= 0) {
    g_buffers[worker].events.push_back(event);
  } else {
    const std::lock_guard lock(g_others);
    g_buffers[STARPU_NMAXWORKERS].events.push_back(event);
  }
}

int64_t memory_of(int worker) {
  return static_cast<int64_t>(starpu_memory_get_used(worker < 0 ? STARPU_MAIN_RAM : starpu_worker_get_memory_node(worker)));
}

// Runs on StarPU's threads.
void ended(void* arg) {
  const auto* task = starpu_task_get_current();
  const auto* i = task ? task->profiling_info : nullptr;
  if (!i || !on()) return;
  const auto id = reinterpret_cast<uint64_t>(arg);
  keep({static_cast<int64_t>(id >> 32), static_cast<int64_t>(id & 0xffffffff), i->workerid, ns(i->submit_time),
        ns(i->push_end_time), ns(i->pop_start_time), ns(i->pop_end_time), ns(i->acquire_data_start_time),
        ns(i->acquire_data_end_time), ns(i->start_time), ns(i->end_time), ns(i->callback_start_time),
        memory_of(i->workerid), memory_of(-1)});
}

int64_t now() { return static_cast<int64_t>(starpu_timing_now() * 1e3); }

std::string node_name(unsigned node) {
  char name[64];
  starpu_memory_node_get_name(node, name, sizeof name);
  return name;
}

void begin(size_t expected) {
  require_running();
  require_main_thread();
  {
    const py::gil_scoped_release nogil;
    wait_for_tasks();
  }
  g_buffers.reset(new Buffer[STARPU_NMAXWORKERS + 1]);
  for (unsigned worker = 0; worker < starpu_worker_get_count(); ++worker) g_buffers[worker].events.reserve(expected);
  g_runs = 0;
  starpu_profiling_status_set(STARPU_PROFILING_ENABLE);  // resets the counters of workers
  g_transfers.clear();
  for (int bus = 0; bus < starpu_bus_get_count(); ++bus) g_transfers.push_back(transfers(bus));
  g_on = true;
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
  py::list workers, nodes, buses;
  std::vector<Event> events;
  for (unsigned worker = 0; worker <= STARPU_NMAXWORKERS; ++worker)
    events.insert(events.end(), g_buffers[worker].events.begin(), g_buffers[worker].events.end());
  g_buffers.reset();
  for (unsigned worker = 0; worker < starpu_worker_get_count(); ++worker) {
    char name[128];
    starpu_worker_get_name(static_cast<int>(worker), name, sizeof name);
    starpu_profiling_worker_info info;
    starpu_profiling_worker_get_info(static_cast<int>(worker), &info);
    const auto seconds = [](const timespec& t) { return static_cast<double>(ns(t)) * 1e-9; };
    workers.append(py::dict(
        py::arg("name") = name,
        py::arg("kind") = starpu_worker_get_type_as_string(starpu_worker_get_type(static_cast<int>(worker))),
        py::arg("node") = starpu_worker_get_memory_node(worker), py::arg("total_s") = seconds(info.total_time),
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
  starpu_profiling_status_set(STARPU_PROFILING_DISABLE);
  const size_t columns = sizeof(Event) / sizeof(int64_t);
  py::array_t<int64_t> table({events.size(), columns});
  std::memcpy(table.mutable_data(), events.data(), events.size() * sizeof(Event));
  return py::dict(py::arg("events") = table, py::arg("workers") = workers, py::arg("nodes") = nodes,
                  py::arg("buses") = buses);
}

}  // namespace

uint32_t begin_run() { return on() ? ++g_runs : 0; }

void watch(starpu_task* task, uint32_t run, uint32_t index) {
  task->callback_func = ended;
  task->callback_arg = reinterpret_cast<void*>((uint64_t{run} << 32) | index);
}

Interval::Interval() : start_(on() ? now() : -1) {}

Interval::~Interval() {
  if (start_ < 0 || !on()) return;
  const int64_t end = now(), s = start_;
  const int worker = starpu_worker_get_id();
  keep({0, 0, worker, s, s, s, s, s, s, s, end, end, memory_of(worker), memory_of(-1)});
}

void bind(py::module_& m) {
  m.def("profile_begin", begin, py::arg("expected"));
  m.def("profile_finish", finish);
}

}  // namespace nntile::profile
