#include "call_site.h"

#include <iterator>
#include <map>
#include <shared_mutex>
#include <sstream>
#include <unordered_map>

#include "cuda_module.h"
#include "emulated_module.h"

namespace jax_fa4 {
namespace {

using xla::ffi::AnyBuffer;
using xla::ffi::Dictionary;
using xla::ffi::ErrorCode;
using Integers = xla::ffi::Span<const int64_t>;

std::vector<std::string> words(std::string_view text) {
  std::istringstream stream{std::string(text)};
  return {std::istream_iterator<std::string>(stream), std::istream_iterator<std::string>()};
}

std::string decode_base64(std::string_view text) {
  std::string bytes;
  bytes.reserve(text.size() / 4 * 3);
  uint32_t bits = 0;
  int count = 0;
  for (const char c : text) {
    uint32_t value;
    if (c >= 'A' && c <= 'Z') value = c - 'A';
    else if (c >= 'a' && c <= 'z') value = c - 'a' + 26;
    else if (c >= '0' && c <= '9') value = c - '0' + 52;
    else if (c == '+') value = 62;
    else if (c == '/') value = 63;
    else if (c == '=') break;
    else throw Failure(ErrorCode::kInvalidArgument, "jax_fa4: a module in the program is not base64 text");
    bits = bits << 6 | value;
    if (++count == 4) {
      bytes += {static_cast<char>(bits >> 16), static_cast<char>(bits >> 8), static_cast<char>(bits)};
      bits = count = 0;
    }
  }
  if (count == 3) bytes += {static_cast<char>(bits >> 10), static_cast<char>(bits >> 2)};
  if (count == 2) bytes += static_cast<char>(bits >> 4);
  return bytes;
}

// Modules are kept for the life of the process: a captured graph may outlive the executable that it came from, and the
// number of distinct kernels of a process is small.
Module* intern(std::string arch, std::string symbol, std::string object) {
  static std::mutex mutex;
  static auto* modules = new std::unordered_map<std::string_view, std::unique_ptr<Module>>;
  const std::lock_guard lock(mutex);
  const auto found = modules->find(object);
  if (found != modules->end()) return found->second.get();
  auto module = std::make_unique<Module>(std::move(arch), std::move(symbol), std::move(object));
  Module* result = module.get();
  (*modules)[result->object] = std::move(module);
  return result;
}

template <class T>
T attribute(const Dictionary& attributes, std::string_view name) {
  auto value = attributes.get<T>(name);
  if (value.has_error())
    throw Failure(ErrorCode::kInvalidArgument, "jax_fa4: the program's call lacks the attribute '" + std::string(name) +
                                                   "'; it was made by another version of jax_fa4, export it again");
  return *value;
}

}  // namespace

Module::Module(std::string arch, std::string symbol, std::string object)
    : arch(std::move(arch)), symbol(std::move(symbol)), object(std::move(object)) {}

Module::~Module() = default;

CudaModule& Module::cuda() {
  const std::lock_guard lock(mutex_);
  if (!cuda_) cuda_ = std::make_unique<CudaModule>(object, symbol);
  return *cuda_;
}

EmulatedModule& Module::emulated(const std::string& ptx) {
  const std::lock_guard lock(mutex_);
  if (!emulated_) emulated_ = std::make_unique<EmulatedModule>(arch, object, ptx, symbol);
  return *emulated_;
}

CallSite::~CallSite() {
  for (auto& ready : prepared) delete ready.load();
}

CallSite& CallSite::of(const Dictionary& attributes) {
  static std::shared_mutex mutex;
  static auto* sites = new std::map<std::string, std::unique_ptr<CallSite>, std::less<>>;
  const auto key = attribute<std::string_view>(attributes, "key");
  {
    const std::shared_lock lock(mutex);
    if (const auto found = sites->find(key); found != sites->end()) return *found->second;
  }
  auto made = std::make_unique<CallSite>(attributes);
  const std::unique_lock lock(mutex);
  return *sites->try_emplace(std::string(key), std::move(made)).first->second;
}

CallSite::CallSite(const Dictionary& attributes) {
  kernel = attribute<std::string_view>(attributes, "kernel");
  const auto archs = words(attribute<std::string_view>(attributes, "archs"));
  const auto symbols = words(attribute<std::string_view>(attributes, "symbols"));
  const auto buffer_counts = attribute<Integers>(attributes, "buffer_counts");
  const auto shared_bytes = attribute<Integers>(attributes, "shared_bytes");
  if (archs.empty() || symbols.size() != archs.size() || buffer_counts.size() != archs.size() ||
      shared_bytes.size() != archs.size())
    throw Failure(ErrorCode::kInvalidArgument, "jax_fa4: the program's call carries no complete compiled module");
  for (size_t i = 0; i < archs.size(); ++i) {
    std::string object = decode_base64(attribute<std::string_view>(attributes, archs[i]));
    variants.push_back({archs[i], intern(archs[i], symbols[i], std::move(object)), buffer_counts[i], shared_bytes[i]});
  }
  const auto sources = attribute<Integers>(attributes, "dims");
  dims.assign(sources.begin(), sources.end());
  if (dims.size() != 2 * kDims)
    throw Failure(ErrorCode::kInvalidArgument, "jax_fa4: attribute 'dims' must have " + std::to_string(2 * kDims) +
                                                   " numbers, it has " + std::to_string(dims.size()));
  if (attributes.contains("ptx")) ptx = attribute<std::string_view>(attributes, "ptx");
}

Arguments::Arguments(const CallSite& site, int64_t buffer_count, xla::ffi::RemainingArgs operands,
                     xla::ffi::RemainingRets results) {
  operand_count_ = operands.size();
  count_ = static_cast<size_t>(buffer_count);
  if (count_ > kMaxBuffers || count_ > operand_count_ + results.size())
    throw Failure(ErrorCode::kInvalidArgument,
                  "jax_fa4: a kernel takes " + std::to_string(count_) + " buffers, the call has " +
                      std::to_string(operand_count_ + results.size()) + ", and " + std::to_string(kMaxBuffers) +
                      " are allowed");
  for (size_t i = 0; i < count_; ++i) {
    const AnyBuffer buffer = i < operand_count_ ? *operands.get<AnyBuffer>(i)
                                                : **results.get<AnyBuffer>(i - operand_count_);
    buffers_[i] = buffer.untyped_data();
    bytes_[i] = buffer.size_bytes();
    for (int d = 0; d < kDims; ++d)
      if (site.dims[2 * d] == static_cast<int64_t>(i)) dims_[d] = buffer.dimensions()[site.dims[2 * d + 1]];
  }
}

void** Arguments::vector(int32_t sm_count, void* stream) {
  dims_[kDims] = sm_count;
  stream_ = stream;
  size_t n = 0;
  for (int32_t& dim : dims_) vector_[n++] = &dim;
  vector_[n++] = &stream_;
  for (size_t i = 0; i < count_; ++i) vector_[n++] = &buffers_[i];
  vector_[n++] = &result_;
  return vector_.data();
}

}  // namespace jax_fa4
