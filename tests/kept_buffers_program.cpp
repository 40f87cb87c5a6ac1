// Keeps, takes and trims random buffers beside a list of all kept buffers, oldest first. Ends with an error at the
// first difference.
#include "kept_buffers.h"

#include <cstdio>
#include <cstdlib>
#include <random>

using nntile::KeptBuffers;

#define CHECK(condition) \
  if (!(condition)) std::exit((std::printf("line %d: %s\n", __LINE__, #condition), 1))

int main() {
  std::mt19937 random;
  KeptBuffers buffers;
  std::list<KeptBuffers::Buffer> kept, used;
  size_t held = 0, taken = 0, trimmed = 0;
  for (int step = 0; step < 100000; ++step) {
    const size_t bytes = 1 + random() % 20;
    if (const auto what = random() % 8; what < 4) {
      auto oldest = kept.begin();
      while (oldest != kept.end() && oldest->bytes != bytes) ++oldest;
      if (const auto address = buffers.take(bytes)) {
        CHECK(oldest != kept.end() && oldest->address == address);
        used.splice(used.end(), kept, oldest);
        ++taken;
      } else {
        CHECK(oldest == kept.end());
        buffers.add(bytes);
        held += bytes;
        used.push_back({uintptr_t(step) + 1, bytes});
      }
    } else if (what < 7 && !used.empty()) {
      const auto one = std::next(used.begin(), static_cast<std::ptrdiff_t>(random() % used.size()));
      buffers.keep(*one);
      kept.splice(kept.end(), used, one);
    } else if (what == 7) {
      const size_t limit = held - std::min(held, size_t(random() % 100));
      for (const auto& [address, freed] : buffers.trim(bytes, limit)) {
        CHECK(held + bytes > limit && !kept.empty() && kept.front().address == address && kept.front().bytes == freed);
        held -= freed;
        kept.pop_front();
        ++trimmed;
      }
      CHECK(kept.empty() || held + bytes <= limit);
    }
  }
  CHECK(taken && trimmed && !kept.empty());
  CHECK(buffers.trim(0, 0).size() == kept.size() && buffers.trim(0, 0).empty());
}
