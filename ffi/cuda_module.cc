#include "cuda_module.h"

#include <atomic>
#include <cstring>

namespace jax_fa4 {
namespace {

using xla::ffi::ErrorCode;

// The host part of a compiled module calls the CUDA runtime through eight symbols. These stand for them, on top of the
// driver alone: no CUDA runtime or compiler library is needed to run a module, and a machine may hold devices that a
// module has no code for.
struct RuntimeConfig {  // cudaLaunchConfig_t
  uint32_t grid[3], block[3];
  uint64_t shared_bytes;
  cuda::Stream stream;
  const cuda::LaunchAttribute* attributes;
  uint32_t attribute_count;
};
static_assert(sizeof(RuntimeConfig) == 56);

thread_local std::string failed_launch;
std::atomic<uint64_t> launches{0};

std::string launch_text(const RuntimeConfig& config, cuda::Kernel kernel) {
  constexpr int kCluster = 4, kStaticShared = 1, kMaxDynamicShared = 8;
  const auto triple = [](const uint32_t* v) {
    return std::to_string(v[0]) + "x" + std::to_string(v[1]) + "x" + std::to_string(v[2]);
  };
  cuda::Device device = 0;
  int fixed = 0, limit = 0;
  cuda::driver().cuCtxGetDevice(&device);
  cuda::driver().cuKernelGetAttribute(&fixed, kStaticShared, kernel, device);
  cuda::driver().cuKernelGetAttribute(&limit, kMaxDynamicShared, kernel, device);
  std::string text = "grid " + triple(config.grid) + ", block " + triple(config.block);
  for (uint32_t i = 0; i < config.attribute_count; ++i) {
    const auto* value = reinterpret_cast<const uint32_t*>(config.attributes[i].value);
    if (config.attributes[i].id == kCluster) text += ", cluster " + triple(value);
  }
  return text + ", shared memory " + std::to_string(config.shared_bytes) + " bytes of " + std::to_string(limit) +
         " allowed beside " + std::to_string(fixed);
}

int library_load(cuda::Library* library, const void* code, void* options, void* values, unsigned count,
                 void* library_options, void* library_values, unsigned library_count) {
  return cuda::driver().cuLibraryLoadData(library, code, options, values, count, library_options, library_values,
                                          library_count);
}
int library_get_kernel(cuda::Kernel* kernel, cuda::Library library, const char* name) {
  return cuda::driver().cuLibraryGetKernel(kernel, library, name);
}
int kernel_get_attribute(int* value, int which, cuda::Kernel kernel, cuda::Device device) {
  return cuda::driver().cuKernelGetAttribute(value, which, kernel, device);
}
// cudaFuncAttribute and CUfunction_attribute agree in the two that modules set (8: dynamic shared memory, 14:
// non-portable cluster size), and cudaDeviceAttr is CUdevice_attribute.
int kernel_set_attribute(cuda::Kernel kernel, int which, int value, cuda::Device device) {
  return cuda::driver().cuKernelSetAttribute(which, value, kernel, device);
}
int get_device(int* device) { return cuda::driver().cuCtxGetDevice(device); }
int function_set_attribute(cuda::Kernel kernel, int which, int value) {
  cuda::Device device = 0;
  const cuda::Result result = cuda::driver().cuCtxGetDevice(&device);
  return result ? result : kernel_set_attribute(kernel, which, value, device);
}
int device_get_attribute(int* value, int which, cuda::Device device) {
  return cuda::driver().cuDeviceGetAttribute(value, which, device);
}
int launch_kernel(const RuntimeConfig* from, cuda::Kernel kernel, void** parameters) {
  cuda::LaunchConfig config{};
  std::memcpy(config.grid, from->grid, sizeof config.grid);
  std::memcpy(config.block, from->block, sizeof config.block);
  config.shared_bytes = static_cast<uint32_t>(from->shared_bytes);
  config.stream = from->stream;
  config.attributes = from->attributes;
  config.attribute_count = from->attribute_count;
  const cuda::Result result = cuda::driver().cuLaunchKernelEx(&config, kernel, parameters, nullptr);
  if (result) failed_launch = launch_text(*from, kernel);
  return result;
}


void* runtime_symbol(const std::string& name) {
  static const struct {
    const char* name;
    void* function;
  } symbols[] = {
      {"_cudaLibraryLoadData", reinterpret_cast<void*>(library_load)},
      {"_cudaLibraryGetKernel", reinterpret_cast<void*>(library_get_kernel)},
      {"_cuKernelGetAttribute", reinterpret_cast<void*>(kernel_get_attribute)},
      {"_cudaKernelSetAttributeForDevice", reinterpret_cast<void*>(kernel_set_attribute)},
      {"_cudaGetDevice", reinterpret_cast<void*>(get_device)},
      {"_cudaFuncSetAttribute", reinterpret_cast<void*>(function_set_attribute)},
      {"_cudaDeviceGetAttribute", reinterpret_cast<void*>(device_get_attribute)},
      {"_cudaLaunchKernelEx", reinterpret_cast<void*>(launch_kernel)},
      {"memcpy", reinterpret_cast<void*>(static_cast<void* (*)(void*, const void*, size_t)>(std::memcpy))},
      {"memset", reinterpret_cast<void*>(static_cast<void* (*)(void*, int, size_t)>(std::memset))},
  };
  for (const auto& symbol : symbols)
    if (name == symbol.name) return symbol.function;
  throw Failure(ErrorCode::kUnimplemented,
                "jax_fa4: a module calls '" + name + "', which the launcher does not have; it needs a newer jax_fa4");
}

// Whether code for "sm_90a" runs on a device: "a" is that compute capability alone, "f" its family, none what is newer
// within the major version.
bool runs_on(const std::string& arch, int major, int minor) {
  const int number = std::atoi(arch.c_str() + 3);
  const char suffix = arch.back();
  if (number / 10 != major) return false;
  return suffix == 'a' ? number % 10 == minor : number % 10 <= minor;
}

const CallSite::Variant& variant_for(const CallSite& site, cuda::Device device) {
  const int major = cuda::attribute(cuda::kComputeCapabilityMajor, device);
  const int minor = cuda::attribute(cuda::kComputeCapabilityMinor, device);
  std::string held;
  for (const CallSite::Variant& variant : site.variants) {
    if (runs_on(variant.arch, major, minor)) {
      const int64_t limit = cuda::attribute(cuda::kMaxSharedMemoryPerBlockOptin, device);
      if (variant.shared_bytes > limit)
        throw Failure(ErrorCode::kResourceExhausted,
                      "jax_fa4: " + site.kernel + " needs " + std::to_string(variant.shared_bytes) +
                          " bytes of shared memory a block, and " + cuda::device_text(device) + " allows " +
                          std::to_string(limit) + "; use backend=\"xla\" on this device");
      return variant;
    }
    held += (held.empty() ? "" : ", ") + variant.arch;
  }
  throw Failure(ErrorCode::kFailedPrecondition,
                "jax_fa4: this program's " + site.kernel + " holds modules for " + held + ", and the device is " +
                    cuda::device_text(device) + "; make the program again under `with jax_fa4.target(\"sm_" +
                    std::to_string(major) + std::to_string(minor) + "a\", ...)`, or use backend=\"xla\"");
}

}  // namespace

CudaModule::CudaModule(const std::string& object, const std::string& symbol)
    : linked_(std::make_unique<emu::LinkedObject>(reinterpret_cast<const uint8_t*>(object.data()), object.size(),
                                                  runtime_symbol)) {
  const auto find = [&](const std::string& name) {
    void* address = linked_->symbol(name);
    if (!address)
      throw Failure(ErrorCode::kInvalidArgument,
                    "jax_fa4: a module lacks its function '" + name + "'; compile it again with this version");
    return address;
  };
  const std::string prefix = "jax_fa4_cuda_";
  host_function_ = reinterpret_cast<void (*)(void**)>(find(symbol));
  load_to_device_ = reinterpret_cast<int (*)(cuda::Library*, cuda::Device)>(find(prefix + "load_to_device"));
  const auto count = reinterpret_cast<int (*)()>(find(prefix + "num_binaries"))();
  if (count != 1)
    throw Failure(ErrorCode::kUnimplemented,
                  "jax_fa4: a module holds " + std::to_string(count) + " binaries; exactly one is supported");
  const auto init = reinterpret_cast<int (*)(cuda::Library*)>(find(prefix + "init"));
  if (const int result = init(&library_))
    throw Failure(ErrorCode::kFailedPrecondition, "jax_fa4: loading a module failed: " + cuda::describe(result));
}

void CudaModule::launch(Arguments& arguments, int32_t sm_count, cuda::Stream stream, const std::string& name) const {
  launches.fetch_add(1, std::memory_order_relaxed);
  failed_launch.clear();
  host_function_(arguments.vector(sm_count, stream));
  if (const int32_t result = arguments.result())
    throw Failure(ErrorCode::kInternal, "jax_fa4: launching " + name + " failed" +
                                            (failed_launch.empty() ? "" : " (" + failed_launch + ")") + ": " +
                                            cuda::describe(result));
}

void CudaModule::prepare(cuda::Device device) {
  const std::lock_guard lock(mutex_);
  if (const int result = load_to_device_(&library_, device))
    throw Failure(ErrorCode::kFailedPrecondition, "jax_fa4: loading a module on " + cuda::device_text(device) +
                                                      " failed: " + cuda::describe(result));
}

const CallSite::Prepared& prepare(CallSite& site, cuda::Device device) {
  if (device < 0 || device >= kMaxDevices)
    throw Failure(ErrorCode::kOutOfRange, "jax_fa4: device " + std::to_string(device) + " is beyond the " +
                                              std::to_string(kMaxDevices) + " supported");
  if (const auto* ready = site.prepared[device].load(std::memory_order_acquire)) return *ready;
  const CallSite::Variant& variant = variant_for(site, device);
  CudaModule& module = variant.module->cuda();
  module.prepare(device);
  const auto* ready = new CallSite::Prepared{&module, variant.buffer_count,
                                             cuda::attribute(cuda::kMultiprocessorCount, device)};
  const CallSite::Prepared* other = nullptr;
  if (site.prepared[device].compare_exchange_strong(other, ready, std::memory_order_acq_rel)) return *ready;
  delete ready;  // another thread was faster
  return *other;
}

cuda::Device current_device(cuda::Stream stream, int ordinal) {
  const cuda::Driver& driver = cuda::driver();
  cuda::Device device = 0;
  if (driver.cuCtxGetDevice(&device) == 0) return device;
  cuda::Context context = nullptr;
  if (stream && driver.cuStreamGetCtx(stream, &context) == 0 && driver.cuCtxSetCurrent(context) == 0 &&
      driver.cuCtxGetDevice(&device) == 0)
    return device;
  if (const cuda::Result result = driver.cuDeviceGet(&device, ordinal))
    throw Failure(ErrorCode::kInternal, "jax_fa4: no CUDA device " + std::to_string(ordinal) + ": " +
                                            cuda::describe(result));
  return device;
}

}  // namespace jax_fa4

// How often modules were launched in this process. A graph that XLA captured and replays does not count, which is how
// tests tell that it was captured.
extern "C" __attribute__((visibility("default"))) uint64_t jax_fa4_launch_count() {
  return jax_fa4::launches.load(std::memory_order_relaxed);
}
