// A compiled object on the software GPU.
#pragma once

#include <string>

#include "call_site.h"
#include "emu/api.h"

namespace jax_fa4 {

class EmulatedModule {
 public:
  EmulatedModule(const std::string& arch, const std::string& object, const std::string& ptx, const std::string& symbol);
  ~EmulatedModule();
  void run(Arguments& arguments);

 private:
  emu_module* module_;
  int32_t sm_count_;
};

}  // namespace jax_fa4
