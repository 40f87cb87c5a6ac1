// Memory of tiles with CUDA devices. On a device, tiles come from ATen's allocator, which splits and merges blocks of
// any size; StarPU's own cache reuses buffers only for equal sizes. All uses of a tile's block are on one stream, or
// wait for this stream (queue_cuda.cpp), so a freed block is really free. The queue does not know the workspaces of
// kernels. Tiles are allocated under a separate stream (`key_of_tiles`), so ATen never reuses a workspace's block for a
// tile. In main memory, StarPU pins each buffer, at about 2 GB/s, while copies reach 50 GB/s. So freed buffers are
// kept, and reused for tiles of the same size.
#include <c10/cuda/CUDACachingAllocator.h>

#include <array>
#include <atomic>

#include "internal.h"
#include "kept_buffers.h"
#include "on_cuda.h"

namespace nntile {
namespace {

namespace blocks = c10::cuda::CUDACachingAllocator;

constexpr size_t kForKernels = size_t{512} << 20;

// Main memory of tiles. StarPU counts the bytes of tiles, but not of kept buffers, so kept buffers do not stop
// evictions.
class MainMemory {
 public:
  // Returns the address of a buffer; 0 if there is no memory for it within the limit.
  uintptr_t allocate(size_t bytes) {
    if (starpu_memory_allocate(STARPU_MAIN_RAM, bytes, 0)) return 0;
    auto address = take(bytes);
    if (!address) {
      free_kept(bytes, g.pinned);
      address = pin(bytes);
      if (!address && free_kept(bytes, 0)) address = pin(bytes);
      const std::lock_guard lock(mutex_);
      if (address) buffers_.add(bytes);
    }
    if (!address) starpu_memory_deallocate(STARPU_MAIN_RAM, bytes);
    return address;
  }

  void free(size_t bytes, uintptr_t address) {
    {
      const std::lock_guard lock(mutex_);
      buffers_.keep({address, bytes});
    }
    if (!g.running) free_kept(0, 0);
    starpu_memory_deallocate(STARPU_MAIN_RAM, bytes);
  }

  // Frees kept buffers until the buffers of tiles, kept buffers and `more` take at most `limit` bytes. Returns whether
  // it freed any.
  bool free_kept(size_t more, size_t limit) {
    std::vector<KeptBuffers::Buffer> freed;
    {
      const std::lock_guard lock(mutex_);
      freed = buffers_.trim(more, limit);
    }
    for (const auto& [address, bytes] : freed) starpu_free_on_node_flags(STARPU_MAIN_RAM, address, bytes, kFlags);
    return !freed.empty();
  }

 private:
  static constexpr int kFlags = STARPU_MALLOC_PINNED;  // without STARPU_MALLOC_COUNT
  static uintptr_t pin(size_t bytes) { return starpu_malloc_on_node_flags(STARPU_MAIN_RAM, bytes, kFlags); }

  uintptr_t take(size_t bytes) {
    const std::lock_guard lock(mutex_);
    return buffers_.take(bytes);
  }

  std::mutex mutex_;
  KeptBuffers buffers_;
};

MainMemory& main_memory() {
  static auto& memory = *new MainMemory;
  return memory;
}

size_t held(c10::DeviceIndex device) { return static_cast<size_t>(blocks::getDeviceStats(device).reserved_bytes[0].current); }

// Returns whether tiles may take `more` bytes of a device and still leave kForKernels for the workspaces of kernels,
// both of the process's limit and of the free memory: a kernel without workspace fails, while a tile can wait for
// evictions. ATen's own count is used, since ATen holds more memory than tiles use: unused parts of segments.
bool leaves_room(c10::DeviceIndex device, size_t more = 0) {
  size_t free = 0, total = 0;
  if (cudaMemGetInfo(&free, &total) != cudaSuccess) return true;
  const auto limit = static_cast<size_t>(blocks::getMemoryFraction(device) * static_cast<double>(total));
  const size_t own = held(device);
  return std::min(free, limit > own ? limit - own : 0) >= std::min<size_t>(kForKernels, limit / 8) + more;
}

// For each device: true if tiles are cut from one block (reserve_for_tiles). Then no other memory is available, and an
// attempt to allocate from the driver would stall the device for a millisecond.
std::array<std::atomic<bool>, STARPU_MAXCUDADEVS> g_reserved{};

size_t largest_block(c10::DeviceIndex device) {
  size_t largest = 1;
  blocks::cacheInfo(device, &largest);
  return largest;
}

bool would_not_fit(c10::DeviceIndex device, size_t bytes) {
  return g_reserved.at(static_cast<size_t>(device)) && largest_block(device) < bytes && !leaves_room(device, bytes);
}

// The smallest size that a device could not allocate since a block was last freed. Requests of at least this size are
// refused at once: StarPU repeats a request often, and each attempt to allocate takes milliseconds.
class Room {
 public:
  uint64_t now() {
    const std::lock_guard lock(mutex_);
    return given_back_;
  }

  void refuse(size_t bytes, uint64_t since) {
    const std::lock_guard lock(mutex_);
    if (since == given_back_) refused_ = std::min(refused_, bytes);
  }

  void give_back() {
    const std::lock_guard lock(mutex_);
    ++given_back_;
    refused_ = SIZE_MAX;
  }

  bool lacks(size_t bytes) {
    const std::lock_guard lock(mutex_);
    return bytes >= refused_;
  }

 private:
  std::mutex mutex_;
  uint64_t given_back_ = 0;  // number of blocks freed so far
  size_t refused_ = SIZE_MAX;
};

Room& room(unsigned node) {
  static auto& rooms = *new std::array<Room, STARPU_MAXCUDADEVS>;
  return rooms.at(static_cast<size_t>(starpu_memory_node_get_devid(node)));
}

// Returns the address of a new block; 0 if there is no memory for it within the limit or on the GPU.
uintptr_t allocate_on_device(unsigned node, size_t bytes) {
  const auto since = room(node).now();
  if (room(node).lacks(bytes) || starpu_memory_allocate(node, bytes, 0)) return 0;
  const auto device = static_cast<c10::DeviceIndex>(starpu_memory_node_get_devid(node));
  try {
    const c10::cuda::CUDAGuard guard(device);
    const bool scarce = starpu_memory_get_available(node) < starpu_memory_get_total(node) / 4;
    const size_t before = scarce ? held(device) : 0;
    if (!scarce || !would_not_fit(device, bytes)) {
      auto* block = blocks::raw_alloc_with_stream(std::max<size_t>(bytes, 1), key_of_tiles(device));
      if (!scarce || held(device) <= before || leaves_room(device)) return reinterpret_cast<uintptr_t>(block);
      blocks::raw_delete(block);
      blocks::emptyCache();
    }
  } catch (const c10::OutOfMemoryError&) {  // within the limit: other processes use the GPU, too
  } catch (const std::exception& error) {
    fail("CUDA", error.what());
  }
  starpu_memory_deallocate(node, bytes);
  room(node).refuse(bytes, since);
  return 0;
}

bool is_device(unsigned node) { return starpu_node_get_kind(node) == STARPU_CUDA_RAM; }

// With STARPU_USE_NUMA, main memory has several nodes; StarPU itself allocates on those after the first.
bool is_ours(unsigned node) { return g.cuda && (is_device(node) || node == STARPU_MAIN_RAM); }

starpu_ssize_t allocate(void* buffer, unsigned node) {
  if (!is_ours(node)) return starpu_interface_variable_ops.allocate_data_on_node(buffer, node);
  const size_t bytes = STARPU_VARIABLE_GET_ELEMSIZE(buffer);
  const auto address = is_device(node) ? allocate_on_device(node, bytes) : main_memory().allocate(bytes);
  if (!address) return -ENOMEM;
  auto& variable = *static_cast<starpu_variable_interface*>(buffer);
  variable.ptr = variable.dev_handle = address;
  variable.offset = 0;
  return static_cast<starpu_ssize_t>(bytes);
}

void free(void* buffer, unsigned node) {
  if (!is_ours(node)) return starpu_interface_variable_ops.free_data_on_node(buffer, node);
  auto& variable = *static_cast<starpu_variable_interface*>(buffer);
  if (is_device(node)) {
    blocks::raw_delete(reinterpret_cast<void*>(variable.ptr));
    starpu_memory_deallocate(node, variable.elemsize);
    room(node).give_back();
  } else {
    main_memory().free(variable.elemsize, variable.ptr);
  }
  variable.ptr = variable.dev_handle = 0;
}

}  // namespace

void free_kept_memory() {
  main_memory().free_kept(0, 0);
  for (auto& reserved : g_reserved) reserved = false;  // the next runtime may use segments
}

// Allocates one block on each device, from which tiles are cut. ATen never merges segments that it got from the driver:
// without this block, all segments end up too small when memory is short.
void reserve_for_tiles() {
  for (unsigned node = 0; node < starpu_memory_nodes_get_count(); ++node) {
    if (!is_device(node) || starpu_memory_get_used(node)) continue;  // tiles exist already
    const auto device = static_cast<c10::DeviceIndex>(starpu_memory_node_get_devid(node));
    auto& reserved = g_reserved.at(static_cast<size_t>(device));
    const size_t bytes = starpu_memory_get_total(node);
    reserved = largest_block(device) >= bytes;  // an earlier runtime has allocated the block
    if (reserved || !leaves_room(device, bytes)) continue;
    const c10::cuda::CUDAGuard guard(device);
    try {
      blocks::raw_delete(blocks::raw_alloc_with_stream(bytes, key_of_tiles(device)));
      blocks::resetPeakStats(device);  // no tile uses the block yet
      reserved = true;
    } catch (const c10::OutOfMemoryError&) {  // other processes use the GPU, too: use segments
    }
  }
}

bool lacks_room(unsigned node, size_t bytes) { return is_device(node) && room(node).lacks(bytes); }

starpu_data_interface_ops* tile_interface() {
  static starpu_data_interface_ops ops = [] {
    auto variable = starpu_interface_variable_ops;
    variable.copy_methods = tile_copies();
    variable.allocate_data_on_node = allocate;
    variable.free_data_on_node = free;
    variable.dontcache = 1;
    return variable;
  }();
  return &ops;
}

}  // namespace nntile
