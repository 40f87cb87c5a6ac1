// Detects that no task makes progress: StarPU itself would wait for ever, as for memory that is never freed.
#include <filesystem>
#include <fstream>
#include <map>

#include "internal.h"

namespace nntile {
namespace {

// Limits of the time in which ...
std::chrono::seconds g_no_room{10};   // ... no task ends and no tile moves, while a tile waits for memory
std::chrono::seconds g_still{120};    // ... no task ends and no tile moves, for any reason
std::chrono::seconds g_in_vain{600};  // ... no task ends, although tiles move or other processes use the cores

std::mutex g_advice_mutex;
std::string g_advice;

std::string mib(size_t bytes) { return std::to_string((bytes + (1 << 20) - 1) >> 20) + " MiB"; }

std::string describe(unsigned node) {
  char name[64];
  starpu_memory_node_get_name(node, name, sizeof name);
  const auto total = starpu_memory_get_total(node);
  return std::string(name) + " has " + mib(starpu_memory_get_used(node)) + " taken" +
         (total > 0 ? " of " + mib(static_cast<size_t>(total)) : "");
}

// Returns whether a tile of this size does not fit on the disk any more, or whether the disk is nearly full.
bool disk_is_full(size_t bytes = 0) {
  if (starpu_disk_swap_node < 0) return false;
  const auto node = static_cast<unsigned>(starpu_disk_swap_node);
  const auto total = static_cast<double>(starpu_memory_get_total(node));
  const auto used = static_cast<double>(starpu_memory_get_used(node));
  return used > 0.9 * total || used + static_cast<double>(bytes) > total;
}

// Returns a text on a tile that waits for room in a memory; an empty text without such a tile. Cached buffers of StarPU
// are not the cause: StarPU frees them before a tile waits.
std::string lack_of_room() {
  for (unsigned node = 0; node < starpu_memory_nodes_get_count(); ++node) {
    const auto total = starpu_memory_get_total(node);
    const size_t wanted = smallest_waiting(node);
    if (!wanted || total <= 0) continue;
    if (starpu_memory_get_used(node) + wanted <= static_cast<size_t>(total) && !lacks_room(node, wanted)) continue;
    const bool cuda = starpu_node_get_kind(node) == STARPU_CUDA_RAM;
    const bool full = !cuda && disk_is_full(wanted);
    return "a tile of " + mib(wanted) + " waits for room: " + describe(node) +
           (cuda ? " (runtime.cuda_memory)" : " (runtime.memory)") +
           (full ? "; the disk is full: " + describe(static_cast<unsigned>(starpu_disk_swap_node)) +
                       " (runtime.disk.size)" : "");
  }
  return "";
}

// Returns advice for the user: on memory if a memory is nearly full, otherwise on the load of the machine.
std::string advice() {
  if (disk_is_full())
    return "The disk is full: use a larger runtime.disk.size, smaller tiles, or a smaller batch" +
           (g_advice.empty() ? "" : "; " + g_advice);
  for (unsigned node = 0; node < starpu_memory_nodes_get_count(); ++node) {
    const auto total = starpu_memory_get_total(node);
    if (total > 0 && starpu_memory_get_used(node) > 0.8 * static_cast<double>(total))
      return "Use smaller tiles, or a smaller batch" + (g_advice.empty() ? "" : "; " + g_advice);
  }
  double load = 0;
  getloadavg(&load, 1);
  return "There is room in memory. Either other processes take the cores from this one (the load average is " +
         std::to_string(static_cast<int>(load)) + "): end them, or give it cores of its own; or this is a fault of nntile_py";
}

[[noreturn]] void stuck(const std::string& what, std::chrono::seconds patience, std::string state) {
  g.stuck = true;
  if (state.empty())
    for (unsigned node = 0; node < starpu_memory_nodes_get_count(); ++node)
      state += (node ? "; " : "") + describe(node);
  const std::lock_guard lock(g_advice_mutex);
  throw TaskError(what + " for " + std::to_string(patience.count()) + " s although " +
                  std::to_string(starpu_task_nsubmitted()) + " are left" +
                  (g.messages ? ", and " + std::to_string(g.messages) + " messages to or from other ranks, the first " +
                                    waited_for() : "") +
                  (g.leaving ? ", and " + std::to_string(g.leaving) + " tiles on their way to main memory" : "") +
                  ". Memory: " + state + ". " + advice());
}

// Returns the total time that this process's threads were ready but not running (proc(5), schedstat).
std::chrono::nanoseconds queued() {
  std::error_code none;
  long long sum = 0, run, wait;
  for (const auto& thread : std::filesystem::directory_iterator("/proc/self/task", none))
    if (std::ifstream file(thread.path() / "schedstat"); file >> run >> wait) sum += wait;
  return std::chrono::nanoseconds(sum);
}

}  // namespace

void advise(const std::string& text) {
  const std::lock_guard lock(g_advice_mutex);
  g_advice = text;
}

void be_patient(int64_t no_room, int64_t still, int64_t in_vain) {
  g_no_room = std::chrono::seconds(no_room);
  g_still = std::chrono::seconds(still);
  g_in_vain = std::chrono::seconds(in_vain);
}

Transfers transfers(int bus) {
  static std::map<int, Transfers> sums;
  const std::lock_guard lock(g_advice_mutex);
  starpu_profiling_bus_info info;
  starpu_bus_get_profiling_info(bus, &info);  // StarPU counts also without profiling, and resets its counters here
  auto& sum = sums[bus];
  sum.bytes += static_cast<int64_t>(info.transferred_bytes);
  sum.count += info.transfer_count;
  return sum;
}

void Watchdog::look() {
  // At most one second counts: if the process was stopped or the machine paused, the clock has advanced much further.
  const auto second = std::chrono::seconds(1);
  const auto now = clock::now();
  const auto passed = std::min<clock::duration>(now - last_, second);
  last_ = now;
  const bool early = still_ < second;
  still_ += passed;
  in_vain_ += passed;
  // g.shared: the process has other users of StarPU. Their tasks may run for any time, and g.ended does not count them.
  if (g.active || g.shared || g.ended != ended_) still_ = in_vain_ = {};
  ended_ = g.ended;
  std::vector<size_t> moved;
  for (int bus = 0; bus < starpu_bus_get_count(); ++bus) moved.push_back(static_cast<size_t>(transfers(bus).count));
  for (unsigned node = 0; node < starpu_memory_nodes_get_count(); ++node) moved.push_back(starpu_memory_get_used(node));
  if (moved != moved_) still_ = {};
  moved_ = std::move(moved);
  // StarPU counts a transfer when it starts, and updates the used memory when the transfer ends. During a slow transfer
  // to a disk both numbers stay the same, so the limit is longer with a disk.
  const auto no_room = starpu_disk_swap_node >= 0 ? g_still : g_no_room;
  if (still_ > no_room)
    if (auto lack = lack_of_room(); !lack.empty()) stuck("out of memory: no task could start", no_room, lack);
  if (early && still_ >= second) queued_ = queued();
  if (still_ > g_still && queued() - queued_ > g_still / 2) still_ = {};  // too few cores: only g_in_vain counts
  if (still_ > g_still) stuck("no progress: no task ended and no tile moved", g_still, "");
  if (in_vain_ > g_in_vain) stuck("no progress: no task ended", g_in_vain, "");
}

}  // namespace nntile
