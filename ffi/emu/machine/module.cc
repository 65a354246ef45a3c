#include "machine/module.h"

#include <xmmintrin.h>

#include <cstdlib>
#include <cstring>

#include "decode/builder.h"
#include "ptx/module.h"

namespace emu {
namespace {

// cudaDeviceAttr of the CUDA runtime's public ABI.
int attribute_value(int attribute, int architecture, uint32_t sm_count) {
  switch (attribute) {
    case 1: return 1024;     // threads per block
    case 8: return 49152;    // shared memory per block
    case 10: return 32;      // warp size
    case 12: return 65536;   // registers per block
    case 16: return static_cast<int>(sm_count);
    case 39: return 2048;    // threads per multiprocessor
    case 75: return architecture / 10;
    case 76: return architecture % 10;
    case 81: return 233472;  // shared memory per multiprocessor
    case 82: return 65536;   // registers per multiprocessor
    case 97: return 232448;  // shared memory per block, opted in
    case 111: return 1024;   // of which reserved
    default: return 0;
  }
}

class LoadContext final : public HostContext {
 public:
  LoadContext(const Module& module, int architecture) : module_(module), architecture_(architecture) {}
  void launch(const LaunchConfig&) override { throw fail("a kernel launch while loading"); }
  int device_attribute(int attribute) override { return attribute_value(attribute, architecture_, 1); }
  const std::string* kernel_named(const std::string& name) override { return module_.name_of(name); }

 private:
  const Module& module_;
  int architecture_;
};

class RunContext final : public HostContext {
 public:
  RunContext(const Module& module, const MachineOptions& options, Report& report)
      : module_(module), options_(options), report_(report) {}
  void launch(const LaunchConfig& config) override {
    const Program* program = module_.program(config.kernel);
    Launch launch(*program, config, options_, launches_++);
    launch.run();
    report_.add(std::move(launch.counters), *program);
  }
  int device_attribute(int attribute) override { return attribute_value(attribute, module_.architecture(), options_.sm_count); }
  const std::string* kernel_named(const std::string& name) override { return module_.name_of(name); }

 private:
  const Module& module_;
  const MachineOptions& options_;
  Report& report_;
  uint64_t launches_ = 0;
};

int parse_architecture(const std::string& target) {
  int value = 0;
  if (target.rfind("sm_", 0) == 0) value = std::atoi(target.c_str() + 3);
  if (value != 90 && value != 100 && value != 103)
    throw fail("PTX for %s; known are sm_90a, sm_100a and sm_103a", target.c_str());
  return value;
}

// The calling thread's floating-point mode, set to IEEE for the run: XLA's threads flush subnormals.
class FloatingPointMode {
 public:
  FloatingPointMode() : saved_(_mm_getcsr()) { _mm_setcsr(0x1f80); }
  ~FloatingPointMode() { _mm_setcsr(saved_); }

 private:
  unsigned saved_;
};

}  // namespace

Module::Module(const uint8_t* object, size_t object_bytes, const char* ptx, size_t ptx_bytes, const std::string& symbol) {
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") || !__builtin_cpu_supports("bmi2"))
    throw fail("the software GPU needs a processor with AVX2, FMA and BMI2");
  const ptx::Module parsed = ptx::parse(ptx, ptx_bytes);
  architecture_ = parse_architecture(parsed.target);
  for (const ptx::Kernel& kernel : parsed.kernels) programs_[kernel.name] = decode(parsed, kernel);
  if (programs_.empty()) throw fail("the PTX has no kernel");

  if (object_bytes == 0) return;
  object_ = std::make_unique<LinkedObject>(object, object_bytes, runtime_symbol);
  entry_ = reinterpret_cast<void (*)(void**)>(object_->symbol(symbol));
  if (!entry_) throw fail("the host object has no function %s", symbol.c_str());
  const std::string init = object_->find("_mlir_", "_cuda_init"), load = object_->find("_mlir_", "_cuda_load_to_device");
  if (init.empty() || load.empty()) throw fail("the host object has no functions _mlir_*_cuda_init and _cuda_load_to_device");
  LoadContext context(*this, architecture_);
  const HostContextScope scope(&context);
  void** library = &library_;
  int32_t device = 0, result = 0;
  void* init_arguments[] = {&library, &result};
  reinterpret_cast<void (*)(void**)>(object_->symbol(init))(init_arguments);
  void* load_arguments[] = {&library, &device, &result};
  if (result == 0) reinterpret_cast<void (*)(void**)>(object_->symbol(load))(load_arguments);
  if (!context.error.empty()) throw Error(context.error);
  if (result) throw fail("the host object failed to load its kernels, code %d", result);
}

const Program* Module::program(const std::string& kernel) const {
  const auto found = programs_.find(kernel);
  return found == programs_.end() ? nullptr : found->second.get();
}
const std::string* Module::name_of(const std::string& kernel) const {
  const auto found = programs_.find(kernel);
  return found == programs_.end() ? nullptr : &found->first;
}

void Module::run(void** arguments, const MachineOptions& options, Report& report) const {
  if (!entry_) throw fail("the module was loaded without a host part");
  const FloatingPointMode mode;
  RunContext context(*this, options, report);
  const HostContextScope scope(&context);
  entry_(arguments);
  if (!context.error.empty()) throw Error(context.error);
}

void Module::launch(const LaunchConfig& config, const MachineOptions& options, Report& report) const {
  if (!program(config.kernel)) throw fail("the PTX has no kernel %s", config.kernel.c_str());
  const FloatingPointMode mode;
  RunContext(*this, options, report).launch(config);
}

}  // namespace emu
