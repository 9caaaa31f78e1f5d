// Three small objects through which backward calls the schedule. Autograd runs them in C++, without
// the GIL.
//
//   PreBackwardHook     on the node behind a unit's output: backward reaches the unit
//   GradientHook        on an unsharded parameter: its gradient has arrived
//   PostBackwardNode    a node in front of a unit's inputs: backward has passed the unit
//
// Their pointers are weak, since a graph may outlive the model.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <memory>
#include <vector>

namespace fsdp {

class BackwardTarget {
 public:
  virtual ~BackwardTarget() = default;
  virtual void on_pre_backward(int forward_call) = 0;
  virtual void on_gradient(std::size_t trainable) = 0;
  virtual void on_post_backward() = 0;
};

void add_pre_backward_hook(const at::Tensor& output, std::weak_ptr<BackwardTarget> target,
                           int forward_call);

void set_gradient_hook(const at::Tensor& parameter, std::weak_ptr<BackwardTarget> target,
                       std::size_t trainable);

// Returns aliases of `inputs` behind one node. All inputs require gradients.
std::vector<at::Tensor> add_post_backward_node(const std::vector<at::Tensor>& inputs,
                                               std::weak_ptr<BackwardTarget> target);

}  // namespace fsdp
