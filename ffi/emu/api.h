/* C API of the software GPU. Thread-safe: a module may be run from several threads at once. */
#ifndef JAX_FA4_EMU_API_H_
#define JAX_FA4_EMU_API_H_

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define EMU_EXPORT __attribute__((visibility("default")))

typedef struct emu_module emu_module; /* a loaded artifact: linked host part and decoded kernels */
typedef struct emu_error emu_error;   /* why a call failed; free with emu_error_free */
typedef struct emu_report emu_report; /* what a run did; free with emu_report_free */

/* A piece of host memory that stands for global memory of the device. */
typedef struct emu_region {
  const void* base;
  uint64_t bytes;
  uint32_t writable; /* 0: a store into it is an error */
} emu_region;

typedef struct emu_options {
  uint64_t struct_bytes;  /* sizeof(emu_options), so that fields may be added at the end */
  uint64_t seed;          /* fixes the interleaving, hence results and counts, bit for bit */
  uint32_t threads;       /* host threads; 0: as many as there are processors. No influence on results */
  uint32_t strict;        /* report what real hardware only forgives. 1: all of it, or a sum of: 2 a missing
                             tcgen05.wait::ld, 4 a CTA that ends too early, 8 a missing tcgen05.fence */
  uint32_t timing;        /* 1: warps follow a model of the hardware's clock, and the report estimates cycles */
  uint32_t sm_count;      /* streaming multiprocessors; 0: 148 for sm_100, 132 for sm_90 */
  const emu_region* regions; /* global memory; with none, global addresses are not checked */
  uint64_t region_count;
  uint32_t trace;         /* so many of a kernel's clusters, the first ones, report what happened when */
  uint64_t limit;         /* warp instructions after which a cluster is stopped with an error; 0: none */
} emu_options;

/* A launch without a host part. Zeros in `cluster` stand for 1. */
typedef struct emu_launch_config {
  uint32_t grid[3], block[3], cluster[3];
  uint32_t dynamic_shared_bytes;
  void** params; /* pointers to each parameter, as for cuLaunchKernel */
} emu_launch_config;

/* Links `object` (x86-64 ELF, the host part of a compiled module), parses `ptx` and decodes its kernels. `symbol` names
 * the host function that emu_run calls. With object_bytes 0 there is no host part, and emu_launch is the way to run. Returns NULL and sets *error when anything is unknown or damaged. */
EMU_EXPORT emu_module* emu_load(const uint8_t* object, uint64_t object_bytes, const char* ptx, uint64_t ptx_bytes,
                                const char* symbol, emu_error** error);
EMU_EXPORT void emu_unload(emu_module*);

/* Calls the host function, void f(void** args): pointers to each argument in order, last to an int32 result. Every kernel that it launches runs to its end. Device pointers in `args` are host pointers.
 * Returns 0; or nonzero and sets *error. `report` may be NULL, and is set on failure too when the kernels began. */
EMU_EXPORT int emu_run(emu_module*, void** args, const emu_options*, emu_report** report, emu_error** error);

/* Launches one kernel of the module. */
EMU_EXPORT int emu_launch(emu_module*, const char* kernel, const emu_launch_config*, const emu_options*,
                          emu_report** report, emu_error** error);

/* The message, with the kernel and the PTX line where there is one. Lives as long as the error. */
EMU_EXPORT const char* emu_error_message(const emu_error*);
EMU_EXPORT void emu_error_free(emu_error*);

/* Counters and complaints as a JSON object. Lives as long as the report. */
EMU_EXPORT const char* emu_report_json(const emu_report*);
EMU_EXPORT void emu_report_free(emu_report*);

#ifdef __cplusplus
}
#endif
#endif
