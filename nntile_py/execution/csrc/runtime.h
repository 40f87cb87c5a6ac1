// Interface to StarPU: start and stop, tiles, task records, programs, errors.
#pragma once
#include <atomic>
#include <functional>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <variant>
#include <vector>

#include "kernel.h"

namespace nntile {

// A Python exception or null; its destruction takes the GIL.
using Cause = std::shared_ptr<void>;

struct TaskError : std::runtime_error {
  explicit TaskError(const std::string& what, Cause cause_ = {}) : std::runtime_error(what), cause(std::move(cause_)) {}
  Cause cause;
};

// An exception of a Python kernel.
struct PythonError : TaskError {
  using TaskError::TaskError;
};

struct RuntimeOptions {
  int cpus = 1;
  std::string scheduler = "lws";
  int window = 0;  // maximum number of tasks in flight; 0: no bound
  bool calibrate = false;
  size_t memory = 0;  // maximum bytes of main memory for tiles
  int cuda = 0;       // CUDA workers, one per device
  bool disk = false;  // STARPU_DISK_SWAP names a folder for evicted tiles
  size_t page = 1;    // sizes of tiles are multiples of this
  int ahead = 0;      // tasks that a CUDA worker launches before an earlier task has ended; 0 if the policy times tasks
  size_t pinned = 0;  // with CUDA workers: maximum bytes of main memory for tiles and for buffers kept for later tiles
};

void start(const RuntimeOptions& options);
std::vector<std::string> schedulers();
void on_idle(std::function<void()> hook);  // called repeatedly during waits; may throw to end the wait
void stop();
void advise(const std::string& text);  // added to the watchdog's messages
void be_patient(int64_t no_room, int64_t still, int64_t in_vain);  // sets the watchdog's limits in seconds, for tests
bool running();
void drop_python_tasks();  // skips Python tasks that have not begun, until the runtime stops
void wait_all();  // throws TaskError if a task failed
void check();     // throws TaskError, after all tasks have ended, if a task failed
void fail(const std::string& task, const std::string& what, Cause cause = {});
bool failed();
size_t memory_used();
int cpu_workers();
int cuda_workers();

// A task outside of programs.
class Submitted {
 public:
  bool done() const { return ended_; }
  void wait();  // throws TaskError if a task failed
  void end() { ended_ = true; }
  uint32_t run = 0;  // number of the task's run in the current profile; 0 without a profile

 private:
  std::atomic<bool> ended_{false};
};

struct Options {
  int priority = 0;
  bool cpu = true, cuda = true;  // kinds of workers that may run the task
  int worker = -1;               // the required worker, numbered within its kind; -1: any
  bool always = false;           // the task runs also after a failure, because it only moves data
};

// Submits a task outside of programs; labels: names of the tiles in error messages.
std::shared_ptr<Submitted> submit_python(const std::string& name, const std::vector<std::string>& labels,
                                         std::vector<std::shared_ptr<Tile>> tiles, const std::vector<int>& modes,
                                         PythonKernel kernel, const Options& options);

int mode_of(const std::string& name);  // R, W, RW, COMMUTE, REDUX

// Submits a write of the tile, which happens in order with the tasks. Does not wait.
void write_tile(const std::shared_ptr<Tile>& tile, std::unique_ptr<char[]> data);
bool on_disk(const Tile& tile);  // returns whether StarPU has a copy of the tile on the disk
void read_tile(const std::shared_ptr<Tile>& tile, void* data);  // waits for the tasks that write the tile
void zero_tile(const std::shared_ptr<Tile>& tile);  // fills the tile with zeros on any worker
void invalidate(const std::shared_ptr<Tile>& tile);
// Copies a tile from a device to main memory after the tasks submitted so far, so that StarPU can evict this tile from
// the device before others. only_read: the last of these tasks only reads the tile.
void leave(const Tile& tile, bool only_read);
// A message that carries a version of a tile to or from another rank. Both ranks use the same tag, and post the
// messages with this tag in the same order.
struct Message {
  std::shared_ptr<Tile> tile;
  int peer;
  int64_t tag;
  int priority;
  bool sends;
  std::string name;  // name of the tile
};
// Posts a message in order with the tasks. Waits only if too many messages are in flight. run, index: numbers of the
// program's run and of the message in the current profile; run is 0 without a profile.
void post(const Message& message, uint32_t run = 0, uint32_t index = 0);
// Returns a text on the oldest message that this process receives or, if it receives none, sends; an empty text without
// a message in flight. peer: the other rank; -1: any rank.
std::string waited_for(int peer = -1);
// transport: null if there is only one rank. most: largest number of messages in flight.
void use_transport(const struct Transport* transport, int most);
void reserve_for_tiles();      // allocates one block per device from which tiles are cut

// Reads scalars after the tasks submitted so far have written them.
class Fetch {
 public:
  explicit Fetch(const std::vector<std::shared_ptr<Tile>>& tiles);
  bool done() const;
  std::vector<double> wait();

 private:
  struct State;
  std::shared_ptr<State> state_;
};

// Copies of tiles after the tasks submitted so far, made while later tasks run. A later task that writes a tile waits
// for its copy.
class Copies {
 public:
  explicit Copies(std::vector<std::shared_ptr<Tile>> tiles);
  bool done() const;
  void wait();  // throws TaskError if a task failed
  bool dropped() const;  // a task has failed, so the copies are invalid
  const Tile& tile(size_t k) const;
  const void* data(size_t k) const;  // the copy of tile k, valid when done() is true

 private:
  struct State;
  struct Item;
  std::shared_ptr<State> state_;
};

class Program {
 public:
  // window: bound on the tasks in flight while the program is submitted, besides g.window; 0: no such bound.
  explicit Program(bool tf32, bool checked = false, int window = 0);
  void drop();  // frees the program after its tasks, or never, if waiting is impossible
  void add(TaskRecord record, const std::vector<std::string>& kernels, const std::string& codelet,
           const std::string& kind);  // kind: "cpu", "cuda", or "" for both
  void add_invalidate(std::shared_ptr<Tile> tile);
  void add_message(Message message);
  // Submits all tasks; waits only if the window is full. Returns the run's number in the current profile; 0 without a
  // profile.
  uint32_t run(const std::vector<double>& slots);
  size_t tasks() const { return tasks_; }
  void let_go();  // releases the residents, if the program holds them; waits for all tasks
  uint64_t checked_run() const { return run_; }  // number of the last run, if the program is checked

 private:
  friend class Captured;
  ~Program() = default;
  void begin(const std::vector<double>& slots);  // begins a run; throws if impossible
  // Acquires the residents, unless they are held already, or were released a few runs ago.
  void hold();
  template <class Use>
  void each_resident(Use use);
  void finish();
  std::vector<std::variant<TaskRecord, std::shared_ptr<Tile>, Message>> items_;
  std::vector<Tile*> needs_;  // tiles that must be initialised before the program runs
  size_t tasks_ = 0;
  size_t slots_ = 0;
  unsigned generation_;
  bool tf32_, checked_;
  int window_;
  uint64_t run_ = 0;
  bool finished_ = false, leaves_ = false;  // leaves_: some tasks evict tiles
  bool has_residents_ = false, holds_ = false, addressed_ = false;  // addressed_: the addresses of residents are known
  int pause_ = 0;                      // runs before the residents are acquired
  std::atomic<size_t> missing_{0};     // residents that are not acquired yet
};

// The first task of a checked program that wrote a value that is not finite: number of the run, of the task, and of the
// task's part.
struct NotFinite {
  uint64_t run, task, body;
};
std::optional<NotFinite> take_not_finite();  // waits for all tasks; returns the first such task since the last call

// Computes `loops` times ten fused multiply-adds on vectors in fp32 or fp64. Returns the flop.
double fma_flop(int64_t loops, bool fp64);

}  // namespace nntile
