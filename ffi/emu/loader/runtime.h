// The stand-in for the CUDA runtime that host parts are linked against. It is reached through C symbols that carry no
// context, so the host part's caller installs a HostContext for its thread.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace emu {

struct Dim3 {
  uint32_t x = 1, y = 1, z = 1;
};

struct LaunchConfig {
  std::string kernel;
  Dim3 grid, block, cluster;
  uint64_t dynamic_shared_bytes = 0;
  void** parameters = nullptr;
};

class HostContext {
 public:
  virtual ~HostContext() = default;
  virtual void launch(const LaunchConfig&) = 0;      // may throw Error: kept, the host part sees a CUDA error
  virtual int device_attribute(int attribute) = 0;   // cudaDeviceAttr
  virtual const std::string* kernel_named(const std::string& name) = 0;  // null: no such kernel. Lives with the module

  std::string error;  // of the first launch that failed
};

// Installs `context` for the calling thread while it lives.
class HostContextScope {
 public:
  explicit HostContextScope(HostContext* context);
  ~HostContextScope();

 private:
  HostContext* previous_;
};

void* runtime_symbol(const std::string& name);  // throws Error for a symbol that has no stand-in

}  // namespace emu
