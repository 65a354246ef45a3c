#include "api.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <thread>

#include "machine/module.h"

struct emu_module {
  emu::Module module;
};
struct emu_error {
  std::string message;
};
struct emu_report {
  std::string json;
};

namespace {

void set_error(emu_error** error, const std::string& message) {
  if (error) *error = new emu_error{message};
}

emu::MachineOptions convert(const emu_options* given, int architecture) {
  emu_options o;
  std::memset(&o, 0, sizeof o);
  if (given) std::memcpy(&o, given, std::min<uint64_t>(given->struct_bytes, sizeof o));
  emu::MachineOptions options;
  options.seed = o.seed;
  options.threads = o.threads ? o.threads : std::max(1u, std::thread::hardware_concurrency());
  options.strict = o.strict;
  options.trace = o.trace;
  options.architecture = architecture;
  options.sm_count = o.sm_count ? o.sm_count : architecture >= 100 ? 148 : 132;
  for (uint64_t i = 0; i < o.region_count; ++i)
    options.regions.push_back({reinterpret_cast<uint64_t>(o.regions[i].base), o.regions[i].bytes, o.regions[i].writable != 0});
  return options;
}

}  // namespace

extern "C" {

emu_module* emu_load(const uint8_t* object, uint64_t object_bytes, const char* ptx, uint64_t ptx_bytes, const char* symbol,
                     emu_error** error) {
  try {
    return new emu_module{emu::Module(object, object_bytes, ptx, ptx_bytes, symbol)};
  } catch (const emu::Error& problem) {
    std::string message = problem.what();
    if (problem.ptx_line) message = "PTX line " + std::to_string(problem.ptx_line) + ": " + message;
    set_error(error, message);
  } catch (const std::exception& problem) {
    set_error(error, problem.what());
  }
  return nullptr;
}

void emu_unload(emu_module* module) { delete module; }

int emu_run(emu_module* module, void** args, const emu_options* options, emu_report** report, emu_error** error) {
  int result = 0;
  try {
    emu::Report collected;
    collected.options = convert(options, module->module.architecture());
    try {
      module->module.run(args, collected.options, collected);
    } catch (const std::exception& problem) {
      set_error(error, problem.what());
      result = 1;
    }
    if (report) *report = new emu_report{collected.json()};
  } catch (const std::exception& problem) {
    set_error(error, problem.what());
    result = 1;
  }
  return result;
}

const char* emu_error_message(const emu_error* error) { return error->message.c_str(); }
void emu_error_free(emu_error* error) { delete error; }
const char* emu_report_json(const emu_report* report) { return report->json.c_str(); }
void emu_report_free(emu_report* report) { delete report; }

}  // extern "C"
