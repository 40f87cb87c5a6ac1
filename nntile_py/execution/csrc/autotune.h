// Choices between equivalent kernels, by measurement. They are stored for later processes, because a new measurement
// may choose another kernel, which changes the last bits of results.
#pragma once
#include <functional>
#include <map>
#include <string>
#include <vector>

namespace nntile {

void keep_choices(const std::string& folder);  // sets the folder of choices; empty: choices stay in this process

// Returns the stored choice for `key` in the folder's `file`, else the result of `measure`. One caller measures at a
// time; nested choices are not stored.
int chosen(const std::string& file, const std::string& key, const std::function<int()>& measure);

// A choice between kernels in a CUDA graph. The fastest kernel there may differ from the fastest kernel in isolation:
// in a graph, operands are not in the cache, and another kernel ends just before.
struct Choice {
  size_t way, count;  // number of the chosen candidate, number of candidates
  std::string file;   // file that stores the choice
  bool open = true;   // the choice was not yet measured in graphs
  bool used = true;   // the choice was used since the caller last cleared this flag
};
using Choices = std::map<std::string, Choice>;  // by key
// Choices of the program that this worker launches or captures now; null outside of such programs.
inline thread_local Choices* choices_in_graph = nullptr;
// Returns the candidate to use now; `alone`: the fastest in isolation, used outside graphs.
size_t way_to_take(const std::function<std::string()>& file, const std::function<std::string()>& key, size_t count,
                   size_t alone);

// The functions below are for CUDA workers; autotune_cuda.cpp defines them.
// Returns the minimum of several timings on this worker's stream, in ms; infinite if `run` returns false.
float least_ms(const std::function<bool()>& run);
// File of the choices for this GPU model, library and driver.
std::string choices_file(const std::string& kind, const std::string& library);
// Returns the number of the fastest of several equivalent kernels, measured once for `key`.
int fastest_of(const std::string& file, const std::string& key, const std::vector<std::function<void()>>& ways);

}  // namespace nntile
