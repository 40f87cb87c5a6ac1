// Views of tiles' memory as numpy arrays.
#pragma once
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <stdexcept>
#include <string>

#include "dtypes.h"
#include "kernel.h"

namespace nntile {
namespace py = pybind11;

inline at::ScalarType scalar_type(const std::string& name) {
  std::string known;
  for (const auto& [key, type, numpy] : kDtypes) {
    if (key == name) return type;
    known += std::string(known.empty() ? "" : ", ") + key;
  }
  throw std::invalid_argument("unknown dtype " + name + "; known are " + known);
}

inline py::dtype numpy_dtype(at::ScalarType type) {
  for (const auto& [key, known, numpy] : kDtypes)
    if (known == type) return py::dtype(numpy);
  throw std::invalid_argument("this dtype has no numpy form");
}

// Returns a numpy view of a tile's memory, valid while the task runs.
inline py::array view(const Tile& tile, void* data, bool writeable) {
  py::array array(numpy_dtype(tile.dtype), tile.shape, data, py::capsule(data, [](void*) {}));
  if (!writeable) array.attr("flags").attr("writeable") = false;
  return array;
}

void bind_starpupy(py::module_& m);  // starpupy.cpp

}  // namespace nntile
