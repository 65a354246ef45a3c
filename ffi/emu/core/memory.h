// Views of the memories that functional units read and write, and the observer through which the judge sees accesses.
#pragma once

#include <cstdint>
#include <cstring>

#include "core/error.h"

namespace emu {

enum class Space : uint8_t { kGlobal, kShared, kTensor };
enum class Proxy : uint8_t { kGeneric, kAsync, kTensorCore };  // who accesses: a thread; TMA/bulk copy; WGMMA/tcgen05

// Told of every access to shared memory when present (the machine installs one in checked runs; null costs one test).
class SharedObserver {
 public:
  virtual ~SharedObserver() = default;
  // False: some of it was never written. For others than threads that is an error.
  virtual bool read(uint32_t address, uint32_t bytes, Proxy proxy) = 0;
  virtual void write(uint32_t address, uint32_t bytes, Proxy proxy) = 0;
};

// One CTA's shared memory. Addresses are offsets from its start (the CTA's rank in the cluster, bits 24 and up of a
// shared::cluster address, is already taken off).
struct SharedView {
  uint8_t* data = nullptr;
  uint32_t bytes = 0;
  SharedObserver* observer = nullptr;

  void check(uint32_t address, uint32_t length) const {
    if (address > bytes || length > bytes - address)
      throw fail("shared memory: access to %u bytes at 0x%x, the block has %u bytes", length, address, bytes);
  }
  const uint8_t* read(uint32_t address, uint32_t length, Proxy proxy) const {
    bool written = true;
    const uint8_t* from = load(address, length, proxy, &written);
    if (!written) throw fail("shared memory: %u bytes are read at 0x%x, but nothing was ever written there", length, address);
    return from;
  }
  // As `read`; memory that was never written is told of instead of refused.
  const uint8_t* load(uint32_t address, uint32_t length, Proxy proxy, bool* written) const {
    check(address, length);
    if (observer) *written = observer->read(address, length, proxy);
    return data + address;
  }
  uint8_t* write(uint32_t address, uint32_t length, Proxy proxy) const {
    check(address, length);
    if (observer) observer->write(address, length, proxy);
    return data + address;
  }
};

// Global memory is host memory. `regions` (may be empty: nothing is checked) is sorted by base.
struct GlobalRegion {
  uint64_t base;
  uint64_t bytes;
  bool writable;
};
// Told of accesses to regions that may be written, when present.
class GlobalObserver {
 public:
  virtual ~GlobalObserver() = default;
  virtual void read(const GlobalRegion&, uint64_t address, uint64_t bytes) = 0;
  virtual void write(const GlobalRegion&, uint64_t address, uint64_t bytes) = 0;
};
struct GlobalView {
  const GlobalRegion* regions = nullptr;
  uint64_t region_count = 0;
  GlobalObserver* observer = nullptr;

  // Throws when no region holds the whole access.
  const GlobalRegion& region_of(uint64_t address, uint64_t length, bool write) const;
  const uint8_t* read(uint64_t address, uint64_t length) const {
    if (region_count) {
      const GlobalRegion& region = region_of(address, length, false);
      if (observer && region.writable) observer->read(region, address, length);
    }
    return reinterpret_cast<const uint8_t*>(address);
  }
  uint8_t* write(uint64_t address, uint64_t length) const {
    if (region_count) {
      const GlobalRegion& region = region_of(address, length, true);
      if (observer) observer->write(region, address, length);
    }
    return reinterpret_cast<uint8_t*>(address);
  }
};

}  // namespace emu
