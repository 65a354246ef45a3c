// What the machine asks of the functional units (tensor cores, tensor memory, TMA). The units know nothing of warps,
// clocks or barriers: each function does the whole of one operation at the moment it is called. The machine decides
// when that is (async/engine.h), and counts bytes and FLOPs from what the functions return.
#pragma once

#include <cstdint>

#include "core/lanes.h"
#include "core/memory.h"

namespace emu {

class TensorMemory;  // tensor/tensor_memory.h: 128 lanes x 512 columns x 32 bits of one CTA, with its allocator

// ---- WGMMA (sm_90a) -------------------------------------------------------------------------------------------------

enum class ElementType : uint8_t { kF16, kBf16, kTf32, kE4m3, kE5m2, kS8, kU8, kF32, kS32 };

struct WgmmaForm {  // fixed at decode
  uint16_t n;       // 8 to 256; M is 64, K is 32 bytes of A
  ElementType d, a, b;
  int8_t scale_a, scale_b;          // 1 or -1
  bool transpose_a, transpose_b;    // MN-major in shared memory (16-bit types)
  bool a_in_registers;
};
struct WgmmaOperands {
  uint32_t* const* d[4];        // per warp of the warpgroup: pointers to its accumulator registers, each of 32 lanes
  const uint32_t* const* a[4];  // with a_in_registers: 4 registers a warp
  uint64_t a_descriptor, b_descriptor;
  bool accumulate;              // scale-d: false gives A*B, true A*B + D
};
void wgmma(const WgmmaForm&, const WgmmaOperands&, const SharedView&);

// ---- tcgen05 (sm_100a) ----------------------------------------------------------------------------------------------

enum class MmaKind : uint8_t { kF16, kTf32, kF8f6f4, kI8 };

struct Tcgen05Mma {
  MmaKind kind;
  uint8_t cta_group;             // 1 or 2
  bool a_in_tensor_memory;
  bool accumulate;               // enable-input-d
  uint32_t instruction_descriptor;
  uint64_t a;                    // shared-memory descriptor, or tensor-memory address
  uint64_t b;                    // shared-memory descriptor
  uint32_t d;                    // tensor-memory address
  uint32_t disable_output_lane[8];  // 4 words (cta_group 1) or 8
  SharedView shared[2];          // of the issuing CTA pair in order of rank; [1] only with cta_group 2
  TensorMemory* tensor[2];
};
struct MmaWork {
  uint32_t m, n, k;
};
MmaWork tcgen05_mma(const Tcgen05Mma&);
// Checks of the instruction and its descriptors that can be made when it is issued; throws.
void tcgen05_mma_check(const Tcgen05Mma&);

struct Tcgen05Copy {  // tcgen05.cp
  uint8_t shape;      // CopyShape
  uint8_t multicast;  // CopyMulticast
  uint32_t address;   // tensor-memory address
  uint64_t descriptor;
};
enum CopyShape : uint8_t { kCopy128x256b, kCopy4x256b, kCopy128x128b, kCopy64x128b, kCopy32x128b };
enum CopyMulticast : uint8_t { kCopyPlain, kCopyWarpx2_02_13, kCopyWarpx2_01_23, kCopyWarpx4 };
void tcgen05_cp(const Tcgen05Copy&, const SharedView&, TensorMemory&);

enum TmemShape : uint8_t { kTmem32x32b, kTmem16x64b, kTmem16x128b, kTmem16x256b, kTmem16x32bx2 };
struct TmemAccess {  // tcgen05.ld / tcgen05.st of one warp
  TmemShape shape;
  uint8_t repeat;        // .x1 to .x128
  bool pack;             // .pack::16b / .unpack::16b
  uint16_t half_split_offset;  // immHalfSplitoff of 16x32bx2
  uint8_t warp;          // warp's rank in its warpgroup: lanes 32*warp .. +31 may be touched
  uint32_t address;      // tensor-memory address: lane << 16 | column
};
int tmem_registers(const TmemAccess&);  // how many registers it moves
// With `unwritten`, cells that were never written are told of: of each register the threads that got one (false: there
// are some). Without, they are an error.
bool tmem_load(const TmemAccess&, const TensorMemory&, uint32_t* const* registers, uint32_t* unwritten = nullptr);
void tmem_store(const TmemAccess&, TensorMemory&, const uint32_t* const* registers);

// ---- TMA ------------------------------------------------------------------------------------------------------------

enum class Reduction : uint8_t { kNone, kAdd, kMin, kMax, kInc, kDec, kAnd, kOr, kXor };

struct TileCopy {
  const uint8_t* map;     // 128-byte tensor map
  uint8_t rank;           // of the instruction; must equal the map's
  int32_t coordinate[5];  // innermost first
  uint32_t shared;        // offset in shared memory
};
uint32_t tile_bytes(const uint8_t* map);         // what complete_tx counts: the elements of a whole box
uint32_t tile_shared_bytes(const uint8_t* map);  // extent in shared memory, where swizzled rows take whole lines
void tile_check(const TileCopy&, bool store);    // rank, alignment, coordinates, fields: at issue; throws
// Global to shared (all destinations, for multicast). Out-of-bounds elements are filled and count as bytes.
void tile_load(const TileCopy&, const GlobalView&, const SharedView* destinations, int destination_count);
// Shared to global, clipped; or reduced into global memory.
void tile_store(const TileCopy&, Reduction, const SharedView&, const GlobalView&);

// cp.reduce.async.bulk of plain bytes, in the type that the instruction names.
enum class BulkType : uint8_t { kF16, kBf16, kB32, kU32, kS32, kB64, kU64, kS64, kF32, kF64 };
void bulk_reduce(uint8_t* destination, const uint8_t* source, uint32_t bytes, Reduction, BulkType);

}  // namespace emu
