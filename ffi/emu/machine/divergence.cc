// Lanes of a warp that diverge become fragments, which meet again at a branch's point of reconvergence.
#include <algorithm>
#include <vector>

#include "machine/cluster.h"
#include "machine/warp.h"

namespace emu {

int32_t Warp::new_node(uint32_t pc, int32_t parent, Mask expected) {
  for (size_t i = 0; i < nodes_.size(); ++i)
    if (!nodes_[i].used) {
      nodes_[i] = {pc, parent, expected, 0, true};
      return static_cast<int32_t>(i);
    }
  nodes_.push_back({pc, parent, expected, 0, true});
  return static_cast<int32_t>(nodes_.size() - 1);
}

Status Warp::branch(const Inst& in, Mask taken) {
  Fragment& f = current();
  const Mask rest = f.mask & ~taken;
  if (rest == 0) {
    f.pc = in.target;
    return Status::kBranch;
  }
  // Lanes that already run towards the same point need no second node: a loop that lanes leave one by one.
  int32_t node = f.node;
  if (in.reconverge < program_.code.size() && !(node >= 0 && nodes_[node].pc == in.reconverge))
    node = new_node(in.reconverge, f.node, f.mask);
  Fragment& other = fragments_[count_++];
  other = Fragment();
  other.mask = taken;
  other.pc = in.target;
  other.node = node;
  f.mask = rest;
  f.node = node;
  ++f.pc;
  return Status::kBranch;
}

void Warp::remove(int fragment) {
  --count_;
  if (fragment != count_) fragments_[fragment] = fragments_[count_];
  fragments_[count_] = Fragment();
}

bool Warp::arrive_at_join(int fragment) {
  while (true) {
    Fragment& f = fragments_[fragment];
    if (f.node < 0 || nodes_[f.node].pc != f.pc) return true;
    JoinNode& node = nodes_[f.node];
    node.arrived |= f.mask;
    if (node.arrived != node.expected) {
      remove(fragment);
      return false;
    }
    f.mask = node.arrived;
    f.node = node.parent;
    node.used = false;
  }
}

// Lanes left a node for good; those that wait at it may be all that is left.
void Warp::check_node(int32_t index) {
  while (index >= 0) {
    JoinNode& node = nodes_[index];
    const int32_t parent = node.parent;
    if (node.used && node.expected == 0) {
      node.used = false;
    } else if (node.used && node.arrived == node.expected) {
      Fragment& f = fragments_[count_++];
      f = Fragment();
      f.mask = node.arrived;
      f.pc = node.pc;
      f.node = parent;
      node.used = false;
    }
    index = parent;
  }
}

Status Warp::exit_lanes(Mask lanes) {
  Fragment& f = current();
  const int32_t node = f.node;
  for (int32_t i = node; i >= 0; i = nodes_[i].parent) nodes_[i].expected &= ~lanes;
  live_ &= ~lanes;
  f.mask &= ~lanes;
  if (f.mask == 0) {
    remove(current_);
    check_node(node);
    return Status::kExit;
  }
  ++f.pc;
  check_node(node);
  return Status::kBranch;
}

bool Warp::converge(int fragment, uint32_t pc) {
  static const auto together = [](Warp& warp, const Wait& wait) {
    Mask here = 0;
    for (int i = 0; i < warp.fragment_count(); ++i) {
      const Fragment& f = warp.fragment(i);
      if (f.pc == wait.a) here |= f.mask;
    }
    return here == warp.live();
  };
  Wait wait;
  wait.done = together;
  wait.what = "the other lanes of its warp";
  wait.a = pc;
  if (!together(*this, wait)) {
    fragments_[fragment].wait = wait;
    fragments_[fragment].retry = true;
    return false;
  }
  // All live lanes stand here: they become one fragment, which runs towards the nearest point common to all.
  std::vector<int32_t> common;
  for (int32_t i = fragments_[fragment].node; i >= 0; i = nodes_[i].parent) common.push_back(i);
  for (int other = 0; other < count_; ++other) {
    std::vector<int32_t> chain;
    for (int32_t i = fragments_[other].node; i >= 0; i = nodes_[i].parent) chain.push_back(i);
    while (!common.empty() && std::find(chain.begin(), chain.end(), common.front()) == chain.end())
      common.erase(common.begin());
  }
  const int32_t target = common.empty() ? -1 : common.front();
  for (JoinNode& node : nodes_) node.used = false;
  for (int32_t i : common) nodes_[i].used = true;
  Fragment merged = fragments_[fragment];
  merged.mask = live_;
  merged.node = target;
  merged.wait = Wait();
  fragments_[0] = merged;
  for (int i = 1; i < count_; ++i) fragments_[i] = Fragment();
  count_ = 1;
  current_ = 0;
  return true;
}

}  // namespace emu
