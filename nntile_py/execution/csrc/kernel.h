// Interface of kernels: tiles as ATen tensors, integer and floating point arguments.
#pragma once
#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "view.h"

struct _starpu_data_state;

namespace nntile {

// Combination of two partial results of a tile. For all monoids, a tile of zeros is the empty result.
// sum: a + b; softmax: (..., [max, sumexp, weighted values...]); moments: (..., [count, mean, M2]).
enum class Monoid : int { sum = 0, softmax = 1, moments = 2 };

// dst <- dst (+) src, tiles of equal shape; the last axis holds the state for softmax and moments.
void combine(Monoid monoid, const at::Tensor& dst, const at::Tensor& src);

// A StarPU data handle with the shape and dtype of the tensor tile it holds.
struct Tile {
  // scales: number of scales, if tiles of this dtype have scales.
  Tile(std::vector<int64_t> shape, at::ScalarType dtype, Monoid monoid, bool redux, size_t scales = 1);
  // A tile on a handle of another library, which registers and unregisters the handle.
  Tile(::_starpu_data_state* foreign, std::vector<int64_t> shape, at::ScalarType dtype);
  // A tile without a handle: its memory lasts as long as a task.
  Tile(std::vector<int64_t> shape, at::ScalarType dtype, size_t scales = 1);
  ~Tile();
  Tile(const Tile&) = delete;
  Tile& operator=(const Tile&) = delete;

  std::vector<int64_t> shape;
  at::ScalarType dtype;
  size_t bytes, scales = 1;
  ::_starpu_data_state* handle = nullptr;
  bool foreign = false;      // another library registered the handle
  bool reducible = false;    // allows access in REDUX mode
  bool initialised = false;  // true: a task submitted so far writes the tile
  std::vector<class Captured*> holders;  // CUDA graphs that keep the tile on a device and rely on its value
  class Program* holder = nullptr;       // program that holds the tile as a resident, see residents.cpp
  void* address = nullptr;               // of a resident while a program holds it
};

class Args;
using Kernel = void (*)(Args&);

struct CudaBinary;
std::shared_ptr<CudaBinary> load_binary(const std::string& cubin, const std::string& name, unsigned shared);

// A Triton kernel with its grid and arguments; see tasks/launch.py.
struct Launch {
  enum Kind : int {
    tile = 0, scratch = 1, int32 = 2, int64 = 3, fp32 = 4, fp32_of_task = 5, int64_of_task = 6, live_int32 = 7, live_int64 = 8,
    matrix = 9
  };
  struct Argument {
    int kind;
    // The meaning depends on `kind`: number of the tile, offset in the scratch block, value of the argument, or
    // position in the task's floats.
    int64_t whole;
    double real;  // value of a fp32 argument
    // Numbers of the formula in `integer`: position in the task's floats, factor, divisor, multiplier; see
    // dynamic_size.py.
    std::array<int64_t, 4> live{};
    // Of a matrix: columns, bytes of an element, type of an element, rows and columns of a block, swizzle.
    std::array<int64_t, 6> map{};

    int64_t integer(const double* floats) const {
      if (kind != live_int32 && kind != live_int64) return whole;
      const auto filled = static_cast<int64_t>(floats[live[0]]) * live[1];
      return (filled + live[2] - 1) / live[2] * live[3];
    }
  };
  std::shared_ptr<CudaBinary> binary;
  std::array<Argument, 3> grid;
  unsigned threads, shared;
  enum Overlaps : int { never = 0, always = 1, in_graph = 2 };
  int overlaps;  // when it may start before the previous kernel has ended; see tasks/pdl.py and tasks/launch.py
  std::vector<Argument> arguments;
};

// Data of a submitted task.
struct TaskInstance {
  const struct TaskRecord* record;
  const double* floats;
  uint64_t run = 0;  // number of the run of a checked program; 0: the program is not checked
};

// A Python kernel, called with addresses of tiles, floats, the CUDA device (-1: a CPU worker) and its stream.
struct PythonKernel {
  std::function<void(const std::vector<void*>&, const double*, int, void*)> call;  // empty: no Python kernel
  bool cuda = false;                                                               // CUDA workers may run it too
};

// The size of a tile along an axis of which a step fills only a part, as with packed sequences. One of the body's
// floats holds this size.
struct LiveSize {
  size_t tile;  // number of the tile among the body's tiles
  size_t axis;
  size_t position;  // position of the size among the body's floats
};

// The kernel of a task, or one part of a group of tasks.
struct TaskBody {
  std::string name;
  Kernel cpu = nullptr;   // for CPU workers
  Kernel cuda = nullptr;  // for CUDA workers; see `ways`
  PythonKernel python;    // used instead of the C++ kernels
  // Equivalent lists of launches for CUDA workers. With a key, the fastest of these lists and `cuda` runs, else the
  // first list.
  std::vector<std::vector<Launch>> ways;
  std::string key;  // key of the stored choice
  int64_t scratch = 0;  // bytes shared by the launches
  std::vector<Launch::Argument> table;  // written as int64 to the beginning of the scratch block before the launches
  std::vector<int> places;  // positions of the body's tiles among the task's tiles
  std::vector<Tile*> tiles;
  std::vector<LiveSize> lives;
  std::vector<int64_t> ints;
  size_t first_float = 0;  // position of the body's first float among the task's floats
  uint64_t accumulates = 0;  // bit k: the kernel adds to tile k instead of overwriting the tile
  bool tf32 = false;  // products of fp32 tiles on CUDA may use tf32
};

// The constant part of a task, the same in all replays of its program.
struct TaskRecord {
  struct Codelet* codelet = nullptr;
  std::vector<TaskBody> bodies;
  std::string name;
  std::vector<std::shared_ptr<Tile>> tiles;
  std::vector<int> modes;  // enum starpu_data_access_mode
  std::vector<std::shared_ptr<Tile>> scratch;  // tiles without handles; their places follow those of `tiles`
  std::vector<int> residents;  // positions of tiles that no other task uses, see residents.cpp
  bool holds = false;          // the program holds the residents, which StarPU then does not fetch
  std::vector<std::shared_ptr<Tile>> others;  // the tiles except the residents
  std::vector<int> modes_of_others;
  const auto& fetched() const { return holds ? others : tiles; }  // the tiles that StarPU fetches
  std::vector<double> floats;
  std::vector<std::pair<int, int>> slots;  // (position in floats, slot of the program)
  uint32_t footprint = 0;
  int priority = 0;
  std::vector<int> leaves;  // positions of tiles to evict from the device after the task
  int worker = -1;  // StarPU's number of the required worker; -1: any
  int delay = 0;    // number of later tasks that may run before this task
  double flop = 0;
  int64_t number = 0;  // position among the program's tasks
  TaskInstance instance{};  // used by all runs if the task's floats never change
};

class Args {
 public:
  // floats, buffers: of the whole task, which may have several bodies
  Args(const TaskBody& body, const double* floats, void** buffers, c10::Device device)
      : body_(body), floats_(floats + body.first_float), buffers_(buffers), device_(device) {}
  // The filled part of a tile. On CPU workers it is contiguous at the beginning of the tile; on CUDA workers each row
  // has its offset in the full tile.
  at::Tensor operator[](size_t k) const { return view(k).tensor(); }
  View view(size_t k) const;
  at::IntArrayRef most(size_t k) const { return body_.tiles.at(k)->shape; }  // sizes of the full tile
  size_t scales(size_t k) const { return body_.tiles.at(k)->scales; }
  size_t tiles() const { return body_.tiles.size(); }
  int64_t i(size_t k) const { return body_.ints.at(k); }
  std::span<const int64_t> ints() const { return body_.ints; }
  double f(size_t k) const { return floats_[k]; }
  bool accumulates(size_t k) const { return (body_.accumulates >> k) & 1; }
  bool tf32() const { return body_.tf32; }

 private:
  const TaskBody& body_;
  const double* floats_;
  void** buffers_;
  c10::Device device_;
};

// Registers a kernel under a name, which operators in Python use.
struct RegisterKernel {
  RegisterKernel(const char* name, c10::DeviceType where, Kernel kernel);
};
Kernel find_kernel(const std::string& name, c10::DeviceType where);  // null: no such kernel

#define NNTILE_KERNEL(name, function) \
  static const ::nntile::RegisterKernel register_##name(#name, c10::DeviceType::CPU, function)
#define NNTILE_CUDA_KERNEL(name, function) \
  static const ::nntile::RegisterKernel register_cuda_##name(#name, c10::DeviceType::CUDA, function)

}  // namespace nntile
