#include "judge/taint.h"

#include "core/error.h"
#include "machine/warp.h"

namespace emu {
namespace {

constexpr uint32_t kUnitBytes = 128;

// Instructions that only compute.
bool carries(Unit unit) {
  switch (unit) {
    case Unit::kAlu:
    case Unit::kFma:
    case Unit::kFmaPacked:
    case Unit::kMufu:
    case Unit::kConvert:
    case Unit::kMove:
    case Unit::kPredicate:
    case Unit::kShuffle: return true;
    default: return false;
  }
}

const char* use_of(Unit unit) {
  switch (unit) {
    case Unit::kSharedStore:
    case Unit::kGlobalStore:
    case Unit::kTensorMemoryStore: return "a store";
    case Unit::kSharedLoad:
    case Unit::kGlobalLoad:
    case Unit::kTensorMemoryLoad: return "an address";
    case Unit::kControl: return "a branch";
    default: return "an operand";
  }
}

}  // namespace

void Taint::mark(Slot slot, uint32_t bits, Mask lanes, const Source& source) {
  if (slot == kNoSlot) return;
  for (uint32_t unit = 0; unit < (bits <= 32 ? 1u : bits / 32u); ++unit) {
    Marked& marked = registers_[slot / kUnitBytes + unit];
    marked.lanes |= lanes;
    marked.source = source;
  }
}

Taint::Marked Taint::at(Slot slot) const {
  if (slot & kConstantSlot) return {};
  const auto found = registers_.find(slot / kUnitBytes);
  return found == registers_.end() ? Marked{} : found->second;
}

Taint::Marked Taint::sources_of(Warp& warp, const Inst& in, Mask running, Mask active) const {
  const Program& program = warp.program();
  Marked result;
  const auto add = [&](const Marked& marked, Mask lanes) {
    if ((marked.lanes & lanes) && !result.lanes) result.source = marked.source;
    result.lanes |= marked.lanes & lanes;
  };
  const Slot* predicate = program.touched_predicates.data() + in.predicates;
  for (uint32_t i = 0; i < in.predicate_reads; ++i)
    if (const auto found = predicates_.find(predicate[i]); found != predicates_.end())
      add(found->second, predicate[i] == in.guard ? running : active);
  if (in.selects) {  // d = p ? a : b takes only the one
    const Mask chosen = warp.predicate(in.op[3]);
    add(at(in.op[1]), active & chosen);
    add(at(in.op[2]), active & ~chosen);
    return result;
  }
  const uint16_t* unit = program.touched.data() + in.touched;
  for (uint32_t i = 0; i < in.touched_reads; ++i)
    if (const auto found = registers_.find(unit[i]); found != registers_.end()) add(found->second, active);
  return result;
}

void Taint::set(std::unordered_map<uint32_t, Marked>& place, uint32_t key, Mask lanes, const Marked& from) {
  if (from.lanes) {
    Marked& marked = place[key];
    marked.lanes = (marked.lanes & ~lanes) | from.lanes;
    marked.source = from.source;
  } else if (const auto found = place.find(key); found != place.end()) {
    found->second.lanes &= ~lanes;
    if (!found->second.lanes) place.erase(found);
  }
}

void Taint::follow(Warp& warp, const Inst& in, Mask running, Mask active) {
  Marked from = sources_of(warp, in, running, active);
  const Program& program = warp.program();
  if (from.lanes && !carries(in.unit))
    throw fail("%s: nothing was ever written at 0x%x, which was read at PTX line %u; the value reaches %s here",
               from.source.memory, from.source.address, from.source.line, use_of(in.unit));
  if (from.lanes && in.unit == Unit::kShuffle) from.lanes = running;  // any lane may have it now
  const Mask written = active | from.lanes;
  const uint16_t* unit = program.touched.data() + in.touched;
  for (uint32_t i = in.touched_reads; i < in.touched_count; ++i) set(registers_, unit[i], written, from);
  const Slot* predicate = program.touched_predicates.data() + in.predicates;
  for (uint32_t i = in.predicate_reads; i < in.predicate_count; ++i) set(predicates_, predicate[i], written, from);
}

}  // namespace emu
