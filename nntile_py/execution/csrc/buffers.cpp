#include "buffers.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <unordered_map>
#include <utility>

#include "internal.h"

namespace nntile {

Buffers::Buffers(const TaskRecord& record, void** buffers, c10::Device device) : of_starpu_(buffers) {
  const auto& fetched = record.fetched();
  if (record.scratch.empty() && fetched.same) return;
  own_.reserve(record.tiles.size() + record.scratch.size());
  const auto add = [&](const Tile& tile, void* address) {
    auto& made = own_.emplace_back();
    made.id = STARPU_VARIABLE_INTERFACE_ID;
    made.ptr = made.dev_handle = reinterpret_cast<uintptr_t>(address);
    made.elemsize = tile.bytes;
    all_.push_back(&made);
  };
  for (size_t k = 0; k < record.tiles.size(); ++k) {
    const auto& tile = *record.tiles[k];
    const int place = fetched.places[k];
    if (place < 0) add(tile, tile.address);
    else if (tile.whole) add(tile, pointer(tile, buffers[place]));
    else all_.push_back(buffers[place]);
  }
  if (record.scratch.empty()) return;
  constexpr size_t kAligned = 256;
  size_t bytes = 0;
  const auto place = [&](const Tile& tile) {
    return std::exchange(bytes, bytes + (tile.bytes + kAligned - 1) / kAligned * kAligned);
  };
  std::vector<size_t> offsets;
  for (const auto& tile : record.scratch) offsets.push_back(place(*tile));
  memory_ = at::empty({static_cast<int64_t>(bytes)}, at::TensorOptions(at::kByte).device(device));
  for (size_t k = 0; k < offsets.size(); ++k) add(*record.scratch[k], memory_.data_ptr<uint8_t>() + offsets[k]);
}

// Parts of one tile become one access to the whole. A task that writes a part only keeps the other parts, so the whole
// is also read.
Fetched fetched_of(const TaskRecord& record, bool residents) {
  Fetched made;
  std::unordered_map<const Tile*, int> places;
  for (size_t k = 0; k < record.tiles.size(); ++k) {
    const auto& whole = record.tiles[k]->whole ? record.tiles[k]->whole : record.tiles[k];
    const int mode = record.modes[k] | (record.tiles[k]->whole ? STARPU_R : 0);
    const auto& own = record.residents;
    if (!residents && std::find(own.begin(), own.end(), static_cast<int>(k)) != own.end()) {
      made.places.push_back(-1);
      continue;
    }
    const auto [found, fresh] = places.emplace(whole.get(), static_cast<int>(made.tiles.size()));
    made.places.push_back(found->second);
    if (fresh) made.tiles.push_back(whole), made.modes.push_back(mode);
    else made.modes[static_cast<size_t>(found->second)] |= mode;
  }
  made.same = made.tiles == record.tiles;
  return made;
}

}  // namespace nntile
