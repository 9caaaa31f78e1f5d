#include "shape_cache.h"

#include <ATen/ATen.h>

#include <mutex>
#include <sstream>
#include <unordered_map>

namespace emulated_gpu {
namespace {

constexpr std::size_t kMostEntries = 100000;

struct Cache {
  std::mutex mutex;
  std::unordered_map<std::string, torch::jit::Stack> shapes;
};
Cache& cache() {
  static auto* the_cache = new Cache;
  return *the_cache;
}

void write(std::ostream& key, const at::Tensor& tensor) {
  if (!tensor.defined()) {
    key << "none";
    return;
  }
  key << tensor.scalar_type() << tensor.sizes() << tensor.strides() << tensor.device()
      << tensor.unsafeGetTensorImpl()->is_wrapped_number();
}

// Returns false for a value of an unknown kind.
bool write(std::ostream& key, const c10::IValue& value) {
  if (value.isTensor()) {
    write(key, value.toTensor());
  } else if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorVector()) {
      write(key, tensor);
    }
  } else if (value.isInt() || value.isBool() || value.isIntList() || value.isBoolList() ||
             value.isString() || value.isNone()) {
    key << value;
  } else if (value.isDouble()) {
    key << "double";  // only the shapes of aten::arange and aten::range depend on it
  } else {
    return false;
  }
  key << ';';
  return true;
}

}  // namespace

std::optional<std::string> shape_key(const Signature& signature,
                                     const torch::jit::Stack& arguments) {
  std::ostringstream key;
  key << signature.name << ';';
  const bool is_range =
      signature.name.rfind("aten::arange", 0) == 0 || signature.name.rfind("aten::range", 0) == 0;
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    if (is_range && arguments[i].isDouble()) {
      key << std::hexfloat << arguments[i].toDouble() << std::defaultfloat << ';';
      continue;
    }
    if (!signature.arguments[i].is_generator && !write(key, arguments[i])) {
      return std::nullopt;
    }
  }
  return key.str();
}

std::optional<torch::jit::Stack> cached_shapes(const std::string& key) {
  const std::lock_guard<std::mutex> lock(cache().mutex);
  const auto found = cache().shapes.find(key);
  return found != cache().shapes.end() ? std::optional(found->second) : std::nullopt;
}

void cache_shapes(const std::string& key, const torch::jit::Stack& shapes) {
  const std::lock_guard<std::mutex> lock(cache().mutex);
  if (cache().shapes.size() < kMostEntries) {
    cache().shapes[key] = shapes;
  }
}

}  // namespace emulated_gpu
