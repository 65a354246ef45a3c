// The one exception type of the software GPU. Functional units throw it without a place; the machine adds kernel, warp
// and PTX line on the way out.
#pragma once

#include <cstdarg>
#include <cstdio>
#include <stdexcept>
#include <string>

namespace emu {

class Error : public std::runtime_error {
 public:
  explicit Error(const std::string& message, int ptx_line = 0) : std::runtime_error(message), ptx_line(ptx_line) {}
  int ptx_line;  // 1-based; 0: not known yet
};

// throw fail("tensor map: rank %u, allowed 1 to 5", rank);
[[gnu::format(printf, 1, 2)]] inline Error fail(const char* format, ...) {
  char text[1024];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  return Error(text);
}

}  // namespace emu
