// Transport of tiles between ranks, which nntile_py._mpi provides to _core, as _core does not use MPI itself.
#pragma once
#include <cstdint>

struct _starpu_data_state;

namespace nntile {

struct Transport {
  // Posts a send or a receive of the next version of a tile. When the transfer ends, a StarPU thread calls `done(arg)`.
  // Returns nonzero on an error.
  using Post = int (*)(_starpu_data_state* handle, int peer, int64_t tag, int priority, void (*done)(void*), void* arg);
  Post send, receive;
};
constexpr auto kTransport = "nntile_py transport";  // name of the capsule

// Provided by _core: writes into `text` what this process waits for from a rank (-1: any).
using WaitedFor = void (*)(int peer, char* text, unsigned long room);
constexpr auto kWaitedFor = "nntile_py waited for";

}  // namespace nntile
