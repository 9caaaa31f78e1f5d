#include "torch/autograd_hooks.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <type_traits>
#include <utility>

namespace fsdp {
namespace {

using torch::autograd::Node;
using torch::autograd::variable_list;
using NodePtr = decltype(torch::autograd::Edge::function);

// Nodes without saved tensors may run again after a backward that did not keep the graph.
struct KeptTarget {
  explicit KeptTarget(std::shared_ptr<BackwardTarget> target)
      : target(target), owner(std::move(target)) {}
  std::weak_ptr<BackwardTarget> target;
  std::shared_ptr<BackwardTarget> owner;
};

struct PreBackwardHook final : torch::autograd::FunctionPreHook {
  PreBackwardHook(std::shared_ptr<BackwardTarget> target, CallId call, const Node* node)
      : kept(std::move(target)), call(call), node(node) {}

  variable_list operator()(const variable_list& gradients) override {
    if (const auto unit = kept.target.lock()) {
      unit->on_pre_backward(call, node);
    }
    if (!torch::autograd::get_current_graph_task_keep_graph()) {
      kept.owner.reset();
    }
    return gradients;
  }

  KeptTarget kept;
  CallId call;
  const Node* node;  // that owns this
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
  PostBackwardNode(std::shared_ptr<BackwardTarget> target, CallId call)
      : kept(std::move(target)), call(call) {}

  variable_list apply(variable_list&& gradients) override {
    if (const auto unit = kept.target.lock()) {
      unit->on_post_backward(call);
    }
    return std::move(gradients);
  }

  void release_variables() override { kept.owner.reset(); }

  std::string name() const override { return "FsdpPostBackward"; }

  KeptTarget kept;
  CallId call;
};

// torch 2.11 has nodes in std::shared_ptr with a deleter of its own, newer versions in
// c10::intrusive_ptr. Argument-dependent lookup finds the deleter where it exists.
template <typename T>
auto make_node(std::shared_ptr<BackwardTarget> target, CallId call) {
  if constexpr (std::is_same_v<NodePtr, std::shared_ptr<Node>>) {
    return std::shared_ptr<T>(new T(std::move(target), call), [](auto* node) { deleteNode(node); });
  } else {
    return c10::make_intrusive<T>(std::move(target), call);
  }
}

// Whether the node, which is alive, has the hook of this call. Another node may have been made
// where one was freed.
bool has_hook_of(const Node& node, CallId call) {
  return std::any_of(node.pre_hooks().begin(), node.pre_hooks().end(), [call](const auto& hook) {
    const auto* ours = dynamic_cast<const PreBackwardHook*>(hook.get());
    return ours != nullptr && ours->call == call;
  });
}

void hook_node(Node* node, const std::shared_ptr<BackwardTarget>& target, CallId call,
               GraphCalls* calls) {
  node->add_pre_hook(std::make_unique<PreBackwardHook>(target, call, node));
  if (calls != nullptr) {
    calls->add(call, node);
  }
}

}  // namespace

void GraphCalls::forget_before(CallId call) {
  const auto kept = std::find_if(outputs_.begin(), outputs_.end(),
                                 [call](const Output& output) { return output.call >= call; });
  outputs_.erase(outputs_.begin(), kept);
}

// Autograd does not list the node at which backward begins, which may be `first`.
const BackwardGraph& GraphCalls::current(const Node* first) {
  const auto* nodes = torch::autograd::get_current_graph_task_nodes_in_graph();
  const auto* chosen = torch::autograd::get_current_graph_task_exec_info();
  graph_.is_whole = nodes == nullptr;
  graph_.accumulates = chosen == nullptr || chosen->empty();
  graph_.is_kept = torch::autograd::get_current_graph_task_keep_graph();
  graph_.calls.clear();
  if (nodes == nullptr) {
    return graph_;
  }
  const auto runs = [&](Node* node) {
    if (node == first) {
      return true;
    }
    if (nodes->count(node) == 0) {
      return false;
    }
    if (graph_.accumulates) {
      return true;
    }
    const auto info = chosen->find(node);
    return info != chosen->end() && info->second.should_execute();
  };
  for (const Output& output : outputs_) {
    if (runs(output.node) && has_hook_of(*output.node, output.call)) {
      graph_.calls.push_back(output.call);
    }
  }
  return graph_;
}

void add_pre_backward_hook(const at::Tensor& output, const std::shared_ptr<BackwardTarget>& target,
                           CallId call, GraphCalls* calls) {
  if (!output.requires_grad() || output.is_leaf()) {
    return;
  }
  // An in-place change of a view replaces the view's node but keeps its base's node in the graph,
  // so the base's node gets a hook, too.
  if (output.is_view() && output._base().requires_grad() && !output._base().is_leaf()) {
    hook_node(output._base().grad_fn().get(), target, call, calls);
  }
  hook_node(output.grad_fn().get(), target, call, calls);
}

void set_gradient_hook(const at::Tensor& parameter, std::weak_ptr<BackwardTarget> target,
                       std::size_t trainable) {
  torch::autograd::impl::set_post_acc_grad_hooks(
      parameter, std::make_unique<GradientHook>(std::move(target), trainable));
}

std::vector<at::Tensor> add_post_backward_node(const std::vector<at::Tensor>& inputs,
                                               std::shared_ptr<BackwardTarget> target,
                                               CallId call) {
  NodePtr node = make_node<PostBackwardNode>(std::move(target), call);
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
