#include "buffers.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <unordered_map>
#include <utility>

#include "internal.h"

namespace nntile {

Buffers::Buffers(const TaskRecord& record, void** buffers, c10::Device device) : starpu_buffers_(buffers) {
  const auto& fetched = record.fetched();
  if (record.scratch.empty() && fetched.same_tiles) return;
  own_.reserve(record.tiles.size() + record.scratch.size());
  const auto add = [&](const Tile& tile, void* address) {
    auto& buffer = own_.emplace_back();
    buffer.id = STARPU_VARIABLE_INTERFACE_ID;
    buffer.ptr = buffer.dev_handle = reinterpret_cast<uintptr_t>(address);
    buffer.elemsize = tile.bytes;
    all_.push_back(&buffer);
  };
  for (size_t k = 0; k < record.tiles.size(); ++k) {
    const auto& tile = *record.tiles[k];
    const int place = fetched.places[k];
    if (place < 0) add(tile, tile.address);
    else if (tile.whole) add(tile, pointer(tile, buffers[place]));
    else all_.push_back(buffers[place]);
  }
  if (record.scratch.empty()) return;
  size_t bytes = 0;
  const auto place = [&](const Tile& tile) {
    return std::exchange(bytes, bytes + (tile.bytes + kAlignment - 1) / kAlignment * kAlignment);
  };
  std::vector<size_t> offsets;
  for (const auto& tile : record.scratch) offsets.push_back(place(*tile));
  memory_ = at::empty({static_cast<int64_t>(bytes)}, at::TensorOptions(at::kByte).device(device));
  for (size_t k = 0; k < offsets.size(); ++k) add(*record.scratch[k], memory_.data_ptr<uint8_t>() + offsets[k]);
}

// All accesses to parts of one tile become one access to the whole tile. A task that writes a part must keep the other
// parts, so this access also reads.
Fetched fetched_of(const TaskRecord& record, bool with_residents) {
  Fetched fetched;
  std::unordered_map<const Tile*, int> places;
  const auto& residents = record.residents;
  for (size_t k = 0; k < record.tiles.size(); ++k) {
    const auto& whole = record.tiles[k]->whole ? record.tiles[k]->whole : record.tiles[k];
    const int mode = record.modes[k] | (record.tiles[k]->whole ? STARPU_R : 0);
    if (!with_residents && std::find(residents.begin(), residents.end(), static_cast<int>(k)) != residents.end()) {
      fetched.places.push_back(-1);
      continue;
    }
    const auto [place, is_new] = places.emplace(whole.get(), static_cast<int>(fetched.tiles.size()));
    fetched.places.push_back(place->second);
    if (is_new) fetched.tiles.push_back(whole), fetched.modes.push_back(mode);
    else fetched.modes[static_cast<size_t>(place->second)] |= mode;
  }
  fetched.same_tiles = fetched.tiles == record.tiles;
  return fetched;
}

}  // namespace nntile
