#include "buffers.h"

#include <ATen/ops/empty.h>

#include <utility>

#include "internal.h"

namespace nntile {

Buffers::Buffers(const TaskRecord& record, void** buffers, c10::Device device) : starpu_buffers_(buffers) {
  if (record.scratch.empty() && !record.holds) return;
  own_.reserve(record.residents.size() + record.scratch.size());
  const auto add = [&](const Tile& tile, void* address) {
    auto& buffer = own_.emplace_back();
    buffer.id = STARPU_VARIABLE_INTERFACE_ID;
    buffer.ptr = buffer.dev_handle = reinterpret_cast<uintptr_t>(address);
    buffer.elemsize = tile.bytes;
    all_.push_back(&buffer);
  };
  for (const auto& tile : record.tiles)
    if (record.holds && tile->address) add(*tile, tile->address);
    else all_.push_back(*buffers++);
  if (record.scratch.empty()) return;
  constexpr size_t kAlignment = 256;  // bytes, as memory that CUDA allocates has
  size_t bytes = 0;
  const auto place = [&](const Tile& tile) {
    return std::exchange(bytes, bytes + (tile.bytes + kAlignment - 1) / kAlignment * kAlignment);
  };
  std::vector<size_t> offsets;
  for (const auto& tile : record.scratch) offsets.push_back(place(*tile));
  memory_ = at::empty({static_cast<int64_t>(bytes)}, at::TensorOptions(at::kByte).device(device));
  for (size_t k = 0; k < offsets.size(); ++k) add(*record.scratch[k], memory_.data_ptr<uint8_t>() + offsets[k]);
}

}  // namespace nntile
