#include "decode/builder.h"

#include <algorithm>
#include <cstring>

namespace emu {
namespace {

struct TypeInfo {
  const char* name;
  Type type;
  int bits;
};
constexpr TypeInfo kTypes[] = {
    {"pred", Type::kPred, 1},  {"b8", Type::kB8, 8},     {"u8", Type::kU8, 8},       {"s8", Type::kS8, 8},
    {"b16", Type::kB16, 16},   {"u16", Type::kU16, 16},  {"s16", Type::kS16, 16},    {"f16", Type::kF16, 16},
    {"bf16", Type::kBf16, 16}, {"b32", Type::kB32, 32},  {"u32", Type::kU32, 32},    {"s32", Type::kS32, 32},
    {"f32", Type::kF32, 32},   {"f16x2", Type::kF16x2, 32}, {"bf16x2", Type::kBf16x2, 32}, {"tf32", Type::kTf32, 32},
    {"b64", Type::kB64, 64},   {"u64", Type::kU64, 64},  {"s64", Type::kS64, 64},    {"f64", Type::kF64, 64},
    {"f32x2", Type::kF32x2, 64}, {"b128", Type::kB128, 128}};

struct SpecialInfo {
  const char* name;
  Special special;
};
constexpr SpecialInfo kSpecials[] = {
    {"%tid.x", Special::kTidX},           {"%tid.y", Special::kTidY},           {"%tid.z", Special::kTidZ},
    {"%ntid.x", Special::kNtidX},         {"%ntid.y", Special::kNtidY},         {"%ntid.z", Special::kNtidZ},
    {"%ctaid.x", Special::kCtaidX},       {"%ctaid.y", Special::kCtaidY},       {"%ctaid.z", Special::kCtaidZ},
    {"%nctaid.x", Special::kNctaidX},     {"%nctaid.y", Special::kNctaidY},     {"%nctaid.z", Special::kNctaidZ},
    {"%laneid", Special::kLaneid},        {"%warpid", Special::kWarpid},        {"%nwarpid", Special::kNwarpid},
    {"%smid", Special::kSmid},            {"%nsmid", Special::kNsmid},
    {"%clusterid.x", Special::kClusteridX}, {"%clusterid.y", Special::kClusteridY}, {"%clusterid.z", Special::kClusteridZ},
    {"%nclusterid.x", Special::kNclusteridX}, {"%nclusterid.y", Special::kNclusteridY},
    {"%nclusterid.z", Special::kNclusteridZ},
    {"%cluster_ctaid.x", Special::kClusterCtaidX}, {"%cluster_ctaid.y", Special::kClusterCtaidY},
    {"%cluster_ctaid.z", Special::kClusterCtaidZ}, {"%cluster_nctaid.x", Special::kClusterNctaidX},
    {"%cluster_nctaid.y", Special::kClusterNctaidY}, {"%cluster_nctaid.z", Special::kClusterNctaidZ},
    {"%cluster_ctarank", Special::kClusterCtarank}, {"%cluster_nctarank", Special::kClusterNctarank},
    {"%is_explicit_cluster", Special::kIsExplicitCluster}, {"%lanemask_eq", Special::kLanemaskEq},
    {"%lanemask_lt", Special::kLanemaskLt}, {"%lanemask_le", Special::kLanemaskLe},
    {"%lanemask_gt", Special::kLanemaskGt}, {"%lanemask_ge", Special::kLanemaskGe},
    {"%dynamic_smem_size", Special::kDynamicSmemSize}, {"%total_smem_size", Special::kTotalSmemSize}};

size_t align_up(size_t value, size_t alignment) { return (value + alignment - 1) / alignment * alignment; }

}  // namespace

Type type_named(std::string_view suffix) {
  for (const TypeInfo& t : kTypes)
    if (suffix == t.name) return t.type;
  return Type::kNone;
}
int type_bits(Type type) {
  for (const TypeInfo& t : kTypes)
    if (type == t.type) return t.bits;
  return 0;
}
bool type_signed(Type type) {
  return type == Type::kS8 || type == Type::kS16 || type == Type::kS32 || type == Type::kS64;
}

void Builder::refuse(const std::string& why) const {
  throw Error(at->text() + ": " + why, at->line);
}

const ptx::Operand& Builder::operand(size_t i) const {
  if (i >= at->operands.size()) refuse("operand " + std::to_string(i + 1) + " is missing");
  return at->operands[i];
}

void Builder::expect_operands(size_t least, size_t most) const {
  if (operand_count() < least || operand_count() > most)
    refuse(std::to_string(operand_count()) + " operands, expected " + std::to_string(least) +
           (most > least ? " to " + std::to_string(most) : ""));
}

int Builder::register_bits(const ptx::Operand& o) const {
  return o.kind == ptx::Operand::kRegister ? kernel.registers[o.reg].bits : 0;
}

Slot Builder::constant(uint64_t bits, int width) {
  const auto key = std::make_pair(bits, width);
  const auto found = constants_.find(key);
  if (found != constants_.end()) return found->second;
  const size_t offset = align_up(program.constants.size(), 64);
  const int element = width == 64 ? 8 : 4;
  const int count = width == 1 ? 1 : kLanes;
  const uint64_t value = width == 1 ? (bits ? kAllLanes : 0) : width == 16 ? bits & 0xffff : width == 8 ? bits & 0xff : bits;
  program.constants.resize(offset + static_cast<size_t>(element) * count);
  for (int i = 0; i < count; ++i) std::memcpy(&program.constants[offset + static_cast<size_t>(i) * element], &value, element);
  return constants_[key] = static_cast<Slot>(offset) | kConstantSlot;
}

Slot Builder::special(Special which, bool wide, int64_t addend) {
  const auto key = std::make_pair(std::make_pair(static_cast<int>(which), wide), addend);
  const auto found = specials_.find(key);
  if (found != specials_.end()) return found->second;
  const Slot slot = program.register_bytes;
  program.register_bytes += wide ? 256 : 128;
  program.specials.push_back({which, slot, wide, addend});
  return specials_[key] = slot;
}

Slot Builder::source(const ptx::Operand& o, int bits) {
  switch (o.kind) {
    case ptx::Operand::kRegister: {
      const int width = kernel.registers[o.reg].bits;
      if (width != bits && !(bits == 8 && width == 16))
        refuse("operand " + kernel.registers[o.reg].name + " has " + std::to_string(width) + " bits, expected " +
               std::to_string(bits));
      if (o.negated) refuse("a negated predicate is not known here");
      if (recording) reads.push_back(o.reg);
      return recording ? 0 : slot_of_register[o.reg];
    }
    case ptx::Operand::kInteger: return constant(o.bits, bits);
    case ptx::Operand::kFloat: {
      if (o.wide == (bits == 64)) return constant(o.bits, bits);
      if (!o.wide || bits != 32) refuse("floating-point constant of another width");
      double value;
      std::memcpy(&value, &o.bits, 8);
      const float narrow = static_cast<float>(value);
      uint32_t word;
      std::memcpy(&word, &narrow, 4);
      return constant(word, 32);
    }
    case ptx::Operand::kName: {
      if (o.name == "WARP_SZ") return constant(kLanes, bits);
      for (const SpecialInfo& s : kSpecials)
        if (o.name == s.name) {
          if (bits != 32) refuse("special register " + o.name + " has 32 bits, expected " + std::to_string(bits));
          return special(s.special, false, 0);
        }
      const auto symbol = symbols.find(o.name);
      if (symbol == symbols.end()) refuse("unknown name " + o.name);
      if (bits != 32 && bits != 64) refuse("address of " + o.name + " as an operand of " + std::to_string(bits) + " bits");
      const int64_t value = static_cast<int64_t>(symbol->second.value);
      if (symbol->second.kind == Symbol::kShared) return special(Special::kSharedBase, bits == 64, value);
      if (bits != 64) refuse("address of " + o.name + " has 64 bits");
      return special(symbol->second.kind == Symbol::kParameter ? Special::kParameterBase : Special::kLocalBase, true, value);
    }
    default: refuse("an operand of this kind is not known here");
  }
}

Slot Builder::destination(const ptx::Operand& o, int bits) {
  if (o.kind == ptx::Operand::kSink) return kNoSlot;
  if (o.kind != ptx::Operand::kRegister || o.negated) refuse("the destination must be a register");
  const int width = kernel.registers[o.reg].bits;
  if (width != bits && !(bits == 8 && width == 16))
    refuse("destination " + kernel.registers[o.reg].name + " has " + std::to_string(width) + " bits, expected " +
           std::to_string(bits));
  if (recording) writes.push_back(o.reg);
  return recording ? 0 : slot_of_register[o.reg];
}

Slot Builder::read_write(const ptx::Operand& o, int bits) {
  source(o, bits);
  return destination(o, bits);
}

std::vector<Slot> Builder::sources(const ptx::Operand& vector, int bits) {
  std::vector<Slot> result;
  if (vector.kind != ptx::Operand::kVector) return {source(vector, bits)};
  for (const ptx::Operand& item : vector.items) result.push_back(source(item, bits));
  return result;
}
std::vector<Slot> Builder::destinations(const ptx::Operand& vector, int bits) {
  std::vector<Slot> result;
  if (vector.kind != ptx::Operand::kVector) return {destination(vector, bits)};
  for (const ptx::Operand& item : vector.items) result.push_back(destination(item, bits));
  return result;
}

Address Builder::address(const ptx::Operand& o) {
  if (o.kind != ptx::Operand::kAddress) refuse("expected an address in brackets");
  const ptx::Operand& base = o.items[0];
  if (base.kind == ptx::Operand::kRegister) {
    const int bits = register_bits(base);
    if (bits != 32 && bits != 64) refuse("an address has 32 or 64 bits");
    return {source(base, bits), bits == 64, o.offset};
  }
  if (base.kind == ptx::Operand::kInteger) return {constant(base.bits, 64), true, o.offset};
  return {source(base, 64), true, o.offset};
}

uint64_t Builder::immediate(size_t i) const {
  const ptx::Operand& o = operand(i);
  if (o.kind != ptx::Operand::kInteger) refuse("operand " + std::to_string(i + 1) + " must be an integer constant");
  return o.bits;
}

void Builder::begin_modifiers() { left_ = at->suffix; }
bool Builder::take(std::string_view suffix) {
  const auto found = std::find(left_.begin(), left_.end(), suffix);
  if (found == left_.end()) return false;
  left_.erase(found);
  return true;
}
bool Builder::peek_type() const {
  return std::any_of(left_.begin(), left_.end(), [](const std::string& s) { return type_named(s) != Type::kNone; });
}
Type Builder::take_type() {
  for (auto s = left_.begin(); s != left_.end(); ++s) {
    const Type type = type_named(*s);
    if (type == Type::kNone) continue;
    left_.erase(s);
    return type;
  }
  refuse("no type");
}
int Builder::take_one(std::initializer_list<std::string_view> names) {
  int index = 0;
  for (std::string_view name : names) {
    if (take(name)) return index;
    ++index;
  }
  return -1;
}
void Builder::finish_modifiers() const {
  if (!left_.empty()) refuse("modifier ." + left_.front() + " is not known here");
}

}  // namespace emu
