// Kernels, codelets, programs.
#include <algorithm>
#include <cstring>
#include <map>
#include <unordered_map>
#include <utility>

#ifdef NNTILE_CUDA
#include "graph_params.h"
#endif
#include "buffers.h"
#include "on_cuda.h"
#include "dtypes.h"
#include "internal.h"
#include "profile.h"

namespace nntile {

// StarPU keeps pointers to codelets, models and their names, so these live as long as the process.
struct Codelet {
  starpu_codelet cl;
  starpu_perfmodel model;
  std::string name;
};

namespace {

std::map<std::pair<c10::DeviceType, std::string>, Kernel>& kernels() {
  static std::map<std::pair<c10::DeviceType, std::string>, Kernel> table;
  return table;
}

void run_python(const TaskBody& body, const double* floats, void** buffers, int device, void* stream) {
  std::vector<void*> pointers;
  for (const int place : body.places) pointers.push_back(pointer(buffers[place]));
  body.python.call(pointers, floats + body.first_float, device, stream);
}

void run_cpu(void** starpu_buffers, void* cl_arg) {
  const profile::Interval interval(profile::Interval::Of::program);
  const auto& instance = *static_cast<const TaskInstance*>(cl_arg);
  Buffers task_buffers(*instance.record, starpu_buffers, c10::kCPU);
  auto** buffers = task_buffers.all();
  for (size_t k = 0; k < instance.record->bodies.size(); ++k) {
    const auto& body = instance.record->bodies[k];
    guarded(body.name, [&] {
      if (body.python.call) {
        run_python(body, instance.floats, buffers, -1, nullptr);
      } else {
        Args args(body, instance.floats, buffers, c10::kCPU);
        body.cpu(args);
      }
      if (instance.run) check_finite(instance, k, buffers, c10::kCPU);
    });
  }
}

#ifdef NNTILE_CUDA
void run_cuda(void** starpu_buffers, void* cl_arg) {
  const auto& instance = *static_cast<const TaskInstance*>(cl_arg);
  const auto& record = *instance.record;
  on_cuda(starpu_buffers, record.fetched().size(), [&](c10::Device device) {
    Buffers task_buffers(*instance.record, starpu_buffers, device);
    auto** buffers = task_buffers.all();
    for (size_t k = 0; k < instance.record->bodies.size(); ++k) {
      const auto& body = instance.record->bodies[k];
      guarded(body.name, [&] {
        run_on_cuda(body, instance.floats, buffers, device);
        if (instance.run) check_finite(instance, k, buffers, device);
      });
    }
  });
}
#endif

uint32_t footprint(starpu_task* task) { return static_cast<const TaskInstance*>(task->cl_arg)->record->footprint; }

Codelet* make_codelet(const std::string& name, bool cpu, bool cuda) {
  auto* codelet = new Codelet{};  // all zeros: StarPU then initialises the performance model with its first task
  codelet->name = name;
  starpu_codelet_init(&codelet->cl);
  codelet->cl.name = codelet->name.c_str();
  if (cpu) codelet->cl.cpu_funcs[0] = run_cpu;
#ifdef NNTILE_CUDA
  if (cuda) codelet->cl.cuda_funcs[0] = run_cuda;
  codelet->cl.cuda_flags[0] = STARPU_CUDA_ASYNC;
#else
  (void)cuda;
#endif
  codelet->cl.nbuffers = STARPU_VARIABLE_NBUFFERS;
  codelet->model.type = STARPU_HISTORY_BASED;
  codelet->model.symbol = codelet->name.c_str();
  codelet->model.footprint = footprint;
  return codelet;
}

// Returns the codelet of a name and of the kinds of workers that may run its tasks.
Codelet* get_codelet(const std::string& name, bool cpu, bool cuda) {
  static std::map<std::tuple<std::string, bool, bool>, Codelet*> table;
  auto& codelet = table[{name, cpu, cuda}];
  if (!codelet) codelet = make_codelet(name, cpu, cuda);
  codelet->cl.model = g.models ? &codelet->model : nullptr;
  return codelet;
}

}  // namespace

#ifdef NNTILE_CUDA
void run_on_cuda(const TaskBody& body, const double* floats, void** buffers, c10::Device device) {
  if (!body.ways.empty()) return run_launches(body, floats, buffers, device);
  if (changing) changing->refuse();
  after_own_kernel = false;
  if (body.python.call) return run_python(body, floats, buffers, device.index(), task_stream());
  Args args(body, floats, buffers, device);
  body.cuda(args);
}
#endif

// Sets a task's tiles; all dependencies are implicit, in submission order.
void set_tiles(starpu_task* task, const std::vector<std::shared_ptr<Tile>>& tiles, const std::vector<int>& modes) {
  const size_t n = tiles.size();
  task->nbuffers = static_cast<int>(n);
  auto* handles = task->handles;
  auto* access = task->modes;
  if (n > STARPU_NMAXBUFS) {  // StarPU frees these two arrays
    task->dyn_handles = handles = static_cast<starpu_data_handle_t*>(std::malloc(n * sizeof(*handles)));
    task->dyn_modes = access = static_cast<starpu_data_access_mode*>(std::malloc(n * sizeof(*access)));
  }
  for (size_t k = 0; k < n; ++k) {
    handles[k] = tiles[k]->handle;
    access[k] = static_cast<starpu_data_access_mode>(modes[k]);
    if (!writes(modes[k])) continue;
    before_write(*tiles[k]);
    tiles[k]->initialised = true;
  }
}

void submit(starpu_task* task, const std::string& name) {
  const int status = starpu_task_submit(task);
  if (status) throw TaskError("task " + name + " was refused: " + std::strerror(-status));
}

void wait_for_window(int window) {
  if (g.window > 0) window = window > 0 ? std::min(window, g.window) : g.window;
  if (window > 0 && starpu_task_nsubmitted() >= window)
    wait_until([window] { return starpu_task_nsubmitted() < window; });
}

RegisterKernel::RegisterKernel(const char* name, c10::DeviceType where, Kernel kernel) {
  kernels()[{where, name}] = kernel;
}

Kernel find_kernel(const std::string& name, c10::DeviceType where) {
  const auto found = kernels().find({where, name});
  return found == kernels().end() ? nullptr : found->second;
}

// Returns the part of a tile that a step fills; see Args.
View filled_part(const TaskBody& body, size_t k, const double* floats, void* data, c10::Device device) {
  const Tile& tile = *body.tiles.at(k);
  at::DimVector shape(tile.shape.begin(), tile.shape.end()), strides(shape.size());
  const auto stride = [&] {
    int64_t step = 1;
    for (size_t axis = shape.size(); axis-- > 0; step *= std::max<int64_t>(shape[axis], 1)) strides[axis] = step;
  };
  if (!device.is_cpu()) stride();
  for (const auto& live : body.lives)
    if (live.tile == k) shape[live.axis] = static_cast<int64_t>(floats[live.position]);
  if (device.is_cpu()) stride();
  return {data, tile.dtype, device, std::move(shape), std::move(strides)};
}

View Args::view(size_t k) const {
  return filled_part(body_, k, floats_, pointer(buffers_[body_.places[k]]), device_);
}

int mode_of(const std::string& name) {
  static const std::map<std::string, int> modes = {
      {"R", STARPU_R}, {"W", STARPU_W}, {"RW", STARPU_RW}, {"COMMUTE", STARPU_RW | STARPU_COMMUTE},
      {"REDUX", STARPU_REDUX},
  };
  const auto found = modes.find(name);
  if (found == modes.end()) throw std::invalid_argument("no access mode is called " + name);
  return found->second;
}

Program::Program(bool tf32, bool checked, int window)
    : generation_(g.generation), tf32_(tf32), checked_(checked), window_(window) {}

void Program::drop() {
  if (generation_ == g.generation && (running() || g.stuck)) {
    // Tasks in flight point into the records, so wait for all tasks. Where this is not possible (in a task in which
    // Python's garbage collector runs, or with a stuck runtime), the program is never freed.
    if (g.stuck || starpu_worker_get_id() >= 0) return;
    starpu_task_wait_for_all();
    try {
      if (holds_) {
        let_go();
        sleep_if_idle();
      }
    } catch (...) {  // after an interrupt, or with a stuck runtime
      return;
    }
  }
  delete this;
}

void Program::add(TaskRecord record, const std::vector<std::string>& kernels, const std::string& codelet,
                  const std::string& kind) {
  bool cpu = g.cpus > 0, cuda = g.cuda > 0 && kind != "cpu";  // worker kinds that can run every part
  for (size_t k = 0; k < record.bodies.size(); ++k) {
    auto& body = record.bodies[k];
    body.tf32 = tf32_;
    bool low = false;  // some tiles have a dtype without CPU kernels
    for (const int place : body.places) {
      const auto number = static_cast<size_t>(place), known = record.tiles.size();
      body.tiles.push_back((number < known ? record.tiles[number] : record.scratch.at(number - known)).get());
      low |= at::isReducedFloatingType(body.tiles.back()->dtype) && !is_scaled(body.tiles.back()->dtype);
    }
    const bool python = static_cast<bool>(body.python.call);
    body.cpu = low ? nullptr : find_kernel(kernels.at(k), c10::kCPU);
    body.cuda = find_kernel(kernels[k], c10::kCUDA);
    // A C++ CUDA kernel is one more candidate, so the stored choice of the fastest kernel needs another key.
    if (body.cuda && !body.key.empty()) body.key += " and ATen";
    cpu &= python || body.cpu;
    cuda &= python ? body.python.cuda : body.cuda || !body.ways.empty();
    if (cpu || cuda) continue;
    if (!python && !find_kernel(kernels[k], c10::kCPU) && !body.cuda) throw std::invalid_argument("no kernel is called " + kernels[k]);
    const auto workers = std::to_string(g.cpus) + " CPU, " + std::to_string(g.cuda) + " CUDA";
    throw TaskError(body.name + ": kernel " + kernels[k] + (low ? " on bf16 or fp16 tiles" : "") + " runs on no worker of " +
                    (kind == "cpu" ? "runtime.on_cpu, CPU workers" : "this runtime (" + workers + ")"));
  }
  cpu &= kind != "cuda" || !cuda;
  for (size_t k = 0; k < record.tiles.size(); ++k)
    if ((record.modes.at(k) & STARPU_REDUX) && !record.tiles[k]->reducible)
      throw std::invalid_argument(record.name + ": REDUX needs a tile that was created for reductions");
  for (const auto& [position, slot] : record.slots) slots_ = std::max(slots_, static_cast<size_t>(slot) + 1);
  if (record.worker >= 0) {  // numbered among CUDA workers, or among CPU workers if there are no CUDA workers
    const auto kind = cuda ? STARPU_CUDA_WORKER : STARPU_CPU_WORKER;
    const int count = cuda ? g.cuda : g.cuda ? 0 : g.cpus;
    record.worker = record.worker < count ? starpu_worker_get_by_type(kind, record.worker) : -1;
  }
  record.codelet = get_codelet(codelet, cpu, cuda);
  record.number = static_cast<int64_t>(tasks_);
  leaves_ |= !record.leaves.empty();
  has_residents_ |= !record.residents.empty();
  for (size_t k = 0; k < record.tiles.size(); ++k)
    if (std::find(record.residents.begin(), record.residents.end(), static_cast<int>(k)) == record.residents.end()) {
      record.others.push_back(record.tiles[k]);
      record.modes_of_others.push_back(record.modes[k]);
    }
  items_.emplace_back(std::move(record));
  ++tasks_;
  finished_ = false;
}

void Program::add_invalidate(std::shared_ptr<Tile> tile) {
  items_.emplace_back(std::move(tile));
  finished_ = false;
}

void Program::add_message(Message message) {
  items_.emplace_back(std::move(message));
  finished_ = false;
}

// Reading uninitialised tiles aborts in StarPU, so all accesses are checked here once, in order.
void Program::finish() {
  std::unordered_map<const Tile*, bool> state;
  needs_.clear();
  for (const auto& item : items_) {
    if (const auto* tile = std::get_if<std::shared_ptr<Tile>>(&item)) {
      state[tile->get()] = false;
      continue;
    }
    const auto use = [&](const std::string& name, Tile* tile, int mode) {
      const bool seen = state.contains(tile);
      if (reads(mode)) {
        if (seen && !state[tile]) throw TaskError(name + ": reads a tile before any task wrote it");
        if (!seen) needs_.push_back(tile);
      }
      if (!seen || writes(mode)) state[tile] = true;
    };
    if (const auto* message = std::get_if<Message>(&item)) {
      use("a message", message->tile.get(), message->sends ? STARPU_R : STARPU_W);
      continue;
    }
    const auto& record = std::get<TaskRecord>(item);
    for (size_t k = 0; k < record.tiles.size(); ++k) use(record.name, record.tiles[k].get(), record.modes[k]);
  }
  for (auto& item : items_)  // the list is complete, so addresses of records are final
    if (auto* record = std::get_if<TaskRecord>(&item)) record->instance = {record, record->floats.data()};
  finished_ = true;
}

void Program::begin(const std::vector<double>& slots) {
  require_running();
  check();
  if (generation_ != g.generation) throw TaskError("this program belongs to a runtime that has stopped");
  if (slots.size() < slots_) throw std::invalid_argument("a program was run with too few slots");
  if (!finished_) finish();
  for (const auto* tile : needs_)
    if (!tile->initialised) throw TaskError("a program was run before its inputs were written");
  wake();
}

uint32_t Program::run(const std::vector<double>& slots) {
  begin(slots);
  if (leaves_) let_go_of_all();  // the eviction plan counts on the whole memory of the device
  hold();
  const uint32_t replay = profile::begin_run();
  uint32_t index = 0;
  static uint64_t runs = 0;
  if (checked_) run_ = ++runs;
  for (auto& item : items_) {
    if (auto* tile = std::get_if<std::shared_ptr<Tile>>(&item)) {
      invalidate(*tile);
      continue;
    }
    if (const auto* message = std::get_if<Message>(&item)) {
      post(*message, replay, replay ? index++ : 0);
      continue;
    }
    wait_for_window(window_);
    const auto& record = std::get<TaskRecord>(item);
    for (const auto& tile : record.tiles)  // another program's residents; a wait that an interrupt may end
      if (tile->holder != this) before_use(*tile);
    auto* task = starpu_task_create();
    task->cl = &record.codelet->cl;
    set_tiles(task, record.fetched(), record.holds ? record.modes_of_others : record.modes);
    if (record.slots.empty() && !checked_) {
      task->cl_arg = const_cast<TaskInstance*>(&record.instance);
      task->cl_arg_size = sizeof(TaskInstance);
    } else {  // each run has its own copy of the floats, because run n+1 is submitted while run n executes
      const size_t bytes = record.floats.size() * sizeof(double);
      auto* instance = static_cast<TaskInstance*>(std::malloc(sizeof(TaskInstance) + bytes));
      auto* floats = reinterpret_cast<double*>(instance + 1);
      std::memcpy(floats, record.floats.data(), bytes);
      for (const auto& [position, slot] : record.slots) floats[position] = slots.at(static_cast<size_t>(slot));
      *instance = {&record, floats, run_};
      task->cl_arg = instance;
      task->cl_arg_size = sizeof(TaskInstance) + bytes;
      task->cl_arg_free = 1;
    }
    task->priority = record.priority;
    if (record.worker >= 0) plan(task, record);
    task->name = record.name.c_str();
    task->flops = record.flop;
    if (replay) profile::watch(task, replay, index++);
    submit(task, record.name);
    for (const int place : record.leaves)
      leave(*record.tiles.at(static_cast<size_t>(place)), !(record.modes[static_cast<size_t>(place)] & STARPU_W));
  }
  return replay;
}

}  // namespace nntile
