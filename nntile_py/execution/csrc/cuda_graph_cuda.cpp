#include "cuda_graph.h"

#include <ATen/cuda/CUDAGraph.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAException.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "graph_params.h"
#include "autotune.h"
#include "internal.h"
#include "on_cuda.h"
#include "profile.h"

namespace nntile {

struct Captured::Graph {
  bool launched = false;          // kernel by kernel
  std::vector<void*> addresses;   // of the task's tiles at capture
  Changing changing;
  std::unique_ptr<at::cuda::CUDAGraph> graph;
};

// Argument of the task.
struct Captured::Run {
  Captured* captured;
  std::vector<double> slots;
};

namespace {

constexpr size_t kGraphs = 80;       // maximum of one program at a time
constexpr size_t kMostMade = 1024;   // maximum in total: beyond, slots or tile addresses change too often
constexpr float kTimed = 2;          // ms of launches per timing of a graph
constexpr int kMostTimed = 5;        // maximum number of these launches
constexpr float kGain = 0.998f;      // a candidate must be below this fraction of the time

std::vector<Captured*> holding;  // programs that keep weights on the device; used only by the main thread, as holds_
std::map<unsigned, size_t> held_bytes;  // by memory node

}  // namespace

Captured::Captured(Program& program, const std::vector<size_t>& records, int worker,
                   std::vector<std::shared_ptr<Tile>> weights, std::vector<std::shared_ptr<Tile>> tiles,
                   std::vector<int> modes, size_t own, std::vector<int> changing, bool measures)
    : program_(program), worker_(starpu_worker_get_by_type(STARPU_CUDA_WORKER, worker)), weights_(std::move(weights)),
      tiles_(std::move(tiles)), modes_(std::move(modes)), changing_(std::move(changing)), own_(own),
      measures_(measures) {
  if (worker_ < 0) throw std::invalid_argument("there is no CUDA worker number " + std::to_string(worker));
  if (!program.finished_) program.finish();
  size_t number = 0;
  auto next = records.begin();
  for (const auto& item : program.items_) {
    if (const auto* tile = std::get_if<std::shared_ptr<Tile>>(&item)) {
      items_.emplace_back(tile->get());
    } else if (const auto* record = std::get_if<TaskRecord>(&item)) {
      if (next == records.end() || *next != number++) continue;
      ++next;
      items_.emplace_back(record);
      flop_ += record->flop;
    } else {
      throw std::invalid_argument("a program with messages cannot be captured");
    }
  }
}

Captured::~Captured() = default;

void Captured::drop() {
  try {
    if (holds_) {
      let_go();
      sleep_if_idle();
    }
  } catch (...) {  // cannot wait: within a task, with a stuck runtime, or after an interrupt
    return;
  }
  delete this;
}

unsigned Captured::node() const { return starpu_worker_get_memory_node(static_cast<unsigned>(worker_)); }

bool Captured::shared(const Tile& tile) const {
  return std::any_of(tile.holders.begin(), tile.holders.end(),
                     [&](const Captured* one) { return one != this && one->node() == node(); });
}

bool Captured::hold(size_t most) {
  require_running();
  if (!holds_ && !acquire(most)) return false;
  if (addresses_.size() == weights_.size()) return true;
  wait_until([this] { return missing_ == 0; });
  for (const auto& tile : weights_)
    addresses_.push_back(pointer_on(*tile, node()));
  return true;
}

bool Captured::acquire(size_t most) {
  size_t more = own_;
  for (const auto& tile : weights_) {
    require(*tile);
    if (!tile->initialised) throw TaskError("a program was run before its weights were written");
    if (!shared(*tile)) more += tile->bytes;
  }
  if (held_bytes[node()] + more > most || starpu_memory_allocate(node(), own_, 0)) return false;
  wake();
  holding.push_back(this);
  holds_ = true;
  held_bytes[node()] += more;
  missing_ = weights_.size();
  for (const auto& tile : weights_) {
    tile->holders.push_back(this);
    starpu_data_acquire_on_node_cb(
        tile->handle, static_cast<int>(node()), STARPU_R,
        [](void* missing) { --*static_cast<std::atomic<size_t>*>(missing); }, &missing_);
  }
  return true;
}

void Captured::let_go() {
  if (!holds_ || g.forked) return;
  require_main_thread();
  wake();
  wait_until([this] { return missing_ == 0; });
  wait_for_tasks();
  graphs_.clear();
  addresses_.clear();
  for (const auto& tile : weights_) {
    starpu_data_release_on_node(tile->handle, static_cast<int>(node()));
    std::erase(tile->holders, this);
    if (!shared(*tile)) held_bytes[node()] -= tile->bytes;
  }
  starpu_memory_deallocate(node(), own_);
  held_bytes[node()] -= own_;
  std::erase(holding, this);
  holds_ = false;
}

void let_go_of_all() {
  while (!holding.empty()) holding.back()->let_go();
}

void before_write(Tile& tile) {
  while (!tile.holders.empty()) tile.holders.back()->let_go();
}

uint32_t Captured::run(const std::vector<double>& slots) {
  program_.begin(slots);
  if (!holds_) throw TaskError("a captured program was run without its weights");
  const uint32_t replay = profile::begin_run();
  static starpu_codelet* codelet = [] {
    auto* cl = new_codelet("captured", {}, nullptr, [](void** buffers, void* arg) {
      const std::unique_ptr<Run> run(static_cast<Run*>(arg));
      on_cuda(buffers, run->captured->tiles_.size(),
              [&](c10::Device device) { run->captured->on_worker(run->slots, buffers, device); });
    });
    cl->nbuffers = STARPU_VARIABLE_NBUFFERS;
    return cl;
  }();
  wait_for_window();
  for (const auto& tile : tiles_) before_use(*tile);
  auto* task = starpu_task_create();
  task->cl = codelet;
  set_tiles(task, tiles_, modes_);
  task->cl_arg = new Run{this, slots};
  task->cl_arg_size = sizeof(Run);
  task->cl_arg_free = 0;
  task->name = codelet->name;
  task->flops = flop_;
  task->execute_on_a_specific_worker = 1;
  task->workerid = static_cast<unsigned>(worker_);
  if (replay) profile::watch(task, replay, 0);
  submit(task, codelet->name);
  return replay;
}

std::string Captured::broken() const {
  const std::lock_guard lock(mutex_);
  return broken_;
}

void Captured::on_worker(const std::vector<double>& slots, void** buffers, c10::Device device) {
  guarded("captured", [&] {
    std::vector<void*> addresses;
    for (size_t k = 0; k < tiles_.size(); ++k) addresses.push_back(pointer(buffers[k]));
    const auto key = fixed(slots);
    if (graphs_.size() >= kGraphs && !graphs_.contains(key)) {
      C10_CUDA_CHECK(cudaStreamSynchronize(task_stream()));  // a graph may be running
      graphs_.clear();
    }
    auto& graph = graphs_[key];
    if (graph.graph && graph.addresses == addresses) return launch(graph, slots);
    if (graph.launched && broken().empty()) {
      try {
        if (made_ >= kMostMade) throw TaskError("it was captured " + std::to_string(made_) + " times");
        choose(slots, buffers, device);
        capture(graph, slots, buffers, device);
        ++made_;
        graph.addresses = std::move(addresses);
        return launch(graph, slots);
      } catch (const std::exception& error) {
        // The graph is never deleted: ATen's allocators may go on querying a capture that did not end.
        [[maybe_unused]] const auto* kept = graph.graph.release();
        const auto* own = dynamic_cast<const c10::Error*>(&error);
        const std::lock_guard lock(mutex_);
        broken_ = own ? own->what_without_backtrace() : error.what();
      }
    }
    walk(slots, buffers, device, true);
    graph.launched = true;
  });
}

std::vector<double> Captured::fixed(std::vector<double> slots) const {
  for (const auto slot : changing_) slots.at(static_cast<size_t>(slot)) = 0;
  return slots;
}

void Captured::launch(Graph& graph, const std::vector<double>& slots) {
  graph.changing.set(graph.graph->raw_cuda_graph_exec(), slots);
  graph.graph->replay();
}

// ATen's allocator gives a graph private memory for the lifetime of the graph.
void Captured::capture(Graph& graph, const std::vector<double>& slots, void** buffers, c10::Device device) {
  if (graph.graph) C10_CUDA_CHECK(cudaStreamSynchronize(task_stream()));  // the old graph may be running
  graph.graph.reset();
  const auto there = [](const auto& one) { return one.second.graph != nullptr; };
  if (!pool_held_ && std::none_of(graphs_.begin(), graphs_.end(), there))
    pool_ = at::cuda::graph_pool_handle();  // a released pool no longer exists
  graph.graph = std::make_unique<at::cuda::CUDAGraph>(true);  // keep the graph, as its nodes are needed
  graph.changing = {};
  auto& made = *graph.graph;
  {
    const c10::InferenceMode off(false);  // its tensors for random numbers are shared
    made.capture_begin(pool_, cudaStreamCaptureModeThreadLocal);
  }
  std::exception_ptr error;
  try {
    changing = &graph.changing;
    walk(slots, buffers, device, false);
  } catch (...) {
    error = std::current_exception();
  }
  changing = nullptr;
  try {
    made.capture_end();
  } catch (...) {  // a failure, or an operation that cannot be captured, invalidated the capture
    if (!error) error = std::current_exception();
    try {
      c10::cuda::CUDACachingAllocator::endAllocateToPool(device.index(), pool_);
    } catch (...) {  // already reported before the failure
    }
  }
  cudaGetLastError();
  if (error) std::rethrow_exception(error);
  graph.changing.finish();
  made.instantiate();
}

// Returns the time of a launch between other launches of the same graph.
float Captured::milliseconds(Graph& graph) {
  const auto run = [&](int count) {
    return [&graph, count] {
      for (int k = 0; k < count; ++k) graph.graph->replay();
      return true;
    };
  };
  run(1)();
  const int count = std::clamp(static_cast<int>(kTimed / least_ms(run(1))), 1, kMostTimed);
  return least_ms(run(count)) / static_cast<float>(count);
}

// Measures the open choices one after the other, with all other choices fixed. Choices between kernels, whose file
// sorts last, come first: they determine the products for which cuBLASLt chooses an algorithm. The last pass uses all
// choices, because choices that another process stored meanwhile may not have run here before.
void Captured::choose(const std::vector<double>& slots, void** buffers, c10::Device device) {
  const auto open = [](const auto& one) { return one.second.open && one.second.used; };
  if (std::none_of(choices_.begin(), choices_.end(), open)) return;
  Graph held, tried;  // `held` keeps the memory that all graphs use
  const auto timed = [&] {
    try {
      walk(slots, buffers, device, false);  // loads kernels, chooses algorithms
    } catch (const std::exception&) {
      return std::numeric_limits<float>::infinity();
    }
    capture(tried, slots, buffers, device);
    return milliseconds(tried);
  };
  try {
    for (;;) {
      for (auto& [key, choice] : choices_) choice.used = false;
      walk(slots, buffers, device, false);
      auto next = choices_.end();
      for (auto one = choices_.begin(); one != choices_.end(); ++one)
        if (open(*one) && (next == choices_.end() || one->second.file > next->second.file)) next = one;
      if (next == choices_.end()) break;
      auto& [key, choice] = *next;
      const auto fastest = [&] {
        if (!held.graph) capture(held, slots, buffers, device);
        pool_held_ = true;
        size_t best = choice.way;
        float least = timed();
        for (choice.way = 0; choice.way < choice.count; ++choice.way) {
          if (choice.way == best) continue;
          const float ms = timed();
          if (ms < kGain * least) best = choice.way, least = ms;
        }
        return static_cast<int>(best);
      };
      choice.way = std::min(static_cast<size_t>(chosen(choice.file, key, fastest)), choice.count - 1);
      choice.open = false;
    }
  } catch (...) {  // see on_worker
    pool_held_ = false;
    for (auto* graph : {&held, &tried}) [[maybe_unused]] const auto* kept = graph->graph.release();
    throw;
  }
  if (!std::exchange(pool_held_, false)) return;
  held.graph.reset();
  tried.graph.reset();
  c10::cuda::CUDACachingAllocator::emptyCache();
}

// Returns the changing slots among a part's floats, which end where the floats of the next part begin.
Changing::Slots Captured::changing_of(const TaskRecord& record, const TaskBody& body) const {
  size_t end = record.floats.size();
  for (const auto& other : record.bodies)
    if (other.first_float > body.first_float) end = std::min(end, other.first_float);
  Changing::Slots found;
  for (const auto& [position, slot] : record.slots)
    if (static_cast<size_t>(position) >= body.first_float && static_cast<size_t>(position) < end &&
        std::find(changing_.begin(), changing_.end(), slot) != changing_.end())
      found.emplace_back(position, slot);
  return found;
}

// Runs all tasks in order on the worker's stream. guards: errors are attributed to tasks, as outside graphs.
void Captured::walk(const std::vector<double>& slots, void** buffers, c10::Device device, bool guards) {
  struct Choosing {
    explicit Choosing(Choices* choices) { choices_in_graph = choices; }
    ~Choosing() { choices_in_graph = nullptr; }
  } choosing(measures_ ? &choices_ : nullptr);
  std::unordered_map<const Tile*, starpu_variable_interface> places;
  std::unordered_map<const Tile*, at::Tensor> own;
  const auto put = [&](const Tile* tile, void* address) {
    auto& place = places[tile];
    place.id = STARPU_VARIABLE_INTERFACE_ID;
    place.ptr = place.dev_handle = reinterpret_cast<uintptr_t>(address);
    place.elemsize = tile->bytes;
  };
  for (size_t k = 0; k < weights_.size(); ++k) put(weights_[k].get(), addresses_[k]);
  for (size_t k = 0; k < tiles_.size(); ++k) put(tiles_[k].get(), pointer(buffers[k]));
  after_own_kernel = false;
  for (const auto& item : items_) {
    if (const auto* gone = std::get_if<const Tile*>(&item)) {
      if (own.erase(*gone)) places.erase(*gone);
      continue;
    }
    const auto& record = *std::get<const TaskRecord*>(item);
    auto floats = record.floats;
    for (const auto& [position, slot] : record.slots)
      floats[static_cast<size_t>(position)] = slots.at(static_cast<size_t>(slot));
    std::vector<void*> at;
    const auto place = [&](const Tile* tile) {
      if (!places.contains(tile)) {
        auto& made = own[tile];
        made = at::empty({static_cast<int64_t>(tile->bytes)}, at::TensorOptions(at::kByte).device(device));
        put(tile, made.data_ptr());
      }
      at.push_back(&places[tile]);
    };
    for (const auto& tile : record.tiles) place(tile.get());
    for (const auto& tile : record.scratch) place(tile.get());
    for (const auto& body : record.bodies) {
      if (changing) changing->begin(body, changing_of(record, body));
      const auto run = [&] { run_on_cuda(body, floats.data(), at.data(), device); };
      if (guards) guarded(body.name, run);
      else run();
    }
    for (const auto& tile : record.scratch) places.erase(tile.get()), own.erase(tile.get());
  }
}

}  // namespace nntile
