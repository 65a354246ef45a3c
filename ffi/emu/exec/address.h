// Addresses of the lanes of a warp, checked.
#pragma once

#include <cinttypes>

#include "exec/lane_ops.h"
#include "machine/cluster.h"
#include "machine/launch.h"

namespace emu {

// Where an instruction's address operand lies: base in op[kBase], offset in Inst::immediate.
struct AddressForm {
  Slot base = kNoSlot;
  bool wide = false;
  int64_t offset = 0;

  uint64_t of(Warp& w, int lane) const {
    const uint64_t value = wide ? w.pairs(base)[lane] : w.words(base)[lane];
    return value + static_cast<uint64_t>(offset);
  }
};
inline AddressForm make_address(Builder& b, const ptx::Operand& o) {
  const Address a = b.address(o);
  return {a.base, a.wide, a.offset};
}

enum class AccessSpace : uint8_t { kGeneric, kGlobal, kShared, kSharedCluster, kParameter, kLocal };

// The state space among the modifiers. `shared::cta` and `shared` are the CTA's own.
inline AccessSpace take_space(Builder& b) {
  if (b.take("global") || b.take("const")) return AccessSpace::kGlobal;
  if (b.take("shared") || b.take("shared::cta")) return AccessSpace::kShared;
  if (b.take("shared::cluster")) return AccessSpace::kSharedCluster;
  if (b.take("local")) return AccessSpace::kLocal;
  if (b.take("param")) return AccessSpace::kParameter;
  return AccessSpace::kGeneric;
}

inline void check_aligned(uint64_t address, uint32_t bytes, const char* space) {
  if (address % bytes) throw fail("%s memory: address 0x%" PRIx64 " is not aligned to %u bytes", space, address, bytes);
}

// A shared address of another CTA of the cluster needs the .shared::cluster space.
inline const SharedView& shared_view(Warp& w, uint32_t address, bool cluster) {
  if (address >> 24 == w.cta.rank) return w.cta.shared;
  if (!cluster)
    throw fail("shared memory: 0x%08x is in CTA %u of the cluster, this is CTA %u; such an access needs .shared::cluster",
               address, address >> 24, w.cta.rank);
  return w.cta.cluster.shared_of(address, "shared memory");
}

inline const uint8_t* shared_read(Warp& w, uint32_t address, uint32_t bytes, bool cluster) {
  return shared_view(w, address, cluster).read(Cluster::offset_of(address), bytes, Proxy::kGeneric);
}
// As shared_read, for instructions whose results remember that memory was never written (judge/taint.h).
inline const uint8_t* shared_load(Warp& w, uint32_t address, uint32_t bytes, bool cluster, bool* written) {
  return shared_view(w, address, cluster).load(Cluster::offset_of(address), bytes, Proxy::kGeneric, written);
}
inline uint8_t* shared_write(Warp& w, uint32_t address, uint32_t bytes, bool cluster) {
  return shared_view(w, address, cluster).write(Cluster::offset_of(address), bytes, Proxy::kGeneric);
}
inline bool in_shared_window(uint64_t address) { return address >= kSharedWindow; }

}  // namespace emu
