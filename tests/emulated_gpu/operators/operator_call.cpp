#include "operator_call.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/InferenceMode.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "emulated_gpu.h"
#include "shape_cache.h"
#include "tensors.h"

namespace emulated_gpu {
namespace {

using c10::IValue;
using torch::jit::Stack;

// CUDA's kernels have these statistics and products in fp32, whatever their inputs are.
const std::unordered_set<std::string> kInFloat = {
    "aten::native_layer_norm", "aten::native_layer_norm_backward",
    "aten::native_group_norm", "aten::native_group_norm_backward",
    "aten::_fused_rms_norm",   "aten::_fused_rms_norm_backward"};

// One call of an operator, as the stream's thread runs it.
struct Kernel {
  c10::OperatorHandle op;
  const Signature& signature;
  RandomState random;
  Stack arguments;                  // aliases and copies of the host
  std::vector<at::Tensor> outputs;  // aliases of the tensors that the call has made

  void run();
};

at::Tensor widen(const at::Tensor& tensor) {
  const at::ScalarType dtype = tensor.scalar_type();
  return dtype == at::kBFloat16 || dtype == at::kHalf ? tensor.to(at::kFloat) : tensor;
}

void note_uses(const Signature& signature, const Stack& aliases) {
  for (std::size_t i = 0; i < aliases.size(); ++i) {
    for_each_tensor(aliases[i], [&](const at::Tensor& tensor) {
      note_use(tensor, signature.arguments[i].is_written);
    });
  }
}

void Kernel::run() {
  const c10::InferenceMode no_inference(false);
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const at::NoGradGuard no_grad;
  Stack stack = arguments;
  random.set_generators(stack);
  note_uses(signature, stack);
  for (const at::Tensor& output : outputs) {
    note_use(output, true);
  }
  if (kInFloat.count(signature.name) != 0) {
    for (IValue& value : stack) {
      value = map_tensors(value, widen);
    }
  }
  op.callBoxed(&stack);
  std::size_t number = 0;
  if (!outputs.empty()) {
    for (const IValue& value : stack) {
      for_each_tensor(value, [&](const at::Tensor& t) { outputs.at(number++).copy_(t); });
    }
  }
}

}  // namespace

OperatorCall::OperatorCall(const c10::OperatorHandle& op, const Signature& signature,
                           Stack arguments)
    : op_(op), signature_(signature), arguments_(std::move(arguments)), device_(find_device()) {}

Stack OperatorCall::run() {
  const c10::cuda::CUDAGuard on(device_);
  if (!depends_on_data()) {
    if (const std::optional<Stack> shapes = find_shapes()) {
      return enqueue_kernel(*shapes);
    }
  }
  return compute_now();
}

c10::Device OperatorCall::find_device() const {
  std::optional<c10::Device> found;
  for (const IValue& value : arguments_) {
    for_each_tensor(value, [&](const at::Tensor& tensor) {
      if (tensor.is_cuda() && !found.has_value()) {
        found = tensor.device();
      }
    });
  }
  for (const IValue& value : arguments_) {
    if (!found.has_value() && value.isDevice() && value.toDevice().has_index()) {
      found = value.toDevice();
    }
  }
  return found.value_or(c10::Device(at::kCUDA, c10::cuda::current_device()));
}

// Whether the host needs a result of the operator, or gives it a device.
bool OperatorCall::depends_on_data() const {
  bool depends = !signature_.returns_only_tensors || signature_.has_no_shapes;
  for (std::size_t i = 0; i < arguments_.size(); ++i) {
    depends |= arguments_[i].isDevice();
    if (signature_.arguments[i].is_written) {
      for_each_tensor(arguments_[i], [&](const at::Tensor& t) { depends |= !t.is_cuda(); });
    }
  }
  return depends;
}

// The operator's results on the meta device, or nothing if that has none.
std::optional<Stack> OperatorCall::find_shapes() {
  Stack shapes;
  if (!signature_.makes_tensors && !signature_.has_out) {
    return shapes;
  }
  const std::optional<std::string> key = shape_key(signature_, arguments_);
  if (key.has_value()) {
    if (std::optional<Stack> cached = cached_shapes(*key)) {
      return cached;
    }
  }
  try {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    for (std::size_t i = 0; i < arguments_.size(); ++i) {
      const bool is_generator = signature_.arguments[i].is_generator;
      shapes.push_back(is_generator ? IValue() : map_tensors(arguments_[i], meta_of));
    }
    op_.callBoxed(&shapes);
    for (const IValue& value : shapes) {
      for_each_tensor(value, [](const at::Tensor& t) { TORCH_CHECK(t.is_meta()); });
    }
    if (key.has_value()) {
      cache_shapes(*key, shapes);
    }
    return shapes;
  } catch (const std::exception&) {
    // The result's shape depends on the data if an index is a mask, but not for other indices.
    if (signature_.name.find("index") == std::string::npos) {
      signature_.has_no_shapes = true;
    }
    return std::nullopt;
  }
}

Stack OperatorCall::enqueue_kernel(const Stack& shapes) {
  TORCH_CHECK(!(signature_.makes_tensors && signature_.returns_arguments), signature_.name,
              " returns both new tensors and arguments, which is not emulated.");
  RandomState random(signature_, device_, arguments_);
  auto kernel = std::make_shared<Kernel>(Kernel{op_, signature_, std::move(random), {}, {}});
  Stack results;
  for (std::size_t r = 0; r < signature_.returns.size(); ++r) {
    if (signature_.returns[r] == Signature::kNew) {
      results.push_back(map_tensors(shapes[r], [&](const at::Tensor& like) {
        at::Tensor made = on_device(like);
        kernel->outputs.push_back(host_alias_of(made));
        return made;
      }));
      continue;
    }
    results.push_back(given(r));
    if (signature_.has_out && results[r].isTensor() && shapes[r].isTensor() &&
        results[r].toTensor().sizes() != shapes[r].toTensor().sizes()) {
      results[r].toTensor().resize_(shapes[r].toTensor().sizes());
    }
  }
  for (const IValue& value : arguments_) {
    kernel->arguments.push_back(map_tensors(value, [](const at::Tensor& tensor) {
      return tensor.is_cuda() ? host_alias_of(tensor) : host_copy_of(tensor);
    }));
  }
  enqueue(c10::cuda::getCurrentCUDAStream().stream(), signature_.name, [kernel] {
    try {
      kernel->run();
    } catch (const std::exception& error) {
      fail(kernel->signature.name + ": " + error.what());
    }
  });
  return results;
}

Stack OperatorCall::compute_now() {
  const RandomState random(signature_, device_, arguments_);
  const c10::cuda::CUDAStream stream = c10::cuda::getCurrentCUDAStream();
  stream.synchronize();
  Stack host = host_arguments();
  random.set_generators(host);
  Stack results;
  run_now(stream.stream(), signature_.name, [&] {
    note_uses(signature_, host);
    {
      const at::AutoDispatchBelowADInplaceOrView below_autograd;
      op_.callBoxed(&host);
    }
    results = place(host);
  });
  return results;
}

// Brings what the host has computed to the device.
Stack OperatorCall::place(const Stack& host) {
  Stack results;
  const auto copy = [](const at::Tensor& to, const at::Tensor& computed) {
    c10::cuda::getCurrentCUDAStream().synchronize();  // fresh memory becomes NaN in its order
    note_use(to, true);
    host_alias_of(to).copy_(computed);
  };
  for (std::size_t r = 0; r < signature_.returns.size(); ++r) {
    if (signature_.returns[r] == Signature::kNew) {
      results.push_back(map_tensors(host[r], [&](const at::Tensor& computed) {
        at::Tensor made = on_device(computed);
        copy(made, computed);
        return made;
      }));
      continue;
    }
    results.push_back(given(r));
    const auto argument = static_cast<std::size_t>(signature_.returns[r]);
    if (signature_.arguments[argument].is_out && results[r].isTensor() &&
        results[r].toTensor().is_cuda()) {
      const at::Tensor& computed = host[r].toTensor();
      results[r].toTensor().resize_(computed.sizes());
      copy(results[r].toTensor(), computed);
    }
  }
  return results;
}

Stack OperatorCall::host_arguments() const {
  Stack host;
  for (std::size_t i = 0; i < arguments_.size(); ++i) {
    const IValue& value = arguments_[i];
    if (value.isDevice()) {
      host.push_back(c10::Device(at::kCPU));
    } else if (signature_.arguments[i].is_out && value.isTensor() && value.toTensor().is_cuda()) {
      host.push_back(at::empty({0}, value.toTensor().options().device(at::kCPU)));
    } else {
      host.push_back(map_tensors(
          value, [](const at::Tensor& t) { return t.is_cuda() ? host_alias_of(t) : t; }));
    }
  }
  return host;
}

at::Tensor OperatorCall::on_device(const at::Tensor& like) const {
  return at::empty_strided(like.sizes(), like.strides(), like.options().device(device_));
}

IValue OperatorCall::given(std::size_t returned) const {
  return arguments_[static_cast<std::size_t>(signature_.returns[returned])];
}

}  // namespace emulated_gpu
