// StarPU-MPI, in a module of its own: where one process computes, no MPI library is loaded.
#define OMPI_SKIP_MPICXX 1  // old bindings for C++, in libraries of their own
#define MPICH_SKIP_MPICXX 1
#include <pybind11/pybind11.h>
#include <starpu_mpi.h>

#include <stdexcept>

#include "../transport.h"

namespace py = pybind11;

namespace {

MPI_Comm g_comm = MPI_COMM_NULL;

int send(starpu_data_handle_t handle, int peer, int64_t tag, int priority, void (*done)(void*), void* arg) {
  return starpu_mpi_isend_detached_prio(handle, peer, tag, priority, g_comm, done, arg);
}

int receive(starpu_data_handle_t handle, int peer, int64_t tag, int priority, void (*done)(void*), void* arg) {
  return starpu_mpi_irecv_detached_prio(handle, peer, tag, priority, g_comm, done, arg);
}

const nntile::Transport g_transport{send, receive};

}  // namespace

PYBIND11_MODULE(_mpi, m) {
  m.doc() = "StarPU-MPI for nntile_py._core";
  // comm: a communicator that is StarPU's alone, as Fortran's number of it; StarPU is running.
  m.def("start", [](int comm) {
    g_comm = MPI_Comm_f2c(comm);
    const py::gil_scoped_release nogil;
    if (starpu_mpi_init_comm(nullptr, nullptr, 0, g_comm)) throw std::runtime_error("StarPU-MPI did not start");
  });
  // No message is on its way; StarPU is stopped after it.
  m.def("stop", [] { starpu_mpi_shutdown_comm(g_comm); }, py::call_guard<py::gil_scoped_release>());
  m.def("transport", [] { return py::capsule(&g_transport, nntile::kTransport); });
}
