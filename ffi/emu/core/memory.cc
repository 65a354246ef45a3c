#include "core/memory.h"

#include <algorithm>
#include <cinttypes>

namespace emu {

const GlobalRegion& GlobalView::region_of(uint64_t address, uint64_t length, bool write) const {
  const GlobalRegion* end = regions + region_count;
  const GlobalRegion* after =
      std::upper_bound(regions, end, address, [](uint64_t a, const GlobalRegion& r) { return a < r.base; });
  const char* verb = write ? "store to" : "load from";
  if (after == regions)
    throw fail("global memory: %s 0x%" PRIx64 " (%" PRIu64 " bytes), below every array", verb, address, length);
  const GlobalRegion& region = after[-1];
  const uint64_t offset = address - region.base;
  if (offset > region.bytes || length > region.bytes - offset)
    throw fail("global memory: %s 0x%" PRIx64 " (%" PRIu64 " bytes), which is %" PRIu64
               " bytes into an array of %" PRIu64 " bytes",
               verb, address, length, offset, region.bytes);
  if (write && !region.writable)
    throw fail("global memory: store to 0x%" PRIx64 ", %" PRIu64 " bytes into a read-only array", address, offset);
  return region;
}

}  // namespace emu
