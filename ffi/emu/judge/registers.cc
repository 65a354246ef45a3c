#include "judge/registers.h"

#include <algorithm>

#include "core/error.h"

namespace emu {
namespace {

// The registers of an instruction by their numbers in the text: those it reads, then those it writes.
struct Named {
  Named(const Program& program, const Inst& in)
      : reads(program.named.data() + in.named), writes(reads + in.named_reads), end(reads + in.named_count) {}
  const uint32_t* reads;
  const uint32_t* writes;
  const uint32_t* end;
};

}  // namespace

uint32_t RegistersInFlight::issue(const uint32_t* begin, const uint32_t* end, uint32_t line) {
  ++issued_;
  for (const uint32_t* r = begin; r != end; ++r) registers_[*r] = {issued_, line};
  return issued_;
}

uint32_t RegistersInFlight::access(const Inst& in, bool* writes) {
  const Named named(program_, in);
  if (in.moves && named.reads != named.writes) {
    const uint32_t* const last = std::max_element(
        named.reads, named.writes, [&](uint32_t a, uint32_t b) { return at(a).operation < at(b).operation; });
    const Register moved = at(*last);
    for (const uint32_t* w = named.writes; w != named.end; ++w) registers_[*w] = moved;
    return 0;
  }
  if (issued_ == waited_) return 0;
  for (const uint32_t* r = named.reads; r != named.end; ++r)
    if (in_flight(*r)) {
      *writes = r >= named.writes;
      return at(*r).line;
    }
  return 0;
}

void WgmmaRegisters::issue(const Inst& in, size_t d_count, size_t a_count) {
  const uint32_t* const named = program_.named.data() + in.named;
  for (size_t i = 0; i < d_count + a_count; ++i) {
    if (i >= d_count && held_.in_flight(named[i]))
      throw fail("wgmma: a register of A belongs to the wgmma.mma_async of PTX line %u, for which no wgmma.wait_group waited",
                 held_.at(named[i]).line);
    if (fences_ == 0 || written_[named[i]] > fences_)
      throw fail("missing wgmma.fence: %s was written by another instruction and there was no wgmma.fence since",
                 i < d_count ? "an accumulator" : "a register of A");
  }
  held_.issue(named, named + d_count + a_count, in.line);
}

void WgmmaRegisters::wait(size_t keep) {
  for (; groups_.size() > keep; groups_.pop_front()) held_.wait(groups_.front());
}

void WgmmaRegisters::access(const Inst& in) {
  bool writes = false;
  if (const uint32_t line = held_.access(in, &writes))
    throw fail("missing wgmma.wait_group: a register is %s that belongs to the wgmma.mma_async of PTX line %u",
               writes ? "written" : "read", line);
  const Named named(program_, in);
  uint32_t written = in.moves ? 0 : fences_ + 1;
  if (in.moves)
    for (const uint32_t* r = named.reads; r != named.writes; ++r) written = std::max(written, written_[*r]);
  for (const uint32_t* w = named.writes; w != named.end; ++w) written_[*w] = written;
}

void TensorLoadRegisters::issue(const Inst& in) {
  const Named named(program_, in);
  held_.issue(named.writes, named.end, in.line);
}

void TensorLoadRegisters::access(const Inst& in) {
  bool writes = false;
  if (const uint32_t line = held_.access(in, &writes))
    throw fail("strict: a register is %s before tcgen05.wait::ld, that the tcgen05.ld of PTX line %u loads",
               writes ? "written" : "used", line);
}

}  // namespace emu
