// Overrides every operator that has a kernel for CUDA with one boxed function.
#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <torch/library.h>

#include <string>
#include <unordered_set>

#include "emulated_gpu.h"
#include "operator_call.h"
#include "signature.h"

namespace emulated_gpu {
namespace {

using torch::jit::Stack;

// torch's own functions stay: they allocate, make views or copy memory, and launch no kernel.
const std::unordered_set<std::string> kTorchsOwn = {"aten::empty.memory_format",
                                                    "aten::empty_strided",
                                                    "aten::as_strided",
                                                    "aten::view",
                                                    "aten::_reshape_alias",
                                                    "aten::unfold",
                                                    "aten::view_as_real",
                                                    "aten::view_as_complex",
                                                    "aten::set_",
                                                    "aten::set_.source_Tensor",
                                                    "aten::set_.source_Storage",
                                                    "aten::set_.source_Storage_storage_offset",
                                                    "aten::resize_",
                                                    "aten::_local_scalar_dense",
                                                    "aten::record_stream",
                                                    "aten::is_pinned",
                                                    "aten::_pin_memory",
                                                    "aten::pin_memory",
                                                    "aten::is_set_to",
                                                    "aten::_copy_from",
                                                    "aten::_copy_from_and_resize",
                                                    "aten::_resize_output_",
                                                    "aten::_efficientzerotensor",
                                                    "aten::_cudnn_init_dropout_state"};

// These have no kernel for CUDA alone, but choose cuDNN or launch kernels by themselves.
const std::unordered_set<std::string> kComposite = {"aten::copy_", "aten::convolution",
                                                    "aten::convolution_backward"};

bool makes_a_view(const c10::FunctionSchema& schema) {
  for (const c10::Argument& returned : schema.returns()) {
    if (returned.alias_info() != nullptr && !returned.alias_info()->isWrite()) {
      return true;
    }
  }
  return false;
}

bool is_overridden(const c10::OperatorHandle& op, const std::string& name) {
  if (kComposite.count(name) != 0) {
    return true;
  }
  return name.rfind("aten::", 0) == 0 && kTorchsOwn.count(name) == 0 && op.hasSchema() &&
         op.hasKernelForDispatchKey(c10::DispatchKey::CUDA) && !makes_a_view(op.schema());
}

// Fills memory that torch's allocator hands out with NaN, also if it was used before. The allocator
// calls this while it holds its lock.
void poison_given(const c10::cuda::CUDACachingAllocator::TraceEntry& entry) {
  using c10::cuda::CUDACachingAllocator::TraceEntry;
  if (entry.action_ == TraceEntry::ALLOC) {
    poison(static_cast<cudaStream_t>(entry.stream_), reinterpret_cast<void*>(entry.addr_),
           entry.size_, "what torch's allocator gives");
  }
}

// torch's allocator exists by now. It may be CUDA's own, whose memory is always fresh.
bool poison_what_torch_gives() {
  if (c10::cuda::CUDACachingAllocator::name() != "native") {
    return false;
  }
  c10::cuda::CUDACachingAllocator::attachAllocatorTraceTracker(&poison_given);
  return true;
}

bool copies_between_devices(const Signature& signature, const Stack& stack) {
  return signature.name == "aten::copy_" &&
         torch::jit::peek(stack, 0, signature.arguments.size()).toTensor().device() !=
             torch::jit::peek(stack, 1, signature.arguments.size()).toTensor().device();
}

// torch's own copy between two GPUs launches a kernel, unless both tensors are dense and alike.
// Then the kernels run before it on the one GPU and after it on the other one.
void copy_between_gpus(const at::Tensor& to, const at::Tensor& from) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const at::Tensor sent = from.resolve_conj().resolve_neg().to(to.scalar_type()).contiguous();
  const at::Tensor came = at::empty_like(sent, sent.options().device(to.device()));
  came.copy_(sent);
  to.copy_(came);
}

bool is_one_block(const at::Tensor& to, const at::Tensor& from) {
  return to.scalar_type() == from.scalar_type() && to.sizes() == from.sizes() &&
         to.is_contiguous() && from.is_contiguous() && to.is_conj() == from.is_conj() &&
         to.is_neg() == from.is_neg();
}

void copy_between_devices(const c10::OperatorHandle& op, Stack& stack) {
  const at::Tensor to = torch::jit::peek(stack, 0, 3).toTensor();
  const at::Tensor from = torch::jit::peek(stack, 1, 3).toTensor();
  if (!to.is_cuda() || !from.is_cuda() || is_one_block(to, from)) {
    op.callBoxedForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd, stack);
    return;
  }
  copy_between_gpus(to, from);
  torch::jit::drop(stack, 3);
  stack.emplace_back(to);
}

// Computes aten::native_dropout by other operators. It has no argument for a generator, so the
// CPU's kernel would draw from the host's generator instead of the GPU's.
void drop_out(Stack& stack) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const auto train = torch::jit::pop(stack).toOptional<bool>();
  const double probability = torch::jit::pop(stack).toDouble();
  const at::Tensor input = torch::jit::pop(stack).toTensor();
  const double kept = train.value_or(true) ? 1 - probability : 1;
  const at::Tensor mask = at::empty_like(input, at::kBool).bernoulli_(kept);
  torch::jit::push(stack, input * mask * (kept > 0 ? 1 / kept : 0), mask);
}

void run_operator(const c10::OperatorHandle& op, c10::DispatchKeySet /*keys*/, Stack* stack) {
  static const bool poisons [[maybe_unused]] = poison_what_torch_gives();
  const Signature& signature = signature_of(op);
  if (copies_between_devices(signature, *stack)) {
    copy_between_devices(op, *stack);
    return;
  }
  if (signature.name == "aten::native_dropout") {
    drop_out(*stack);
    return;
  }
  Stack arguments = torch::jit::pop(*stack, signature.arguments.size());
  if (signature.name == "aten::_fused_sdp_choice") {
    stack->push_back(static_cast<std::int64_t>(0));  // made of other operators
    return;
  }
  Stack results = OperatorCall(op, signature, std::move(arguments)).run();
  stack->insert(stack->end(), results.begin(), results.end());
}

}  // namespace
}  // namespace emulated_gpu

// Returns how many operators it has overridden.
extern "C" __attribute__((visibility("default"))) int emulated_gpu_install_operators() {
  using namespace emulated_gpu;
  static auto* library =
      new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::CUDA, __FILE__, __LINE__);
  auto& dispatcher = c10::Dispatcher::singleton();
  int count = 0;
  for (const c10::OperatorName& operator_name : dispatcher.getAllOpNames()) {
    const std::string name = c10::toString(operator_name);
    const auto op = dispatcher.findOp(operator_name);
    if (op.has_value() && is_overridden(*op, name)) {
      library->impl(name.substr(std::string("aten::").size()).c_str(),
                    torch::CppFunction::makeFromBoxedFunction<&run_operator>());
      ++count;
    }
  }
  return count;
}
