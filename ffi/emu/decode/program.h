// A kernel ready to execute: compact records, one a PTX instruction.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "async/lateness.h"
#include "core/lanes.h"

namespace emu {

class Warp;
struct Inst;

// What the warp does after an instruction.
enum class Status : uint8_t {
  kNext,     // go on with the next instruction
  kBranch,   // `Warp` has already set where its lanes go
  kBlocked,  // executed nothing: try again when Warp's wait condition holds
  kSuspend,  // done; the warp sleeps until its wait condition holds, and then goes on with the next instruction
  kExit      // the lanes are gone
};

using Execute = Status (*)(Warp&, const Inst&, Mask);

// Counted classes of instructions (report: "units").
enum class Unit : uint8_t {
  kAlu, kFma, kFmaPacked, kMufu, kConvert, kMove, kPredicate, kShuffle, kControl, kBarrier, kSharedLoad, kSharedStore,
  kGlobalLoad, kGlobalStore, kAtomic, kTensorMemoryLoad, kTensorMemoryStore, kTensor, kAsyncCopy, kFence, kOther, kCount
};
inline constexpr const char* kUnitNames[] = {
    "alu", "fma", "fma_packed", "mufu", "convert", "move", "predicate", "shuffle", "control", "barrier", "shared_load",
    "shared_store", "global_load", "global_store", "atomic", "tensor_memory_load", "tensor_memory_store", "tensor",
    "async_copy", "fence", "other"};

// Where an operand lies: byte offset in the warp's registers, or, with the top bit, in the program's constants.
using Slot = uint32_t;
inline constexpr Slot kConstantSlot = 0x80000000u;
inline constexpr Slot kNoSlot = 0x7fffffffu;

struct Extra {  // what does not fit a record: vectors of operands, forms of tensor instructions
  virtual ~Extra() = default;
};

struct Inst {
  Execute execute = nullptr;
  Slot guard = kNoSlot;  // predicate
  uint32_t guard_flip = 0;  // all ones: negated
  Slot op[6] = {kNoSlot, kNoSlot, kNoSlot, kNoSlot, kNoSlot, kNoSlot};  // destination first
  int64_t immediate = 0;
  const Extra* extra = nullptr;
  uint32_t target = 0;        // branches: instruction
  uint32_t reconverge = 0;    // branches: where diverging lanes meet; program size: nowhere
  uint32_t touched = 0;       // first of its register units in Program::touched
  uint16_t touched_count = 0;
  uint16_t touched_reads = 0; // the first of them are read, the others written
  uint32_t predicates = 0;    // likewise in Program::touched_predicates
  uint16_t predicate_count = 0, predicate_reads = 0;
  uint32_t named = 0;         // first of its registers in Program::named
  uint16_t named_count = 0, named_reads = 0;  // as for touched
  Unit unit = Unit::kOther;
  bool joins = false;         // lanes that diverged before may wait here for each other
  bool aligned = false;       // all lanes of the warp must execute it together
  bool chains = false;        // follows operations in flight in their order: no wait for registers they hold
  bool selects = false;       // op[0] = op[3] ? op[1] : op[2]
  bool moves = false;         // between registers
  bool always = false;        // execute even when the guard masks off every lane
  uint16_t form = 0;          // in Program::forms
  uint32_t line = 0;          // PTX
};

// Contents that are the same for a warp's whole life, put into its registers when it starts.
enum class Special : uint8_t {
  kTidX, kTidY, kTidZ, kNtidX, kNtidY, kNtidZ, kCtaidX, kCtaidY, kCtaidZ, kNctaidX, kNctaidY, kNctaidZ, kLaneid, kWarpid,
  kNwarpid, kSmid, kNsmid, kClusteridX, kClusteridY, kClusteridZ, kNclusteridX, kNclusteridY, kNclusteridZ,
  kClusterCtaidX, kClusterCtaidY, kClusterCtaidZ, kClusterNctaidX, kClusterNctaidY, kClusterNctaidZ, kClusterCtarank,
  kClusterNctarank, kIsExplicitCluster, kLanemaskEq, kLanemaskLt, kLanemaskLe, kLanemaskGt, kLanemaskGe, kDynamicSmemSize,
  kTotalSmemSize, kSharedBase, kParameterBase, kLocalBase, kCount
};

struct SpecialUse {
  Special special;
  Slot slot;
  bool wide;         // 64 bits
  int64_t addend;    // bases: offset of the variable
};

struct ProgramParameter {
  uint32_t offset, bytes;
};

struct Program {
  std::string name;
  std::vector<Inst> code;
  std::vector<std::unique_ptr<Extra>> extras;
  std::vector<uint8_t> constants;     // 64-byte aligned copies are made by Program::seal
  std::shared_ptr<uint8_t[]> constant_memory;
  const uint8_t* constant_base = nullptr;
  std::vector<std::string> forms;     // opcodes with their modifiers
  std::vector<uint16_t> touched;      // register units (128 bytes each) that instructions read or write
  std::vector<Slot> touched_predicates;
  bool has_wgmma = false, has_tensor_loads = false;
  OperationKinds operations;          // that its instructions start
  std::vector<uint32_t> named;        // where it has them: registers of the text that instructions read or write
  uint32_t register_count = 0;        // of the text
  std::vector<SpecialUse> specials;
  std::vector<ProgramParameter> parameters;
  uint32_t parameter_bytes = 0;
  uint32_t register_bytes = 0;        // of a warp
  uint32_t static_shared_bytes = 0;   // from kSharedBase on
  uint32_t local_bytes = 0;           // of a thread
  uint32_t required_threads[3] = {0, 0, 0};
  uint32_t required_cluster[3] = {0, 0, 0};
  uint32_t max_registers = 0;
  int line = 0;
};

inline constexpr uint32_t kSharedBase = 1024;  // real parts keep the first KiB for themselves
inline constexpr uint64_t kSharedWindow = uint64_t{1} << 60;

}  // namespace emu
