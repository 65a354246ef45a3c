#pragma once

#include "decode/builder.h"

namespace emu {

bool has_carry(const Builder&);  // the instruction has .cc
void decode_carry(Builder&);

}  // namespace emu
