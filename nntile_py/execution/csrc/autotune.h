// Choices that were made by measurement, kept for later processes: what is measured anew may turn out otherwise, and
// with it the last bits of a result.
#pragma once
#include <functional>
#include <map>
#include <string>
#include <vector>

namespace nntile {

void keep_choices(const std::string& folder);  // where, from now on; without one they are this process's alone

// What was chosen for `key` in the folder's `file`; if nothing was, what `measure` says. One caller measures at a time;
// what it chooses meanwhile is not kept.
int chosen(const std::string& file, const std::string& key, const std::function<int()>& measure);

// Between the ways to compute something in a CUDA graph, where another one may be the fastest than alone: operands are
// not in the cache there, and a kernel ends just before.
struct Choice {
  size_t way, count;  // of them
  std::string file;   // where it is kept
  bool open = true;   // not yet made for graphs
  bool used = true;   // asked for since the caller has last set this to false
};
using Choices = std::map<std::string, Choice>;  // by what is kept
inline thread_local Choices* choices_in_graph = nullptr;  // of the program whose kernels this worker launches or captures
// The way that is to be taken now; `alone`: the fastest alone, which is taken outside of graphs.
size_t way_to_take(const std::function<std::string()>& file, const std::function<std::string()>& key, size_t count,
                   size_t alone);

// On CUDA workers, in choices_cuda.cpp.
// The least of some timings on this worker's stream, in ms; infinite where `run` returns false.
float least_ms(const std::function<bool()>& run);
// Where choices for this kind of GPU, library and driver are kept.
std::string choices_file(const std::string& kind, const std::string& library);
// Which of several ways to the same result is the fastest: measured once for `key`, 0 the first of them.
int fastest_of(const std::string& file, const std::string& key, const std::vector<std::function<void()>>& ways);

}  // namespace nntile
