// Small objects through which backward calls the schedule. Autograd runs them in C++, without the
// GIL.
//
//   PreBackwardHook     on the node behind a unit's output: backward reaches the unit
//   GradientHook        on an unsharded parameter: its gradient has arrived
//   PostBackwardNode    a node in front of a unit's inputs: backward has passed the unit; an
//                       InputWatch puts it there
//   ShardedHook         on a sharded parameter: autograd is about to add to its gradient, because
//                       the loss uses the sharded parameter itself. If that is on the host and its
//                       unit on a GPU, the hook adds instead: Note [turns] in torch/torch_root.h
//
// The first and the last own the model's C++ side until backward has passed them without keeping
// the graph. So a backward works if its model was dropped, as it does for modules of torch.
// Afterwards, a graph that something keeps, such as a loss, keeps nothing else alive.
//
// Note [inputs]
// A unit gets its caller's own tensors, so an in-place change has the same effect as without
// sharding. While the unit's forward runs, each of these tensors is an output of the
// PostBackwardNode. The node passes gradients on to their former destinations. When forward has
// ended, the tensor has its own history again: other uses of it do not delay the node, and hooks
// and torch.autograd.grad see the whole gradient. Hooks that forward has registered move to the
// tensor's own node. A tensor that forward has changed in place keeps its new history, which
// includes the PostBackwardNode, and counts as an output.
//
// Two other kinds of changed inputs count as outputs, too. One needed no gradient before forward
// wrote into it, such as a buffer for results. The other is an input of a later module of a group.
// It has no node, because backward has not passed the unit there.
//
// A leaf cannot be the output of a node, so no node is in front of it. If all inputs are leaves,
// backward has passed the unit when it reaches an earlier unit, or ends. If forward returns an
// input as it is, the caller gets a view of it, and the view's node tells when backward reaches the
// unit.
//
// In place of an AsyncCollectiveTensor, a unit gets another tensor: Note [async inputs] in
// torch/unit_forward.cpp.
//
// Note [outputs on another device]
// Autograd runs a node on the thread of the device of its gradient, at the same time as nodes of
// other devices. An output on the host, such as h.sum().cpu(), is reached as soon as backward
// begins, while the device's thread still runs later units. The order of backward does not allow
// that. So if a unit on a GPU returns an output on the host, the unit's hooks are on the first
// nodes behind that output that run on the GPU.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "core/schedule/backward_order.h"
#include "core/schedule/forward_order.h"

namespace fsdp {

class TorchUnit;

// Which calls have their outputs in the graph of the backward that runs: Note [order of backward]
// in core/schedule/backward_order.h.
class GraphCalls {
 public:
  // The output is behind the node.
  void add(CallId call, torch::autograd::Node* node) { outputs_.push_back({call, node}); }
  void forget_before(CallId call);

  // Call it in a hook of the backward that begins. `first` is the hook's node if it is behind an
  // output. The result is valid until the next call.
  const BackwardGraph& current(const torch::autograd::Node* first);

 private:
  struct Output {
    CallId call;
    torch::autograd::Node* node;  // not owned; it may have been freed
  };
  std::vector<Output> outputs_;
  BackwardGraph graph_;
};

// The number of the next node that autograd makes on this thread.
std::uint64_t next_node_number();

// Adds the output's nodes to `calls`, if it is not null. `first_node` is next_node_number() when
// forward entered the unit.
void add_pre_backward_hook(const at::Tensor& output, const std::shared_ptr<TorchUnit>& unit,
                           CallId call, std::uint64_t first_node, GraphCalls* calls);

// Does not replace a user's post-accumulate hook: PyTorch has room for one only. The reduction then
// finds the gradient in .grad.
void set_gradient_hook(const at::Tensor& parameter, std::weak_ptr<TorchUnit> unit,
                       std::size_t trainable);
// Whether the parameter has this hook, which a registration of the user's replaces.
bool has_gradient_hook(const at::Tensor& parameter);

// Puts a ShardedHook on the sharded parameter with this number, or gives the one there this unit.
// Each backward calls it, since the first hook that the user registers removes it.
void ensure_sharded_hook(const at::Tensor& parameter, const std::weak_ptr<TorchUnit>& unit,
                         std::size_t trainable);

// Returns a view of the tensor, which requires gradients, behind a PostBackwardNode.
at::Tensor add_post_backward_node(const at::Tensor& tensor, std::shared_ptr<TorchUnit> unit,
                                  CallId call);

// Returns an alias of `values`, which share memory with the tensor. The tensor gets the alias's
// gradient. Autograd refuses to change the alias in place, since the tensor's history would miss
// the change.
at::Tensor with_history_of(const at::Tensor& tensor, const at::Tensor& values);

// Puts a PostBackwardNode in front of a call's inputs while its forward runs: Note [inputs].
class InputWatch {
 public:
  InputWatch() = default;
  // The inputs that get the node require gradients and are no leaves. Of the other ones, changed()
  // has those that forward has changed.
  InputWatch(const std::vector<at::Tensor>& inputs, std::vector<at::Tensor> others,
             std::shared_ptr<TorchUnit> unit, CallId call);

  bool is_empty() const { return inputs_.empty() && others_.empty(); }

  // Forward has ended.
  void end();
  // After end(): the inputs that forward has changed in place, and may be used again.
  std::vector<at::Tensor> changed() const;
  // After end(): the tensor that the caller gets in place of an output.
  at::Tensor output_for(const at::Tensor& tensor) const;

 private:
  struct Input {
    at::Tensor tensor;
    torch::autograd::Edge before;
    decltype(torch::autograd::Edge::function) node;
    bool is_changed = false;
  };
  struct Other {
    at::Tensor tensor;
    const torch::autograd::Node* node;  // null if the tensor required no gradient
  };
  std::vector<Input> inputs_;
  std::vector<Other> others_;
};

}  // namespace fsdp
