// Copies of tiles to main memory, for checkpoints and for outputs of forward passes: one task per tile.
#include <cstring>
#include <map>

#include "internal.h"
#include "on_cuda.h"
#include "profile.h"

namespace nntile {
namespace {

struct Free {
  bool pinned = false;
  void operator()(char* data) const {
#ifdef NNTILE_CUDA
    if (pinned) {
      cudaFreeHost(data);
      return;
    }
#endif
    delete[] data;
  }
};
using Block = std::unique_ptr<char[], Free>;

// Main memory for copies, reused until the runtime stops: allocating and pinning 1.5 GB took 0.8 s.
class Pool {
 public:
  Block take(size_t bytes) {
    const std::lock_guard lock(mutex_);
    if (auto found = spare_.extract(bytes)) return std::move(found.mapped());
#ifdef NNTILE_CUDA
    void* pinned = nullptr;
    if (g.cuda && cudaHostAlloc(&pinned, bytes, cudaHostAllocPortable) == cudaSuccess)
      return Block(static_cast<char*>(pinned), Free{true});
    cudaGetLastError();  // clears the error: memory that is not pinned works too, but more slowly
#endif
    return Block(new char[bytes], Free{});
  }

  void give_back(Block block, size_t bytes) {
    if (g.forked) return;
    const std::lock_guard lock(mutex_);
    if (g.running) spare_.emplace(bytes, std::move(block));
  }

  void clear() {
    const std::lock_guard lock(mutex_);
    spare_.clear();
  }

 private:
  std::mutex mutex_;
  std::multimap<size_t, Block> spare_;
} g_pool;

}  // namespace

struct Copies::State {
  std::vector<std::shared_ptr<Tile>> tiles;
  std::vector<Block> data;
  uint64_t failures = failure_count();
  std::atomic<bool> dropped{false};  // a task failed before the tiles were copied: the copies are invalid
  std::atomic<size_t> missing;

  ~State() {
    for (size_t k = 0; k < data.size(); ++k) g_pool.give_back(std::move(data[k]), tiles[k]->bytes);
  }
};

struct Copies::Item {
  std::shared_ptr<State> state;
  size_t k;

  void end() const {
    if (failure_count() != state->failures) state->dropped = true;
    --state->missing;
    announce();
  }

  // Functions of the codelet. arg: the Item of the task.
  static void on_cpu(void** buffers, void* arg) {
    const profile::Interval interval(profile::Interval::Of::starpu);
    const std::unique_ptr<Item> item(static_cast<Item*>(arg));
    guarded("checkpoint", [&] {
      const auto& tile = *item->state->tiles[item->k];
      std::memcpy(item->state->data[item->k].get(), pointer(buffers[0]), tile.bytes);
    }, true);
    item->end();
  }

#ifdef NNTILE_CUDA
  static void on_gpu(void** buffers, void* arg) {
    const profile::Interval interval(profile::Interval::Of::starpu);
    auto* item = static_cast<Item*>(arg);
    on_cuda(buffers, 1, [&](c10::Device) {
      guarded("checkpoint", [&] {
        const auto& tile = *item->state->tiles[item->k];
        auto* to = item->state->data[item->k].get();
        const auto status = cudaMemcpyAsync(to, pointer(buffers[0]), tile.bytes, cudaMemcpyDeviceToHost, task_stream());
        if (status != cudaSuccess) throw std::runtime_error(cudaGetErrorString(status));
      }, true);
      // The task ends for StarPU before the stream has finished the copy, so the stream calls Item::end.
      cudaLaunchHostFunc(task_stream(), [](void* done) {
        const std::unique_ptr<Item> owned(static_cast<Item*>(done));
        owned->end();
      }, item);
    });
  }
#endif

  static starpu_codelet* codelet() {
    static starpu_codelet* codelet = new_codelet("checkpoint", {STARPU_R}, on_cpu, IF_CUDA(on_gpu));
    return codelet;
  }
};

Copies::Copies(std::vector<std::shared_ptr<Tile>> tiles) : state_(std::make_shared<State>()) {
  require_running();
  check();
  for (const auto& tile : tiles) {
    require(*tile);
    if (!tile->initialised) throw TaskError("a tile was copied before any task wrote it");
  }
  state_->tiles = std::move(tiles);
  state_->missing = state_->tiles.size();
  for (const auto& tile : state_->tiles) state_->data.push_back(g_pool.take(tile->bytes));
  wake();
  for (size_t k = 0; k < state_->tiles.size(); ++k) {
    before_use(*state_->tiles[k]);
    auto* task = starpu_task_create();
    task->cl = Item::codelet();
    task->handles[0] = state_->tiles[k]->handle;
    task->cl_arg = new Item{state_, k};
    task->cl_arg_free = 0;
    task->name = "checkpoint";
    for (int worker = 0; worker < g.cuda; ++worker) {  // the copy runs on the device that has the tile, if any
      const int id = starpu_worker_get_by_type(STARPU_CUDA_WORKER, worker);
      int valid = 0;
      starpu_data_query_status2(task->handles[0], static_cast<int>(starpu_worker_get_memory_node(static_cast<unsigned>(id))),
                                nullptr, &valid, nullptr, nullptr);
      if (!valid) continue;
      task->execute_on_a_specific_worker = 1;
      task->workerid = static_cast<unsigned>(id);
      break;
    }
    if (starpu_task_submit(task)) throw TaskError("checkpoint: the task was refused");
  }
}

bool Copies::done() const { return state_->missing == 0; }

void Copies::wait() {
  wait_for([&] { return done(); });
  if (state_->dropped) throw TaskError("a task had failed before the tiles were copied: " + last_failure());
}

bool Copies::dropped() const { return state_->dropped; }

const Tile& Copies::tile(size_t k) const { return *state_->tiles.at(k); }

const void* Copies::data(size_t k) const { return state_->data.at(k).get(); }

void free_spare_copies() { g_pool.clear(); }

}  // namespace nntile
