#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <cstring>
#include <string>

#include "core/error.h"
#include "ptx/lexer.h"
#include "ptx/literal.h"
#include "ptx/module.h"

namespace emu::ptx {
namespace {

class Parser {
 public:
  Parser(const char* text, size_t bytes) : tokens_(tokenize(text, bytes)) {}

  Module run() {
    while (peek().kind != Token::kEnd) top_level();
    if (module_.target.empty()) throw Error("no .target in the module", 1);
    return std::move(module_);
  }

 private:
  struct Scope {
    std::map<std::string, int, std::less<>> registers;
    std::map<std::string, std::string, std::less<>> labels;  // as written -> unique
  };

  const Token& peek(size_t ahead = 0) const { return tokens_[std::min(at_ + ahead, tokens_.size() - 1)]; }
  const Token& next() { return tokens_[std::min(at_++, tokens_.size() - 1)]; }
  bool accept(std::string_view text) {
    if (peek().text != text || peek().kind == Token::kString) return false;
    next();
    return true;
  }
  void expect(std::string_view text) {
    if (!accept(text)) refuse(peek(), "expected '" + std::string(text) + "'");
  }
  std::string word(const char* what) {
    if (peek().kind != Token::kWord) refuse(peek(), std::string("expected ") + what);
    return std::string(next().text);
  }
  uint64_t integer() {
    bool negative = accept("-");
    if (peek().kind != Token::kNumber) refuse(peek(), "expected an integer");
    const Operand value = number();
    if (value.kind != Operand::kInteger) refuse(peek(), "expected an integer");
    return negative ? -value.bits : value.bits;
  }

  void top_level() {
    const Token token = peek();
    if (accept(".version")) return void(next());
    if (accept(".target")) {
      module_.target = word("a target");
      while (accept(",")) next();
      return;
    }
    if (accept(".address_size")) {
      if (integer() != 64) refuse(token, "only 64-bit addresses are known");
      return;
    }
    if (accept(".file")) {
      while (peek().line == token.line && peek().kind != Token::kEnd) next();
      return;
    }
    if (accept(".section")) {
      next();
      expect("{");
      for (int depth = 1; depth;) {
        if (peek().kind == Token::kEnd) refuse(peek(), "section without end");
        const Token t = next();
        depth += t.text == "{" ? 1 : t.text == "}" ? -1 : 0;
      }
      return;
    }
    bool external = false;
    while (peek().text == ".visible" || peek().text == ".extern" || peek().text == ".weak" || peek().text == ".common")
      external |= next().text == ".extern";
    if (accept(".entry")) return kernel();
    if (peek().text == ".shared" || peek().text == ".global" || peek().text == ".const") {
      variable(module_.variables, external);
      return;
    }
    if (accept(";")) return;
    refuse(peek(), "unknown directive");
  }

  void variable(std::vector<Variable>& into, bool external) {
    Variable v;
    v.external = external;
    v.space = std::string(next().text.substr(1));
    uint32_t element = UINT32_MAX;
    while (peek().kind == Token::kWord && peek().text[0] == '.') {
      if (accept(".align")) v.alignment = static_cast<uint32_t>(integer());
      else {
        element = type_bytes(peek().text);
        if (element == UINT32_MAX || element == 0) refuse(peek(), "unknown type of a variable");
        next();
      }
    }
    if (element == UINT32_MAX) refuse(peek(), "variable without a type");
    do {
      Variable one = v;
      one.name = word("a variable");
      uint64_t count = 1;
      while (accept("[")) {
        if (accept("]")) {
          count = 0;
        } else {
          const uint64_t extent = integer();
          if (extent > (1u << 30)) refuse(peek(), "variable too large");
          count *= extent;
          expect("]");
        }
      }
      one.bytes = count * element;
      if (accept("=")) {
        const bool braces = accept("{");
        do {
          const uint64_t value = constant();
          for (uint32_t i = 0; i < element && i < 8; ++i) one.initial.push_back(uint8_t(value >> (8 * i)));
        } while (braces && accept(","));
        if (braces) expect("}");
        one.initial.resize(one.bytes);
      }
      one.alignment = std::max(one.alignment, element);
      into.push_back(std::move(one));
    } while (accept(","));
    expect(";");
  }
  uint64_t constant() {
    const bool negative = accept("-");
    const Operand value = number();
    return negative ? -value.bits : value.bits;
  }

  void kernel() {
    kernel_ = Kernel();
    kernel_.line = peek().line;
    kernel_.name = word("a kernel's name");
    if (accept("(")) {
      if (!accept(")")) {
        do parameter();
        while (accept(","));
        expect(")");
      }
    }
    while (peek().text != "{") {
      const Token token = next();
      if (token.text == ".reqntid") triple(kernel_.required_threads);
      else if (token.text == ".reqnctapercluster") triple(kernel_.required_cluster);
      else if (token.text == ".maxnreg") kernel_.max_registers = static_cast<uint32_t>(integer());
      else if (token.text == ".maxntid" || token.text == ".minnctapersm" || token.text == ".maxclusterrank") {
        uint32_t ignored[3];
        triple(ignored);
      } else if (token.text != ".explicitcluster" && token.text != ".blocksareclusters") {
        refuse(token, "unknown directive of a kernel");
      }
    }
    scopes_.assign(1, Scope());
    scan_labels();
    expect("{");
    body();
    module_.kernels.push_back(std::move(kernel_));
  }
  void triple(uint32_t* values) {
    values[0] = values[1] = values[2] = 1;
    int i = 0;
    do values[i++] = static_cast<uint32_t>(integer());
    while (i < 3 && accept(","));
  }
  void parameter() {
    expect(".param");
    uint32_t alignment = 1, bytes = UINT32_MAX;
    while (peek().kind == Token::kWord && peek().text[0] == '.') {
      if (accept(".align")) alignment = static_cast<uint32_t>(integer());
      else if (accept(".ptr") || accept(".global") || accept(".shared") || accept(".const") || accept(".local")) {
      } else {
        bytes = type_bytes(peek().text);
        if (bytes == UINT32_MAX || bytes == 0) refuse(peek(), "unknown type of a parameter");
        next();
      }
    }
    if (bytes == UINT32_MAX) refuse(peek(), "parameter without a type");
    const uint32_t element = bytes;
    Parameter p;
    p.name = word("a parameter's name");
    if (accept("[")) {
      bytes *= static_cast<uint32_t>(integer());
      expect("]");
    }
    // The alignment of a `.ptr` is that of the memory it points to; a value is aligned to its own size at least.
    alignment = std::max(std::min(alignment, 128u), element);
    if (alignment & (alignment - 1) || bytes > 32768) refuse(peek(), "parameter with odd alignment or size");
    kernel_.parameter_bytes = (kernel_.parameter_bytes + alignment - 1) / alignment * alignment;
    p.offset = kernel_.parameter_bytes;
    p.bytes = bytes;
    kernel_.parameter_bytes += bytes;
    kernel_.parameters.push_back(std::move(p));
  }

  // Labels may be used before they stand, and each pair of braces has its own: collect them scope by scope, in order.
  void scan_labels() {
    scope_labels_.clear();
    next_scope_ = 0;
    std::vector<size_t> open;
    for (size_t i = at_; i < tokens_.size(); ++i) {
      const std::string_view text = tokens_[i].text;
      // A brace that opens a scope follows the end of a statement; one of a vector follows an operand or a comma.
      if (text == "{" && opens_scope(i)) {
        open.push_back(scope_labels_.size());
        scope_labels_.emplace_back();
      } else if (text == "}" && !open.empty() && !closes_vector(i)) {
        open.pop_back();
        if (open.empty()) return;
      } else if (tokens_[i].kind == Token::kWord && tokens_[i + 1].text == ":" && !open.empty()) {
        scope_labels_[open.back()][std::string(text)] = std::string(text) + "#" + std::to_string(open.back());
      }
    }
  }
  bool opens_scope(size_t i) const {
    if (i == at_) return true;
    const std::string_view before = tokens_[i - 1].text;
    return before == ";" || before == "{" || before == "}" || before == ":";
  }
  bool closes_vector(size_t i) const {
    const std::string_view before = tokens_[i - 1].text;
    return !(before == ";" || before == "}" || before == "{" || before == ":") ||
           (before == "}" && (tokens_[i + 1].text == "," || tokens_[i + 1].text == "]" || tokens_[i + 1].text == ";"));
  }

  void body() {
    scopes_.emplace_back();
    if (next_scope_ < scope_labels_.size()) scopes_.back().labels = scope_labels_[next_scope_++];
    while (!accept("}")) {
      const Token& token = peek();
      if (token.kind == Token::kEnd) refuse(token, "kernel without end");
      if (accept("{")) {
        body();
      } else if (token.text == ".reg") {
        next();
        registers();
      } else if (token.text == ".shared" || token.text == ".local" || token.text == ".const" || token.text == ".global") {
        variable(kernel_.variables, false);
      } else if (token.text == ".pragma") {
        while (!accept(";")) next();
      } else if (token.kind == Token::kWord && peek(1).text == ":") {
        kernel_.labels[scopes_.back().labels.at(std::string(token.text))] = kernel_.instructions.size();
        next();
        next();
      } else if (!accept(";")) {
        instruction();
      }
    }
    scopes_.pop_back();
  }

  void registers() {
    const Token type = next();
    const uint32_t bytes = type_bytes(type.text);
    if (bytes == UINT32_MAX) refuse(type, "unknown type of a register");
    const uint8_t bits = bytes == 0 ? 1 : bytes == 1 ? 16 : static_cast<uint8_t>(bytes * 8);
    do {
      const std::string name = word("a register");
      if (accept("<")) {
        const uint64_t count = integer();
        if (count > 1000000) refuse(peek(), "too many registers");
        expect(">");
        for (uint64_t i = 0; i < count; ++i) add_register(name + std::to_string(i), bits);
      } else {
        add_register(name, bits);
      }
    } while (accept(","));
    expect(";");
  }
  void add_register(const std::string& name, uint8_t bits) {
    scopes_.back().registers[name] = static_cast<int>(kernel_.registers.size());
    kernel_.registers.push_back({name, bits});
  }
  int find_register(std::string_view name) const {
    for (auto scope = scopes_.rbegin(); scope != scopes_.rend(); ++scope) {
      const auto found = scope->registers.find(name);
      if (found != scope->registers.end()) return found->second;
    }
    return -1;
  }

  void instruction() {
    Instruction in;
    in.line = peek().line;
    if (accept("@")) {
      in.guard_negated = accept("!");
      in.guard = find_register(word("a predicate"));
      if (in.guard < 0 || kernel_.registers[in.guard].bits != 1) refuse(peek(), "unknown predicate");
    }
    const std::string whole = word("an instruction");
    size_t begin = 0;
    for (size_t dot; (dot = whole.find('.', begin)) != std::string::npos; begin = dot + 1)
      add_part(in, whole.substr(begin, dot - begin));
    add_part(in, whole.substr(begin));
    if (peek().text != ";") {
      do in.operands.push_back(operand());
      while (accept(","));
    }
    expect(";");
    kernel_.instructions.push_back(std::move(in));
  }
  static void add_part(Instruction& in, const std::string& part) {
    if (in.opcode.empty()) in.opcode = part;
    else in.suffix.push_back(part);
  }

  Operand operand() {
    Operand first = simple();
    if (accept("|")) {
      Operand pair;
      pair.kind = Operand::kPair;
      pair.items.push_back(std::move(first));
      pair.items.push_back(simple());
      return pair;
    }
    return first;
  }
  Operand simple() {
    Operand result;
    const Token token = peek();
    if (accept("[")) {
      result.kind = Operand::kAddress;
      result.items.push_back(simple());
      if (accept("+")) {
        result.offset = static_cast<int64_t>(integer());
      } else if (peek().text == "-") {
        result.offset = static_cast<int64_t>(integer());
      }
      while (accept(",")) result.items.push_back(simple());
      expect("]");
      return result;
    }
    if (accept("{")) {
      result.kind = Operand::kVector;
      if (!accept("}")) {
        do result.items.push_back(simple());
        while (accept(","));
        expect("}");
      }
      return result;
    }
    if (accept("!")) {
      result = simple();
      if (result.kind != Operand::kRegister) refuse(token, "'!' before something that is no predicate");
      result.negated = true;
      return result;
    }
    if (accept("-")) {
      result = number();
      if (result.kind == Operand::kInteger) result.bits = -result.bits;
      else result.bits ^= result.wide ? uint64_t{1} << 63 : uint64_t{1} << 31;
      return result;
    }
    if (token.kind == Token::kNumber) return number();
    if (token.kind != Token::kWord) refuse(token, "expected an operand");
    next();
    if (token.text == "_") return result;
    result.reg = find_register(token.text);
    result.kind = result.reg >= 0 ? Operand::kRegister : Operand::kName;
    if (result.reg < 0) result.name = label(token.text);
    return result;
  }
  std::string label(std::string_view name) const {
    for (auto scope = scopes_.rbegin(); scope != scopes_.rend(); ++scope) {
      const auto found = scope->labels.find(name);
      if (found != scope->labels.end()) return found->second;
    }
    return std::string(name);
  }
  Operand number() { return parse_number(next()); }

  std::vector<Token> tokens_;
  size_t at_ = 0;
  Module module_;
  Kernel kernel_;
  std::vector<Scope> scopes_;
  std::vector<std::map<std::string, std::string, std::less<>>> scope_labels_;
  size_t next_scope_ = 0;
};

}  // namespace

Module parse(const char* text, size_t bytes) { return Parser(text, bytes).run(); }

}  // namespace emu::ptx
