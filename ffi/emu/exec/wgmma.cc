// wgmma: the four warps of a warpgroup issue the same operation; it happens when all have.
#include <algorithm>
#include <cstring>

#include "exec/lane_ops.h"
#include "machine/cluster.h"
#include "machine/launch.h"
#include "tensor/units.h"

namespace emu {

namespace {
struct WgmmaInst : Extra {
  WgmmaForm form;
  std::vector<Slot> d, a;
  Slot a_descriptor = kNoSlot, b_descriptor = kNoSlot, accumulate = kNoSlot;
  std::string shape;
};
}  // namespace

class WgmmaOperation final : public Operation {
 public:
  explicit WgmmaOperation(const WgmmaInst& inst, Cta& owner) : inst_(inst), cta_(owner) {}
  bool ready() const override { return issued_ == 4; }

  void issue(Warp& w, Mask m) {
    const uint32_t member = w.index % 4;
    if (warps_[member]) throw fail("wgmma: the warps of the warpgroup issue different operations");
    warps_[member] = &w;
    const int lane = first_lane(m);
    const uint64_t a = inst_.form.a_in_registers ? 0 : w.pairs(inst_.a_descriptor)[lane];
    const uint64_t b = w.pairs(inst_.b_descriptor)[lane];
    const bool accumulate = w.predicate(inst_.accumulate) >> lane & 1;
    if (issued_ && (a != a_ || b != b_ || accumulate != accumulate_))
      throw fail("wgmma: descriptors or scale-d differ between the warps of a warpgroup");
    a_ = a;
    b_ = b;
    accumulate_ = accumulate;
    ++issued_;
  }
  const WgmmaInst& inst() const { return inst_; }
  OperationKind kind() const override { return OperationKind::kMma; }
  OperationNote note() const override {
    return {inst_.shape.substr(6) + (inst_.form.a_in_registers ? ", A in registers" : ""), 0, 2ull * 64 * inst_.form.n * 16};
  }
  Span due(Timing& timing) const override {
    const uint64_t n = inst_.form.n;
    return timing.tensor_done(cta_.rank, 1, 2 * 64 * n * 16, (inst_.form.a_in_registers ? 0 : 64 * 32) + n * 32);
  }

  bool step(Cluster& cluster) override {
    std::vector<uint32_t*> d[4];
    std::vector<const uint32_t*> a[4];
    WgmmaOperands operands{};
    for (int i = 0; i < 4; ++i) {
      for (Slot slot : inst_.d) d[i].push_back(warps_[i]->words(slot));
      for (Slot slot : inst_.a) a[i].push_back(warps_[i]->words(slot));
      operands.d[i] = d[i].data();
      operands.a[i] = a[i].data();
    }
    operands.a_descriptor = a_;
    operands.b_descriptor = b_;
    operands.accumulate = accumulate_;
    wgmma(inst_.form, operands, cta_.shared);
    const OperationPtr self = shared_from_this();
    for (Warp* w : warps_) w->release(self);
    Warpgroup& group = cta_.warpgroups[warps_[0]->index / 4];
    group.pending.pop_front();
    ++group.first;
    cluster.traffic.tensor_flops += 2ull * 64 * inst_.form.n * 16;
    ++cluster.traffic.mma_shapes[inst_.shape];
    constexpr uint64_t kNoAddress = ~uint64_t{0x3fff};
    const uint64_t shape = inst_.form.n | uint64_t{inst_.form.a_in_registers} << 16 | uint64_t{inst_.form.transpose_a} << 17 |
                           uint64_t{inst_.form.transpose_b} << 18;
    cluster.traffic.forms.emplace(FormKind::kWgmma, shape, a_ & kNoAddress, b_ & kNoAddress);
    cluster.event();
    return true;
  }

 private:
  const WgmmaInst& inst_;
  Cta& cta_;
  Warp* warps_[4] = {};
  int issued_ = 0;
  uint64_t a_ = 0, b_ = 0;
  bool accumulate_ = false;
};

namespace {

Status execute_mma(Warp& w, const Inst& in, Mask m) {
  const WgmmaInst& inst = static_cast<const WgmmaInst&>(*in.extra);
  Cluster& cluster = w.cta.cluster;
  Warpgroup& group = w.cta.warpgroups[w.index / 4];
  if (group.queue < 0) group.queue = cluster.new_queue();
  const uint64_t number = w.wgmma_issued++;
  std::shared_ptr<WgmmaOperation> operation;
  if (number - group.first >= group.pending.size()) {
    operation = std::make_shared<WgmmaOperation>(inst, w.cta);
    operation->line = static_cast<int>(in.line);
    group.pending.push_back(operation);
  } else {
    operation = group.pending[number - group.first];
    if (&operation->inst() != &inst) throw fail("wgmma: the warps of the warpgroup issue different operations");
  }
  w.wgmma_registers->issue(in, inst.d.size(), inst.a.size());
  // What it reads and writes asynchronously is held until it has happened.
  w.hold(inst.d, operation);
  if (!inst.a.empty()) w.hold(inst.a, operation);
  w.wgmma_groups.open.push_back(operation);
  operation->issue(w, m);
  if (operation->ready()) cluster.engine.issue(cluster, operation, group.queue, cluster.clock());
  cluster.event();
  return Status::kNext;
}

Status execute_commit(Warp& w, const Inst&, Mask) {
  if (w.wgmma_registers) w.wgmma_registers->commit();
  w.wgmma_groups.commit();
  return Status::kNext;
}
Status execute_wait(Warp& w, const Inst& in, Mask) {
  if (w.wgmma_registers) w.wgmma_registers->wait(static_cast<size_t>(in.immediate));
  Wait wait;
  wait.what = "groups of wgmma, all but";
  wait.b = static_cast<uint64_t>(in.immediate);
  wait.done = [](Warp& warp, const Wait& self) {
    auto& committed = warp.wgmma_groups.committed;
    while (committed.size() > self.b) {
      for (const OperationPtr& operation : committed.front())
        if (!operation->finished) return false;
      committed.pop_front();
    }
    return true;
  };
  return wait.done(w, wait) ? Status::kNext : w.suspend(std::move(wait));
}
Status execute_fence(Warp& w, const Inst&, Mask) {
  if (w.wgmma_registers) w.wgmma_registers->fence();
  return Status::kNext;
}

ElementType element(Builder& b) {
  switch (b.take_type()) {
    case Type::kF16: return ElementType::kF16;
    case Type::kBf16: return ElementType::kBf16;
    case Type::kF32: return ElementType::kF32;
    default: b.refuse("the type is not known here");
  }
}

void decode_mma(Builder& b) {
  WgmmaInst& f = *b.make_extra<WgmmaInst>();
  unsigned m = 0, n = 0, k = 0;
  for (const std::string& s : b.at->suffix)
    if (std::sscanf(s.c_str(), "m%un%uk%u", &m, &n, &k) == 3) {
      f.shape = "wgmma." + s;
      b.take(s);
      break;
    }
  if (m != 64 || k != 16 || n % 8 || n < 8 || n > 256) b.refuse("the shape is not known");
  f.form.n = static_cast<uint16_t>(n);
  f.form.d = element(b);
  f.form.a = element(b);
  f.form.b = element(b);
  if (f.form.d != ElementType::kF32 && f.form.d != ElementType::kF16) b.refuse("the accumulator's type is not known");
  const bool registers = b.operand(1).kind == ptx::Operand::kVector;
  f.form.a_in_registers = registers;
  b.expect_operands(registers ? 7 : 8, registers ? 7 : 8);
  const ptx::Operand& d = b.operand(0);
  if (d.kind != ptx::Operand::kVector || d.items.size() != n / (f.form.d == ElementType::kF32 ? 2 : 4)) b.refuse("the accumulator's length");
  b.sources(d, 32);
  if (registers) {
    f.a = b.sources(b.operand(1), 32);
    if (f.a.size() != 4) b.refuse("A takes four registers");
  } else {
    f.a_descriptor = b.source(1, Type::kB64);
  }
  f.b_descriptor = b.source(2, Type::kB64);
  f.accumulate = b.source(3, Type::kPred);
  const auto scale = [&](size_t i) -> int8_t {
    const int64_t v = static_cast<int64_t>(b.immediate(i));
    if (v != 1 && v != -1) b.refuse("a scale must be 1 or -1");
    return static_cast<int8_t>(v);
  };
  f.form.scale_a = scale(4);
  f.form.scale_b = scale(5);
  f.form.transpose_a = !registers && b.immediate(6) != 0;
  f.form.transpose_b = b.immediate(registers ? 6 : 7) != 0;
  f.d = b.destinations(d, 32);
  b.inst.chains = true;
  b.inst.execute = execute_mma;
  b.program.operations.add(OperationKind::kMma);
}

void decode_wgmma(Builder& b) {
  const int which = b.take_one({"mma_async", "fence", "commit_group", "wait_group"});
  if (which < 0 || !b.take("sync") || !b.take("aligned")) b.refuse("the form is not known here");
  b.inst.aligned = true;
  b.inst.unit = Unit::kTensor;
  if (which == 0) {
    decode_mma(b);
  } else {
    b.expect_operands(which == 3, which == 3);
    b.inst.immediate = which == 3 ? static_cast<int64_t>(b.immediate(0)) : 0;
    b.inst.execute = which == 1 ? execute_fence : which == 2 ? execute_commit : execute_wait;
  }
  b.finish_modifiers();
}

}  // namespace

void register_wgmma(DecodeTable& t) { t["wgmma"] = decode_wgmma; }

}  // namespace emu
