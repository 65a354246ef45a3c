// The few functions of the CUDA driver that launching needs, found at run time: the library is built and loaded without
// a CUDA toolkit or driver. Types and enumerators are those of the driver's public ABI.
#pragma once

#include <cstdint>
#include <string>

namespace jax_fa4::cuda {

using Result = int;    // CUresult; 0 is success
using Device = int;    // CUdevice
using Context = void*;  // CUcontext
using Library = void*;  // CUlibrary
using Kernel = void*;   // CUkernel, usable where a CUfunction is expected
using Stream = void*;   // CUstream

enum DeviceAttribute : int {
  kMultiprocessorCount = 16,
  kComputeCapabilityMajor = 75,
  kComputeCapabilityMinor = 76,
  kMaxSharedMemoryPerBlockOptin = 97,
};

struct LaunchAttribute {  // CUlaunchAttribute
  int32_t id, padding;
  uint64_t value[8];
};
static_assert(sizeof(LaunchAttribute) == 72);

struct LaunchConfig {  // CUlaunchConfig
  uint32_t grid[3], block[3], shared_bytes;
  Stream stream;
  const LaunchAttribute* attributes;
  uint32_t attribute_count;
};
static_assert(sizeof(LaunchConfig) == 56);

struct Driver {
  Result (*cuInit)(unsigned);
  Result (*cuDriverGetVersion)(int*);
  Result (*cuGetErrorName)(Result, const char**);
  Result (*cuGetErrorString)(Result, const char**);
  Result (*cuDeviceGet)(Device*, int);
  Result (*cuDeviceGetAttribute)(int*, int, Device);
  Result (*cuDeviceGetName)(char*, int, Device);
  Result (*cuCtxGetCurrent)(Context*);
  Result (*cuCtxSetCurrent)(Context);
  Result (*cuCtxGetDevice)(Device*);
  Result (*cuStreamGetCtx)(Stream, Context*);
  Result (*cuLibraryLoadData)(Library*, const void*, void*, void*, unsigned, void*, void*, unsigned);
  Result (*cuLibraryGetKernel)(Kernel*, Library, const char*);
  Result (*cuKernelGetAttribute)(int*, int, Kernel, Device);
  Result (*cuKernelSetAttribute)(int, int, Kernel, Device);
  Result (*cuLaunchKernelEx)(const LaunchConfig*, Kernel, void**, void**);
};

const Driver& driver();  // throws Failure: no driver, or one too old to have these functions

std::string version_text();                    // of the driver, as in "CUDA 12.8"
std::string describe(Result result);           // "CUDA_ERROR_...: explanation", with what to do where that is known
std::string device_text(Device device);        // "NVIDIA H200 (sm_90)"
int attribute(DeviceAttribute which, Device device);

}  // namespace jax_fa4::cuda
