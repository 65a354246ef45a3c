// What an instruction family in exec/ uses to turn a parsed instruction into a record.
#pragma once

#include <map>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/error.h"
#include "decode/program.h"
#include "ptx/module.h"

namespace emu {

enum class Type : uint8_t { kNone, kPred, kB8, kU8, kS8, kB16, kU16, kS16, kF16, kBf16, kB32, kU32, kS32, kF32, kF16x2,
                            kBf16x2, kTf32, kB64, kU64, kS64, kF64, kF32x2, kB128 };
Type type_named(std::string_view suffix);  // kNone when it is none
int type_bits(Type);
bool type_signed(Type);

struct Address {
  Slot base;
  bool wide;       // 64-bit base
  int64_t offset;
};

// Symbols of the module and its kernel.
struct Symbol {
  enum Kind : uint8_t { kShared, kParameter, kLocal } kind;
  uint64_t value;  // offset in its memory
};
using SymbolTable = std::unordered_map<std::string, Symbol>;

class Builder {
 public:
  Builder(const ptx::Kernel& kernel, const SymbolTable& symbols, Program& program)
      : kernel(kernel), symbols(symbols), program(program) {}

  const ptx::Kernel& kernel;
  const SymbolTable& symbols;
  Program& program;
  const ptx::Instruction* at = nullptr;  // being decoded
  Inst inst;

  // Pass 1 records which registers each instruction reads and writes; pass 2 has their slots.
  bool recording = true;
  std::vector<uint32_t> reads, writes;  // of the current instruction, register numbers
  std::vector<Slot> slot_of_register;

  // -- operands ---------------------------------------------------------------------------------------------------
  size_t operand_count() const { return at->operands.size(); }
  const ptx::Operand& operand(size_t i) const;     // throws when absent
  void expect_operands(size_t least, size_t most) const;
  Slot source(const ptx::Operand&, int bits);       // register, constant or special register, as `bits` wide (1 to 64)
  Slot source(size_t i, Type type) { return source(operand(i), type_bits(type)); }
  Slot destination(const ptx::Operand&, int bits);  // kNoSlot for the sink _
  Slot destination(size_t i, Type type) { return destination(operand(i), type_bits(type)); }
  Slot read_write(const ptx::Operand&, int bits);
  std::vector<Slot> sources(const ptx::Operand& vector, int bits);       // {a, b, ...} or a single operand
  std::vector<Slot> destinations(const ptx::Operand& vector, int bits);
  Address address(const ptx::Operand&);
  uint64_t immediate(size_t i) const;               // must be an integer constant
  Slot constant(uint64_t bits, int width);          // broadcast to all lanes
  Slot special(Special, bool wide, int64_t addend);
  int register_bits(const ptx::Operand&) const;     // 0 when it is no register

  // -- modifiers, taken in any order; what is left over is refused ----------------------------------------------------
  void begin_modifiers();
  bool take(std::string_view suffix);
  Type take_type();                // the next (leftmost) type among the modifiers; throws when there is none
  bool peek_type() const;
  // Takes whichever of the names is there and returns its index, or -1.
  int take_one(std::initializer_list<std::string_view> names);
  void finish_modifiers() const;   // throws for what nobody took

  template <class E>
  E* make_extra() {
    auto owned = std::make_unique<E>();
    E* raw = owned.get();
    program.extras.push_back(std::move(owned));
    inst.extra = raw;
    return raw;
  }
  [[noreturn]] void refuse(const std::string& why) const;

 private:
  std::vector<std::string> left_;
  std::map<std::pair<uint64_t, int>, Slot> constants_;
  std::map<std::pair<std::pair<int, bool>, int64_t>, Slot> specials_;
};

using Decode = void (*)(Builder&);
using DecodeTable = std::unordered_map<std::string, Decode>;

// One function a family; each adds its opcodes.
void register_integer(DecodeTable&);
void register_bits(DecodeTable&);
void register_carry(DecodeTable&);
void register_float(DecodeTable&);
void register_convert(DecodeTable&);
void register_predicate(DecodeTable&);
void register_move(DecodeTable&);
void register_shuffle(DecodeTable&);
void register_control(DecodeTable&);
void register_memory(DecodeTable&);
void register_atomic(DecodeTable&);
void register_matrix_memory(DecodeTable&);
void register_mbarrier(DecodeTable&);
void register_fence(DecodeTable&);
void register_copy(DecodeTable&);
void register_wgmma(DecodeTable&);
void register_tcgen05(DecodeTable&);
void register_cluster_launch(DecodeTable&);

// Decodes one kernel; throws Error with the PTX line.
std::unique_ptr<Program> decode(const ptx::Module&, const ptx::Kernel&);

}  // namespace emu
