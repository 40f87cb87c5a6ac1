// Messages with tiles between ranks.
#include <map>

#include "internal.h"
#include "profile.h"
#include "transport.h"

namespace nntile {

namespace {
const Transport* g_transport = nullptr;
int g_most = 0;  // maximum messages in flight

struct UnderWay {
  std::string name;
  profile::Passage passage;
};
std::mutex g_mutex;
std::map<uintptr_t, UnderWay> g_under_way;  // by number, in posting order

void ended(void* number) {
  const std::lock_guard lock(g_mutex);
  auto node = g_under_way.extract(reinterpret_cast<uintptr_t>(number));
  profile::note(node.mapped().passage);
  ++g.ended;
  --g.messages;
}
}  // namespace

void use_transport(const Transport* transport, int most) {
  g_transport = transport;
  g_most = most;
}

void post(const Message& message, uint32_t run, uint32_t index) {
  require(*message.tile);
  if (!g_transport) throw TaskError("a tile cannot be sent or received, as there is only one rank: use nntile_py.Runtime(mpi=True)");
  if (message.sends && !message.tile->initialised) throw TaskError("a tile cannot be sent before a task has written it");
  wake();
  // All ranks post messages in the order of the whole program, so the first waiting message can always end.
  if (g.messages >= g_most) wait_until([] { return g.messages < g_most; });
  before_use(*message.tile);
  ++g.messages;
  message.tile->initialised = true;
  static uintptr_t count = 0;
  const auto number = ++count;
  {
    const std::lock_guard lock(g_mutex);
    const auto bytes = static_cast<int64_t>(message.tile->bytes);
    g_under_way[number] = {message.name, profile::passage(run, index, message.peer, message.sends, message.tag, bytes)};
  }
  const auto how = message.sends ? g_transport->send : g_transport->receive;
  void* arg = reinterpret_cast<void*>(number);
  if (how(message.tile->handle, message.peer, message.tag, message.priority, ended, arg)) {
    ended(arg);
    throw TaskError("StarPU-MPI refused a message to or from rank " + std::to_string(message.peer));
  }
}

std::string waited_for(int peer) {
  const std::lock_guard lock(g_mutex);
  const UnderWay* found = nullptr;
  for (const auto& [number, one] : g_under_way) {
    if (peer >= 0 && one.passage.peer != peer) continue;
    if (!found || (found->passage.sends && !one.passage.sends)) found = &one;
    if (!found->passage.sends) break;
  }
  if (!found) return "";
  return found->name + (found->passage.sends ? " to rank " : " from rank ") + std::to_string(found->passage.peer);
}

}  // namespace nntile
