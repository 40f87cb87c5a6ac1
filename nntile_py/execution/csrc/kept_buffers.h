// Buffers in main memory that are kept for later tiles of the same size.
#pragma once

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <list>
#include <map>
#include <vector>

namespace nntile {

// Only bookkeeping: the caller allocates and frees the buffers, and holds a lock.
class KeptBuffers {
 public:
  struct Buffer {
    uintptr_t address;
    size_t bytes;
  };

  // Counts a new buffer of a tile.
  void add(size_t bytes) { held_ += bytes; }

  // Keeps a buffer that a tile has freed.
  void keep(Buffer buffer) {
    oldest_first_.push_back(buffer);
    by_size_.emplace(buffer.bytes, std::prev(oldest_first_.end()));
  }

  // Returns the address of a kept buffer of this size, which now belongs to a tile; 0 if no kept buffer has this size.
  uintptr_t take(size_t bytes) {
    const auto found = by_size_.lower_bound(bytes);
    if (found == by_size_.end() || found->first != bytes) return 0;
    const auto address = found->second->address;
    oldest_first_.erase(found->second);
    by_size_.erase(found);
    return address;
  }

  // Removes kept buffers, the oldest first, until the buffers of tiles, kept buffers and `more` take at most `limit`
  // bytes. Returns the removed buffers.
  std::vector<Buffer> trim(size_t more, size_t limit) {
    std::vector<Buffer> removed;
    while (!oldest_first_.empty() && held_ + more > limit) {
      const Buffer buffer = oldest_first_.front();
      auto same = by_size_.lower_bound(buffer.bytes);  // the oldest of its size, since equal keys stay in their order
      oldest_first_.pop_front();
      by_size_.erase(same);
      held_ -= buffer.bytes;
      removed.push_back(buffer);
    }
    return removed;
  }

 private:
  std::list<Buffer> oldest_first_;
  std::multimap<size_t, std::list<Buffer>::iterator> by_size_;
  size_t held_ = 0;  // bytes of the buffers of tiles and of kept buffers
};

}  // namespace nntile
