#include "runtime.h"

#include <ATen/Parallel.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/Exception.h>
#include <malloc.h>
#include <starpu.h>

#include <unistd.h>

#include <chrono>
#include <cstring>
#include <map>
#include <thread>
#include <tuple>
#include <unordered_map>
#include <unordered_set>

namespace nntile {

namespace {

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
unsigned g_generation = 0;  // of the runtime: what belongs to an earlier one is of no use
int g_window = 0;
size_t g_limit = 0;  // bytes that tiles may take

// For noticing that nothing moves any more: StarPU waits for ever for memory that nobody will give back.
std::atomic<uint64_t> g_ended{0};
std::atomic<int> g_active{0};
std::atomic<bool> g_stuck{false};
constexpr auto kPatience = std::chrono::seconds(20);

bool g_models = false;  // keeping a model up to date costs about 1 us a task: only where the policy asks it
std::mutex g_tiles_mutex;
std::unordered_set<Tile*> g_tiles;

template <class Run>
void guarded(const std::string& name, Run run) {
  struct Active {
    Active() { ++g_active; }
    ~Active() {
      --g_active;
      ++g_ended;
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

void run_cpu(void** buffers, void* cl_arg) {
  const auto& instance = *static_cast<const TaskInstance*>(cl_arg);
  guarded(instance.record->name, [&] {
    Args args(*instance.record, instance.floats, buffers);
    instance.record->kernel(args);
  });
}

uint32_t footprint(starpu_task* task) { return static_cast<const TaskInstance*>(task->cl_arg)->record->footprint; }

void* pointer(void* buffer) { return reinterpret_cast<void*>(STARPU_VARIABLE_GET_PTR(buffer)); }

void fill_zero(void** buffers, void*) { std::memset(pointer(buffers[0]), 0, STARPU_VARIABLE_GET_ELEMSIZE(buffers[0])); }

at::Tensor wrap(void* data, at::IntArrayRef shape, at::ScalarType dtype) { return at::from_blob(data, shape, dtype); }

void require_running() {
  if (!g_running) throw TaskError("no runtime is running: use `with nntile_py.Runtime(...):`");
}

void require(const Tile& tile) {
  require_running();
  if (!tile.handle) throw TaskError("this array belongs to a runtime that has stopped");
}

void require_main_thread() {
  if (starpu_worker_get_id() >= 0) throw TaskError("a task must not wait for tasks: it would wait for itself");
}

// Waits until done(); throws when no task has run for a while although some are left.
template <class Done>
void wait_until(Done done) {
  using clock = std::chrono::steady_clock;
  auto since = clock::now();
  auto ended = g_ended.load();
  for (int turn = 0; !done(); ++turn) {
    if (g_stuck) throw TaskError("the runtime ran out of memory before");
    std::this_thread::sleep_for(std::chrono::microseconds(turn < 100 ? 20 : 200));
    if (turn % 1000) continue;
    if (g_active || g_ended != ended) {
      since = clock::now();
      ended = g_ended;
    } else if (clock::now() - since > kPatience) {
      g_stuck = true;
      throw TaskError("out of memory: no task could start for " + std::to_string(kPatience.count()) + " s although " +
                      std::to_string(starpu_task_nsubmitted()) + " are left; their tiles do not fit in " +
                      std::to_string(g_limit >> 20) + " MiB (runtime.memory). Use smaller tiles or a smaller batch");
    }
  }
}

void wait_for_tasks() {
  wait_until([] { return starpu_task_nsubmitted() == 0; });
  starpu_task_wait_for_all();
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
  codelet->model.type = STARPU_HISTORY_BASED;
  codelet->model.symbol = codelet->name.c_str();
  codelet->model.footprint = footprint;
  return codelet;
}

Codelet* get_codelet(const std::string& name) {
  static std::unordered_map<std::string, Codelet*> table;
  auto& codelet = table[name];
  if (!codelet) codelet = make_codelet(name);
  codelet->cl.model = g_models ? &codelet->model : nullptr;
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
  double wanted = static_cast<double>(bytes);
  for (const auto size : shape) {
    wanted *= static_cast<double>(size);
    bytes *= static_cast<size_t>(size);
  }
  if (wanted > static_cast<double>(g_limit))
    throw TaskError("out of memory: one tile of " + std::to_string(wanted / (1 << 20)) + " MiB, allowed are " +
                    std::to_string(g_limit >> 20) + " MiB in all (runtime.memory). Use smaller tiles");
  starpu_variable_data_register(&handle, -1, 0, bytes);  // home -1: allocated at the first write, evictable
  reducible = redux;
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
  if (handle && !g_stuck) starpu_data_unregister_submit(handle);
}

void write_tile(const std::shared_ptr<Tile>& tile, const void* data) {
  struct Write {
    std::shared_ptr<Tile> tile;
    std::unique_ptr<char[]> data;
  };
  require(*tile);
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
  struct Read {
    std::shared_ptr<Tile> tile;
    std::unique_ptr<char[]> data;
    std::atomic<bool> done{false};
  };
  require(*tile);
  require_main_thread();
  check();
  if (!tile->initialised) throw TaskError("a tile was read before any task wrote it");
  auto read = std::make_shared<Read>(tile, std::make_unique<char[]>(tile->bytes));
  starpu_data_acquire_cb(
      tile->handle, STARPU_R,
      [](void* arg) {
        const std::unique_ptr<std::shared_ptr<Read>> owned(static_cast<std::shared_ptr<Read>*>(arg));
        auto& r = **owned;
        const auto handle = r.tile->handle;
        std::memcpy(r.data.get(), reinterpret_cast<void*>(starpu_variable_get_local_ptr(handle)), r.tile->bytes);
        starpu_data_release(handle);
        r.done = true;
      },
      new std::shared_ptr<Read>(read));
  wait_until([&] { return read->done.load(); });
  check();
  std::memcpy(data, read->data.get(), tile->bytes);
}

void invalidate(const std::shared_ptr<Tile>& tile) {
  require(*tile);
  if (tile->initialised) starpu_data_invalidate_submit(tile->handle);
  tile->initialised = false;
}

struct Fetch::State {
  std::vector<double> values;
  std::atomic<size_t> missing;
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
    require(*tiles[k]);
    if (!tiles[k]->initialised || tiles[k]->dtype != at::kDouble)
      throw TaskError("a scalar was fetched before any task wrote it");
    starpu_data_acquire_cb(
        tiles[k]->handle, STARPU_R,
        [](void* arg) {
          const std::unique_ptr<Item> item(static_cast<Item*>(arg));
          const auto handle = item->tile->handle;
          const double value = *reinterpret_cast<double*>(starpu_variable_get_local_ptr(handle));
          starpu_data_release(handle);
          item->state->values[item->k] = value;
          --item->state->missing;
        },
        new Item{state_, tiles[k], k});
  }
}

bool Fetch::done() const { return state_->missing == 0; }

std::vector<double> Fetch::wait() {
  require_main_thread();
  wait_until([&] { return done(); });
  check();
  return state_->values;
}

// -- runtime

void start(const RuntimeOptions& options) {
  if (g_running) throw TaskError("a runtime is running already: one at a time in a process");
  if (g_stuck) throw TaskError("a runtime of this process ran out of memory and cannot be replaced: start a new process");
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
  g_window = options.window;
  const auto pages = static_cast<size_t>(sysconf(_SC_PHYS_PAGES)), page = static_cast<size_t>(sysconf(_SC_PAGE_SIZE));
  g_limit = options.memory ? std::min(options.memory, pages * page) : pages * page;
  ++g_generation;
  starpu_execute_on_each_worker(
      [](void*) {
        at::internal::lazy_init_num_threads();  // else the first parallel region would set it back
        at::set_num_threads(1);
      },
      nullptr, STARPU_CPU);
  g_error.failed = false;
  g_models = options.scheduler.starts_with("dm") || options.scheduler.find("heft") != std::string::npos;
  g_running = true;
}

void stop() {
  if (!g_running) return;
  if (!g_stuck) {
    try {
      wait_for_tasks();
    } catch (const TaskError&) {  // stuck: seen below
    }
  }
  if (g_stuck) {  // its workers wait for memory for ever; they go with the process
    g_running = false;
    return;
  }
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
  require_main_thread();
  wait_for_tasks();
  check();
}

void check() {
  if (!failed()) return;
  require_main_thread();
  wait_for_tasks();
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
  for (const auto& tile : tiles) require(*tile);
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

Program::Program() : generation_(g_generation) {}

Program::~Program() {
  if (!running() || g_stuck || generation_ != g_generation) return;
  starpu_task_wait_for_all();  // tasks in flight point into the records
}

void Program::add(TaskRecord record, const std::string& codelet) {
  for (size_t k = 0; k < record.tiles.size(); ++k)
    if ((record.modes.at(k) & STARPU_REDUX) && !record.tiles[k]->reducible)
      throw std::invalid_argument(record.name + ": REDUX on a tile that was not made for it");
  for (const auto& [position, slot] : record.slots) slots_ = std::max(slots_, static_cast<size_t>(slot) + 1);
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
void Program::finish() {
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
  for (auto& item : items_)  // the list is complete: its records stay where they are
    if (auto* record = std::get_if<TaskRecord>(&item)) record->instance = {record, record->floats.data()};
  finished_ = true;
}

void Program::run(const std::vector<double>& slots) {
  require_running();
  check();
  if (generation_ != g_generation) throw TaskError("this program belongs to a runtime that has stopped");
  if (slots.size() < slots_) throw std::invalid_argument("a program was run with too few slots");
  if (!finished_) finish();
  for (const auto* tile : needs_)
    if (!tile->initialised) throw TaskError("a program was run before its inputs were written");
  for (auto& item : items_) {
    if (auto* tile = std::get_if<std::shared_ptr<Tile>>(&item)) {
      invalidate(*tile);
      continue;
    }
    if (g_window > 0 && starpu_task_nsubmitted() >= g_window)
      wait_until([] { return starpu_task_nsubmitted() < g_window; });
    const auto& record = std::get<TaskRecord>(item);
    auto* task = starpu_task_create();
    task->cl = &record.codelet->cl;
    set_tiles(task, record.tiles, record.modes);
    if (record.slots.empty()) {
      task->cl_arg = const_cast<TaskInstance*>(&record.instance);
      task->cl_arg_size = sizeof(TaskInstance);
    } else {  // the step's own copy: n+1 is submitted while n runs
      const size_t bytes = record.floats.size() * sizeof(double);
      auto* instance = static_cast<TaskInstance*>(std::malloc(sizeof(TaskInstance) + bytes));
      auto* floats = reinterpret_cast<double*>(instance + 1);
      std::memcpy(floats, record.floats.data(), bytes);
      for (const auto& [position, slot] : record.slots) floats[position] = slots.at(static_cast<size_t>(slot));
      *instance = {&record, floats};
      task->cl_arg = instance;
      task->cl_arg_size = sizeof(TaskInstance) + bytes;
      task->cl_arg_free = 1;
    }
    task->priority = record.priority;
    task->name = record.name.c_str();
    task->flops = record.flop;
    submit(task, record.name);
  }
}

}  // namespace nntile
