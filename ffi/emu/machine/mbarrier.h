// mbarrier objects: the 64-bit word in shared memory itself holds their state.
//   0-19 arrivals still pending; 20-39 arrivals expected in each phase; 40-60 transaction bytes still pending (signed);
//   61 phase; 62-63 the pattern 10, so that memory that is no mbarrier is told apart
#pragma once

#include <cstdint>

#include "machine/cluster.h"

namespace emu::mbarrier {

inline constexpr uint32_t kMaxCount = (1u << 20) - 1;

// `address`: of any CTA of the cluster.
void init(Cluster&, uint32_t address, uint32_t count);
void invalidate(Cluster&, uint32_t address);
uint64_t arrive(Cluster&, uint32_t address, uint32_t count, bool drop = false);  // returns the state before
void expect_tx(Cluster&, uint32_t address, uint32_t bytes);
void complete_tx(Cluster&, uint32_t address, uint32_t bytes);
// At the end: an error where a barrier was told of more bytes than it expected. (Fewer is how pipelines wind down.)
void check_finished(Cluster&);
uint32_t phase(Cluster&, uint32_t address);                    // 0 or 1: of the phase that is not complete
inline uint32_t phase_of_state(uint64_t state) { return static_cast<uint32_t>(state >> 61 & 1); }

}  // namespace emu::mbarrier
