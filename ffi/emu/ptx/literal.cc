#include "ptx/literal.h"

#include <cstdlib>
#include <cstring>

#include "core/error.h"

namespace emu::ptx {

void refuse(const Token& at, const std::string& what) {
  throw Error(what + (at.kind == Token::kEnd ? " at the end" : " at '" + std::string(at.text.substr(0, 60)) + "'"),
              at.line);
}

uint32_t type_bytes(std::string_view type) {
  static const std::pair<const char*, uint32_t> sizes[] = {{"8", 1}, {"16", 2}, {"32", 4}, {"64", 8}, {"128", 16}};
  if (type == ".pred") return 0;
  if (type == ".f16x2" || type == ".bf16x2") return 4;
  if (type == ".bf16") return 2;
  if (type.size() >= 3 && type[0] == '.' && std::strchr("busf", type[1]))
    for (const auto& [suffix, bytes] : sizes)
      if (type.substr(2) == suffix) return bytes;
  return UINT32_MAX;
}

Operand parse_number(const Token& token) {
  std::string text(token.text);
  Operand result;
  if (token.kind != Token::kNumber) refuse(token, "expected a number");
  char* end = nullptr;
  if (text.size() > 2 && text[0] == '0' && std::strchr("fFdD", text[1])) {
    result.kind = Operand::kFloat;
    result.wide = text[1] == 'd' || text[1] == 'D';
    if (text.size() != (result.wide ? 18u : 10u)) refuse(token, "odd floating-point constant");
    result.bits = std::strtoull(text.c_str() + 2, &end, 16);
  } else if (text.find('.') != std::string::npos) {
    result.kind = Operand::kFloat;
    result.wide = true;
    const double value = std::strtod(text.c_str(), &end);
    std::memcpy(&result.bits, &value, 8);
  } else {
    result.kind = Operand::kInteger;
    if (text.back() == 'U' || text.back() == 'u') text.pop_back();
    const bool binary = text.size() > 2 && text[0] == '0' && (text[1] == 'b' || text[1] == 'B');
    const bool hex = text.size() > 2 && text[0] == '0' && (text[1] == 'x' || text[1] == 'X');
    const bool octal = !binary && !hex && text.size() > 1 && text[0] == '0';
    result.bits = std::strtoull(text.c_str() + (binary || hex ? 2 : 0), &end, binary ? 2 : hex ? 16 : octal ? 8 : 10);
  }
  if (!end || *end) refuse(token, "odd number");
  return result;
}

}  // namespace emu::ptx
