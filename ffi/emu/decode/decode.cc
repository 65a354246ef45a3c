#include <algorithm>
#include <cstring>
#include <queue>
#include <set>

#include "decode/builder.h"
#include "decode/flow.h"

namespace emu {
namespace {

const DecodeTable& decode_table() {
  static const DecodeTable table = [] {
    DecodeTable t;
    for (auto add : {register_integer, register_bits, register_carry, register_float, register_convert, register_predicate, register_move,
                     register_shuffle, register_control, register_memory, register_atomic, register_matrix_memory,
                     register_mbarrier, register_fence, register_copy, register_wgmma, register_tcgen05,
                     register_cluster_launch})
      add(t);
    return t;
  }();
  return table;
}

SymbolTable collect_symbols(const ptx::Module& module, const ptx::Kernel& kernel, Program& program) {
  SymbolTable symbols;
  for (const ptx::Parameter& p : kernel.parameters) {
    symbols[p.name] = {Symbol::kParameter, p.offset};
    program.parameters.push_back({p.offset, p.bytes});
  }
  program.parameter_bytes = kernel.parameter_bytes;
  uint64_t shared = kSharedBase;
  std::vector<const ptx::Variable*> dynamic;
  for (const auto* list : {&module.variables, &kernel.variables})
    for (const ptx::Variable& v : *list) {
      if (v.space != "shared" && v.space != "local") throw Error("variable " + v.name + ": state space ." + v.space + " is not known", kernel.line);
      if (v.alignment == 0 || v.alignment & (v.alignment - 1) || v.alignment > 4096)
        throw Error("variable " + v.name + ": alignment " + std::to_string(v.alignment), kernel.line);
      if (v.space == "local") {
        program.local_bytes = (program.local_bytes + v.alignment - 1) / v.alignment * v.alignment;
        symbols[v.name] = {Symbol::kLocal, program.local_bytes};
        program.local_bytes += static_cast<uint32_t>(v.bytes);
        if (v.bytes > 65536 || program.local_bytes > 65536) throw Error("kernel " + kernel.name + ": too much local memory", kernel.line);
        continue;
      }
      if (v.external) {
        dynamic.push_back(&v);
        continue;
      }
      shared = (shared + v.alignment - 1) / v.alignment * v.alignment;
      symbols[v.name] = {Symbol::kShared, shared};
      shared += v.bytes;
    }
  if (shared > kSharedBase + 232448) throw Error("kernel " + kernel.name + ": too much static shared memory", kernel.line);
  program.local_bytes = (program.local_bytes + 63) / 64 * 64;
  uint64_t alignment = 16;
  for (const ptx::Variable* v : dynamic) alignment = std::max<uint64_t>(alignment, v->alignment);
  shared = (shared + alignment - 1) / alignment * alignment;
  for (const ptx::Variable* v : dynamic) symbols[v->name] = {Symbol::kShared, shared};
  program.static_shared_bytes = static_cast<uint32_t>(shared - kSharedBase);
  return symbols;
}

class Decoder {
 public:
  Decoder(const ptx::Module& module, const ptx::Kernel& kernel)
      : kernel_(kernel), program_(std::make_unique<Program>()), symbols_(collect_symbols(module, kernel, *program_)),
        builder_(kernel, symbols_, *program_) {}

  std::unique_ptr<Program> run() {
    if (kernel_.instructions.empty()) throw Error("kernel " + kernel_.name + " is empty", kernel_.line);
    pass(true);
    const Flow flow = analyze_flow(flow_);
    allocate(flow);
    program_->extras.clear();
    program_->code.clear();
    pass(false);
    finish(flow);
    return std::move(program_);
  }

 private:
  void pass(bool recording) {
    builder_.recording = recording;
    for (const ptx::Instruction& in : kernel_.instructions) {
      builder_.at = &in;
      builder_.inst = Inst();
      builder_.inst.line = static_cast<uint32_t>(in.line);
      builder_.reads.clear();
      builder_.writes.clear();
      if (in.guard >= 0) {
        ptx::Operand guard;
        guard.kind = ptx::Operand::kRegister;
        guard.reg = in.guard;
        builder_.inst.guard = builder_.source(guard, 1);
        builder_.inst.guard_flip = in.guard_negated ? kAllLanes : 0;
      }
      const auto found = decode_table().find(in.opcode);
      if (found == decode_table().end()) builder_.refuse("this instruction is not known");
      builder_.begin_modifiers();
      found->second(builder_);
      if (!builder_.inst.execute) builder_.refuse("this form is not known");
      if (recording) {
        FlowInput f;
        f.reads = builder_.reads;
        f.writes = builder_.writes;
        f.guarded = in.guard >= 0;
        if (in.opcode == "bra") f.target = builder_.inst.target;
        f.ends = in.opcode == "bra" || in.opcode == "ret" || in.opcode == "exit" || in.opcode == "trap";
        flow_.push_back(std::move(f));
      }
      builder_.inst.form = form_of(in);
      program_->code.push_back(builder_.inst);
    }
    const ptx::Instruction& last = kernel_.instructions.back();
    if (last.guard >= 0 || !(last.opcode == "bra" || last.opcode == "ret" || last.opcode == "exit" || last.opcode == "trap"))
      throw Error("kernel " + kernel_.name + " runs over its end", last.line);
  }

  uint16_t form_of(const ptx::Instruction& in) {
    const auto [found, added] = forms_.try_emplace(in.text(), static_cast<uint16_t>(program_->forms.size()));
    if (added) program_->forms.push_back(found->first);
    return found->second;
  }

  // A move may follow the operation in flight that writes its source (Warp::follow): the source keeps its place as long as
  // the destination does.
  void prolong_moved(std::vector<LiveRange>& ranges) const {
    std::vector<bool> in_flight(ranges.size());
    const auto any_read = [&](size_t i) {
      return std::any_of(flow_[i].reads.begin(), flow_[i].reads.end(), [&](uint32_t r) { return in_flight[r]; });
    };
    const std::vector<Inst>& code = program_->code;
    for (size_t i = 0; i < code.size(); ++i)
      if (code[i].chains || code[i].unit == Unit::kTensorMemoryLoad || (code[i].moves && any_read(i)))
        for (uint32_t r : flow_[i].writes) in_flight[r] = true;
    for (size_t i = code.size(); i-- > 0;)
      if (code[i].moves)
        for (uint32_t r : flow_[i].reads)
          if (in_flight[r])
            for (uint32_t w : flow_[i].writes) ranges[r].end = std::max(ranges[r].end, ranges[w].end);
  }

  // Linear scan: registers whose intervals do not meet share a place.
  void allocate(const Flow& flow) {
    const uint32_t count = static_cast<uint32_t>(kernel_.registers.size());
    std::vector<LiveRange> ranges = live_ranges(flow_, flow, count);
    prolong_moved(ranges);
    std::vector<uint32_t> order;
    for (uint32_t r = 0; r < count; ++r)
      if (ranges[r].begin <= ranges[r].end) order.push_back(r);
    std::sort(order.begin(), order.end(), [&](uint32_t a, uint32_t b) {
      return ranges[a].begin != ranges[b].begin ? ranges[a].begin < ranges[b].begin : a < b;
    });
    // Predicates (4 bytes), words, pairs and quads have places of their own.
    const uint32_t unit_bytes[4] = {4, 128, 256, 512};
    const auto kind_of = [&](uint32_t r) {
      const int bits = kernel_.registers[r].bits;
      return bits == 1 ? 0 : bits <= 32 ? 1 : bits == 64 ? 2 : 3;
    };
    using Busy = std::pair<uint32_t, uint32_t>;  // end, index
    std::priority_queue<Busy, std::vector<Busy>, std::greater<>> busy[4];
    std::priority_queue<uint32_t, std::vector<uint32_t>, std::greater<>> free[4];
    uint32_t used[4] = {0, 0, 0, 0};
    std::vector<uint32_t> index(count, 0);
    for (uint32_t r : order) {
      const int kind = kind_of(r);
      while (!busy[kind].empty() && busy[kind].top().first < ranges[r].begin) {
        free[kind].push(busy[kind].top().second);
        busy[kind].pop();
      }
      if (free[kind].empty()) free[kind].push(used[kind]++);
      index[r] = free[kind].top();
      free[kind].pop();
      busy[kind].push({ranges[r].end, index[r]});
    }
    uint32_t base[4], at = program_->register_bytes;  // special registers are there already
    at = (at + 127) / 128 * 128;
    for (int kind = 0; kind < 4; ++kind) {
      base[kind] = at;
      at += (used[kind] * unit_bytes[kind] + 127) / 128 * 128;
    }
    builder_.slot_of_register.resize(count);
    for (uint32_t r = 0; r < count; ++r)
      builder_.slot_of_register[r] = base[kind_of(r)] + index[r] * unit_bytes[kind_of(r)];
    // A register that nobody reads nor writes keeps slot 0 of its kind; it is never used.
    program_->register_bytes = at;
  }

  void name_registers(Inst& in, const FlowInput& uses) {
    std::vector<uint32_t>& named = program_->named;
    in.named = static_cast<uint32_t>(named.size());
    for (const auto* list : {&uses.reads, &uses.writes}) {
      in.named_reads = static_cast<uint16_t>(named.size() - in.named);
      for (uint32_t r : *list)
        if (kernel_.registers[r].bits > 1) named.push_back(r);
    }
    in.named_count = static_cast<uint16_t>(named.size() - in.named);
  }

  void finish(const Flow& flow) {
    Program& p = *program_;
    const uint32_t end = static_cast<uint32_t>(p.code.size());
    for (const Inst& in : p.code) {
      p.has_wgmma |= in.chains;
      p.has_tensor_loads |= in.unit == Unit::kTensorMemoryLoad;
    }
    p.register_count = static_cast<uint32_t>(kernel_.registers.size());
    for (uint32_t i = 0; i < end; ++i) {
      Inst& in = p.code[i];
      in.touched = static_cast<uint32_t>(p.touched.size());
      in.predicates = static_cast<uint32_t>(p.touched_predicates.size());
      for (const auto* list : {&flow_[i].reads, &flow_[i].writes}) {
        in.touched_reads = static_cast<uint16_t>(p.touched.size() - in.touched);
        in.predicate_reads = static_cast<uint16_t>(p.touched_predicates.size() - in.predicates);
        for (uint32_t r : *list) {
          const int bits = kernel_.registers[r].bits;
          if (bits == 1) {
            p.touched_predicates.push_back(builder_.slot_of_register[r]);
            continue;
          }
          const uint32_t unit = builder_.slot_of_register[r] / 128;
          for (uint32_t u = 0; u < (bits <= 32 ? 1u : bits / 32u); ++u) p.touched.push_back(static_cast<uint16_t>(unit + u));
        }
      }
      in.touched_count = static_cast<uint16_t>(p.touched.size() - in.touched);
      in.predicate_count = static_cast<uint16_t>(p.touched_predicates.size() - in.predicates);
      if (p.has_wgmma || p.has_tensor_loads) name_registers(in, flow_[i]);
      if (flow_[i].target < 0) continue;
      const uint32_t block = flow.immediate_postdominator[flow.block_of[i]];
      in.reconverge = block < flow.blocks.size() ? flow.blocks[block].begin : end;
    }
    for (uint32_t i = 0; i < end; ++i)
      if (flow_[i].target >= 0 && p.code[i].reconverge < end) p.code[p.code[i].reconverge].joins = true;
    p.constant_memory.reset(new (std::align_val_t(64)) uint8_t[p.constants.size() + 64],
                            [](uint8_t* memory) { ::operator delete[](memory, std::align_val_t(64)); });
    std::copy(p.constants.begin(), p.constants.end(), p.constant_memory.get());
    p.constant_base = p.constant_memory.get();
    p.name = kernel_.name;
    p.line = kernel_.line;
    p.max_registers = kernel_.max_registers;
    std::copy_n(kernel_.required_threads, 3, p.required_threads);
    std::copy_n(kernel_.required_cluster, 3, p.required_cluster);
  }

  const ptx::Kernel& kernel_;
  std::unique_ptr<Program> program_;
  SymbolTable symbols_;
  Builder builder_;
  std::vector<FlowInput> flow_;
  std::map<std::string, uint16_t> forms_;
};

}  // namespace

std::unique_ptr<Program> decode(const ptx::Module& module, const ptx::Kernel& kernel) {
  return Decoder(module, kernel).run();
}

}  // namespace emu
