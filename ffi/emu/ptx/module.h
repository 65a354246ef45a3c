// A PTX module as parsed: names resolved, nothing interpreted yet.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace emu::ptx {

struct Register {
  std::string name;
  uint8_t bits;  // 1 (predicate), 16, 32, 64 or 128
};

struct Operand {
  enum Kind : uint8_t {
    kRegister,  // reg; negated: !p
    kInteger,   // bits (two's complement)
    kFloat,     // bits; wide: 0d (64-bit), else 0f (32-bit) or a decimal number as 64-bit
    kName,      // name: a special register, a variable, a parameter or a label
    kVector,    // items: {a, b}
    kAddress,   // items[0] is the base, offset; items[1], when there, the vector of coordinates
    kPair,      // items: a|b
    kSink       // _
  };
  Kind kind = kSink;
  bool negated = false;
  bool wide = false;
  int reg = -1;
  uint64_t bits = 0;
  int64_t offset = 0;
  std::string name;
  std::vector<Operand> items;
};

struct Instruction {
  int line = 0;
  int guard = -1;  // predicate register; -1: none
  bool guard_negated = false;
  std::string opcode;               // "mbarrier"
  std::vector<std::string> suffix;  // "try_wait", "parity", ...
  std::vector<Operand> operands;

  std::string text() const {  // opcode with its modifiers
    std::string result = opcode;
    for (const std::string& s : suffix) result += "." + s;
    return result;
  }
};

struct Parameter {
  std::string name;
  uint32_t offset, bytes;
};

struct Variable {  // .shared or .global or .const or .local
  std::string name, space;
  uint32_t alignment = 1;
  uint64_t bytes = 0;  // 0 with `external`: the dynamic part of shared memory
  bool external = false;
  std::vector<uint8_t> initial;
};

struct Kernel {
  std::string name;
  int line = 0;
  std::vector<Parameter> parameters;
  uint32_t parameter_bytes = 0;
  uint32_t required_threads[3] = {0, 0, 0};  // .reqntid; 0: not given
  uint32_t required_cluster[3] = {0, 0, 0};  // .reqnctapercluster
  uint32_t max_registers = 0;                // .maxnreg
  std::vector<Register> registers;
  std::vector<Variable> variables;
  std::vector<Instruction> instructions;
  std::map<std::string, size_t> labels;  // name (made unique by its scope) to index of the instruction after it
};

struct Module {
  std::string target;  // "sm_100a"
  std::vector<Variable> variables;
  std::vector<Kernel> kernels;
};

Module parse(const char* text, size_t bytes);  // throws Error with the line

}  // namespace emu::ptx
