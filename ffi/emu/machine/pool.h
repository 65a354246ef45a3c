// Threads that share out indices 0..n-1.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

namespace emu {

// Calls `body(i)` for each i below `count` on at most `threads` threads, and returns when all are done. The threads live
// on for later calls. `body` must not throw.
void parallel_for(uint32_t threads, size_t count, const std::function<void(size_t)>& body);

}  // namespace emu
