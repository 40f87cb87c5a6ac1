// Choices that were made by measurement, kept for later processes: what is measured anew may turn out otherwise, and
// with it the last bits of a result.
#pragma once
#include <functional>
#include <string>

namespace nntile {

void keep_choices(const std::string& folder);  // where, from now on; without one they are this process's alone

// What was chosen for `key` in the folder's `file`; if nothing was, what `measure` says. One caller measures at a time;
// what it chooses meanwhile is not kept.
int chosen(const std::string& file, const std::string& key, const std::function<int()>& measure);

}  // namespace nntile
