// Tiles on their way between ranks.
#include "internal.h"
#include "transport.h"

namespace nntile {

namespace {
const Transport* g_transport = nullptr;
int g_most = 0;  // messages under way
}  // namespace

void use_transport(const Transport* transport, int most) {
  g_transport = transport;
  g_most = most;
}

void post(const Message& message) {
  require(*message.tile);
  if (!g_transport) throw TaskError("a tile was to travel between ranks, and there is one: use nntile_py.Runtime(mpi=True)");
  if (message.sends && !message.tile->initialised) throw TaskError("a tile was to be sent before any task wrote it");
  wake();
  // Those that wait were submitted in the order of the whole program, on every rank: the first of them can end.
  if (g.messages >= g_most) wait_until([] { return g.messages < g_most; });
  ++g.messages;
  message.tile->initialised = true;
  const auto done = [](void*) {
    ++g.ended;
    --g.messages;
  };
  const auto how = message.sends ? g_transport->send : g_transport->receive;
  if (how(message.tile->handle, message.peer, message.tag, message.priority, done, nullptr)) {
    --g.messages;
    throw TaskError("StarPU-MPI refused a message to or from rank " + std::to_string(message.peer));
  }
}

}  // namespace nntile
