// A compiled object on NVIDIA devices: its host part linked in this process, its kernels loaded on each device used.
#pragma once

#include <memory>
#include <mutex>
#include <string>

#include "call_site.h"
#include "cuda_driver.h"
#include "emu/loader/elf.h"

namespace jax_fa4 {

class CudaModule {
 public:
  CudaModule(const std::string& object, const std::string& symbol);

  // Makes the kernels ready on a device; not allowed while a graph is captured.
  void prepare(cuda::Device device);
  void launch(Arguments& arguments, int32_t sm_count, cuda::Stream stream, const std::string& name) const;

 private:
  std::unique_ptr<emu::LinkedObject> linked_;
  void (*host_function_)(void**) = nullptr;
  int (*load_to_device_)(cuda::Library*, cuda::Device) = nullptr;
  cuda::Library library_ = nullptr;
  std::mutex mutex_;
};

// Picks the site's module for the device and loads it there, once. Throws Failure that names both when there is none.
const CallSite::Prepared& prepare(CallSite& site, cuda::Device device);

// The device of the current context; makes the stream's context current if there is none.
cuda::Device current_device(cuda::Stream stream, int ordinal);

}  // namespace jax_fa4
