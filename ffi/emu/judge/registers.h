// Registers of a warp that asynchronous instructions still read or write, and the rules for them. Registers are those of
// the text. A move is no access: ptxas gives both ends one register, compilers put moves between an instruction and its
// wait, and published kernels move accumulators of products in flight. What was moved is watched in its new place.
#pragma once

#include <cstdint>
#include <deque>
#include <vector>

#include "decode/program.h"

namespace emu {

class RegistersInFlight {
 public:
  explicit RegistersInFlight(const Program& program) : program_(program), registers_(program.register_count) {}

  struct Register {
    uint32_t operation = 0;  // the last one that has it
    uint32_t line = 0;       // of that operation
  };
  const Register& at(uint32_t named) const { return registers_[named]; }
  bool in_flight(uint32_t named) const { return registers_[named].operation > waited_; }

  // A new operation, which has these registers.
  uint32_t issue(const uint32_t* begin, const uint32_t* end, uint32_t line);
  uint32_t issued() const { return issued_; }
  void wait(uint32_t operation) { waited_ = operation; }  // this one and those before are done
  // Any other instruction: the line of the operation whose register it touches, 0: of none.
  uint32_t access(const Inst& in, bool* writes);

 private:
  const Program& program_;
  std::vector<Register> registers_;
  uint32_t issued_ = 0, waited_ = 0;
};

// wgmma.mma_async (PTX ISA, "Asynchronous warpgroup level matrix instructions"): until a wgmma.wait_group for its group
// nobody may touch its accumulators and its A registers; and between an ordinary write to such a register and the
// instruction there must be a wgmma.fence. Constants moved into a register need none: compilers put such moves behind it.
class WgmmaRegisters {
 public:
  explicit WgmmaRegisters(const Program& program)
      : program_(program), held_(program), written_(program.register_count) {}

  void fence() { ++fences_; }
  // `d_count` accumulators and `a_count` registers of A come first among the registers that `in` reads.
  void issue(const Inst& in, size_t d_count, size_t a_count);
  void commit() { groups_.push_back(held_.issued()); }
  void wait(size_t keep);
  void access(const Inst& in);

 private:
  const Program& program_;
  RegistersInFlight held_;
  std::vector<uint32_t> written_;  // one more than the fences before the register's last ordinary write
  std::deque<uint32_t> groups_;    // committed: the last operation of each
  uint32_t fences_ = 0;
};

// tcgen05.ld: its registers may be touched after tcgen05.wait::ld. Hardware interlocks them: only strict runs ask.
class TensorLoadRegisters {
 public:
  explicit TensorLoadRegisters(const Program& program) : program_(program), held_(program) {}

  void issue(const Inst& in);
  void wait() { held_.wait(held_.issued()); }
  void access(const Inst& in);

 private:
  const Program& program_;
  RegistersInFlight held_;
};

}  // namespace emu
