// A short program as one task, of which a CUDA worker runs a graph: launched at once, not a kernel at a time.
#pragma once
#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "autotune.h"
#include "runtime.h"

namespace nntile {

// For each set of slots, which a caller rounds so that there are few, the first run launches the kernels one by one, so
// that whatever is measured, loaded or allocated once is there; the second captures them; the others launch the graph.
// Which kernels and algorithms are the fastest is measured by the times of the whole graph.
class Captured {
 public:
  // weights: tiles that are only read, and stay on the device; tiles, modes: what it reads or writes besides, the task's
  // own. All others it writes before it reads them: they have no handles here. own: the most bytes they take together.
  // changing: slots that differ from run to run; each set of the others has a graph of its own.
  Captured(Program& program, std::vector<std::shared_ptr<Tile>> weights, std::vector<std::shared_ptr<Tile>> tiles,
           std::vector<int> modes, size_t own, std::vector<int> changing);
  Captured(const Captured&) = delete;
  void drop();  // deletes it; where tasks in flight cannot be waited for they keep it, for ever

  // From now on the weights stay on the device. False: all that do, with what graphs have of their own, would be more
  // than `most` bytes.
  bool hold(size_t most);
  // They do not; waits for all tasks, and drops the graphs. Workers stay awake: tasks may be submitted next.
  void let_go();
  uint32_t run(const std::vector<double>& slots);  // as Program::run; after hold()
  std::string broken() const;  // why no graph could be made: kernels are launched one by one; empty: none was refused
  size_t graphs() const { return made_; }  // captured since it was made

 private:
  ~Captured();
  struct Graph;
  struct Run;
  using Item = std::variant<const TaskRecord*, const Tile*>;  // a task, or a tile that is of no use any more

  bool acquire(size_t most);
  void on_worker(const std::vector<double>& slots, void** buffers, c10::Device device);
  std::vector<double> fixed(std::vector<double> slots) const;  // with 0 for those that change
  void launch(Graph& graph, const std::vector<double>& slots);
  void choose(const std::vector<double>& slots, void** buffers, c10::Device device);
  float milliseconds(Graph& graph);
  void capture(Graph& graph, const std::vector<double>& slots, void** buffers, c10::Device device);
  std::vector<std::pair<int, int>> changing_of(const TaskRecord& record, const TaskBody& body) const;
  void walk(const std::vector<double>& slots, void** buffers, c10::Device device, bool guards);

  Program& program_;
  std::vector<Item> items_;  // the program's, which stay where they are
  std::vector<std::shared_ptr<Tile>> weights_, tiles_;
  std::vector<int> modes_;
  std::vector<int> changing_;
  size_t own_;
  double flop_ = 0;
  bool holds_ = false;
  std::atomic<size_t> missing_{0};  // weights that are on their way
  std::vector<void*> addresses_;    // of the weights
  std::map<std::vector<double>, Graph> graphs_;  // by slots that do not change; the worker's
  Choices choices_;  // the worker's
  std::pair<unsigned long long, unsigned long long> pool_;  // of ATen's memory: one for all of them, as they run in turn
  bool pool_held_ = false;  // by a graph that is none of those
  std::atomic<size_t> made_{0};
  mutable std::mutex mutex_;
  std::string broken_;
};

}  // namespace nntile
