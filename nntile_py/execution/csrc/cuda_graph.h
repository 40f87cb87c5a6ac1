// Tasks of a program as one task, which a CUDA worker runs as one CUDA graph instead of kernel by kernel.
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

// There is one graph per set of slots; the caller rounds slots so that there are few sets. The first run of a set
// launches the kernels one by one, which performs all one-time measurements, loads and allocations. The second run
// captures the graph; later runs launch it.
class Captured {
 public:
  // records: numbers of the program's tasks that are in the graphs. worker: number of the CUDA worker that runs them.
  // weights: read-only tiles, which stay on the device. tiles, modes: other tiles that the task reads or writes. All
  // remaining tiles are written before they are read and have no handles here; own: maximum bytes of these together.
  // changing: slots that differ from run to run; there is a graph for each set of the other slots. measures: kernels and
  // algorithms are chosen by the time of the whole graph, which runs the program several times; false: as without a
  // graph.
  Captured(Program& program, const std::vector<size_t>& records, int worker, std::vector<std::shared_ptr<Tile>> weights,
           std::vector<std::shared_ptr<Tile>> tiles, std::vector<int> modes, size_t own, std::vector<int> changing,
           bool measures);
  Captured(const Captured&) = delete;
  void drop();  // deletes this object; if tasks in flight cannot be waited for, it is never deleted

  // Keeps the weights on the device from now on. False: all such weights and the memory of graphs would exceed `most`
  // bytes.
  bool hold(size_t most);
  // Releases the weights: waits for all tasks and drops the graphs. Workers stay awake, as more tasks may follow.
  void let_go();
  uint32_t run(const std::vector<double>& slots);  // as Program::run; after hold()
  std::string broken() const;  // why a capture failed, so that kernels are launched one by one; empty: no failure
  size_t graphs() const { return made_; }  // number of captures so far

 private:
  ~Captured();
  struct Graph;
  struct Run;
  using Item = std::variant<const TaskRecord*, const Tile*>;  // a task, or a tile that is no longer needed

  unsigned node() const;                // memory node of the worker's device
  bool shared(const Tile& tile) const;  // another program keeps this tile on the device
  bool acquire(size_t most);
  void on_worker(const std::vector<double>& slots, void** buffers, c10::Device device);
  std::vector<double> fixed(std::vector<double> slots) const;  // slots, with 0 for changing slots
  void launch(Graph& graph, const std::vector<double>& slots);
  void choose(const std::vector<double>& slots, void** buffers, c10::Device device);
  float milliseconds(Graph& graph);
  void capture(Graph& graph, const std::vector<double>& slots, void** buffers, c10::Device device);
  std::vector<std::pair<int, int>> changing_of(const TaskRecord& record, const TaskBody& body) const;
  void walk(const std::vector<double>& slots, void** buffers, c10::Device device, bool guards);

  Program& program_;
  int worker_;               // number of the worker in StarPU
  std::vector<Item> items_;  // of the program, at fixed addresses
  std::vector<std::shared_ptr<Tile>> weights_, tiles_;
  std::vector<int> modes_;
  std::vector<int> changing_;
  size_t own_;
  bool measures_;
  double flop_ = 0;
  bool holds_ = false;
  std::atomic<size_t> missing_{0};  // weights in transfer
  std::vector<void*> addresses_;    // of the weights
  std::map<std::vector<double>, Graph> graphs_;  // by unchanging slots; only the worker uses it
  Choices choices_;  // measured in the graph; only the worker uses them
  std::pair<unsigned long long, unsigned long long> pool_;  // ATen's memory pool, shared by all graphs
  bool pool_held_ = false;  // a graph that is not in graphs_ keeps the pool alive
  std::atomic<size_t> made_{0};
  mutable std::mutex mutex_;
  std::string broken_;
};

}  // namespace nntile
