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
  options.timing = o.timing;
  options.trace = o.trace;
  options.limit = o.limit;
  options.architecture = architecture;
  options.sm_count = o.sm_count ? o.sm_count : architecture >= 100 ? 148 : 132;
  for (uint64_t i = 0; i < o.region_count; ++i)
    options.regions.push_back({reinterpret_cast<uint64_t>(o.regions[i].base), o.regions[i].bytes, o.regions[i].writable != 0});
  return options;
}

// Runs `body`, and turns what it throws into an error and what it counted into a report.
template <class F>
int run(emu_module* module, const emu_options* given, emu_report** report, emu_error** error, F body) {
  int result = 0;
  try {
    emu::Report collected;
    collected.options = convert(given, module->module.architecture());
    try {
      body(collected.options, collected);
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
  return run(module, options, report, error,
             [&](const emu::MachineOptions& o, emu::Report& r) { module->module.run(args, o, r); });
}

int emu_launch(emu_module* module, const char* kernel, const emu_launch_config* config, const emu_options* options,
               emu_report** report, emu_error** error) {
  emu::LaunchConfig launch;
  launch.kernel = kernel;
  const auto dim3 = [](const uint32_t* v) { return emu::Dim3{std::max(v[0], 1u), std::max(v[1], 1u), std::max(v[2], 1u)}; };
  launch.grid = dim3(config->grid);
  launch.block = dim3(config->block);
  launch.cluster = dim3(config->cluster);
  launch.dynamic_shared_bytes = config->dynamic_shared_bytes;
  launch.parameters = config->params;
  return run(module, options, report, error,
             [&](const emu::MachineOptions& o, emu::Report& r) { module->module.launch(launch, o, r); });
}

const char* emu_error_message(const emu_error* error) { return error->message.c_str(); }
void emu_error_free(emu_error* error) { delete error; }
const char* emu_report_json(const emu_report* report) { return report->json.c_str(); }
void emu_report_free(emu_report* report) { delete report; }

}  // extern "C"
