// Tiles shared with StarPU's own Python package (starpupy): tasks of starpupy take tiles, and tasks of nntile_py
// take numpy handles of starpupy.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <map>

#include "internal.h"
#include "numpy_view.h"

namespace nntile {
namespace {

constexpr const char* kHandle = "Handle";  // name of starpupy's capsules

struct Layout {
  std::vector<int64_t> shape;
  at::ScalarType dtype;
};

// Shapes and dtypes of the tiles that starpupy's tasks may take. Entries outlive their tiles: tasks may still use them.
std::map<starpu_data_handle_t, Layout> g_layouts;  // guarded by the GIL

// Called by starpupy, with the GIL held, for each handle of a task that starpupy has not registered itself; see
// scripts/build_starpu.sh.
PyObject* object_of(starpu_data_handle_t handle, void* buffer) {
  const auto& [shape, dtype] = g_layouts.at(handle);
  void* data = pointer(buffer);
  return py::array(numpy_dtype(dtype), shape, data, py::capsule(data, [](void*) {})).release().ptr();
}

// Returns the capsule of a tile. starpupy refuses the capsule if there is no tile, or if its runtime has stopped.
py::capsule capsule_of(Tile* tile) {
  if (!running() || !tile || !tile->handle) return py::capsule(reinterpret_cast<void*>(-1), kHandle);
  {
    const py::gil_scoped_release nogil;  // a Python task that this waits for needs the GIL
    before_use(*tile);
  }
  before_write(*tile);
  if (!tile->foreign) {
    g_layouts[tile->handle] = {tile->shape, tile->dtype};
    starpu_data_set_user_data(tile->handle, reinterpret_cast<void*>(object_of));
  }
  return py::capsule(static_cast<void*>(tile->handle), kHandle);
}

// Returns a tile on a numpy handle of starpupy. address: memory of the handle's array.
std::shared_ptr<Tile> adopt(const py::capsule& capsule, std::vector<int64_t> shape, const std::string& dtype, uintptr_t address) {
  require_running();
  auto* handle = static_cast<starpu_data_handle_t>(PyCapsule_GetPointer(capsule.ptr(), kHandle));
  if (!handle) throw py::error_already_set();
  if (handle == reinterpret_cast<starpu_data_handle_t>(-1)) throw TaskError("starpu_array: the handle is unregistered");
  // scripts/build_starpu.sh moves the address to the field of the interface where tiles have it.
  if (pointer(starpu_data_get_interface_on_node(handle, STARPU_MAIN_RAM)) != reinterpret_cast<void*>(address))
    throw TaskError("starpu_array: another build of StarPU's Python package than nntile_py's is imported; allowed: the build of make setup");
  return std::make_shared<Tile>(handle, std::move(shape), scalar_type(dtype));
}

}  // namespace

void bind_starpupy(py::module_& m) {
  m.def("share_workers", share_workers, py::call_guard<py::gil_scoped_release>());
  // (CPU workers, CUDA workers, policy) of a StarPU that this process has started already, or None.
  m.def("starpu_workers", []() -> py::object {
    if (!starpu_is_initialized()) return py::none();
    return py::make_tuple(starpu_cpu_worker_get_count(), starpu_cuda_worker_get_count(),
                          starpu_sched_get_sched_policy()->policy_name);
  });
  m.def("starpu_capsule", capsule_of);
  m.def("adopt", adopt);
}

}  // namespace nntile
