#include "decode/flow.h"

#include <algorithm>

namespace emu {
namespace {

std::vector<Block> make_blocks(const std::vector<FlowInput>& code, std::vector<uint32_t>& block_of) {
  const uint32_t n = static_cast<uint32_t>(code.size());
  std::vector<bool> leader(n + 1, false);
  leader[0] = true;
  for (uint32_t i = 0; i < n; ++i) {
    if (code[i].target >= 0) leader[static_cast<size_t>(code[i].target)] = true;
    if (code[i].target >= 0 || code[i].ends) leader[i + 1] = true;
  }
  std::vector<Block> blocks;
  block_of.assign(n, 0);
  for (uint32_t i = 0; i < n; ++i) {
    if (leader[i]) blocks.push_back({i, i, {}});
    blocks.back().end = i + 1;
    block_of[i] = static_cast<uint32_t>(blocks.size() - 1);
  }
  for (Block& block : blocks) {
    const FlowInput& last = code[block.end - 1];
    if (last.target >= 0 && last.target < n) block.next.push_back(block_of[static_cast<size_t>(last.target)]);
    if (!(last.ends && !last.guarded) && block.end < n) block.next.push_back(block_of[block.end]);
  }
  return blocks;
}

// Cooper, Harvey and Kennedy's iteration on the reversed graph, with one added exit node.
std::vector<uint32_t> postdominators(const std::vector<Block>& blocks) {
  const uint32_t n = static_cast<uint32_t>(blocks.size()), exit = n, none = n + 1;
  std::vector<std::vector<uint32_t>> before(n + 1);
  for (uint32_t b = 0; b < n; ++b) {
    for (uint32_t s : blocks[b].next) before[s].push_back(b);
    if (blocks[b].next.empty()) before[exit].push_back(b);
  }
  // Reverse postorder from the exit over the reversed edges.
  std::vector<uint32_t> order, number(n + 1, none), position(n + 1, 0);
  std::vector<uint32_t> stack = {exit};
  std::vector<bool> seen(n + 1, false);
  seen[exit] = true;
  while (!stack.empty()) {
    const uint32_t at = stack.back();
    if (position[at] < before[at].size()) {
      const uint32_t to = before[at][position[at]++];
      if (!seen[to]) {
        seen[to] = true;
        stack.push_back(to);
      }
    } else {
      number[at] = static_cast<uint32_t>(order.size());
      order.push_back(at);
      stack.pop_back();
    }
  }
  std::vector<uint32_t> idom(n + 1, none);
  idom[exit] = exit;
  for (bool changed = true; changed;) {
    changed = false;
    for (auto at = order.rbegin(); at != order.rend(); ++at) {
      if (*at == exit) continue;
      uint32_t best = blocks[*at].next.empty() ? exit : none;
      for (uint32_t s : blocks[*at].next) {
        if (idom[s] == none) continue;
        if (best == none) {
          best = s;
          continue;
        }
        uint32_t a = s, b = best;
        while (a != b) {
          while (number[a] < number[b]) a = idom[a];
          while (number[b] < number[a]) b = idom[b];
        }
        best = a;
      }
      if (best != idom[*at]) {
        idom[*at] = best;
        changed = true;
      }
    }
  }
  for (uint32_t& d : idom)
    if (d == none) d = exit;  // a block that never reaches the exit
  idom.resize(n);
  return idom;
}

}  // namespace

Flow analyze_flow(const std::vector<FlowInput>& code) {
  Flow flow;
  if (code.empty()) return flow;
  flow.blocks = make_blocks(code, flow.block_of);
  flow.immediate_postdominator = postdominators(flow.blocks);
  return flow;
}

std::vector<LiveRange> live_ranges(const std::vector<FlowInput>& code, const Flow& flow, uint32_t register_count) {
  const size_t words = (register_count + 63) / 64, blocks = flow.blocks.size();
  using Set = std::vector<uint64_t>;
  std::vector<Set> gen(blocks, Set(words)), kill(blocks, Set(words)), in(blocks, Set(words)), out(blocks, Set(words));
  const auto has = [](const Set& s, uint32_t r) { return s[r / 64] >> (r % 64) & 1; };
  const auto add = [](Set& s, uint32_t r) { s[r / 64] |= uint64_t{1} << (r % 64); };
  for (size_t b = 0; b < blocks; ++b)
    for (uint32_t i = flow.blocks[b].begin; i < flow.blocks[b].end; ++i) {
      for (uint32_t r : code[i].reads)
        if (!has(kill[b], r)) add(gen[b], r);
      if (!code[i].guarded)
        for (uint32_t r : code[i].writes) add(kill[b], r);
    }
  for (bool changed = true; changed;) {
    changed = false;
    for (size_t b = blocks; b-- > 0;) {
      for (uint32_t s : flow.blocks[b].next)
        for (size_t w = 0; w < words; ++w) out[b][w] |= in[s][w];
      for (size_t w = 0; w < words; ++w) {
        const uint64_t now = gen[b][w] | (out[b][w] & ~kill[b][w]);
        changed |= now != in[b][w];
        in[b][w] = now;
      }
    }
  }
  std::vector<LiveRange> ranges(register_count);
  const auto extend = [&](uint32_t r, uint32_t position) {
    ranges[r].begin = std::min(ranges[r].begin, position);
    ranges[r].end = std::max(ranges[r].end, position);
  };
  for (size_t b = 0; b < blocks; ++b) {
    for (uint32_t r = 0; r < register_count; ++r) {
      if (in[b][r / 64] == 0 && out[b][r / 64] == 0) {
        r |= 63;
        continue;
      }
      if (has(in[b], r)) extend(r, 2 * flow.blocks[b].begin);
      if (has(out[b], r)) extend(r, 2 * flow.blocks[b].end - 1);
    }
    for (uint32_t i = flow.blocks[b].begin; i < flow.blocks[b].end; ++i) {
      for (uint32_t r : code[i].reads) extend(r, 2 * i);
      for (uint32_t r : code[i].writes) extend(r, 2 * i + 1);
    }
  }
  return ranges;
}

}  // namespace emu
