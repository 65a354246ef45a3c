// Values that were read from shared or tensor memory where nothing was ever written. They may travel through a warp's
// registers, and through a selection that drops them; reaching a store, a branch, an address or any other instruction
// that acts on them is an error. Kept by register and lane, for the few registers that hold such a value: a warp that
// never read one pays a test per instruction.
#pragma once

#include <cstdint>
#include <unordered_map>

#include "core/lanes.h"
#include "decode/program.h"

namespace emu {

class Taint {
 public:
  struct Source {
    const char* memory;  // "shared memory" or "tensor memory"
    uint32_t address;
    uint32_t line;       // PTX, of the load
  };

  bool any() const { return !registers_.empty() || !predicates_.empty(); }
  // The lanes of a register of `bits` received such a value.
  void mark(Slot slot, uint32_t bits, Mask lanes, const Source& source);
  // Before an instruction executes: `running` are the lanes that stand at it, `active` those for which its guard holds.
  // Carries the marks from its sources to its destinations, or throws where it may not have such a source.
  void follow(Warp& warp, const Inst& in, Mask running, Mask active);

 private:
  struct Marked {
    Mask lanes = 0;
    Source source{};
  };
  Marked sources_of(Warp& warp, const Inst& in, Mask running, Mask active) const;
  Marked at(Slot slot) const;
  static void set(std::unordered_map<uint32_t, Marked>& place, uint32_t key, Mask lanes, const Marked& from);

  std::unordered_map<uint32_t, Marked> registers_;   // by unit of 128 bytes
  std::unordered_map<uint32_t, Marked> predicates_;  // by slot
};

}  // namespace emu
