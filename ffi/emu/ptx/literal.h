// Numbers and type names of PTX.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "ptx/lexer.h"
#include "ptx/module.h"

namespace emu::ptx {

[[noreturn]] void refuse(const Token& at, const std::string& what);  // throws Error with the token and its line

// Bytes of a fundamental type such as ".b32": 0 for .pred, UINT32_MAX when it is none.
uint32_t type_bytes(std::string_view type);

Operand parse_number(const Token& token);  // kInteger or kFloat

}  // namespace emu::ptx
