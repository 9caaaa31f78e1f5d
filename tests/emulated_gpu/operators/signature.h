// What the schema of an operator says of its arguments and returns.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <atomic>
#include <cstddef>
#include <string>
#include <vector>

namespace emulated_gpu {

struct Argument {
  bool is_written;
  bool is_out;  // an argument that the operator resizes and writes its result to
  bool is_generator;
};

struct Signature {
  static constexpr int kNew = -1;

  std::string name;
  std::vector<Argument> arguments;
  std::vector<int> returns;  // for each, the number of the argument that it is, or kNew
  bool makes_tensors = false;
  bool returns_arguments = false;
  bool returns_only_tensors = true;
  bool has_out = false;
  // Set once the meta device has turned out to lack a kernel, or one that needs no data.
  mutable std::atomic<bool> has_no_shapes{false};
};

// Of each operator, made once.
const Signature& signature_of(const c10::OperatorHandle& op);

}  // namespace emulated_gpu
