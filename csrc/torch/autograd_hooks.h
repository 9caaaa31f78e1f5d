// Three small objects through which backward calls the schedule. Autograd runs them in C++, without
// the GIL.
//
//   PreBackwardHook     on the node behind a unit's output: backward reaches the unit
//   GradientHook        on an unsharded parameter: its gradient has arrived
//   PostBackwardNode    a node in front of a unit's inputs: backward has passed the unit
//
// The first and the last own the model's C++ side until backward has passed them without keeping
// the graph. So a backward works if its model was dropped, as it does for modules of torch.
// Afterwards, a graph that is kept, such as by a loss, keeps nothing else.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <memory>
#include <vector>

#include "core/backward_order.h"
#include "core/call_id.h"

namespace torch::autograd {
struct Node;
}

namespace fsdp {

// `call` is the call of the unit's forward that made the node.
class BackwardTarget {
 public:
  virtual ~BackwardTarget() = default;
  virtual void on_pre_backward(CallId call, const torch::autograd::Node* node) = 0;
  virtual void on_gradient(std::size_t trainable) = 0;
  virtual void on_post_backward(CallId call) = 0;
};

// Which calls have their outputs in the graph of the backward that runs: Note [order of backward]
// in core/backward_order.h.
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

// Adds the output's nodes to `calls`, if it is not null.
void add_pre_backward_hook(const at::Tensor& output, const std::shared_ptr<BackwardTarget>& target,
                           CallId call, GraphCalls* calls);

void set_gradient_hook(const at::Tensor& parameter, std::weak_ptr<BackwardTarget> target,
                       std::size_t trainable);

// Returns aliases of `inputs` behind one node. All inputs require gradients.
std::vector<at::Tensor> add_post_backward_node(const std::vector<at::Tensor>& inputs,
                                               std::shared_ptr<BackwardTarget> target, CallId call);

}  // namespace fsdp
