#include "torch/torch_root.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <string>
#include <utility>

#include "base/check.h"
#include "core/record/flight_recorder.h"
#include "torch/dtype.h"
#include "torch/out_of_memory.h"
#include "torch/profiler_range.h"
#include "torch/with_python.h"

namespace py = pybind11;

namespace fsdp {
namespace {

// Names of ranges in profilers' timelines, as FSDP2's.
const std::string kBeginForward = "FSDP::root_pre_forward";
const std::string kEndBackward = "FSDP::root_post_backward_callback";

void warn_of_lost_gradients() {
  if (PyErr_WarnEx(PyExc_UserWarning,
                   "A backward ended in an exception, so the gradients that earlier backwards "
                   "without gradient sync had accumulated were dropped. Run all micro-batches of "
                   "this step again.",
                   1) != 0) {
    throw py::error_already_set();
  }
}

}  // namespace

// The last callback of a backward owns this object. If it is destroyed before the callback has run,
// the backward ended in an exception.
struct TorchRoot::BackwardGuard {
  BackwardGuard(std::shared_ptr<TorchRoot> guarded, std::uint64_t guarded_pass)
      : root(std::move(guarded)), pass(guarded_pass) {}
  ~BackwardGuard() {
    if (!ended) {
      root->abandon_backward(pass);
    }
  }
  std::shared_ptr<TorchRoot> root;
  std::uint64_t pass;
  bool ended = false;
};

TorchRoot::TorchRoot(std::shared_ptr<Lanes> lanes, std::shared_ptr<Lanes> replicas,
                     PipelineOptions options, py::object when_stale,
                     std::shared_ptr<StepChecks> checks)
    : lanes_(std::move(lanes)),
      replicas_(std::move(replicas)),
      pipeline_(std::make_unique<Pipeline>(*lanes_, std::move(options), replicas_.get())),
      passes_(pipeline_->passes()),
      when_stale_(std::move(when_stale)),
      checks_(std::move(checks)) {
  lanes_->device->show_ranges_in(&begin_profiler_range);
}

TorchRoot::~TorchRoot() {
  const GilUnlessExit gil;
  if (gil) {
    retire();
    units_.clear();
  }
}

void TorchRoot::retire() {
  {
    const py::gil_scoped_release no_gil;  // the streams finish what was issued
    pipeline_.reset();
  }
  for (const auto& unit : units_) {
    unit->leave_root();
  }
}

void TorchRoot::add_unit(const std::shared_ptr<TorchUnit>& unit, UnitConfig config) {
  const std::string name = config.name;
  const int number = pipeline_->units().add(std::move(config), *unit);
  unit->join(shared_from_this(), name, number);
  units_.push_back(unit);
}

TorchRoot::Turn TorchRoot::take_turn() {
  Turn turn(turns_, std::try_to_lock);
  if (!turn.owns_lock()) {
    const NoGilIfHeld no_gil;
    turn.lock();
  }
  return turn;
}

void TorchRoot::leave_if_idle() {
  const bool is_idle =
      pipeline_ == nullptr || (passes().outermost() == Passes::kNone &&
                               (!passes().in_backward() || passes().has_failed_backward()));
  if (is_idle) {
    owner_.leave();
  }
}

bool TorchRoot::is_recomputing() const {
  return passes().in_backward() && !passes().has_failed_backward() &&
         torch::autograd::get_current_graph_task_id() >= 0;
}

bool TorchRoot::enter_recomputation(const TorchUnit& unit) {
  const bool begins = passes().is_between() && at::GradMode::is_enabled() && unit.number() != 0 &&
                      torch::autograd::get_current_graph_task_id() >= 0 &&
                      pipeline_->awaits_backward_of(unit.number());
  if (begins) {
    const py::gil_scoped_release no_gil;
    (void)ensure_backward();
  }
  return is_recomputing();
}

bool TorchRoot::is_in_inner_backward() const {
  return torch::autograd::get_current_graph_task_id() != backward_task_;
}

bool TorchRoot::enter_forward(TorchUnit& unit) {
  const bool nested = passes().outermost() != Passes::kNone && passes().in_forward() &&
                      !passes().in_backward() && !is_outermost(unit) && unit.number() != 0;
  const bool is_checked = may_train_ || !at::GradMode::is_enabled();
  if (nested) {
    return is_checked;  // the forward around it may be without gradients
  }
  FSDP_CHECK(
      !is_handle_pending_,
      "Forward was called before the wait for the last gradient reduction. Call wait() of the "
      "handle that finalize_backward has returned.");
  for (const auto& other : units_) {
    other->parameters().carry_gradient_settings();
  }
  // A frozen parameter stays trainable while its unit awaits a reduction. recover() drops that
  // reduction, so the settings are compared after it.
  recover();
  if (!is_checked || seen_module_changes_ != module_changes() || needs_new_units()) {
    return false;
  }
  if (!at::GradMode::is_enabled()) {
    had_other_settings_ =
        had_other_settings_ || has_gradient_setting_changed(/*accepts_frozen=*/false);
  } else if (had_other_settings_) {
    settle_gradient_settings();
  }
  for (const auto& other : units_) {
    other->forward().reset_pending();
    other->reclaim_memory();
  }
  owner_.change(RootOwner::Use::Forward);
  passes().enter_forward(unit.number());  // with the GIL, as abandon_backward reads it
  const bool with_gradient = at::GradMode::is_enabled();
  const bool begins_step = checks_ != nullptr && with_gradient && !passes().awaits_backward();
  const py::gil_scoped_release no_gil;
  // A transform of torch.func would treat the copies that move shards as the user's operators.
  const c10::impl::ExcludeDispatchKeyGuard no_transforms(
      c10::DispatchKeySet({c10::DispatchKey::FuncTorchDynamicLayerFrontMode,
                           c10::DispatchKey::FuncTorchDynamicLayerBackMode}));
  look_for_profilers();
  const Range range(*lanes_->device, kBeginForward);
  const CallId first_call = pipeline_->begin_forward(unit.number(), with_gradient);
  if (begins_step) {
    begin_step();
  }
  graph_calls_.forget_before(first_call);
  return true;
}

bool TorchRoot::has_gradient_setting_changed(bool accepts_frozen) const {
  return std::any_of(units_.begin(), units_.end(), [&](const auto& unit) {
    const bool awaits_reduction =
        pipeline_ != nullptr && pipeline_->unit(unit->number()).gradients.awaits_reduction();
    return unit->has_gradient_setting_changed(!accepts_frozen    ? AcceptsFrozen::None
                                              : awaits_reduction ? AcceptsFrozen::All
                                                                 : AcceptsFrozen::Toggling);
  });
}

bool TorchRoot::needs_new_units() const {
  const bool may_wait = awaited_backwards_ > 0 && !at::GradMode::is_enabled() &&
                        std::none_of(units_.begin(), units_.end(), [](const auto& unit) {
                          return unit->parameters().has_flat();
                        });
  return (!may_wait && has_gradient_setting_changed(/*accepts_frozen=*/true)) ||
         std::any_of(units_.begin(), units_.end(),
                     [](const auto& unit) { return unit->parameters().has_other_shards(); });
}

void TorchRoot::leave_forward(py::handle output, bool with_gradient) {
  for (const auto& unit : units_) {
    unit->forward().end_incomplete(*this, output);
  }
  passes().leave_forward();
  awaited_backwards_ += with_gradient ? 1 : 0;
  const py::gil_scoped_release no_gil;
  pipeline_->end_forward(with_gradient);
  leave_if_idle();
}

void TorchRoot::abandon_forward(const TorchUnit& unit) {
  if (owner_.is_of_another_thread()) {
    return;
  }
  if (is_outermost(unit)) {  // otherwise the forward around it may catch the exception
    passes().leave_forward();
    try {
      const py::gil_scoped_release no_gil;
      pipeline_->units().put_away_parameters();
    } catch (const std::exception&) {
      // The forward has replaced a parameter. The next forward reports it, and this one raises its
      // own error.
    }
  }
  leave_if_idle();
}

// A thread of the autograd engine may call this late, when the user has begun another pass.
void TorchRoot::abandon_backward(std::uint64_t number) noexcept {
  if (!passes().fail_backward(number)) {
    return;
  }
  const Turn turn = take_turn();
  try {
    const GilUnlessExit gil;
    if (gil && number == passes().number()) {
      for (const auto& unit : units_) {
        unit->return_users_gradients(/*with_values=*/false);
      }
    }
    if (gil && passes().outermost() != Passes::kNone) {  // forward goes on: it may have caught it
      owner_.change(RootOwner::Use::Forward);
      return;
    }
    if (gil && number == passes().number() && pipeline_ != nullptr) {
      pipeline_->units().put_away_parameters();
    }
  } catch (const std::exception&) {
    // A user has replaced a parameter. The next forward reports it.
  }
  if (number == passes().number()) {
    owner_.leave_backward();
  }
}

TorchRoot::Turn TorchRoot::ensure_backward(const torch::autograd::Node* node) {
  FSDP_CHECK(pipeline_ != nullptr,
             "Parameters were frozen, unfrozen, replaced or converted, and the model ran forward "
             "again, before the backward of an earlier forward. Run that backward first.");
  owner_.enter(RootOwner::Use::Backward);  // it may wait for a thread that needs a turn to leave
  Turn turn = take_turn();
  try {
    if (passes().has_failed_backward() && reset_failed(Pipeline::After::FailureInForward)) {
      with_python(warn_of_lost_gradients);
    }
    if (!passes().in_backward()) {
      begin_engine_backward(node);
    }
  } catch (...) {  // there is no BackwardGuard yet, which would give the root back
    return_from_backward();
    throw;
  }
  return turn;
}

void TorchRoot::begin_engine_backward(const torch::autograd::Node* node) {
  // An evaluation may itself run a backward, for gradients of its inputs.
  if (had_other_settings_ && !passes().in_forward()) {
    settle_gradient_settings();
  }
  awaited_backwards_ = std::max(0, awaited_backwards_ - 1);
  awaits_finalization_ = true;
  if (before_backward_) {
    with_python([this] {
      const py::object method = before_backward_();
      if (!method.is_none()) {
        method();
      }
    });
  }
  owner_.change(RootOwner::Use::Backward);
  look_for_profilers();
  // The engine enables gradients in a backward with create_graph=True: Note [double backward].
  begin_backward(/*may_reshard=*/!at::GradMode::is_enabled(), graph_calls_.current(node));
  auto guard = std::make_shared<BackwardGuard>(shared_from_this(), passes().number());
  torch::autograd::Engine::get_default_engine().queue_callback([guard] {
    with_torch_errors([&] { guard->root->end_backward(); });
    guard->ended = true;
  });
}

void TorchRoot::settle_gradient_settings() {
  align_gradient_settings();
  FSDP_CHECK(
      !has_gradient_setting_changed(/*accepts_frozen=*/true),
      "Parameters were frozen or unfrozen after a forward, and still are at its backward. Set "
      "requires_grad back before that backward, or run the backward first.");
  had_other_settings_ = false;
}

void TorchRoot::align_gradient_settings() {
  with_python([this] {
    for (const auto& unit : units_) {
      unit->parameters().align_gradient_settings();
    }
  });
}

void TorchRoot::begin_backward(bool may_reshard, const BackwardGraph& graph) {
  // Check all units before any is changed, so that a refused backward changes nothing.
  for (const auto& unit : units_) {
    unit->shown_gradients().check(unit->name());
  }
  for (const auto& unit : units_) {
    unit->begin_backward();
  }
  backward_task_ = torch::autograd::get_current_graph_task_id();
  pipeline_->backward().begin_backward(may_reshard, graph);
}

void TorchRoot::end_backward() {
  const Range range(*lanes_->device, kEndBackward);
  Turn turn = take_turn();
  pipeline_->backward().end_backward();
  awaits_finalization_ = awaits_finalization_ && !pipeline_->options().is_last_backward;
  for (const auto& unit : units_) {
    if (pipeline_->unit(unit->number()).gradients.awaits_reduction()) {
      unit->shown_gradients().show_all();
    }
  }
  if (is_checking_ && !passes().in_forward()) {
    end_step();
  }
  turn.unlock();
  for (const auto& unit : units_) {
    unit->return_users_gradients();
    unit->run_post_accumulate_hooks();
    unit->forward().reset_pending();
  }
  return_from_backward();
}

// Gives the root back to the forward around the backward, or to nobody.
void TorchRoot::return_from_backward() {
  if (passes().outermost() != Passes::kNone) {
    owner_.change(RootOwner::Use::Forward);
  } else {
    owner_.leave_backward();
  }
}

// A CUDA graph would replay the checks of its step, and nobody would read their results.
void TorchRoot::begin_step() {
  const bool is_due = checks_->begin_step() && !lanes_->device->is_capturing();
  if (!is_due && !is_checking_) {
    return;
  }
  is_checking_ = is_due;
  for (const auto& unit : units_) {
    if (is_due) {
      unit->checksum().begin();
    } else {
      unit->checksum().discard();  // of a step that ended in an exception
    }
  }
}

void TorchRoot::end_step() {
  is_checking_ = false;
  std::vector<StepChecksum::Numbers> numbers;
  for (const auto& unit : units_) {
    numbers.push_back(unit->checksum().end());
  }
  checks_->compare(numbers);
}

void TorchRoot::reset_iteration() {
  for (const auto& unit : units_) {
    unit->forward().reset_pending();
  }
  passes().reset();
  awaits_finalization_ = is_handle_pending_ = false;
  const py::gil_scoped_release no_gil;
  pipeline_->reset();
  leave_if_idle();
}

void TorchRoot::recover() {
  if (passes().is_between() || pipeline_ == nullptr) {
    return;
  }
  for (const auto& unit : units_) {
    unit->forward().reset_pending();
  }
  passes().reset();
  awaits_finalization_ = false;
  if (reset_failed(Pipeline::After::Failure)) {
    warn_of_lost_gradients();
  }
}

// A thread of the autograd engine calls it without the GIL. Returns whether gradients of earlier
// backwards are lost.
bool TorchRoot::reset_failed(Pipeline::After after) {
  const NoGilIfHeld no_gil;
  const bool loses_shown =
      passes().in_backward() && std::any_of(units_.begin(), units_.end(), [](const auto& unit) {
        return unit->shown_gradients().has_taken();
      });
  return pipeline_->reset(after) || loses_shown;
}

std::vector<at::Tensor> accumulated_gradients(TorchRoot& root, int unit) {
  Pipeline& pipeline = root.pipeline();
  std::vector<at::Tensor> views;
  std::vector<AccumulatedGradients::Part> parts;
  {
    const py::gil_scoped_release no_gil;  // it waits for reductions, and so for users' hooks
    parts = pipeline.reducer().accumulated_parts(pipeline.unit(unit));
  }
  const UnitLayout& layout = pipeline.unit(unit).layout;
  for (const AccumulatedGradients::Part& part : parts) {
    views.push_back(
        at::from_blob(part.first, {layout.world_size(), part.numel}, {part.stride, 1},
                      at::TensorOptions()
                          .dtype(to_scalar_type(layout.reduce_dtype()))
                          .device(root.units().at(static_cast<std::size_t>(unit))->device())));
  }
  return views;
}

void TorchRoot::apply(int unit, UnitSettings settings) {
  if (passes().has_failed() && !passes().in_backward()) {
    recover();
  }
  const double before = pipeline_->unit(unit).pre_scale;
  const double now = settings.pre_scale;
  const bool scales_accumulated = now != before && !passes().has_failed_backward() &&
                                  Reducer::has_any_accumulated(pipeline_->unit(unit));
  FSDP_CHECK(!scales_accumulated || passes().is_between(),
             "set_gradient_divide_factor was called on unit '", pipeline_->unit(unit).name,
             "', which has accumulated gradients, while forward or backward runs. Call it before "
             "or after.");
  pipeline_->units().apply(unit, std::move(settings));
  if (!scales_accumulated) {
    return;
  }
  const at::NoGradGuard no_grad;
  for (at::Tensor& part : accumulated_gradients(*this, unit)) {
    part.mul_(now / before);
  }
}

// This backward reaches no unit. Its end reduces the remaining gradients.
void TorchRoot::reduce_accumulated() {
  if (passes().has_failed() && !passes().in_backward()) {
    recover();
  }
  FSDP_CHECK(!passes().has_failed(),
             "The last backward failed, so there is nothing to reduce. Run the step again; its "
             "forward drops what is left.");
  FSDP_CHECK(passes().is_between(),
             "Gradients cannot be reduced while forward or backward runs. Reduce them "
             "after backward has ended.");
  const py::gil_scoped_release no_gil;
  const at::NoGradGuard no_grad;  // as in a backward that autograd runs
  // There may be no buckets yet after parameters were replaced.
  pipeline_->update_buckets();
  BackwardGraph nothing;
  nothing.is_whole = false;
  begin_backward(/*may_reshard=*/true, nothing);
  try {
    for (const auto& unit : units_) {
      unit->adopt_gradients();
    }
    end_backward();
    awaits_finalization_ = false;
  } catch (...) {
    abandon_backward(passes().number());
    throw;
  }
}

// Works after a failed backward, too: the reductions before it are complete.
void TorchRoot::wait_for_reductions() {
  FSDP_CHECK(passes().is_between() || passes().has_failed(),
             "wait was called on a handle of gradient reductions while forward or backward runs. "
             "Call it before or after.");
  const py::gil_scoped_release no_gil;
  pipeline_->wait_for_reductions();
  is_handle_pending_ = false;
}

void TorchRoot::set_before_backward(py::object method) {
  before_backward_ = method.is_none() ? py::object() : std::move(method);
}

void TorchRoot::unshard(int unit) {
  if (passes().has_failed()) {
    recover();
  }
  if (had_other_settings_) {
    align_gradient_settings();  // the user sees the unsharded parameters
  }
  const py::gil_scoped_release no_gil;
  pipeline_->unshard(unit);
}

void TorchRoot::prefetch_next_forward() {
  if (passes().has_failed()) {
    recover();
  }
  const py::gil_scoped_release no_gil;
  pipeline_->prefetch_next_forward();
}

py::object TorchRoot::pre_forward_when_stale(py::handle module, py::handle args,
                                             py::handle kwargs) {
  const py::object rebuild = when_stale_();
  FSDP_CHECK(!rebuild.is_none(), "The root module was deleted. Keep a reference to the model.");
  return rebuild(module, args, kwargs);
}

}  // namespace fsdp
