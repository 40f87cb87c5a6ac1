// Residents: tiles that only one task of all programs uses, such as the optimizer states of a weight. StarPU needs about
// 3 us for each tile of a task, most of the time of an update of a small weight. So a program acquires its residents
// once, on the memory node of their worker, and its tasks then use the residents' addresses. Before any other
// use of a resident, such as a checkpoint, the program releases all its residents. It acquires them again after kPause
// runs.
#include <algorithm>

#include "internal.h"

namespace nntile {
namespace {

constexpr int kPause = 8;

// Programs that hold their residents. Any thread may free a program, with Python's garbage collection.
std::vector<Program*> holding;
std::mutex holding_mutex;

Program* last_holding() {
  const std::lock_guard lock(holding_mutex);
  return holding.empty() ? nullptr : holding.back();
}

int node_of(const TaskRecord& record) {
  return static_cast<int>(starpu_worker_get_memory_node(static_cast<unsigned>(record.worker)));
}

}  // namespace

// Calls use(record, resident) for each resident of the program.
template <class Use>
void Program::each_resident(Use use) {
  for (auto& item : items_)
    if (auto* record = std::get_if<TaskRecord>(&item))
      for (const int place : record->residents) use(*record, *record->tiles[static_cast<size_t>(place)]);
}

void Program::hold() {
  if (!has_residents_ || (!holds_ && pause_-- > 0)) return;
  if (!holds_) {
    bool ready = true;
    each_resident([&](TaskRecord& record, Tile& tile) { ready = ready && record.worker >= 0 && tile.initialised; });
    if (!ready) return;
    // Another program may hold a tile. An interrupt may end this wait, so nothing is acquired before its end.
    each_resident([](TaskRecord&, Tile& tile) { before_use(tile); });
    holds_ = true;
    {
      const std::lock_guard lock(holding_mutex);
      holding.push_back(this);
    }
    each_resident([&](TaskRecord& record, Tile& tile) {
      tile.holder = this;
      ++missing_;
      starpu_data_acquire_on_node_cb(
          tile.handle, node_of(record), STARPU_RW,
          [](void* missing) { --*static_cast<std::atomic<size_t>*>(missing); }, &missing_);
    });
  }
  if (addressed_) return;
  wait_until([this] { return missing_ == 0; });  // may be interrupted: the next run then continues here
  each_resident([&](TaskRecord& record, Tile& tile) {
    tile.address = pointer_on(tile, static_cast<unsigned>(node_of(record)));
    record.holds = true;
  });
  addressed_ = true;
}

void Program::let_go() {
  if (!holds_ || g.forked) return;
  require_main_thread();
  wake();
  wait_until([this] { return missing_ == 0; });
  wait_for_tasks();  // also for kernels, whose end StarPU's copies would not wait for
  each_resident([&](TaskRecord& record, Tile& tile) {
    record.holds = false;
    tile.address = nullptr;
    tile.holder = nullptr;
    starpu_data_release_on_node(tile.handle, node_of(record));
  });
  {
    const std::lock_guard lock(holding_mutex);
    std::erase(holding, this);
  }
  holds_ = addressed_ = false;
  pause_ = kPause;
}

void before_use(Tile& tile) {
  if (tile.holder) tile.holder->let_go();
}

void let_go_of_residents() {
  while (auto* program = last_holding()) program->let_go();
}

}  // namespace nntile
