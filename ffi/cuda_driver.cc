#include "cuda_driver.h"

#include <dlfcn.h>

#include "failure.h"

namespace jax_fa4::cuda {
namespace {

using xla::ffi::ErrorCode;

Driver load() {
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (!library)
    throw Failure(ErrorCode::kUnavailable, std::string("jax_fa4: the NVIDIA driver's libcuda.so.1 cannot be loaded (") +
                                               dlerror() + "); install the NVIDIA driver");
  Driver driver;
  std::string missing;
  const auto find = [&](auto& function, const char* name) {
    function = reinterpret_cast<std::decay_t<decltype(function)>>(dlsym(library, name));
    if (!function) missing += std::string(missing.empty() ? "" : ", ") + name;
  };
  find(driver.cuInit, "cuInit");
  find(driver.cuDriverGetVersion, "cuDriverGetVersion");
  find(driver.cuGetErrorName, "cuGetErrorName");
  find(driver.cuGetErrorString, "cuGetErrorString");
  find(driver.cuDeviceGet, "cuDeviceGet");
  find(driver.cuDeviceGetAttribute, "cuDeviceGetAttribute");
  find(driver.cuDeviceGetName, "cuDeviceGetName");
  find(driver.cuCtxGetCurrent, "cuCtxGetCurrent");
  find(driver.cuCtxSetCurrent, "cuCtxSetCurrent");
  find(driver.cuCtxGetDevice, "cuCtxGetDevice");
  find(driver.cuStreamGetCtx, "cuStreamGetCtx");
  find(driver.cuLibraryLoadData, "cuLibraryLoadData");
  find(driver.cuLibraryGetKernel, "cuLibraryGetKernel");
  find(driver.cuKernelGetAttribute, "cuKernelGetAttribute");
  find(driver.cuKernelSetAttribute, "cuKernelSetAttribute");
  find(driver.cuLaunchKernelEx, "cuLaunchKernelEx");
  if (!missing.empty())
    throw Failure(ErrorCode::kUnavailable, "jax_fa4: the NVIDIA driver is too old: it lacks " + missing +
                                               "; install one for CUDA 12.4 or newer (12.8 or newer for Blackwell)");
  driver.cuInit(0);
  return driver;
}

}  // namespace

const Driver& driver() {
  static const Driver loaded = load();  // a failure throws, and the next call tries again
  return loaded;
}

std::string version_text() {
  int version = 0;
  driver().cuDriverGetVersion(&version);
  return "CUDA " + std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

std::string describe(Result result) {
  const char *name = nullptr, *text = nullptr;
  driver().cuGetErrorName(result, &name);
  driver().cuGetErrorString(result, &text);
  std::string message = std::string(name ? name : "CUDA error") + " (" + std::to_string(result) + ")";
  if (text) message += std::string(": ") + text;
  switch (result) {
    case 200:  // CUDA_ERROR_INVALID_IMAGE
    case 218:  // CUDA_ERROR_INVALID_PTX
    case 222:  // CUDA_ERROR_UNSUPPORTED_PTX_VERSION
      return message + ". The driver (" + version_text() + ") cannot read this module: install a newer NVIDIA driver";
    case 209:  // CUDA_ERROR_NO_BINARY_FOR_GPU
      return message + ". The module holds no code for this device: compile for it with jax_fa4.target(...)";
    case 1:  // CUDA_ERROR_INVALID_VALUE, what a launch outside the device's limits returns
      return message + ". The launch is outside the device's limits (shared memory, cluster or grid size)";
  }
  return message;
}

int attribute(DeviceAttribute which, Device device) {
  int value = 0;
  const Result result = driver().cuDeviceGetAttribute(&value, which, device);
  if (result) throw Failure(ErrorCode::kInternal, "jax_fa4: reading a device attribute failed: " + describe(result));
  return value;
}

std::string device_text(Device device) {
  char name[256] = "GPU";
  driver().cuDeviceGetName(name, sizeof name, device);
  return std::string(name) + " (sm_" + std::to_string(attribute(kComputeCapabilityMajor, device)) +
         std::to_string(attribute(kComputeCapabilityMinor, device)) + ")";
}

}  // namespace jax_fa4::cuda
