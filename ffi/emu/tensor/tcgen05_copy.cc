// tcgen05.cp: rows of 128 or 256 bits, laid out in shared memory as a K-major MMA operand, into lanes of tensor memory.
#include <cstring>

#include "tensor/descriptor.h"
#include "tensor/tensor_memory.h"
#include "tensor/units.h"

namespace emu {
namespace {

struct CopyForm {
  uint32_t rows, chunks;  // a chunk is 16 bytes: 4 columns
};

CopyForm form(const Tcgen05Copy& copy) {
  const bool plain = copy.multicast == kCopyPlain;
  const bool pairs = copy.multicast == kCopyWarpx2_02_13 || copy.multicast == kCopyWarpx2_01_23;
  if (copy.shape == kCopy128x256b && plain) return {128, 2};
  if (copy.shape == kCopy128x128b && plain) return {128, 1};
  if (copy.shape == kCopy64x128b && pairs) return {64, 1};
  if (copy.shape == kCopy32x128b && copy.multicast == kCopyWarpx4) return {32, 1};
  throw fail("tcgen05.cp: modelled are 128x256b, 128x128b, 64x128b with warpx2 and 32x128b with warpx4");
}

// Row of the source that lane `lane` receives.
uint32_t source_row(const Tcgen05Copy& copy, uint32_t lane) {
  switch (copy.multicast) {
    case kCopyWarpx2_02_13: return lane % 64;
    case kCopyWarpx2_01_23: return lane / 64 * 32 + lane % 32;
    case kCopyWarpx4: return lane % 32;
    default: return lane;
  }
}

}  // namespace

void tcgen05_cp(const Tcgen05Copy& copy, const SharedView& shared, TensorMemory& tensor) {
  const CopyForm shape = form(copy);
  const OperandLayout layout = decode_tcgen05_descriptor(copy.descriptor, false);
  const uint32_t column = tmem_column(copy.address);
  if (tmem_lane(copy.address) != 0) throw fail("tcgen05.cp: begins at lane %u, allowed 0", tmem_lane(copy.address));
  tensor.check(0, kTmemLanes, column, shape.chunks * 4);
  tensor.accessed(0, kTmemLanes, column, shape.chunks * 4, true);
  for (uint32_t lane = 0; lane < kTmemLanes; ++lane) {
    for (uint32_t chunk = 0; chunk < shape.chunks; ++chunk)
      std::memcpy(tensor.row(lane) + column + chunk * 4,
                  shared.read(layout.chunk_address(source_row(copy, lane), chunk), 16, Proxy::kTensorCore), 16);
    tensor.mark_written(lane, TensorMemory::span(column, shape.chunks * 4));
  }
}

}  // namespace emu
