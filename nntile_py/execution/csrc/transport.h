// How tiles travel between ranks: what nntile_py._mpi gives to _core, which by itself knows no MPI.
#pragma once
#include <cstdint>

struct _starpu_data_state;

namespace nntile {

struct Transport {
  // The next version of a tile, from or to a rank; `done(arg)` is called on a thread of StarPU's. Not 0: an error.
  using Post = int (*)(_starpu_data_state* handle, int peer, int64_t tag, int priority, void (*done)(void*), void* arg);
  Post send, receive;
};
constexpr auto kTransport = "nntile_py transport";  // the name of the capsule

// What _core gives to _mpi: writes what this process waits for from a rank (-1: from any) into `text`.
using WaitedFor = void (*)(int peer, char* text, unsigned long room);
constexpr auto kWaitedFor = "nntile_py waited for";

}  // namespace nntile
