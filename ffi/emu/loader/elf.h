// Links one relocatable x86-64 object in memory: the host part of a compiled module.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <string>

namespace emu {

// Address of an external symbol; throws Error when it is not known.
using SymbolResolver = std::function<void*(const std::string&)>;

class LinkedObject {
 public:
  LinkedObject(const uint8_t* object, size_t bytes, const SymbolResolver& resolve);
  ~LinkedObject();
  LinkedObject(const LinkedObject&) = delete;
  LinkedObject& operator=(const LinkedObject&) = delete;

  void* symbol(const std::string& name) const;  // null when absent
  // Name of the only defined symbol that begins and ends so; empty when there is none.
  std::string find(const std::string& prefix, const std::string& suffix) const;

 private:
  uint8_t* memory_ = nullptr;
  size_t bytes_ = 0;
  std::map<std::string, uint8_t*> symbols_;
};

}  // namespace emu
