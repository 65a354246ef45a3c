// The custom call "jax_fa4": on CUDA it launches a compiled module, on the cpu platform the software GPU runs it.

#include "call_site.h"
#include "cuda_module.h"
#include "emulated_module.h"

namespace jax_fa4 {

namespace ffi = xla::ffi;

namespace {

// Runs `body` and turns what it throws into XLA's typed error.
template <class Body>
ffi::Error guarded(const Body& body) {
  try {
    body();
    return ffi::Error::Success();
  } catch (const Failure& failure) {
    return ffi::Error(failure.code, failure.what());
  } catch (const std::exception& other) {
    return ffi::Error::Internal(std::string("jax_fa4: ") + other.what());
  }
}

// Runs when a program is compiled or loaded: a program that cannot be right fails here.
ffi::Error instantiate(ffi::Dictionary attributes) {
  return guarded([&] { CallSite::of(attributes); });
}

ffi::Error emulate_instantiate(ffi::Dictionary attributes) {
  return guarded([&] {
    const CallSite& site = CallSite::of(attributes);
    if (site.variants.size() != 1 || site.ptx.empty())
      throw Failure(ffi::ErrorCode::kFailedPrecondition,
                    "jax_fa4: this program's " + site.kernel + " was made for CUDA devices and cannot run on the cpu; "
                    "use backend=\"auto\", or \"emulate:<arch>\" for the software GPU");
    site.variants[0].module->emulated(site.ptx);
  });
}

// Runs before a program is recorded into a graph, so that no module is loaded while a stream is captured.
ffi::Error cuda_initialize(void* stream, int32_t ordinal, ffi::Dictionary attributes) {
  return guarded([&] { prepare(CallSite::of(attributes), current_device(stream, ordinal)); });
}

ffi::Error cuda_execute(void* stream, int32_t ordinal, ffi::RemainingArgs operands, ffi::RemainingRets results,
                        ffi::Dictionary attributes) {
  return guarded([&] {
    CallSite& site = CallSite::of(attributes);
    const CallSite::Prepared& ready = prepare(site, current_device(stream, ordinal));
    Arguments arguments(site, ready.buffer_count, operands, results);
    ready.module->launch(arguments, ready.sm_count, stream, site.kernel);
  });
}

ffi::Error emulate_execute(ffi::RemainingArgs operands, ffi::RemainingRets results, ffi::Dictionary attributes) {
  return guarded([&] {
    const CallSite& site = CallSite::of(attributes);
    Arguments arguments(site, site.variants[0].buffer_count, operands, results);
    site.variants[0].module->emulated(site.ptx).run(arguments);
  });
}

}  // namespace
}  // namespace jax_fa4

#pragma GCC visibility push(default)

namespace ffi = xla::ffi;

XLA_FFI_DEFINE_HANDLER_SYMBOL(jax_fa4_instantiate, jax_fa4::instantiate,
                              ffi::Ffi::BindInstantiate().Attrs<ffi::Dictionary>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(jax_fa4_cuda_initialize, jax_fa4::cuda_initialize,
                              ffi::Ffi::BindInitialize()
                                  .Ctx<ffi::PlatformStream<void*>>()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .Attrs<ffi::Dictionary>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(jax_fa4_cuda_execute, jax_fa4::cuda_execute,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<void*>>()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attrs<ffi::Dictionary>(),
                              {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(jax_fa4_emulate_instantiate, jax_fa4::emulate_instantiate,
                              ffi::Ffi::BindInstantiate().Attrs<ffi::Dictionary>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(jax_fa4_emulate_execute, jax_fa4::emulate_execute,
                              ffi::Ffi::Bind()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attrs<ffi::Dictionary>());

#pragma GCC visibility pop
