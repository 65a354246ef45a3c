#include "emulated_module.h"

#include <cstring>
#include <deque>
#include <mutex>

namespace jax_fa4 {
namespace {

using xla::ffi::ErrorCode;

// Settings and reports of the process: a program is compiled once and run under many seeds.
std::mutex settings_mutex;
emu_options settings = [] {
  emu_options options{};
  options.struct_bytes = sizeof options;
  return options;
}();
std::deque<std::string> reports;
size_t reports_kept = 0;

[[noreturn]] void fail(ErrorCode code, const std::string& what, emu_error* error) {
  const std::string message = what + (error ? emu_error_message(error) : "no reason given");
  emu_error_free(error);
  throw Failure(code, message);
}

}  // namespace

EmulatedModule::EmulatedModule(const std::string& arch, const std::string& object, const std::string& ptx,
                               const std::string& symbol)
    : sm_count_(arch.rfind("sm_9", 0) == 0 ? 132 : 148) {  // H200, B200
  emu_error* error = nullptr;
  module_ = emu_load(reinterpret_cast<const uint8_t*>(object.data()), object.size(), ptx.data(), ptx.size(),
                     symbol.c_str(), &error);
  if (!module_) fail(ErrorCode::kUnimplemented, "jax_fa4: the software GPU refuses a module for " + arch + ": ", error);
}

EmulatedModule::~EmulatedModule() { emu_unload(module_); }

void EmulatedModule::run(Arguments& arguments) {
  std::array<emu_region, kMaxBuffers> regions;
  for (size_t i = 0; i < arguments.buffer_count(); ++i) {
    const bool result = i >= arguments.operand_count();
    regions[i] = {arguments.buffer(i), arguments.buffer_bytes(i), result};
    if (result) std::memset(arguments.buffer(i), 0xff, arguments.buffer_bytes(i));  // NaN until the kernel writes it
  }
  emu_options options;
  bool keep;
  {
    const std::lock_guard lock(settings_mutex);
    options = settings;
    keep = reports_kept > 0;
  }
  options.regions = regions.data();
  options.region_count = arguments.buffer_count();
  if (!options.sm_count) options.sm_count = sm_count_;
  emu_error* error = nullptr;
  emu_report* report = nullptr;
  const int failed = emu_run(module_, arguments.vector(options.sm_count, nullptr), &options, keep ? &report : nullptr,
                             &error);
  if (report) {
    const std::lock_guard lock(settings_mutex);
    reports.emplace_back(emu_report_json(report));
    while (reports.size() > reports_kept) reports.pop_front();
    emu_report_free(report);
  }
  if (failed) fail(ErrorCode::kInternal, "jax_fa4: the software GPU stopped: ", error);
  if (arguments.result())
    throw Failure(ErrorCode::kInternal, "jax_fa4: the host part of a module failed on the software GPU with CUDA error " +
                                            std::to_string(arguments.result()));
}

}  // namespace jax_fa4

// For jax_fa4.emulator (ctypes).
extern "C" {

// Settings of every later run in this process; `reports` is how many reports to keep for jax_fa4_emulation_report.
EMU_EXPORT void jax_fa4_emulation_configure(const emu_options* options, uint64_t reports) {
  const std::lock_guard lock(jax_fa4::settings_mutex);
  jax_fa4::settings = *options;
  jax_fa4::reports_kept = reports;
  while (jax_fa4::reports.size() > reports) jax_fa4::reports.pop_front();
}

// Takes the oldest report kept, as JSON. Returns its size in bytes, 0 when there is none; when `capacity` is too small
// the report stays and only its size is returned.
EMU_EXPORT uint64_t jax_fa4_emulation_report(char* text, uint64_t capacity) {
  const std::lock_guard lock(jax_fa4::settings_mutex);
  if (jax_fa4::reports.empty()) return 0;
  const std::string& oldest = jax_fa4::reports.front();
  const uint64_t bytes = oldest.size();
  if (bytes > capacity) return bytes;
  std::memcpy(text, oldest.data(), bytes);
  jax_fa4::reports.pop_front();
  return bytes;
}
}
