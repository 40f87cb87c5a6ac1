#include <ATen/core/Tensor.h>
#include <ATen/dlpack.h>
#include <pybind11/functional.h>
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <starpu.h>

#include <algorithm>

#ifdef NNTILE_CUDA
#include "cuda_graph.h"
#endif
#include "autotune.h"
#include "dtypes.h"
#include "internal.h"
#include "numpy_view.h"
#include "profile.h"
#include "transport.h"

namespace py = pybind11;
using namespace nntile;

namespace at {
// Declared here because ATen/DLConvertor.h includes all of ATen, which takes 10 s to compile.
TORCH_API DLManagedTensor* toDLPack(const Tensor& src);
}  // namespace at

namespace {

using release = py::call_guard<py::gil_scoped_release>;

// Returns a view as a DLPack capsule for torch: it supports every dtype and device memory.
py::capsule dlpack(const at::Tensor& tensor) {
  return py::capsule(at::toDLPack(tensor), "dltensor", [](PyObject* capsule) {
    if (!PyCapsule_IsValid(capsule, "dltensor")) return;  // renamed by its consumer
    auto* managed = static_cast<DLManagedTensor*>(PyCapsule_GetPointer(capsule, "dltensor"));
    managed->deleter(managed);
  });
}

// Moves a Python object into a shared pointer. Its last owner need not hold the GIL.
template <class Object>
std::shared_ptr<Object> held(Object object) {
  return {new Object(std::move(object)), [](Object* owned) {
            if (!Py_IsInitialized()) return;  // the process ends
            const py::gil_scoped_acquire gil;
            delete owned;
          }};
}

// (call, takes torch tensors, runs on CUDA workers, which tiles are only read, number of floats); see python_task.py.
using PythonSpec = std::tuple<py::function, bool, bool, std::vector<bool>, size_t>;

// function(device, stream, arrays, floats): arrays are numpy arrays, arguments for cupy on CUDA, or DLPack capsules.
// The function returns None, or (text, exception) of the kernel's exception.
struct PythonCall {
  std::shared_ptr<py::function> function;
  bool torch;
  std::vector<bool> read_only;
  size_t count;                    // number of floats
  std::vector<const Tile*> tiles;  // kept by the task

  void operator()(const std::vector<void*>& pointers, const double* floats, int device, void* stream) const {
    const py::gil_scoped_acquire gil;
    const c10::InferenceMode off(false);  // a kernel may use torch's autograd
    try {
      py::list arrays;
      for (size_t k = 0; k < pointers.size(); ++k) arrays.append(array(*tiles[k], pointers[k], device, read_only[k]));
      const py::object failure = (*function)(device, reinterpret_cast<uintptr_t>(stream), arrays,
                                             std::vector<double>(floats, floats + count));
      if (failure.is_none()) return;
      auto [text, cause] = failure.cast<std::pair<std::string, py::object>>();
      throw PythonError(text, held(std::move(cause)));
    } catch (py::error_already_set& error) {
      throw std::runtime_error(error.what());  // formatted here, as the GIL is held
    }
  }

  py::object array(const Tile& tile, void* data, int device, bool only_read) const {
    const auto where = device < 0 ? c10::Device(c10::kCPU) : c10::Device(c10::kCUDA, static_cast<int8_t>(device));
    if (torch) return dlpack(wrap(data, tile.shape, tile.dtype, where));
    if (device < 0) return view(tile, data, !only_read);
    return py::make_tuple(reinterpret_cast<uintptr_t>(data), tile.shape, numpy_dtype(tile.dtype), only_read);
  }
};

PythonKernel python_kernel(const PythonSpec& spec, std::vector<const Tile*> tiles) {
  const auto& [function, torch, cuda, read_only, floats] = spec;
  return {PythonCall{held(function), torch, read_only, floats, std::move(tiles)}, cuda};
}

// (cubin, name, shared bytes, warps, overlaps, grid, [(kind, value)]); see tasks/launch.py.
using LaunchArguments = std::vector<std::pair<int, py::object>>;
using LaunchList = std::vector<std::tuple<py::bytes, std::string, unsigned, unsigned, int, LaunchArguments, LaunchArguments>>;

// Bodies of a task: [(kernel, name, places of its tiles, ints, first float, accumulates, launches of each way,
//   scratch bytes, [(kind, value)], key of the choice, spec of a Python kernel or None,
//   [(number of a tile, axis, position of its filled size in the floats)])].
using BodyList =
    std::vector<std::tuple<std::string, std::string, std::vector<int>, std::vector<int64_t>, size_t, uint64_t,
                           std::vector<LaunchList>, int64_t, std::vector<std::pair<int, int64_t>>, std::string,
                           std::optional<PythonSpec>, std::vector<std::tuple<size_t, size_t, size_t>>>>;

[[maybe_unused]] Launch::Argument make_argument(int kind, const py::object& value) {
  if (kind == Launch::fp32) return {kind, 0, value.cast<double>(), {}};
  if (kind == Launch::live_int32 || kind == Launch::live_int64) return {kind, 0, 0, value.cast<std::array<int64_t, 4>>()};
  if (kind != Launch::matrix) return {kind, value.cast<int64_t>(), 0, {}};
  const auto all = value.cast<std::array<int64_t, 7>>();
  Launch::Argument made{kind, all[0], 0, {}};
  std::copy(all.begin() + 1, all.end(), made.map.begin());
  return made;
}

std::vector<Launch> make_launches([[maybe_unused]] const LaunchList& list) {
  std::vector<Launch> result;
#ifdef NNTILE_CUDA
  for (const auto& [cubin, name, shared, warps, overlaps, grid, arguments] : list) {
    Launch launch{load_binary(std::string(cubin), name, shared), {}, 32 * warps, shared, overlaps, {}};
    for (size_t k = 0; k < launch.grid.size(); ++k) launch.grid[k] = make_argument(grid.at(k).first, grid[k].second);
    for (const auto& [kind, value] : arguments) launch.arguments.push_back(make_argument(kind, value));
    result.push_back(std::move(launch));
  }
#endif
  return result;
}

// A program is freed after its tasks; Python tasks need the GIL to end.
struct DropProgram {
  void operator()(Program* program) const {
    const py::gil_scoped_release nogil;
    program->drop();
  }
};

#ifdef NNTILE_CUDA
struct DropCaptured {
  void operator()(Captured* captured) const {
    const py::gil_scoped_release nogil;
    captured->drop();
  }
};
#endif

}  // namespace

PYBIND11_MODULE(_core, m) {
  m.doc() = "StarPU runtime, tile programs and kernels of nntile_py";
  static py::object task_error = py::module_::import("nntile_py.errors").attr("TaskError");
  py::register_exception_translator([](std::exception_ptr p) {
    try {
      if (p) std::rethrow_exception(p);
    } catch (const TaskError& e) {
      const py::object error = task_error(e.what());
      if (e.cause) PyException_SetCause(error.ptr(), py::object(*static_cast<py::object*>(e.cause.get())).release().ptr());
      PyErr_SetObject(task_error.ptr(), error.ptr());
    }
  });

  m.def("starpu_version", [] {
    int major, minor, release;
    starpu_get_version(&major, &minor, &release);
    return std::vector<int>{major, minor, release};
  });
  m.def(
      "start",
      [](int cpus, const std::string& scheduler, int window, bool calibrate, size_t memory, int cuda, bool disk,
         size_t page, int ahead, size_t pinned) {
        start({cpus, scheduler, window, calibrate, memory, cuda, disk, page, ahead, pinned});
      },
      py::arg("cpus"), py::arg("scheduler"), py::arg("window"), py::arg("calibrate"), py::arg("memory"),
      py::arg("cuda") = 0, py::arg("disk") = false, py::arg("page") = 1, py::arg("ahead") = 0,
      py::arg("pinned") = 0, release());
#ifdef NNTILE_CUDA
  m.attr("has_cuda") = true;
#else
  m.attr("has_cuda") = false;
#endif
  m.def("stop", stop, release());
  m.def("schedulers", schedulers);
  on_idle([] {  // Ctrl-C ends a wait
    const py::gil_scoped_acquire gil;
    if (PyErr_CheckSignals()) throw py::error_already_set();
  });
  m.def("running", running);
  m.def("drop_python_tasks", drop_python_tasks);
  bind_starpupy(m);
  m.def("wait_all", wait_all, release());
  m.def("check", check, release());
  m.def("advise", advise);
  m.def("be_patient", be_patient);
  m.def("memory_used", memory_used);
  m.def("cpu_workers", cpu_workers);
  m.def("cuda_workers", cuda_workers);
  m.def("reserve_for_tiles", reserve_for_tiles, release());
  m.def("keep_choices", keep_choices);
  m.def("use_transport", [](const std::optional<py::capsule>& capsule, int most) {
    use_transport(capsule ? static_cast<const Transport*>(capsule->get_pointer()) : nullptr, most);
  }, py::arg("transport"), py::arg("most") = 0);
  m.def("post", [](std::shared_ptr<Tile> tile, int peer, int64_t tag, int priority, bool sends, std::string name) {
    const auto run = profile::begin_run();  // in a profile, each message counts as a program
    post({std::move(tile), peer, tag, priority, sends, std::move(name)}, run);
    return run;
  }, py::arg("tile"), py::arg("peer"), py::arg("tag"), py::arg("priority"), py::arg("sends"), py::arg("name"), release());
  m.def("waited_for", [] {
    static const WaitedFor write = [](int peer, char* text, unsigned long room) {
      std::snprintf(text, room, "%s", waited_for(peer).c_str());
    };
    return py::capsule(reinterpret_cast<void*>(write), kWaitedFor);
  });
  m.def("chosen", chosen, release());
  py::class_<Submitted, std::shared_ptr<Submitted>>(m, "Submitted")
      .def("done", &Submitted::done)
      .def_readonly("run", &Submitted::run)
      .def("wait", &Submitted::wait, release());
  m.def("submit_python", [](const std::string& name, const std::vector<std::string>& labels,
                            const std::vector<std::shared_ptr<Tile>>& tiles, const std::vector<std::string>& mode_names,
                            const PythonSpec& spec, int priority, bool cpu, bool cuda, int worker, bool always) {
    std::vector<int> modes;
    std::vector<const Tile*> views;
    for (const auto& mode : mode_names) modes.push_back(mode_of(mode));
    for (const auto& tile : tiles) views.push_back(tile.get());
    auto kernel = python_kernel(spec, std::move(views));
    const py::gil_scoped_release nogil;
    return submit_python(name, labels, tiles, modes, std::move(kernel), {priority, cpu, cuda, worker, always});
  }, py::arg("name"), py::arg("labels"), py::arg("tiles"), py::arg("modes"), py::arg("spec"), py::arg("priority") = 0,
        py::arg("cpu") = true, py::arg("cuda") = true, py::arg("worker") = -1, py::arg("always") = false);

  py::class_<Tile, std::shared_ptr<Tile>>(m, "Tile")
      .def(py::init([](std::vector<int64_t> shape, const std::string& dtype, int monoid, bool redux, size_t scales) {
             const auto of = static_cast<Monoid>(monoid);
             return std::make_shared<Tile>(std::move(shape), scalar_type(dtype), of, redux, scales);
           }),
           py::arg("shape"), py::arg("dtype"), py::arg("monoid") = 0, py::arg("redux") = false, py::arg("scales") = 1)
      .def_property_readonly("shape", [](const Tile& tile) { return py::tuple(py::cast(tile.shape)); })
      .def_property_readonly("dtype", [](const Tile& tile) { return numpy_dtype(tile.dtype); })
      .def_readonly("initialised", &Tile::initialised)
      .def("keep_off_disk", [](const Tile& tile) { starpu_data_set_ooc_flag(tile.handle, 0); })
      .def_property_readonly("on_disk", &on_disk)
      .def("write",
           [](const std::shared_ptr<Tile>& tile, const py::array& array) {
             const py::array data =
                 py::module_::import("numpy").attr("ascontiguousarray")(array, numpy_dtype(tile->dtype));
             const auto elements = static_cast<size_t>(data.size());
             if (is_scaled(tile->dtype)) throw std::invalid_argument("only tasks write tiles of 8 bits");
             if (elements * c10::elementSize(tile->dtype) != tile->bytes)
               throw std::invalid_argument("the array's size is not the tile's");
             const void* pointer = data.data();
             const py::gil_scoped_release nogil;
             auto copy = std::make_unique_for_overwrite<char[]>(tile->bytes);
             if (tile->dtype == at::kBFloat16)
               std::copy_n(static_cast<const float*>(pointer), elements, reinterpret_cast<c10::BFloat16*>(copy.get()));
             else
               std::memcpy(copy.get(), pointer, tile->bytes);
             write_tile(tile, std::move(copy));
           })
      .def("read",
           [](const std::shared_ptr<Tile>& tile) {
             py::array array(numpy_dtype(tile->dtype), tile->shape);
             void* data = array.mutable_data();
             {
               const py::gil_scoped_release nogil;
               if (is_scaled(tile->dtype)) {
                 std::vector<char> low(tile->bytes);
                 read_tile(tile, low.data());
                 const auto rows = static_cast<int64_t>(tile->scales);
                 const auto values = at::from_blob(data, tile->shape, at::kFloat);
                 values.copy_(at::from_blob(low.data(), tile->shape, tile->dtype));
                 const auto scales = low.data() + scale_offset(static_cast<size_t>(values.numel()));
                 values.view({rows, -1}).mul_(at::from_blob(scales, {rows, 1}, at::kFloat));
               } else if (tile->dtype != at::kBFloat16) {
                 read_tile(tile, data);
               } else {
                 std::vector<c10::BFloat16> low(tile->bytes / sizeof(c10::BFloat16));
                 read_tile(tile, low.data());
                 std::copy(low.begin(), low.end(), static_cast<float*>(data));
               }
             }
             return array;
           })
      .def("zero", zero_tile, release())
      .def("invalidate", invalidate, release());

  py::class_<Fetch>(m, "Fetch")
      .def(py::init<std::vector<std::shared_ptr<Tile>>>(), release())
      .def("done", &Fetch::done)
      .def("wait", &Fetch::wait, release());

  py::class_<Copies>(m, "Copies")
      .def(py::init<std::vector<std::shared_ptr<Tile>>>(), release())
      .def("done", &Copies::done)
      .def("wait", &Copies::wait, release())
      .def("dropped", &Copies::dropped)
      .def("array", [](const py::object& self, size_t k) {
        const auto& copies = self.cast<const Copies&>();
        if (!copies.done()) throw TaskError("the tiles are not copied yet");
        const Tile& tile = copies.tile(k);
        if (tile.dtype != at::kBFloat16) return py::array(numpy_dtype(tile.dtype), tile.shape, copies.data(k), self);
        py::array array(numpy_dtype(tile.dtype), tile.shape);
        auto* to = static_cast<float*>(array.mutable_data());
        const py::gil_scoped_release nogil;
        std::copy_n(static_cast<const c10::BFloat16*>(copies.data(k)), tile.bytes / sizeof(c10::BFloat16), to);
        return array;
      });

  py::class_<Program, std::unique_ptr<Program, DropProgram>>(m, "Program")
      .def(py::init<bool, bool, int>(), py::arg("tf32") = false, py::arg("checked") = false, py::arg("window") = 0)
      .def(
          "add",
          [](Program& program, const BodyList& bodies, const std::string& codelet, std::string name,
             std::vector<std::shared_ptr<Tile>> tiles, const std::vector<std::string>& modes,
             std::vector<double> floats, std::vector<std::pair<int, int>> slots, uint32_t footprint, int priority,
             double flop, int worker, int delay, std::vector<int> leaves, const std::string& kind,
             const std::vector<std::tuple<std::vector<int64_t>, std::string, size_t>>& scratch_tiles,
             std::vector<int> residents) {
            TaskRecord record;
            record.residents = std::move(residents);
            for (const auto& [shape, dtype, scales] : scratch_tiles)
              record.scratch.push_back(std::make_shared<Tile>(shape, scalar_type(dtype), scales));
            auto every = tiles;
            every.insert(every.end(), record.scratch.begin(), record.scratch.end());
            std::vector<std::string> kernels;
            for (const auto& [kernel, part, places, ints, first_float, accumulates, ways, scratch, table, key, python,
                              lives] : bodies) {
              TaskBody body;
              body.name = part;
              body.places = places;
              body.ints = ints;
              body.first_float = first_float;
              body.accumulates = accumulates;
              for (const auto& launches : ways) body.ways.push_back(make_launches(launches));
              body.key = key;
              body.scratch = scratch;
              for (const auto& [tile, axis, position] : lives) body.lives.push_back({tile, axis, position});
              for (const auto& [kind, value] : table) body.table.push_back({kind, value, 0, {}});
              if (python) {
                std::vector<const Tile*> views;
                for (const int place : places) views.push_back(every.at(static_cast<size_t>(place)).get());
                body.python = python_kernel(*python, std::move(views));
              }
              record.bodies.push_back(std::move(body));
              kernels.push_back(kernel);
            }
            record.name = std::move(name);
            record.tiles = std::move(tiles);
            for (const auto& mode : modes) record.modes.push_back(mode_of(mode));
            record.floats = std::move(floats);
            record.slots = std::move(slots);
            record.footprint = footprint;
            record.priority = priority;
            record.flop = flop;
            record.worker = worker;
            record.delay = delay;
            record.leaves = std::move(leaves);
            program.add(std::move(record), kernels, codelet, kind);
          },
          py::arg("bodies"), py::arg("codelet"), py::arg("name"), py::arg("tiles"), py::arg("modes"),
          py::arg("floats") = std::vector<double>{}, py::arg("slots") = std::vector<std::pair<int, int>>{},
          py::arg("footprint") = 0, py::arg("priority") = 0, py::arg("flop") = 0.0,
          py::arg("worker") = -1, py::arg("delay") = 0, py::arg("leaves") = std::vector<int>{}, py::arg("kind") = "",
          py::arg("scratch") = std::vector<std::tuple<std::vector<int64_t>, std::string, size_t>>{},
          py::arg("residents") = std::vector<int>{})
      .def("add_invalidate", &Program::add_invalidate)
      .def("add_message",
           [](Program& program, std::shared_ptr<Tile> tile, int peer, int64_t tag, int priority, bool sends,
              std::string name) {
             program.add_message({std::move(tile), peer, tag, priority, sends, std::move(name)});
           },
           py::arg("tile"), py::arg("peer"), py::arg("tag"), py::arg("priority"), py::arg("sends"), py::arg("name"))
      .def("run", &Program::run, release())
      .def_property_readonly("tasks", &Program::tasks)
      .def_property_readonly("checked_run", &Program::checked_run);
#ifdef NNTILE_CUDA
  py::class_<Captured, std::unique_ptr<Captured, DropCaptured>>(m, "Captured")
      .def(py::init([](Program& program, const std::vector<size_t>& records, int worker,
                       std::vector<std::shared_ptr<Tile>> weights, std::vector<std::shared_ptr<Tile>> tiles,
                       const std::vector<std::string>& names, size_t own, std::vector<int> changing, bool measures) {
             std::vector<int> modes;
             for (const auto& name : names) modes.push_back(mode_of(name));
             return std::unique_ptr<Captured, DropCaptured>(new Captured(program, records, worker, std::move(weights),
                                                                         std::move(tiles), std::move(modes), own,
                                                                         std::move(changing), measures));
           }),
           py::arg("program"), py::arg("records"), py::arg("worker"), py::arg("weights"), py::arg("tiles"),
           py::arg("modes"), py::arg("own"), py::arg("changing"), py::arg("measures"), py::keep_alive<1, 2>())
      .def("hold", &Captured::hold, release())
      .def("let_go", &Captured::let_go, release())
      .def("run", &Captured::run, release())
      .def_property_readonly("broken", &Captured::broken)
      .def_property_readonly("graphs", &Captured::graphs);
#endif
  m.def("fma_flop", &fma_flop, release(), py::arg("loops"), py::arg("fp64"));
  m.def("take_not_finite", []() -> std::optional<std::tuple<uint64_t, uint64_t, uint64_t>> {
    const py::gil_scoped_release nogil;
    if (const auto found = take_not_finite()) return std::tuple{found->run, found->task, found->body};
    return {};
  });
  profile::bind(m);
}
