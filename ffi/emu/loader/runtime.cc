#include "loader/runtime.h"

#include <cstring>
#include <map>

#include "core/error.h"

namespace emu {
namespace {

thread_local HostContext* current = nullptr;

constexpr int kSuccess = 0, kInvalidValue = 1, kLaunchFailure = 719, kSymbolNotFound = 500;

// cudaLaunchConfig_t and cudaLaunchAttribute of the CUDA runtime's public ABI.
struct RuntimeAttribute {
  int32_t id;
  int32_t padding;
  uint32_t value[16];
};
struct RuntimeConfig {
  uint32_t grid[3], block[3];
  uint64_t dynamic_shared_bytes;
  void* stream;
  const RuntimeAttribute* attributes;
  uint32_t attribute_count;
};
static_assert(sizeof(RuntimeAttribute) == 72 && sizeof(RuntimeConfig) == 56);
constexpr int kAttributeClusterDimension = 4;

int library_load(void** library, const void*, void*, void*, uint32_t, void*, void*, uint32_t) {
  static char token;
  *library = &token;
  return kSuccess;
}
int library_get_kernel(const void** kernel, void*, const char* name) {
  if (!current) return kInvalidValue;
  *kernel = current->kernel_named(name);
  if (*kernel) return kSuccess;
  if (current->error.empty()) current->error = std::string("the PTX has no kernel ") + name;
  return kSymbolNotFound;
}
int launch_kernel(const RuntimeConfig* config, const std::string* kernel, void** parameters, void*) {
  if (!current || !kernel) return kInvalidValue;
  if (!current->error.empty()) return kLaunchFailure;
  LaunchConfig launch;
  launch.kernel = *kernel;
  launch.grid = {config->grid[0], config->grid[1], config->grid[2]};
  launch.block = {config->block[0], config->block[1], config->block[2]};
  launch.dynamic_shared_bytes = config->dynamic_shared_bytes;
  launch.parameters = parameters;
  for (uint32_t i = 0; i < config->attribute_count; ++i) {
    const RuntimeAttribute& attribute = config->attributes[i];
    if (attribute.id == kAttributeClusterDimension)
      launch.cluster = {attribute.value[0], attribute.value[1], attribute.value[2]};
  }
  try {
    current->launch(launch);
  } catch (const std::exception& problem) {
    current->error = problem.what();
    return kLaunchFailure;
  }
  return kSuccess;
}
int function_set_attribute(const void*, int, int) { return kSuccess; }
int kernel_set_attribute(const void*, int, int, int) { return kSuccess; }
int kernel_get_attribute(int* value, int, const void*, int) {
  *value = 0;  // static shared memory (attribute 1): kernels of this kind use dynamic memory only
  return kSuccess;
}
int device_get_attribute(int* value, int attribute, int) {
  if (!current) return kInvalidValue;
  *value = current->device_attribute(attribute);
  return kSuccess;
}
int get_device(int* device) {
  *device = 0;
  return kSuccess;
}
int set_device(int) { return kSuccess; }
int library_once(void*) { return kSuccess; }
void* tvm_stream(int32_t, int32_t) { return nullptr; }
void tvm_raise(const char* kind, const char* message) {
  if (current && current->error.empty()) current->error = std::string(kind) + ": " + message;
}
void tvm_raise_parts(const char* kind, const char** parts, int32_t count) {
  std::string text;
  for (int32_t i = 0; i < count; ++i) text += parts[i];
  tvm_raise(kind, text.c_str());
}
void tvm_raise_cuda(int code) { tvm_raise("CUDA error", std::to_string(code).c_str()); }

template <class F>
void* address(F* function) {
  return reinterpret_cast<void*>(function);
}

}  // namespace

HostContextScope::HostContextScope(HostContext* context) : previous_(current) { current = context; }
HostContextScope::~HostContextScope() { current = previous_; }

void* runtime_symbol(const std::string& name) {
  static const std::map<std::string, void*> known = {
      {"_cudaLibraryLoadData", address(library_load)},
      {"_cudaLibraryGetKernel", address(library_get_kernel)},
      {"_cudaLaunchKernelEx", address(launch_kernel)},
      {"_cudaFuncSetAttribute", address(function_set_attribute)},
      {"_cudaKernelSetAttributeForDevice", address(kernel_set_attribute)},
      {"_cuKernelGetAttribute", address(kernel_get_attribute)},
      {"_cudaDeviceGetAttribute", address(device_get_attribute)},
      {"_cudaGetDevice", address(get_device)},
      {"_cudaSetDevice", address(set_device)},
      {"cuda_dialect_init_library_once", address(library_once)},
      {"cuda_dialect_unload_library_once", address(library_once)},
      {"TVMFFIEnvGetStream", address(tvm_stream)},
      {"TVMFFIErrorSetRaisedFromCStr", address(tvm_raise)},
      {"TVMFFIErrorSetRaisedFromCStrParts", address(tvm_raise_parts)},
      {"CuteDSLRT_TVMFFISetRaisedCudaError", address(tvm_raise_cuda)},
      {"memcpy", address(static_cast<void* (*)(void*, const void*, size_t)>(std::memcpy))},
      {"memset", address(static_cast<void* (*)(void*, int, size_t)>(std::memset))},
      {"memmove", address(static_cast<void* (*)(void*, const void*, size_t)>(std::memmove))},
  };
  const auto found = known.find(name);
  if (found == known.end()) throw fail("host object: no stand-in for the symbol %s", name.c_str());
  return found->second;
}

}  // namespace emu
