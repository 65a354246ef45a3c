// Control flow of a kernel: basic blocks, immediate post-dominators, liveness of registers.
#pragma once

#include <cstdint>
#include <vector>

namespace emu {

struct FlowInput {          // of one instruction
  std::vector<uint32_t> reads, writes;  // registers
  bool guarded = false;     // its writes may not happen
  bool ends = false;        // nothing follows: ret, exit, unconditional branch
  int64_t target = -1;      // branch
};

struct Block {
  uint32_t begin, end;      // instructions
  std::vector<uint32_t> next;
};

struct Flow {
  std::vector<Block> blocks;
  std::vector<uint32_t> block_of;               // instruction -> block
  std::vector<uint32_t> immediate_postdominator;  // block -> block, or blocks.size() for the exit
};

Flow analyze_flow(const std::vector<FlowInput>&);

struct LiveRange {
  uint32_t begin = UINT32_MAX, end = 0;  // positions 2*i (reads of instruction i), 2*i+1 (writes); empty when begin > end
};
// One interval a register, over the instructions in their order.
std::vector<LiveRange> live_ranges(const std::vector<FlowInput>&, const Flow&, uint32_t register_count);

}  // namespace emu
