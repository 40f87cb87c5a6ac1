#include "runtime.h"

#include <ATen/Parallel.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/Exception.h>
#include <malloc.h>
#include <starpu.h>

#include <cstring>
#include <map>
#include <tuple>
#include <unordered_map>
#include <unordered_set>

namespace nntile {

namespace {

// What travels with a submitted task. Tasks whose floats change at each replay own a copy of them behind the struct.
struct Instance {
  const TaskRecord* record;
  const double* floats;
};

std::unordered_map<std::string, Kernel>& kernels() {
  static std::unordered_map<std::string, Kernel> table;
  return table;
}

struct {
  std::mutex mutex;
  std::atomic<bool> failed{false};
  std::string message;
} g_error;

bool g_running = false;
std::mutex g_tiles_mutex;
std::unordered_set<Tile*> g_tiles;

template <class Run>
void guarded(const std::string& name, Run run) {
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

void run_cpu(void** buffers, void* cl_arg) {
  const auto& instance = *static_cast<const Instance*>(cl_arg);
  guarded(instance.record->name, [&] {
    Args args(*instance.record, instance.floats, buffers);
    instance.record->kernel(args);
  });
}

uint32_t footprint(starpu_task* task) { return static_cast<const Instance*>(task->cl_arg)->record->footprint; }

void* pointer(void* buffer) { return reinterpret_cast<void*>(STARPU_VARIABLE_GET_PTR(buffer)); }

void fill_zero(void** buffers, void*) { std::memset(pointer(buffers[0]), 0, STARPU_VARIABLE_GET_ELEMSIZE(buffers[0])); }

at::Tensor wrap(void* data, at::IntArrayRef shape, at::ScalarType dtype) { return at::from_blob(data, shape, dtype); }

void require_running() {
  if (!g_running) throw TaskError("no runtime is running: use `with nntile_py.Runtime(...):`");
}

}  // namespace

// StarPU keeps pointers to codelets, models and their names: once made they live as long as the process.
struct Codelet {
  starpu_codelet cl;
  starpu_perfmodel model;
  std::string name;
};

namespace {

Codelet* make_codelet(const std::string& name) {
  auto* codelet = new Codelet{};  // StarPU initialises a zeroed model at its first task
  codelet->name = name;
  starpu_codelet_init(&codelet->cl);
  codelet->cl.name = codelet->name.c_str();
  codelet->cl.cpu_funcs[0] = run_cpu;
  codelet->cl.nbuffers = STARPU_VARIABLE_NBUFFERS;
  codelet->cl.model = &codelet->model;
  codelet->model.type = STARPU_HISTORY_BASED;
  codelet->model.symbol = codelet->name.c_str();
  codelet->model.footprint = footprint;
  return codelet;
}

Codelet* get_codelet(const std::string& name) {
  static std::unordered_map<std::string, Codelet*> table;
  auto& codelet = table[name];
  if (!codelet) codelet = make_codelet(name);
  return codelet;
}

// The reduction task is StarPU's own, with no argument of ours: what it needs to know stands beside its codelet.
struct ReductionCodelet {
  starpu_codelet cl;
  Monoid monoid;
  at::ScalarType dtype;
  int64_t width;
};

void run_reduction(void** buffers, void*) {
  const auto* codelet = reinterpret_cast<const ReductionCodelet*>(starpu_task_get_current()->cl);
  guarded("reduction", [&] {
    const auto elements =
        static_cast<int64_t>(STARPU_VARIABLE_GET_ELEMSIZE(buffers[0]) / c10::elementSize(codelet->dtype));
    const int64_t shape[] = {elements / codelet->width, codelet->width};
    combine(codelet->monoid, wrap(pointer(buffers[0]), shape, codelet->dtype),
            wrap(pointer(buffers[1]), shape, codelet->dtype));
  });
}

starpu_codelet* reduction_codelet(Monoid monoid, at::ScalarType dtype, int64_t width) {
  static std::map<std::tuple<Monoid, at::ScalarType, int64_t>, ReductionCodelet*> table;
  auto& codelet = table[{monoid, dtype, width}];
  if (!codelet) {
    codelet = new ReductionCodelet;
    codelet->monoid = monoid;
    codelet->dtype = dtype;
    codelet->width = width;
    starpu_codelet_init(&codelet->cl);
    codelet->cl.name = "reduction";
    codelet->cl.cpu_funcs[0] = run_reduction;
    codelet->cl.nbuffers = 2;
    codelet->cl.modes[0] = STARPU_RW;
    codelet->cl.modes[1] = STARPU_R;
  }
  return &codelet->cl;
}

starpu_codelet* zero_codelet() {
  static starpu_codelet* codelet = [] {
    auto* cl = new starpu_codelet;
    starpu_codelet_init(cl);
    cl->name = "zero";
    cl->cpu_funcs[0] = fill_zero;
    cl->nbuffers = 1;
    cl->modes[0] = STARPU_W;
    return cl;
  }();
  return codelet;
}

// The tiles of a task go into it with these; ours are all implicit dependencies in submission order.
void set_tiles(starpu_task* task, const std::vector<std::shared_ptr<Tile>>& tiles, const std::vector<int>& modes) {
  const size_t n = tiles.size();
  task->nbuffers = static_cast<int>(n);
  auto* handles = task->handles;
  auto* access = task->modes;
  if (n > STARPU_NMAXBUFS) {  // both freed by StarPU
    task->dyn_handles = handles = static_cast<starpu_data_handle_t*>(std::malloc(n * sizeof(*handles)));
    task->dyn_modes = access = static_cast<starpu_data_access_mode*>(std::malloc(n * sizeof(*access)));
  }
  for (size_t k = 0; k < n; ++k) {
    handles[k] = tiles[k]->handle;
    access[k] = static_cast<starpu_data_access_mode>(modes[k]);
    if (modes[k] & (STARPU_W | STARPU_REDUX)) tiles[k]->initialised = !(modes[k] & STARPU_SCRATCH);
  }
}

void submit(starpu_task* task, const std::string& name) {
  const int status = starpu_task_submit(task);
  if (status) throw TaskError("task " + name + " was refused: " + std::strerror(-status));
}

bool reads(int mode) { return (mode & STARPU_R) && !(mode & STARPU_SCRATCH); }

}  // namespace

RegisterKernel::RegisterKernel(const char* name, Kernel cpu) { kernels()[name] = cpu; }

Kernel find_kernel(const std::string& name) {
  const auto found = kernels().find(name);
  if (found == kernels().end()) throw std::invalid_argument("no kernel is called " + name);
  return found->second;
}

at::Tensor Args::operator[](size_t k) const {
  const Tile& tile = *record_.tiles.at(k);
  return wrap(pointer(buffers_[k]), tile.shape, tile.dtype);
}

// -- tiles

Tile::Tile(std::vector<int64_t> shape_, at::ScalarType dtype_, Monoid monoid, bool redux)
    : shape(std::move(shape_)), dtype(dtype_), bytes(c10::elementSize(dtype_)) {
  require_running();
  for (const auto size : shape) bytes *= static_cast<size_t>(size);
  starpu_variable_data_register(&handle, -1, 0, bytes);  // home -1: allocated at the first write, evictable
  if (redux) {
    const int64_t width = monoid == Monoid::sum || shape.empty() ? 1 : shape.back();
    starpu_data_set_reduction_methods(handle, reduction_codelet(monoid, dtype, width), zero_codelet());
  }
  const std::lock_guard lock(g_tiles_mutex);
  g_tiles.insert(this);
}

Tile::~Tile() {
  const std::lock_guard lock(g_tiles_mutex);
  g_tiles.erase(this);
  if (handle) starpu_data_unregister_submit(handle);
}

void write_tile(const std::shared_ptr<Tile>& tile, const void* data) {
  struct Write {
    std::shared_ptr<Tile> tile;
    std::unique_ptr<char[]> data;
  };
  require_running();
  auto write = std::make_unique<Write>(tile, std::make_unique<char[]>(tile->bytes));
  std::memcpy(write->data.get(), data, tile->bytes);
  tile->initialised = true;
  starpu_data_acquire_cb(
      tile->handle, STARPU_W,
      [](void* arg) {
        const std::unique_ptr<Write> owned(static_cast<Write*>(arg));
        const auto handle = owned->tile->handle;
        std::memcpy(reinterpret_cast<void*>(starpu_variable_get_local_ptr(handle)), owned->data.get(),
                    owned->tile->bytes);
        starpu_data_release(handle);
      },
      write.release());
}

void read_tile(const std::shared_ptr<Tile>& tile, void* data) {
  require_running();
  check();
  if (!tile->initialised) throw TaskError("a tile was read before any task wrote it");
  if (starpu_data_acquire(tile->handle, STARPU_R)) throw TaskError("a tile could not be brought to main memory");
  std::memcpy(data, reinterpret_cast<void*>(starpu_variable_get_local_ptr(tile->handle)), tile->bytes);
  starpu_data_release(tile->handle);
  check();
}

void invalidate(const std::shared_ptr<Tile>& tile) {
  if (tile->initialised) starpu_data_invalidate_submit(tile->handle);
  tile->initialised = false;
}

struct Fetch::State {
  std::mutex mutex;
  std::condition_variable ready;
  std::vector<double> values;
  size_t missing;
};

Fetch::Fetch(const std::vector<std::shared_ptr<Tile>>& tiles) : state_(std::make_shared<State>()) {
  struct Item {
    std::shared_ptr<State> state;
    std::shared_ptr<Tile> tile;
    size_t k;
  };
  require_running();
  state_->values.resize(tiles.size());
  state_->missing = tiles.size();
  for (size_t k = 0; k < tiles.size(); ++k) {
    if (!tiles[k]->initialised || tiles[k]->dtype != at::kDouble)
      throw TaskError("a scalar was fetched before any task wrote it");
    starpu_data_acquire_cb(
        tiles[k]->handle, STARPU_R,
        [](void* arg) {
          const std::unique_ptr<Item> item(static_cast<Item*>(arg));
          const auto handle = item->tile->handle;
          const double value = *reinterpret_cast<double*>(starpu_variable_get_local_ptr(handle));
          starpu_data_release(handle);
          const std::lock_guard lock(item->state->mutex);
          item->state->values[item->k] = value;
          if (--item->state->missing == 0) item->state->ready.notify_all();
        },
        new Item{state_, tiles[k], k});
  }
}

bool Fetch::done() const {
  const std::lock_guard lock(state_->mutex);
  return state_->missing == 0;
}

std::vector<double> Fetch::wait() {
  {
    std::unique_lock lock(state_->mutex);
    state_->ready.wait(lock, [&] { return state_->missing == 0; });
  }
  check();
  return state_->values;
}

// -- runtime

void start(const RuntimeOptions& options) {
  if (g_running) throw TaskError("a runtime is running already: one at a time in a process");
  bool known = false;
  std::string names;
  for (auto** policy = starpu_sched_get_predefined_policies(); *policy; ++policy) {
    known |= options.scheduler == (*policy)->policy_name;
    names += std::string(names.empty() ? "" : ", ") + (*policy)->policy_name;
  }
  if (!known) throw std::invalid_argument("scheduler: unknown policy '" + options.scheduler + "'; StarPU has " + names);

  starpu_conf conf;
  starpu_conf_init(&conf);
  conf.ncpus = options.cpus;
  conf.ncuda = 0;
  conf.nopencl = 0;
  conf.sched_policy_name = options.scheduler.c_str();
  conf.catch_signals = 0;
  conf.calibrate = options.calibrate;
  // Tiles are large and short-lived: without these glibc returns each to the kernel, and every step pays the page
  // faults again.
  mallopt(M_MMAP_THRESHOLD, 1 << 30);
  mallopt(M_TRIM_THRESHOLD, 2147483647);
  starpu_malloc_set_align(64);  // MKL's results may depend on alignment
  const int status = starpu_init(&conf);
  if (status) throw TaskError(std::string("StarPU did not start: ") + std::strerror(-status));
  if (options.window > 0) {
    starpu_set_limit_max_submitted_tasks(options.window);
    starpu_set_limit_min_submitted_tasks(options.window * 3 / 4);
  }
  starpu_execute_on_each_worker(
      [](void*) {
        at::internal::lazy_init_num_threads();  // else the first parallel region would set it back
        at::set_num_threads(1);
      },
      nullptr, STARPU_CPU);
  g_error.failed = false;
  g_running = true;
}

void stop() {
  if (!g_running) return;
  starpu_task_wait_for_all();
  {
    const std::lock_guard lock(g_tiles_mutex);
    for (auto* tile : g_tiles) {
      starpu_data_unregister_no_coherency(tile->handle);
      tile->handle = nullptr;
    }
    g_tiles.clear();
  }
  g_running = false;
  starpu_shutdown();
}

bool running() { return g_running; }

bool failed() { return g_error.failed.load(std::memory_order_relaxed); }

void fail(const std::string& task, const std::string& what) {
  const std::lock_guard lock(g_error.mutex);
  if (g_error.failed) return;  // the first failure is the cause
  g_error.message = task + ": " + what;
  g_error.failed = true;
}

void wait_all() {
  require_running();
  starpu_task_wait_for_all();
  check();
}

void check() {
  if (!failed()) return;
  starpu_task_wait_for_all();
  const std::lock_guard lock(g_error.mutex);
  g_error.failed = false;
  throw TaskError(g_error.message);
}

size_t memory_used() { return g_running ? starpu_memory_get_used(STARPU_MAIN_RAM) : 0; }

int mode_of(const std::string& name) {
  static const std::map<std::string, int> modes = {
      {"R", STARPU_R},         {"W", STARPU_W},
      {"RW", STARPU_RW},       {"COMMUTE", STARPU_RW | STARPU_COMMUTE},
      {"REDUX", STARPU_REDUX}, {"SCRATCH", STARPU_SCRATCH},
  };
  const auto found = modes.find(name);
  if (found == modes.end()) throw std::invalid_argument("no access mode is called " + name);
  return found->second;
}

// -- tasks with a body given at run time (Python functions)

namespace {

struct BodyTask {
  std::string name;
  std::vector<std::shared_ptr<Tile>> tiles;
  Body body;
};

void run_body(void** buffers, void* cl_arg) {
  const std::unique_ptr<BodyTask> task(static_cast<BodyTask*>(cl_arg));
  guarded(task->name, [&] {
    std::vector<void*> pointers;
    for (size_t k = 0; k < task->tiles.size(); ++k) pointers.push_back(pointer(buffers[k]));
    task->body(pointers);
  });
}

starpu_codelet* body_codelet() {
  static starpu_codelet* codelet = [] {
    auto* cl = new starpu_codelet;
    starpu_codelet_init(cl);
    cl->name = "python";
    cl->cpu_funcs[0] = run_body;
    cl->nbuffers = STARPU_VARIABLE_NBUFFERS;
    return cl;
  }();
  return codelet;
}

}  // namespace

void submit_body(const std::string& name, std::vector<std::shared_ptr<Tile>> tiles, const std::vector<int>& modes,
                 Body body) {
  require_running();
  check();
  for (size_t k = 0; k < tiles.size(); ++k)
    if (reads(modes[k]) && !tiles[k]->initialised)
      throw TaskError(name + ": argument " + std::to_string(k) + " is read before any task wrote it");
  auto* task = starpu_task_create();
  task->cl = body_codelet();
  set_tiles(task, tiles, modes);
  auto* arg = new BodyTask{name, std::move(tiles), std::move(body)};
  task->cl_arg = arg;
  task->cl_arg_size = sizeof(*arg);
  task->name = "python";
  submit(task, name);
}

// -- programs

Program::~Program() {
  if (running()) starpu_task_wait_for_all();  // tasks in flight point into the records
}

void Program::add(TaskRecord record, const std::string& codelet) {
  record.codelet = get_codelet(codelet);
  items_.emplace_back(std::move(record));
  ++tasks_;
  finished_ = false;
}

void Program::add_invalidate(std::shared_ptr<Tile> tile) {
  items_.emplace_back(std::move(tile));
  finished_ = false;
}

// Reading what nobody wrote aborts in StarPU: found here once, by walking the accesses in order.
void Program::check_initialised() {
  std::unordered_map<const Tile*, bool> state;
  needs_.clear();
  for (const auto& item : items_) {
    if (const auto* tile = std::get_if<std::shared_ptr<Tile>>(&item)) {
      state[tile->get()] = false;
      continue;
    }
    const auto& record = std::get<TaskRecord>(item);
    for (size_t k = 0; k < record.tiles.size(); ++k) {
      auto* tile = record.tiles[k].get();
      const bool seen = state.contains(tile);
      if (reads(record.modes[k])) {
        if (seen && !state[tile]) throw TaskError(record.name + ": reads a tile before any task wrote it");
        if (!seen) needs_.push_back(tile);
      }
      if (!seen || record.modes[k] & (STARPU_W | STARPU_REDUX)) state[tile] = true;
    }
  }
  finished_ = true;
}

void Program::run(const std::vector<double>& slots) {
  require_running();
  check();
  if (!finished_) check_initialised();
  for (const auto* tile : needs_)
    if (!tile->initialised) throw TaskError("a program was run before its inputs were written");
  for (auto& item : items_) {
    if (auto* tile = std::get_if<std::shared_ptr<Tile>>(&item)) {
      invalidate(*tile);
      continue;
    }
    const auto& record = std::get<TaskRecord>(item);
    auto* task = starpu_task_create();
    task->cl = &record.codelet->cl;
    set_tiles(task, record.tiles, record.modes);
    const size_t n = record.floats.size();
    const size_t bytes = sizeof(Instance) + n * sizeof(double);
    auto* instance = static_cast<Instance*>(std::malloc(bytes));  // the step's own copy: n+1 is submitted while n runs
    auto* floats = reinterpret_cast<double*>(instance + 1);
    std::memcpy(floats, record.floats.data(), n * sizeof(double));
    for (const auto& [position, slot] : record.slots) floats[position] = slots.at(static_cast<size_t>(slot));
    *instance = {&record, floats};
    task->cl_arg = instance;
    task->cl_arg_size = bytes;
    task->cl_arg_free = 1;
    task->priority = record.priority;
    task->name = record.name.c_str();
    task->flops = record.flop;
    submit(task, record.name);
  }
}

}  // namespace nntile
