// How everything below the handlers reports a problem: handlers turn it into XLA's typed error.
#pragma once

#include <stdexcept>
#include <string>

#include "xla/ffi/api/ffi.h"

namespace jax_fa4 {

class Failure : public std::runtime_error {
 public:
  Failure(xla::ffi::ErrorCode code, const std::string& message) : std::runtime_error(message), code(code) {}
  xla::ffi::ErrorCode code;
};

}  // namespace jax_fa4
