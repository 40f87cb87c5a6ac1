// Tiles: StarPU data handles, their reductions, transfers to and from the program.
#include <sys/mman.h>

#include <cstring>
#include <map>
#include <tuple>
#include <unordered_set>

#include "dtypes.h"
#include "internal.h"
#include "on_cuda.h"
#include "profile.h"

namespace nntile {
namespace {

std::mutex g_tiles_mutex;
std::unordered_set<Tile*> g_tiles;

void fill_zero(void** buffers, void*) { std::memset(pointer(buffers[0]), 0, STARPU_VARIABLE_GET_ELEMSIZE(buffers[0])); }

// StarPU creates the reduction task without an argument, so its data are stored beside the codelet.
struct ReductionCodelet {
  starpu_codelet cl;
  Monoid monoid;
  at::ScalarType dtype;
  int64_t width;
};

void reduce_on(c10::Device device, void** buffers) {
  const profile::Interval interval(profile::Interval::Of::starpu);
  const auto* codelet = reinterpret_cast<const ReductionCodelet*>(starpu_task_get_current()->cl);
  guarded("reduction", [&] {
    const auto elements =
        static_cast<int64_t>(STARPU_VARIABLE_GET_ELEMSIZE(buffers[0]) / c10::elementSize(codelet->dtype));
    const int64_t shape[] = {elements / codelet->width, codelet->width};
    combine(codelet->monoid, wrap(pointer(buffers[0]), shape, codelet->dtype, device),
            wrap(pointer(buffers[1]), shape, codelet->dtype, device));
  });
}

void run_reduction(void** buffers, void*) { reduce_on(c10::kCPU, buffers); }

#ifdef NNTILE_CUDA
void run_reduction_cuda(void** buffers, void*) {
  on_cuda(buffers, 2, [&](c10::Device device) { reduce_on(device, buffers); });
}

void fill_zero_cuda(void** buffers, void*) {
  const auto fill = [&](c10::Device) {
    cudaMemsetAsync(pointer(buffers[0]), 0, STARPU_VARIABLE_GET_ELEMSIZE(buffers[0]), task_stream());
  };
  on_cuda(buffers, 1, fill, true);  // true: StarPU calls this also within other tasks, with other access modes
}
#endif

starpu_codelet* reduction_codelet(Monoid monoid, at::ScalarType dtype, int64_t width) {
  static std::map<std::tuple<Monoid, at::ScalarType, int64_t>, ReductionCodelet*> table;
  auto& codelet = table[{monoid, dtype, width}];
  if (!codelet) {
    const auto modes = {STARPU_RW, STARPU_R};
    const std::unique_ptr<starpu_codelet> cl(new_codelet("reduction", modes, run_reduction, IF_CUDA(run_reduction_cuda)));
    codelet = new ReductionCodelet{*cl, monoid, dtype, width};
  }
  return &codelet->cl;
}

#ifndef NNTILE_CUDA
starpu_data_interface_ops* tile_interface() {
  static starpu_data_interface_ops ops = [] {
    auto variable = starpu_interface_variable_ops;
    // By default StarPU caches the buffers of freed tiles. Cached buffers on a disk count as taken, and StarPU writes
    // no tile to a full disk.
    variable.dontcache = 1;
    return variable;
  }();
  return &ops;
}
#endif

starpu_codelet* zero_codelet() {
  static starpu_codelet* codelet = new_codelet("zero", {STARPU_W}, fill_zero, IF_CUDA(fill_zero_cuda));
  return codelet;
}

// Asks for huge pages under the whole pages of a large tile: decoding passes stream weights, and page walks take 8 % of
// a pass on two CPU cores. The kernel may refuse.
void advise_huge_pages(void* data, size_t bytes) {
  constexpr size_t page = 4096, huge = size_t{2} << 20;
  if (bytes < huge) return;
  const auto first = (reinterpret_cast<uintptr_t>(data) + page - 1) / page * page;
  const auto end = (reinterpret_cast<uintptr_t>(data) + bytes) / page * page;
  madvise(reinterpret_cast<void*>(first), end - first, MADV_HUGEPAGE);
}

void submit_barrier(const Tile& tile) {
  static starpu_codelet* codelet = [] {
    auto* cl = new_codelet("barrier", {STARPU_RW}, nullptr, nullptr);
    cl->where = STARPU_NOWHERE;  // the task fetches no data
    return cl;
  }();
  auto* task = starpu_task_create();
  task->cl = codelet;
  task->handles[0] = tile.handle;
  task->name = "barrier";
  if (starpu_task_submit(task)) throw TaskError("barrier: the task was refused");
}

// Calls use(address in main memory) when the tasks submitted so far have ended, and then() after the release.
template <class Use, class Then>
void acquire(const std::shared_ptr<Tile>& tile, starpu_data_access_mode mode, Use use, Then then) {
  struct Call {
    std::shared_ptr<Tile> tile;
    Use use;
    Then then;
  };
  const auto run = [](void* arg) {
    const std::unique_ptr<Call> call(static_cast<Call*>(arg));
    // StarPU's "local" address would be wrong: a callback may run on a CUDA worker, whose local memory is the device's.
    call->use(pointer_on(*call->tile, STARPU_MAIN_RAM));
    starpu_data_release(call->tile->handle);
    call->then();
  };
  starpu_data_acquire_cb(tile->handle, mode, run, new Call{tile, std::move(use), std::move(then)});
}

}  // namespace

void require(const Tile& tile) {
  require_running();
  if (!tile.handle) throw TaskError("this array belongs to a runtime that has stopped");
}

void forget_tiles() {
  const std::lock_guard lock(g_tiles_mutex);
  for (auto* tile : g_tiles) {
    if (!tile->foreign) starpu_data_unregister_no_coherency(tile->handle);
    tile->handle = nullptr;
  }
  g_tiles.clear();
}

size_t smallest_waiting(unsigned node) {
  size_t least = 0;
  const std::lock_guard lock(g_tiles_mutex);
  for (const auto* tile : g_tiles) {
    int allocated = 0, requested = 0;
    starpu_data_query_status2(tile->handle, static_cast<int>(node), &allocated, nullptr, nullptr, &requested);
    if (requested && !allocated && (!least || tile->bytes < least)) least = tile->bytes;
  }
  return least;
}

Tile::Tile(std::vector<int64_t> shape_, at::ScalarType dtype_, size_t scales_)
    : shape(std::move(shape_)), dtype(dtype_), bytes(c10::elementSize(dtype_)), scales(scales_) {
  for (const auto size : shape) bytes *= static_cast<size_t>(size);
  if (is_scaled(dtype)) bytes = scale_offset(bytes) + scale_offset(scales * sizeof(float));
}

Tile::Tile(std::vector<int64_t> shape_, at::ScalarType dtype_, Monoid monoid, bool redux, size_t scales_)
    : Tile(std::move(shape_), dtype_, scales_) {
  require_running();
  double wanted = static_cast<double>(c10::elementSize(dtype));
  for (const auto size : shape) wanted *= static_cast<double>(size);
  if (wanted > static_cast<double>(g.limit))
    throw TaskError("out of memory: one tile of " + std::to_string(wanted / (1 << 20)) + " MiB, allowed are " +
                    std::to_string(g.limit >> 20) + " MiB in all (runtime.memory). Use smaller tiles");
  // Home node -1: StarPU allocates the tile at its first write, and may evict it from every memory.
  starpu_variable_interface variable{};
  variable.id = STARPU_VARIABLE_INTERFACE_ID;
  variable.elemsize = (bytes + g.page - 1) / g.page * g.page;
  starpu_data_register(&handle, -1, &variable, tile_interface());
  if (redux) add_by_reduction(*this, monoid);
  const std::lock_guard lock(g_tiles_mutex);
  g_tiles.insert(this);
}

Tile::Tile(::_starpu_data_state* foreign_, std::vector<int64_t> shape_, at::ScalarType dtype_)
    : Tile(std::move(shape_), dtype_) {
  require_running();
  handle = foreign_;
  foreign = initialised = true;
  const std::lock_guard lock(g_tiles_mutex);
  g_tiles.insert(this);
}

void add_by_reduction(Tile& tile, Monoid monoid) {
  g.reduces = tile.reducible = true;
  const int64_t width = monoid == Monoid::sum || tile.shape.empty() ? 1 : tile.shape.back();
  starpu_data_set_reduction_methods(tile.handle, reduction_codelet(monoid, tile.dtype, width), zero_codelet());
}

Tile::~Tile() {
  if (g.forked) return;  // a thread of the parent process may have held the mutex during the fork
  const std::lock_guard lock(g_tiles_mutex);
  g_tiles.erase(this);
  if (handle && !foreign && !g.stuck) starpu_data_unregister_submit(handle);
}

bool on_disk(const Tile& tile) {
  bool found = false;
  for (unsigned node = 0; node < starpu_memory_nodes_get_count(); ++node) {
    if (starpu_node_get_kind(node) != STARPU_DISK_RAM) continue;
    int allocated = 0, requested = 0;
    starpu_data_query_status2(tile.handle, static_cast<int>(node), &allocated, nullptr, nullptr, &requested);
    found |= allocated != 0;
  }
  return found;
}

void write_tile(const std::shared_ptr<Tile>& tile, std::unique_ptr<char[]> data) {
  require(*tile);
  wake();
  before_use(*tile);
  before_write(*tile);
  tile->initialised = true;
  ++g.leaving;
  acquire(
      tile, STARPU_W,
      [data = std::move(data), bytes = tile->bytes](void* to) {
        advise_huge_pages(to, bytes);
        std::memcpy(to, data.get(), bytes);
      },
      [] {
        ++g.ended;
        --g.leaving;
      });
}

void zero_tile(const std::shared_ptr<Tile>& tile) {
  require(*tile);
  wake();
  before_use(*tile);
  before_write(*tile);
  auto* task = starpu_task_create();
  task->cl = zero_codelet();
  task->handles[0] = tile->handle;
  task->name = "zero";
  tile->initialised = true;
  if (starpu_task_submit(task)) throw TaskError("zero: the task was refused");
}

void read_tile(const std::shared_ptr<Tile>& tile, void* data) {
  struct Read {
    std::unique_ptr<char[]> data;
    std::atomic<bool> done{false};
  };
  require(*tile);
  require_main_thread();
  check();
  if (!tile->initialised) throw TaskError("a tile was read before any task wrote it");
  before_use(*tile);
  auto read = std::make_shared<Read>(std::make_unique<char[]>(tile->bytes));  // outlives an interrupted wait
  acquire(
      tile, STARPU_R, [read, bytes = tile->bytes](void* from) { std::memcpy(read->data.get(), from, bytes); },
      [read] {
        read->done = true;
        announce();
      });
  wait_for([&] { return read->done.load(); });
  std::memcpy(data, read->data.get(), tile->bytes);
}

void invalidate(const std::shared_ptr<Tile>& tile) {
  require(*tile);
  before_use(*tile);
  before_write(*tile);
  if (tile->initialised) starpu_data_invalidate_submit(tile->handle);
  tile->initialised = false;
}

void leave(const Tile& tile, bool only_read) {
  // The copy to main memory only reads the tile: later readers do not wait for the copy, later writers do. StarPU would
  // not order the copy after earlier readers. So an empty task with write access comes first: this task waits for the
  // readers, and the copy waits for this task.
  if (only_read) submit_barrier(tile);
  ++g.leaving;
  const auto release = [](void* handle) {
    starpu_data_release(static_cast<starpu_data_handle_t>(handle));
    --g.leaving;
  };
  starpu_data_acquire_on_node_cb(tile.handle, STARPU_MAIN_RAM, STARPU_R, release, tile.handle);
  starpu_data_wont_use(tile.handle);
}

struct Fetch::State {
  uint64_t failures = failure_count();
  std::atomic<bool> dropped{false};  // a task failed before the values were read: they are invalid
  std::vector<double> values;
  std::atomic<size_t> missing;
};

Fetch::Fetch(const std::vector<std::shared_ptr<Tile>>& tiles) : state_(std::make_shared<State>()) {
  require_running();
  state_->values.resize(tiles.size());
  state_->missing = tiles.size();
  for (size_t k = 0; k < tiles.size(); ++k) {
    require(*tiles[k]);
    if (!tiles[k]->initialised || tiles[k]->dtype != at::kDouble)
      throw TaskError("a scalar was fetched before any task wrote it");
    before_use(*tiles[k]);
    acquire(
        tiles[k], STARPU_R, [state = state_, k](void* from) { state->values[k] = *static_cast<double*>(from); },
        [state = state_] {
          if (failure_count() != state->failures) state->dropped = true;
          --state->missing;
          announce();
        });
  }
}

bool Fetch::done() const { return state_->missing == 0; }

std::vector<double> Fetch::wait() {
  wait_for([&] { return done(); });
  if (state_->dropped) throw TaskError("the step was dropped, a task before it had failed: " + last_failure());
  return state_->values;
}
}  // namespace nntile
