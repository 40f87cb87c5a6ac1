// Reader of the structs that scripts/args_headers.py generates.
#pragma once
#include <c10/util/ArrayRef.h>

#include <array>
#include <optional>

#include "kernel.h"

namespace nntile {

// Reads a task's ints and floats in order.
struct ArgsReader {
  const Args& t;
  size_t next_int = 0, next_float = 0;

  int64_t integer() { return t.i(next_int++); }
  double real() { return t.f(next_float++); }

  template <size_t count>
  std::array<int64_t, count> integers() {
    std::array<int64_t, count> result;
    for (auto& value : result) value = integer();
    return result;
  }

  at::IntArrayRef rest() {
    const auto left = t.ints().subspan(next_int);
    next_int += left.size();
    return {left.data(), left.size()};
  }

  // Reads an optional group of arguments, present if ints are left.
  template <class Group>
  std::optional<Group> group() {
    return next_int < t.ints().size() ? std::make_optional<Group>(*this) : std::nullopt;
  }
};

}  // namespace nntile
