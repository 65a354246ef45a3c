#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

namespace emu::ptx {

struct Token {
  enum Kind : uint8_t { kWord, kNumber, kString, kPunctuation, kEnd };
  Kind kind;
  int line;
  std::string_view text;  // a word keeps its dots: "ld.shared::cta.b32", ".reg", "%tid.x"
};

std::vector<Token> tokenize(const char* text, size_t bytes);  // throws Error with the line

}  // namespace emu::ptx
