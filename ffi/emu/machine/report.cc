// Counters as JSON.
#include <cinttypes>
#include <cstdio>
#include <set>

#include "machine/module.h"

namespace emu {
namespace {

std::string quoted(const std::string& text) {
  std::string result = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') result += '\\';
    if (c == '\n') result += "\\n";
    else if (static_cast<unsigned char>(c) >= 32) result += c;
  }
  return result + "\"";
}
class Writer {
 public:
  void number(const char* key, uint64_t value) {
    field(key);
    text_ += std::to_string(value);
  }
  void raw(const char* key, const std::string& value) {
    field(key);
    text_ += value;
  }
  std::string object() const { return "{" + text_ + "}"; }

 private:
  void field(const char* key) {
    if (!text_.empty()) text_ += ",";
    text_ += quoted(key) + ":";
  }
  std::string text_;
};
template <class T, class F>
std::string list(const T& items, F write) {
  std::string result = "[";
  for (const auto& item : items) result += (result.size() > 1 ? "," : "") + write(item);
  return result + "]";
}
std::string units_json(const uint64_t* units) {
  Writer w;
  for (size_t u = 0; u < static_cast<size_t>(Unit::kCount); ++u) w.number(kUnitNames[u], units[u]);
  return w.object();
}

// Opcodes with their modifiers as executed, and the uses of tensor instructions.
std::vector<std::string> forms_of(const KernelCounters& k, const Program& program) {
  std::set<std::string> forms;
  for (size_t i = 0; i < k.executed.size(); ++i)
    if (k.executed[i]) forms.insert(program.forms[program.code[i].form]);
  for (const auto& [kind, a, b, c] : k.traffic.forms) {
    char text[160];
    switch (kind) {
      case FormKind::kTcgen05Mma:
        std::snprintf(text, sizeof text, "tcgen05.mma instruction %08" PRIx64 " a %016" PRIx64 " b %016" PRIx64, a, b, c);
        break;
      case FormKind::kWgmma:
        std::snprintf(text, sizeof text, "wgmma shape %05" PRIx64 " a %016" PRIx64 " b %016" PRIx64, a, b, c);
        break;
      default:
        std::snprintf(text, sizeof text, "tensor map %s flags %08" PRIx64 " box %016" PRIx64 " %08" PRIx64,
                      kind == FormKind::kTileLoad ? "load" : "store", a, b, c);
    }
    forms.insert(text);
  }
  return {forms.begin(), forms.end()};
}

std::string event_json(const TraceEvent& e, uint32_t cluster) {
  std::string row = "[" + quoted(e.kind) + "," + quoted(e.what);
  for (const uint64_t value : {uint64_t{cluster}, uint64_t{e.cta}, uint64_t{e.warp}, uint64_t{e.line}, e.begin, e.started, e.moved,
                               e.end, uint64_t{e.address}, e.amount})
    row += "," + std::to_string(value);
  return row + "]";
}

std::string kernel_json(const KernelCounters& k, const Program& program) {
  uint64_t units[static_cast<size_t>(Unit::kCount)] = {}, instructions = 0, lanes = 0;
  for (const WarpCounters& warp : k.warps) {
    for (size_t u = 0; u < static_cast<size_t>(Unit::kCount); ++u) units[u] += warp.units[u];
    instructions += warp.instructions;
    lanes += warp.lanes;
  }
  const TrafficCounters& t = k.traffic;
  Writer w, traffic, shapes;
  traffic.number("global_read", t.global_read);
  traffic.number("global_written", t.global_written);
  traffic.number("shared_read", t.shared_read);
  traffic.number("shared_written", t.shared_written);
  traffic.number("tensor_memory_read", t.tensor_memory_read);
  traffic.number("tensor_memory_written", t.tensor_memory_written);
  traffic.number("bulk_read", t.bulk_read);
  traffic.number("bulk_written", t.bulk_written);
  for (const auto& [shape, count] : t.mma_shapes) shapes.number(shape.c_str(), count);
  w.raw("kernel", quoted(k.kernel));
  w.number("launches", k.launches);
  w.number("clusters", k.clusters);
  w.number("ctas", k.ctas);
  w.number("instructions", instructions);
  w.number("active_lanes", lanes);
  w.number("tensor_flops", t.tensor_flops);
  w.number("poll_retries", t.poll_retries);
  w.raw("units", units_json(units));
  w.raw("bytes", traffic.object());
  w.raw("mma", shapes.object());
  w.raw("warps", list(k.warps, [](const WarpCounters& warp) {
          Writer one;
          one.number("instructions", warp.instructions);
          one.number("active_lanes", warp.lanes);
          one.raw("units", units_json(warp.units));
          return one.object();
        }));
  w.raw("forms", list(forms_of(k, program), quoted));
  if (!k.cluster_cycles.empty()) {
    w.raw("cluster_cycles", list(k.cluster_cycles, [](uint64_t c) { return std::to_string(c); }));
    w.raw("timing", k.timing_json);
  }
  if (!k.traces.empty()) {
    std::vector<std::string> rows;
    for (const auto& [cluster, events] : k.traces)
      for (const TraceEvent& event : events) rows.push_back(event_json(event, cluster));
    w.raw("trace", list(rows, [](const std::string& row) { return row; }));
  }
  w.raw("votes", list(t.votes, [](const auto& vote) {
          return "[" + std::to_string(vote.first) + "," + std::to_string(vote.second.first) + "," +
                 std::to_string(vote.second.second) + "]";
        }));
  std::string lines = "[", warps = "[";
  for (size_t i = 0; i < k.executed.size(); ++i) {
    if (!k.executed[i]) continue;
    lines += (lines.size() > 1 ? ",[" : "[") + std::to_string(program.code[i].line) + "," + std::to_string(k.executed[i]) + "]";
    warps += (warps.size() > 1 ? "," : "") + std::to_string(k.executed_by[i]);
  }
  w.raw("lines", lines + "]");       // [PTX line, times executed by a warp]
  w.raw("line_warps", warps + "]");  // of each of them: bit i: by warp i
  return w.object();
}

}  // namespace

void Report::add(KernelCounters&& counters, const Program& program) {
  programs[counters.kernel] = &program;
  for (KernelCounters& have : kernels) {
    if (have.kernel != counters.kernel) continue;
    have.launches += counters.launches;
    have.clusters += counters.clusters;
    have.ctas += counters.ctas;
    have.traffic.add(counters.traffic);
    have.cluster_cycles.insert(have.cluster_cycles.end(), counters.cluster_cycles.begin(), counters.cluster_cycles.end());
    for (size_t i = 0; i < have.executed.size(); ++i) {
      have.executed[i] += counters.executed[i];
      have.executed_by[i] |= counters.executed_by[i];
    }
    have.warps.resize(std::max(have.warps.size(), counters.warps.size()));
    for (size_t i = 0; i < counters.warps.size(); ++i) {
      for (size_t u = 0; u < static_cast<size_t>(Unit::kCount); ++u) have.warps[i].units[u] += counters.warps[i].units[u];
      have.warps[i].instructions += counters.warps[i].instructions;
      have.warps[i].lanes += counters.warps[i].lanes;
    }
    return;
  }
  kernels.push_back(std::move(counters));
}

std::string Report::json() const {
  Writer w;
  w.number("seed", options.seed);
  w.number("sm_count", options.sm_count);
  w.number("architecture", static_cast<uint64_t>(options.architecture));
  w.raw("kernels", list(kernels, [&](const KernelCounters& k) { return kernel_json(k, *programs.at(k.kernel)); }));
  w.raw("complaints", list(complaints, quoted));
  return w.object();
}

}  // namespace emu
