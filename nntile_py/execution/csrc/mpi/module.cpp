// StarPU-MPI, in a module of its own: where one process computes, no MPI library is loaded.
#define OMPI_SKIP_MPICXX 1  // old bindings for C++, in libraries of their own
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

// A number for the processes that see each other's numbers: those of one machine, or container.
int64_t place() {
  char text[512] = "";
  const auto length = readlink("/proc/self/ns/pid", text, 200);
  gethostname(text + std::max<ssize_t>(length, 0), 200);
  return static_cast<int64_t>(std::hash<std::string>{}(text));
}

// Each rank gives the next one a sign of life, and ends all if the one before gives none, or is there no more. Its thread
// needs neither Python nor StarPU: only a process that is stopped, or cannot be reached, is silent.
class Watch {
 public:
  void begin(MPI_Comm comm, double patience, nntile::WaitedFor waited_for) {
    comm_ = comm;
    patience_ = std::chrono::duration<double>(patience);
    waited_for_ = waited_for;
    thread_ = std::thread([this] { run(); });
  }

  // The next one is told, and looks no more.
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
      // This process may have been stopped, too, or the machine asleep: that is no silence of the other.
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
        lost(before, "has ended, and told nobody: it was killed, or crashed");
    }
    say(true);
  }

  // Small, so MPI sends it whether or not anyone takes it; it does not wait.
  void say(bool leaves) {
    auto& request = requests_[next_];
    int done = 0;
    MPI_Test(&request, &done, MPI_STATUS_IGNORE);  // done where there is none
    if (!done) return;                             // the next rank takes nothing: the one after it will say so
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
  static constexpr size_t kSigns = 64;  // on their way
  size_t next_ = 0;
  Sign signs_[kSigns] = {};
  std::vector<MPI_Request> requests_ = std::vector<MPI_Request>(kSigns, MPI_REQUEST_NULL);
};

Watch& watch() {
  static auto* one = new Watch;  // never destroyed: the process may end while its thread runs
  return *one;
}

}  // namespace

PYBIND11_MODULE(_mpi, m) {
  m.doc() = "StarPU-MPI for nntile_py._core";
  // mpi4py would keep the GIL while it waits for the others; the level of threads that MPI gives is asked for later.
  m.def("init", [] {
    int level = 0, begun = 0;
    MPI_Initialized(&begun);  // by a script
    if (!begun && MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &level)) throw std::runtime_error("MPI did not start");
  }, py::call_guard<py::gil_scoped_release>());
  // Its name and version, known before it starts.
  m.def("library", [] {
    char text[MPI_MAX_LIBRARY_VERSION_STRING];
    int size = 0;
    MPI_Get_library_version(text, &size);
    return std::string(text);
  });
  // comm: a communicator that is StarPU's alone, as Fortran's number of it; StarPU is running.
  m.def("start", [](int comm) {
    g_comm = MPI_Comm_f2c(comm);
    const py::gil_scoped_release nogil;
    if (starpu_mpi_init_comm(nullptr, nullptr, 0, g_comm)) throw std::runtime_error("StarPU-MPI did not start");
  });
  // No message is on its way; StarPU is stopped after it.
  m.def("stop", [] { starpu_mpi_shutdown_comm(g_comm); }, py::call_guard<py::gil_scoped_release>());
  m.def("transport", [] { return py::capsule(&g_transport, nntile::kTransport); });
  // comm: one of its own; patience: seconds without a sign of life; waited_for: _core's.
  m.def("watch", [](int comm, double patience, const py::capsule& waited_for) {
    watch().begin(MPI_Comm_f2c(comm), patience, reinterpret_cast<nntile::WaitedFor>(waited_for.get_pointer()));
  });
  m.def("leave", [] { watch().end(); }, py::call_guard<py::gil_scoped_release>());
}
