#include "ptx/lexer.h"

#include <cctype>

#include "core/error.h"

namespace emu::ptx {
namespace {

bool word_start(char c) { return std::isalpha(static_cast<unsigned char>(c)) || c == '_' || c == '%' || c == '$' || c == '.'; }
bool word_part(char c) { return word_start(c) || std::isdigit(static_cast<unsigned char>(c)); }

}  // namespace

std::vector<Token> tokenize(const char* text, size_t bytes) {
  std::vector<Token> tokens;
  tokens.reserve(bytes / 6);
  int line = 1;
  size_t i = 0;
  while (i < bytes) {
    const char c = text[i];
    const size_t begin = i;
    Token::Kind kind = Token::kPunctuation;
    if (c == '\n') {
      ++line;
      ++i;
      continue;
    }
    if (c == ' ' || c == '\t' || c == '\r' || c == '\0') {
      ++i;
      continue;
    }
    if (c == '/' && i + 1 < bytes && text[i + 1] == '/') {
      while (i < bytes && text[i] != '\n') ++i;
      continue;
    }
    if (c == '/' && i + 1 < bytes && text[i + 1] == '*') {
      const int first = line;
      for (i += 2; i + 1 < bytes && !(text[i] == '*' && text[i + 1] == '/'); ++i) line += text[i] == '\n';
      if (i + 1 >= bytes) throw Error("comment without end", first);
      i += 2;
      continue;
    }
    if (c == '"') {
      for (++i; i < bytes && text[i] != '"' && text[i] != '\n'; ++i) {
      }
      if (i >= bytes || text[i] != '"') throw Error("string without end", line);
      ++i;
      kind = Token::kString;
    } else if (std::isdigit(static_cast<unsigned char>(c))) {
      while (i < bytes && (std::isalnum(static_cast<unsigned char>(text[i])) || text[i] == '.' ||
                           ((text[i] == '+' || text[i] == '-') && (text[i - 1] == 'e' || text[i - 1] == 'E') &&
                            !(text[begin] == '0' && begin + 1 < bytes && std::isalpha(static_cast<unsigned char>(text[begin + 1]))))))
        ++i;
      kind = Token::kNumber;
    } else if (word_start(c)) {
      while (i < bytes) {
        if (word_part(text[i])) ++i;
        else if (text[i] == ':' && i + 2 < bytes && text[i + 1] == ':' && word_part(text[i + 2])) i += 2;
        else break;
      }
      kind = Token::kWord;
      if (std::string_view(text + begin, i - begin) == ".loc") {  // a place in the source, to the end of the line
        while (i < bytes && text[i] != '\n') ++i;
        continue;
      }
    } else if (c == ':' && i + 1 < bytes && text[i + 1] == ':') {
      i += 2;
    } else {
      ++i;
    }
    tokens.push_back({kind, line, std::string_view(text + begin, i - begin)});
  }
  tokens.push_back({Token::kEnd, line, std::string_view()});
  return tokens;
}

}  // namespace emu::ptx
