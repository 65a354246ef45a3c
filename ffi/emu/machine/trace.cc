#include "machine/trace.h"

#include <algorithm>

namespace emu {

void Trace::executed(uint32_t line, uint64_t clock) {
  WarpState& warp = state_[running_];
  const uint64_t begin = timing_ ? warp.at : order_, end = timing_ ? clock : ++order_;
  if (warp.run == SIZE_MAX) {
    warp.run = events_.size();
    events_.push_back(event("run", line, begin, end));
  }
  TraceEvent& run = events_[warp.run];
  run.end = warp.at = std::max(end, run.begin);
  ++run.amount;
}

void Trace::waited(uint32_t line, const char* what, uint64_t address, uint64_t phase, uint64_t clock) {
  WarpState& warp = state_[running_];
  TraceEvent wait = event("wait", line, warp.at, std::max(warp.at, timing_ ? clock : order_));
  wait.what = what;
  wait.address = static_cast<uint32_t>(address);
  wait.amount = phase;
  warp = {wait.end, SIZE_MAX};
  events_.push_back(std::move(wait));
}

void Trace::arrived(uint32_t line, const char* what, uint32_t address) {
  TraceEvent arrival = event("arrive", line, now(), now());
  arrival.what = what;
  arrival.address = address;
  events_.push_back(std::move(arrival));
}

void Trace::issued(Operation& operation, const Span& span) {
  const OperationNote note = operation.note();
  TraceEvent issue = event(kOperationNames[static_cast<size_t>(operation.kind())], static_cast<uint32_t>(operation.line), now(), now());
  issue.what = note.what;
  issue.address = note.address;
  issue.amount = note.amount;
  issue.started = std::max(issue.begin, timing_ ? span.begin : issue.begin);
  issue.moved = 0;
  operation.traced = events_.size();
  events_.push_back(std::move(issue));
}

void Trace::stepped(const Operation& operation, bool done) {
  TraceEvent& event = events_[operation.traced];
  if (event.moved == 0) event.moved = now();
  if (done) event.end = std::max(event.end, now());
}

void Trace::occupied(const Operation& operation, const Span& span) {
  TraceEvent& event = events_[operation.traced];
  event.started = std::max(event.begin, span.begin);
  event.moved = event.end = std::max(event.end, span.end);
}

}  // namespace emu
