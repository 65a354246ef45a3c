// ldmatrix and stmatrix: 8x8 matrices of 16-bit elements, a row of 16 bytes at each lane's address.
#include <cstring>

#include "exec/address.h"

namespace emu {
namespace {

struct MatrixForm : Extra {
  AddressForm address;
  int count = 1;
  bool transpose = false;
  Slot slot[4] = {kNoSlot, kNoSlot, kNoSlot, kNoSlot};
};

template <bool kStore>
Status execute_matrix(Warp& w, const Inst& in, Mask) {
  const MatrixForm& f = static_cast<const MatrixForm&>(*in.extra);
  uint32_t addresses[kLanes];  // all of them first: a matrix may go to their register
  for (int lane = 0; lane < kLanes; ++lane) addresses[lane] = static_cast<uint32_t>(f.address.of(w, lane));
  for (int k = 0; k < f.count; ++k) {
    uint16_t matrix[8][8];
    uint8_t* rows[8];
    for (int row = 0; row < 8; ++row) {
      const uint32_t address = addresses[8 * k + row];
      check_aligned(address, 16, "shared");
      bool written = true;
      rows[row] = kStore ? shared_write(w, address, 16, false)
                         : const_cast<uint8_t*>(shared_load(w, address, 16, false, &written));
      if (!written)  // transposed, a row goes to every lane
        w.taint.mark(f.slot[k], 32, f.transpose ? kAllLanes : 15u << 4 * row, {"shared memory", address, in.line});
      if (!kStore) std::memcpy(matrix[row], rows[row], 16);
    }
    uint32_t* words = w.words(f.slot[k]);
    for (int lane = 0; lane < kLanes; ++lane) {  // lane holds elements (lane / 4, 2 * (lane % 4)) and the next
      const int row = lane / 4, column = 2 * (lane % 4);
      uint16_t& first = f.transpose ? matrix[column][row] : matrix[row][column];
      uint16_t& second = f.transpose ? matrix[column + 1][row] : matrix[row][column + 1];
      if (kStore) {
        first = static_cast<uint16_t>(words[lane]);
        second = static_cast<uint16_t>(words[lane] >> 16);
      } else {
        words[lane] = first | uint32_t{second} << 16;
      }
    }
    if (kStore)
      for (int row = 0; row < 8; ++row) std::memcpy(rows[row], matrix[row], 16);
  }
  TrafficCounters& t = w.cta.cluster.traffic;
  (kStore ? t.shared_written : t.shared_read) += static_cast<uint64_t>(f.count) * 128;
  if (kStore) w.cta.cluster.stored();
  return Status::kNext;
}

template <bool kStore>
void decode_matrix(Builder& b) {
  MatrixForm& f = *b.make_extra<MatrixForm>();
  if (!b.take("sync") || !b.take("aligned") || !b.take("m8n8")) b.refuse("the form is not known here");
  const int count = b.take_one({"x1", "x2", "x4"});
  f.transpose = b.take("trans");
  if (!b.take("shared") && !b.take("shared::cta")) b.refuse("only shared memory is known");
  if (count < 0 || b.take_type() != Type::kB16) b.refuse("the form is not known here");
  f.count = 1 << count;
  b.expect_operands(2, 2);
  f.address = make_address(b, b.operand(kStore ? 0 : 1));
  const std::vector<Slot> s = kStore ? b.sources(b.operand(1), 32) : b.destinations(b.operand(0), 32);
  if (static_cast<int>(s.size()) != f.count) b.refuse("the vector has another length");
  std::copy(s.begin(), s.end(), f.slot);
  b.inst.aligned = true;
  b.inst.execute = execute_matrix<kStore>;
  b.inst.unit = kStore ? Unit::kSharedStore : Unit::kSharedLoad;
  b.finish_modifiers();
}

}  // namespace

void register_matrix_memory(DecodeTable& t) {
  t["ldmatrix"] = decode_matrix<false>;
  t["stmatrix"] = decode_matrix<true>;
}

}  // namespace emu
