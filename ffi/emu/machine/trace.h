// What happened when in one cluster (options.trace): what its warps executed and waited for, the operations in flight.
// Times are cycles in a timed run, else the number of instructions that the cluster has executed.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "async/engine.h"
#include "machine/timing.h"

namespace emu {

// The meaning of the fields by kind:
//   run                 instructions without a wait between: [begin, end), amount of them, from `line` on
//   wait                `what` for: begin, end; address and amount are the barrier's and its phase, where it is one
//   arrive              at a barrier (`what`, address): begin
//   an operation        its issue (begin), when its unit takes it up (started), when its first step is made (moved: the
//   (see Operation)     source of a store has been read), when it is complete (end); address and amount as it says
struct TraceEvent {
  const char* kind;
  std::string what;
  uint32_t cta, warp, line;
  uint64_t begin, started, moved, end;
  uint32_t address = 0;
  uint64_t amount = 0;
};

class Trace {
 public:
  Trace(const Timing* timing, uint32_t ctas, uint32_t warps) : timing_(timing), warps_(warps), state_(ctas * warps) {}

  uint64_t now() const { return timing_ ? timing_->now : order_; }
  // The warp, numbered through the cluster, that issues and arrives from now on.
  void set_running(uint32_t warp) { running_ = warp; }
  void executed(uint32_t line, uint64_t clock);  // clock: the warp's, in a timed run
  void waited(uint32_t line, const char* what, uint64_t address, uint64_t phase, uint64_t clock);
  void arrived(uint32_t line, const char* what, uint32_t address);
  void issued(Operation&, const Span&);
  void stepped(const Operation&, bool done);
  void occupied(const Operation&, const Span&);  // when its unit worked on it, where its steps do not say
  std::vector<TraceEvent> take() { return std::move(events_); }

 private:
  struct WarpState {
    uint64_t at = 0;             // end of its last event
    size_t run = SIZE_MAX;       // the event that its next instruction prolongs
  };
  TraceEvent event(const char* kind, uint32_t line, uint64_t begin, uint64_t end) const {
    return {kind, {}, running_ / warps_, running_ % warps_, line, begin, begin, begin, end};
  }

  const Timing* timing_;
  const uint32_t warps_;         // of a CTA
  uint32_t running_ = 0;
  uint64_t order_ = 0;
  std::vector<WarpState> state_;
  std::vector<TraceEvent> events_;
};

}  // namespace emu
