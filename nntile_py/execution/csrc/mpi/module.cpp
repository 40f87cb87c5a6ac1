// StarPU-MPI in a separate module, so that a single process loads no MPI library.
#define OMPI_SKIP_MPICXX 1  // obsolete C++ bindings in separate libraries
#define MPICH_SKIP_MPICXX 1
#include <pybind11/pybind11.h>
#include <signal.h>
#include <starpu_mpi.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

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

// Returns a number that is the same for all processes of a machine or container: a hash of host and process namespace.
int64_t place() {
  char text[512] = "";
  const auto length = readlink("/proc/self/ns/pid", text, 200);
  gethostname(text + std::max<ssize_t>(length, 0), 200);
  return static_cast<int64_t>(std::hash<std::string>{}(text));
}

// Each rank sends heartbeats to the next rank, and ends all ranks if the previous rank is silent or gone. A thread
// without Python and StarPU sends the heartbeats, so a process is silent only if it is stopped or cannot be reached.
class Watch {
 public:
  void begin(MPI_Comm comm, double patience, nntile::WaitedFor waited_for) {
    comm_ = comm;
    patience_ = std::chrono::duration<double>(patience);
    waited_for_ = waited_for;
    thread_ = std::thread([this] { run(); });
  }

  // Tells the next rank to stop watching.
  void end() {
    stopping_ = true;
    if (thread_.joinable()) thread_.join();
  }

 private:
  using clock = std::chrono::steady_clock;
  static constexpr auto kEvery = std::chrono::milliseconds(250);
  struct Sign {
    int64_t leaves, process, place;
  };

  void run() {
    MPI_Comm_rank(comm_, &rank_);
    MPI_Comm_size(comm_, &size_);
    const int before = (rank_ + size_ - 1) % size_;
    Sign last{0, 0, 0};
    clock::duration silent{};
    for (auto looked = clock::now(); !stopping_; std::this_thread::sleep_for(kEvery)) {
      say(false);
      int there = 0;
      while (!last.leaves && MPI_Iprobe(before, 0, comm_, &there, MPI_STATUS_IGNORE) == MPI_SUCCESS && there) {
        MPI_Recv(&last, 3, MPI_INT64_T, before, 0, comm_, MPI_STATUS_IGNORE);
        silent = {};
      }
      // Count at most four periods: this process may have been stopped, or its machine asleep, while the other rank
      // sent.
      const auto now = clock::now();
      silent += std::min<clock::duration>(now - looked, 4 * kEvery);
      looked = now;
      if (last.leaves) continue;
      if (silent > patience_) {
        char text[200];
        std::snprintf(text, sizeof text, "has given no sign of life for %g s: its process is stopped, or its machine or "
                      "the network is lost", patience_.count());
        lost(before, text);
      }
      if (last.process && last.place == place_ && kill(static_cast<pid_t>(last.process), 0) && errno == ESRCH)
        lost(before, "has ended without a message: it was killed, or crashed");
    }
    say(true);
  }

  // Sends a heartbeat without waiting. The message is small, so MPI sends it before the next rank receives it.
  void say(bool leaves) {
    auto& request = requests_[next_];
    int done = 0;
    MPI_Test(&request, &done, MPI_STATUS_IGNORE);  // done is true if the slot has no request
    if (!done) return;                             // the next rank does not receive: the rank after it reports that
    signs_[next_] = {leaves, getpid(), place_};
    MPI_Isend(&signs_[next_], 3, MPI_INT64_T, (rank_ + 1) % size_, 0, comm_, &request);
    next_ = (next_ + 1) % kSigns;
  }

  [[noreturn]] void lost(int other, const char* how) {
    char what[512] = "";
    waited_for_(other, what, sizeof what);
    if (!*what) waited_for_(-1, what, sizeof what);
    std::fprintf(stderr, "rank %d of %d: error: rank %d %s. Rank %d waits for %s\n", rank_, size_, other, how, rank_,
                 *what ? what : "no tile");
    std::fflush(stderr);
    MPI_Abort(comm_, 1);
    std::abort();
  }

  MPI_Comm comm_ = MPI_COMM_NULL;
  int rank_ = 0, size_ = 1;
  const int64_t place_ = place();
  std::chrono::duration<double> patience_{};
  nntile::WaitedFor waited_for_ = nullptr;
  std::atomic<bool> stopping_{false};
  std::thread thread_;
  static constexpr size_t kSigns = 64;  // largest number of heartbeats in flight
  size_t next_ = 0;
  Sign signs_[kSigns] = {};
  std::vector<MPI_Request> requests_ = std::vector<MPI_Request>(kSigns, MPI_REQUEST_NULL);
};

Watch& watch() {
  static auto* one = new Watch;  // never destroyed, as the process may end while its thread runs
  return *one;
}

}  // namespace

PYBIND11_MODULE(_mpi, m) {
  m.doc() = "StarPU-MPI for nntile_py._core";
  // Starts MPI. mpi4py would hold the GIL while it waits for other ranks. Python queries the thread level later.
  m.def("init", [] {
    int level = 0, begun = 0;
    MPI_Initialized(&begun);  // the script may have started MPI
    if (!begun && MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &level)) throw std::runtime_error("MPI did not start");
  }, py::call_guard<py::gil_scoped_release>());
  // Name and version of the library, known before the start.
  m.def("library", [] {
    char text[MPI_MAX_LIBRARY_VERSION_STRING];
    int size = 0;
    MPI_Get_library_version(text, &size);
    return std::string(text);
  });
  // comm: Fortran handle of a communicator for StarPU only; StarPU must be running.
  m.def("start", [](int comm) {
    g_comm = MPI_Comm_f2c(comm);
    const py::gil_scoped_release nogil;
    if (starpu_mpi_init_comm(nullptr, nullptr, 0, g_comm)) throw std::runtime_error("StarPU-MPI did not start");
  });
  // No message may be in flight; StarPU must be stopped afterwards.
  m.def("stop", [] { starpu_mpi_shutdown_comm(g_comm); }, py::call_guard<py::gil_scoped_release>());
  m.def("transport", [] { return py::capsule(&g_transport, nntile::kTransport); });
  // comm: a separate communicator; patience: seconds without a heartbeat; waited_for: from _core.
  m.def("watch", [](int comm, double patience, const py::capsule& waited_for) {
    watch().begin(MPI_Comm_f2c(comm), patience, reinterpret_cast<nntile::WaitedFor>(waited_for.get_pointer()));
  });
  m.def("leave", [] { watch().end(); }, py::call_guard<py::gil_scoped_release>());
}
