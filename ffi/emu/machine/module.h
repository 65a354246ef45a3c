// A loaded artifact.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "decode/program.h"
#include "loader/elf.h"
#include "machine/launch.h"

namespace emu {

struct Report {
  std::vector<KernelCounters> kernels;       // in order of their first launch
  std::map<std::string, const Program*> programs;
  std::vector<std::string> complaints;
  MachineOptions options;
  void add(KernelCounters&& counters, const Program& program);
  std::string json() const;
};

class Module {
 public:
  Module(const uint8_t* object, size_t object_bytes, const char* ptx, size_t ptx_bytes, const std::string& symbol);

  // Calls the host function. Throws Error; `report` then holds what was counted so far.
  void run(void** arguments, const MachineOptions& options, Report& report) const;
  // Launches one kernel, without the host part.
  void launch(const LaunchConfig& config, const MachineOptions& options, Report& report) const;
  int architecture() const { return architecture_; }

  const Program* program(const std::string& kernel) const;
  const std::string* name_of(const std::string& kernel) const;

 private:
  std::map<std::string, std::unique_ptr<Program>> programs_;
  std::unique_ptr<LinkedObject> object_;
  void (*entry_)(void**) = nullptr;
  void* library_ = nullptr;
  int architecture_ = 0;
};

}  // namespace emu
