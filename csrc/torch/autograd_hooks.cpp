#include "torch/autograd_hooks.h"

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/variable.h>

#include <type_traits>
#include <utility>

namespace fsdp {
namespace {

using torch::autograd::Node;
using torch::autograd::variable_list;
using NodePtr = decltype(torch::autograd::Edge::function);

struct PreBackwardHook final : torch::autograd::FunctionPreHook {
  PreBackwardHook(std::weak_ptr<BackwardTarget> target, int forward_call)
      : target(std::move(target)), forward_call(forward_call) {}

  variable_list operator()(const variable_list& gradients) override {
    if (const auto unit = target.lock()) {
      unit->on_pre_backward(forward_call);
    }
    return gradients;
  }

  std::weak_ptr<BackwardTarget> target;
  int forward_call;
};

struct GradientHook final : torch::autograd::PostAccumulateGradHook {
  GradientHook(std::weak_ptr<BackwardTarget> target, std::size_t trainable)
      : target(std::move(target)), trainable(trainable) {}

  void operator()(const at::Tensor& /*parameter*/) override {
    if (const auto unit = target.lock()) {
      unit->on_gradient(trainable);
    }
  }

  std::weak_ptr<BackwardTarget> target;
  std::size_t trainable;
};

struct PostBackwardNode final : Node {
  explicit PostBackwardNode(std::weak_ptr<BackwardTarget> target) : target(std::move(target)) {}

  variable_list apply(variable_list&& gradients) override {
    if (const auto unit = target.lock()) {
      unit->on_post_backward();
    }
    return std::move(gradients);
  }

  std::string name() const override { return "FsdpPostBackward"; }

  std::weak_ptr<BackwardTarget> target;
};

// torch 2.11 has nodes in std::shared_ptr with a deleter of its own, newer versions in
// c10::intrusive_ptr. Argument-dependent lookup finds the deleter where it exists.
template <typename T>
auto make_node(std::weak_ptr<BackwardTarget> target) {
  if constexpr (std::is_same_v<NodePtr, std::shared_ptr<Node>>) {
    return std::shared_ptr<T>(new T(std::move(target)), [](auto* node) { deleteNode(node); });
  } else {
    return c10::make_intrusive<T>(std::move(target));
  }
}

}  // namespace

void add_pre_backward_hook(const at::Tensor& output, std::weak_ptr<BackwardTarget> target,
                           int forward_call) {
  if (!output.requires_grad() || output.is_leaf()) {
    return;
  }
  // An in-place change of a view replaces the view's node but keeps its base's node in the graph,
  // so the base's node gets a hook, too.
  if (output.is_view() && output._base().requires_grad() && !output._base().is_leaf()) {
    output._base().grad_fn()->add_pre_hook(std::make_unique<PreBackwardHook>(target, forward_call));
  }
  output.grad_fn()->add_pre_hook(
      std::make_unique<PreBackwardHook>(std::move(target), forward_call));
}

void set_gradient_hook(const at::Tensor& parameter, std::weak_ptr<BackwardTarget> target,
                       std::size_t trainable) {
  torch::autograd::impl::set_post_acc_grad_hooks(
      parameter, std::make_unique<GradientHook>(std::move(target), trainable));
}

std::vector<at::Tensor> add_post_backward_node(const std::vector<at::Tensor>& inputs,
                                               std::weak_ptr<BackwardTarget> target) {
  NodePtr node = make_node<PostBackwardNode>(std::move(target));
  node->set_next_edges(torch::autograd::collect_next_edges(inputs));
  std::vector<at::Tensor> aliases;
  aliases.reserve(inputs.size());
  for (const at::Tensor& input : inputs) {
    at::Tensor alias = input.detach();
    torch::autograd::set_history(alias, node);
    aliases.push_back(std::move(alias));
  }
  return aliases;
}

}  // namespace fsdp
