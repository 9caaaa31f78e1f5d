// One call of an operator on tensors of the emulated GPU. The CPU's kernel computes it over the
// same memory, in order of the current stream.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <memory>
#include <optional>

#include "random.h"
#include "signature.h"

namespace emulated_gpu {

class OperatorCall {
 public:
  OperatorCall(const c10::OperatorHandle& op, const Signature& signature,
               torch::jit::Stack arguments);

  // Returns what the operator returns. Where the meta device can tell the shapes, this enqueues the
  // kernel. Otherwise it waits for the stream and computes at once.
  torch::jit::Stack run();

 private:
  c10::Device find_device() const;
  bool depends_on_data() const;
  std::optional<torch::jit::Stack> find_shapes();
  torch::jit::Stack enqueue_kernel(const torch::jit::Stack& shapes);
  torch::jit::Stack compute_now();
  torch::jit::Stack place(const torch::jit::Stack& host);
  torch::jit::Stack host_arguments() const;
  at::Tensor on_device(const at::Tensor& like) const;
  c10::IValue given(std::size_t returned) const;

  const c10::OperatorHandle op_;
  const Signature& signature_;
  torch::jit::Stack arguments_;
  const c10::Device device_;
};

}  // namespace emulated_gpu
