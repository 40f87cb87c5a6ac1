// StarPU as the rest of the project sees it: start and stop, tiles, task records, programs, errors.
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

// A Python exception, if there is one; dropping it takes the GIL.
using Cause = std::shared_ptr<void>;

struct TaskError : std::runtime_error {
  explicit TaskError(const std::string& what, Cause cause_ = {}) : std::runtime_error(what), cause(std::move(cause_)) {}
  Cause cause;
};

// What a kernel in Python raised.
struct PythonError : TaskError {
  using TaskError::TaskError;
};

struct RuntimeOptions {
  int cpus = 1;
  std::string scheduler = "lws";
  int window = 0;  // most submitted tasks not yet ended; 0: no bound
  bool calibrate = false;
  size_t memory = 0;  // bytes of main memory that a tile may take
  int cuda = 0;       // CUDA workers, one a device
  bool disk = false;  // STARPU_DISK_SWAP names a folder for tiles that have no place in memory
  size_t page = 1;    // tiles take a multiple of so many bytes
  int ahead = 0;      // tasks that a CUDA worker goes on before one has ended, if the policy measures none
};

void start(const RuntimeOptions& options);
std::vector<std::string> schedulers();
void on_idle(std::function<void()> hook);  // called now and then by whoever waits; may throw to end the wait
void stop();
void advise(const std::string& text);  // what to say beside the watchdog's own words
void be_patient(int64_t no_room, int64_t still, int64_t in_vain);  // the watchdog: seconds; for tests
bool running();
void drop_python_tasks();  // until the runtime stops: those that have not begun are not run
void wait_all();  // throws TaskError if a task failed
void check();     // throws TaskError, after all tasks have ended, if a task failed
void fail(const std::string& task, const std::string& what, Cause cause = {});
bool failed();
size_t memory_used();
int cpu_workers();
int cuda_workers();

// Whether a task of its own has ended.
class Submitted {
 public:
  bool done() const { return ended_; }
  void wait();  // throws TaskError if a task failed
  void end() { ended_ = true; }
  uint32_t run = 0;  // its number in the profile that is taken, or 0

 private:
  std::atomic<bool> ended_{false};
};

struct Options {
  int priority = 0;
  bool cpu = true, cuda = true;  // where it may run
  int worker = -1;               // the only one that may run it, counted among its kind; -1: any
  bool always = false;           // after a failure, too: it computes nothing, but moves what others have computed
};

// A task of its own, outside of programs. labels: what each tile is called in errors.
std::shared_ptr<Submitted> submit_python(const std::string& name, const std::vector<std::string>& labels,
                                         std::vector<std::shared_ptr<Tile>> tiles, const std::vector<int>& modes,
                                         PythonKernel kernel, const Options& options);

int mode_of(const std::string& name);  // R, W, RW, COMMUTE, REDUX

void write_tile(const std::shared_ptr<Tile>& tile, const void* data);        // in order with the tasks, without waiting
void read_tile(const std::shared_ptr<Tile>& tile, void* data);               // waits
void zero_tile(const std::shared_ptr<Tile>& tile);  // fills it with zeros, wherever there is a worker
void invalidate(const std::shared_ptr<Tile>& tile);
// Copied to main memory after the tasks submitted so far, it is the first to make room. only_read: by the last of them.
void leave(const Tile& tile, bool only_read);
// A version of a tile, to or from another rank: the same tag there, and for one tag the same order.
struct Message {
  std::shared_ptr<Tile> tile;
  int peer;
  int64_t tag;
  int priority;
  bool sends;
  std::string name;  // of the tile
};
// In order with the tasks; waits only for the window of messages. run, index: of the profile that is taken, if one is.
void post(const Message& message, uint32_t run = 0, uint32_t index = 0);
std::string waited_for(int peer = -1);  // the oldest message under way with a rank, or any; empty if there is none
void use_transport(const struct Transport* transport, int most);  // null: there is one rank
void reserve_for_tiles();      // on each device, one block of all that tiles may take, to cut them from

// Scalars that become readable when the tasks submitted before have written them.
class Fetch {
 public:
  explicit Fetch(const std::vector<std::shared_ptr<Tile>>& tiles);
  bool done() const;
  std::vector<double> wait();

 private:
  struct State;
  std::shared_ptr<State> state_;
};

// What tiles hold after the tasks submitted so far: copied while those that come later run. One that would write a tile
// waits for its copy.
class Copies {
 public:
  explicit Copies(std::vector<std::shared_ptr<Tile>> tiles);
  bool done() const;
  void wait();  // throws TaskError if a task failed
  bool dropped() const;  // a task had failed: the copies are of nothing
  const Tile& tile(size_t k) const;
  const void* data(size_t k) const;  // of a tile, when it is done

 private:
  struct State;
  struct Item;
  std::shared_ptr<State> state_;
};

class Program {
 public:
  explicit Program(bool tf32, bool checked = false);
  ~Program();
  void add(TaskRecord record, const std::vector<std::string>& kernels, const std::string& codelet);
  void add_invalidate(std::shared_ptr<Tile> tile);
  void add_message(Message message);
  // Submits everything; waits only for the window. Returns its number in the profile that is taken, or 0.
  uint32_t run(const std::vector<double>& slots);
  size_t tasks() const { return tasks_; }
  uint64_t checked_run() const { return run_; }  // the number of its last run, where it is checked

 private:
  friend class Captured;
  void begin(const std::vector<double>& slots);  // a run; throws where it cannot
  void finish();
  std::vector<std::variant<TaskRecord, std::shared_ptr<Tile>, Message>> items_;
  std::vector<Tile*> needs_;  // tiles that must hold data before the program runs
  size_t tasks_ = 0;
  size_t slots_ = 0;
  unsigned generation_;
  bool tf32_, checked_;
  uint64_t run_ = 0;
  bool finished_ = false, leaves_ = false;  // leaves_: tiles do, after some of its tasks
};

// The first task of a checked program that wrote a value that is not finite: in which run, the number of the task, of the
// part of it.
struct NotFinite {
  uint64_t run, task, body;
};
std::optional<NotFinite> take_not_finite();  // since it was asked last; waits for all tasks

}  // namespace nntile
