// Finds the first task of a checked program that wrote a value that is not finite.
#include <ATen/ops/full.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/minimum.h>
#include <ATen/ops/where.h>

#include <array>
#include <limits>

#include "dtypes.h"
#include "internal.h"

namespace nntile {
namespace {

constexpr int64_t NONE = std::numeric_limits<int64_t>::max();
constexpr int TASK_BITS = 24, BODY_BITS = 12;

// Smallest key of a task that wrote a value that is not finite: on CPU workers, and on each device (in device memory).
std::atomic<int64_t> g_first{NONE};
std::array<at::Tensor, 64> g_of_devices;

// Returns the key of part `body` of a task. Parts submitted earlier have smaller keys.
int64_t key(const TaskInstance& instance, size_t body) {
  const auto run = static_cast<int64_t>(instance.run);
  return (run << TASK_BITS | instance.record->number) << BODY_BITS | static_cast<int64_t>(body);
}

}  // namespace

void check_finite(const TaskInstance& instance, size_t number, void** buffers, c10::Device device) {
  const auto& body = instance.record->bodies[number];
  for (size_t k = 0; k < body.tiles.size(); ++k) {
    const Tile& tile = *body.tiles[k];
    const auto place = static_cast<size_t>(body.places[k]);
    const int mode = instance.record->modes[place];
    if (!(mode & (STARPU_W | STARPU_REDUX)) || !at::isFloatingType(tile.dtype) || is_scaled(tile.dtype))
      continue;
    const auto x = filled_part(body, k, instance.floats + body.first_float, pointer(buffers[place]), device).tensor();
    const auto finite = at::isfinite(x).all();
    if (device.is_cpu()) {
      if (finite.item<bool>()) continue;
      auto first = g_first.load();
      while (key(instance, number) < first && !g_first.compare_exchange_weak(first, key(instance, number))) {
      }
    } else {
      auto& first = g_of_devices.at(static_cast<size_t>(device.index()));
      const auto none = at::full({}, NONE, finite.options().dtype(at::kLong));
      if (!first.defined()) first = none.clone();
      at::minimum_out(first, first, at::where(finite, none, key(instance, number)));
    }
  }
}

std::optional<NotFinite> take_not_finite() {
  wait_all();
  int64_t first = g_first.exchange(NONE);
  for (auto& of_device : g_of_devices) {
    if (of_device.defined()) first = std::min(first, of_device.item<int64_t>());
    of_device.reset();
  }
  if (first == NONE) return {};
  const auto part = [&](int from, int bits) { return static_cast<uint64_t>(first) >> from & ((uint64_t{1} << bits) - 1); };
  return NotFinite{part(TASK_BITS + BODY_BITS, 27), part(BODY_BITS, TASK_BITS), part(0, BODY_BITS)};
}

void forget_not_finite() {
  g_first = NONE;
  g_of_devices.fill({});
}

}  // namespace nntile
