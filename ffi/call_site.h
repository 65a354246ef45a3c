// One custom call as its attributes describe it, and the argument vector of its host function.
//
// Attributes, all of them strings but where said:
//   key            digest of the other attributes; call sites with equal keys share what was prepared
//   kernel         name for messages
//   archs          the architectures there are modules for, by name, separated by spaces
//   symbols        host function of each, likewise
//   sm_<arch>      for each architecture the compiled object, base64
//   buffer_counts  int64 array: how many buffers the host function of each takes
//   shared_bytes   int64 array: dynamic shared memory a block of each, 0 when unknown
//   dims           int64 array: for each of B, S, T, H, K the operand and its axis
//   ptx            device code for the software GPU (cpu platform only)
// Operands, then results are the kernel's buffers in order. The last results are scratch; where several architectures
// need different amounts of it, each is as large as the largest, and a module takes the first of them.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "failure.h"

namespace jax_fa4 {

class CudaModule;
class EmulatedModule;

constexpr int kDims = 5, kMaxBuffers = 48, kMaxDevices = 64;

// One compiled object, shared by all call sites that carry it.
class Module {
 public:
  Module(std::string arch, std::string symbol, std::string object);
  ~Module();

  const std::string arch, symbol, object;
  CudaModule& cuda();                               // linked on first use
  EmulatedModule& emulated(const std::string& ptx);  // likewise

 private:
  std::mutex mutex_;
  std::unique_ptr<CudaModule> cuda_;
  std::unique_ptr<EmulatedModule> emulated_;
};

// What the attributes of a call say, and what was prepared for it; shared by all executables, devices and threads.
//
// XLA's own per-call state is not used: it needs a type to be registered before the handlers, and JAX registers what it
// was given before a backend starts in the opposite order.
struct CallSite {
  explicit CallSite(const xla::ffi::Dictionary& attributes);
  ~CallSite();
  // The call site of that key, made on first use. Lives to the end of the process, as its modules do.
  static CallSite& of(const xla::ffi::Dictionary& attributes);

  struct Variant {
    std::string arch;
    Module* module;  // lives as long as the process
    int64_t buffer_count, shared_bytes;
  };
  std::string kernel;
  std::vector<Variant> variants;
  std::vector<int64_t> dims;
  std::string ptx;

  struct Prepared {
    CudaModule* module;
    int64_t buffer_count;
    int32_t sm_count;
  };
  std::array<std::atomic<const Prepared*>, kMaxDevices> prepared{};  // by device; made once each
};

// Pointers to each argument, in the order of the calling convention (jax_fa4/kernels/common/abi.py): B, S, T, H, K,
// the number of SMs, the stream, the buffers, and an int32 result.
class Arguments {
 public:
  Arguments(const CallSite& site, int64_t buffer_count, xla::ffi::RemainingArgs operands,
            xla::ffi::RemainingRets results);
  void** vector(int32_t sm_count, void* stream);

  int32_t result() const { return result_; }
  size_t buffer_count() const { return count_; }
  size_t operand_count() const { return operand_count_; }
  void* buffer(size_t i) const { return buffers_[i]; }
  size_t buffer_bytes(size_t i) const { return bytes_[i]; }

 private:
  std::array<int32_t, kDims + 1> dims_{};
  void* stream_ = nullptr;
  int32_t result_ = 0;
  size_t count_ = 0, operand_count_ = 0;
  std::array<void*, kMaxBuffers> buffers_;
  std::array<size_t, kMaxBuffers> bytes_;
  std::array<void*, kDims + kMaxBuffers + 3> vector_;
};

}  // namespace jax_fa4
