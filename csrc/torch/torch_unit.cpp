#include "torch/torch_unit.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <type_traits>
#include <utility>

#include "base/check.h"
#include "base/mix.h"
#include "torch/dtype.h"
#include "torch/torch_root.h"
#include "torch/with_python.h"

namespace py = pybind11;

namespace fsdp {
namespace {

std::atomic<std::uint64_t> optimizer_steps{0};
thread_local std::uint64_t optimizer_steps_of_thread = 0;
std::atomic<bool> counts_steps_by_thread{false};
std::atomic<std::uint64_t> noted_module_changes{0};

// Calls the hooks one by one. PyTorch's own way of calling them raises if one returns a value, and
// FSDP2 ignores the value.
void call_post_accumulate_hooks(const py::object& parameter) {
  with_python([&parameter] {
    const py::list hooks(parameter.attr("_post_accumulate_grad_hooks").attr("values")());
    for (const py::handle hook : hooks) {
      hook(parameter);
    }
  });
}

// Whether users' hooks are on a parameter. swap_tensors (module.to()) leaves them on the object,
// but takes them from the tensor.
bool has_post_accumulate_hooks(const py::object& parameter) {
  const auto* const variable = reinterpret_cast<const THPVariable*>(parameter.ptr());
  return variable->post_accumulate_grad_hooks != nullptr;
}

// Whether a storage can raise a message of its own when its data is accessed, and stop doing so.
// torch 2.11 and older cannot.
template <typename Storage, typename = void>
struct CanRefuse : std::false_type {};
template <typename Storage>
struct CanRefuse<Storage,
                 std::void_t<decltype(std::declval<Storage&>().clear_data_ptr_access_error_msg_())>>
    : std::true_type {};

// See Note [one pointer swap].
template <typename Storage>
void forbid_access(Storage& storage, const std::string& message) {
  if constexpr (CanRefuse<Storage>::value) {
    storage.release_data_and_set_meta_custom_data_ptr_error_msg_(message);
  } else {
    storage.set_nbytes(0);
  }
}

template <typename Storage>
void allow_access(Storage& storage, std::size_t bytes) {
  if constexpr (CanRefuse<Storage>::value) {
    storage.clear_data_ptr_access_error_msg_();
  }
  storage.set_nbytes(bytes);
}

// Returns a plain copy of a gradient that is a tensor subclass, as its class makes it. FSDP2 packs
// gradients by this operator, too.
at::Tensor plain_copy_of(const at::Tensor& gradient, at::Device device) {
  const at::NoGradGuard no_grad;
  at::Tensor plain =
      at::empty(gradient.sizes(), at::TensorOptions().dtype(gradient.scalar_type()).device(device));
  with_python([&] {
    py::list gradients;
    gradients.append(gradient);
    const py::object chunk_cat =
        py::module_::import("torch").attr("ops").attr("fsdp").attr("chunk_cat");
    chunk_cat(gradients, py::arg("dim") = 0, py::arg("num_chunks") = 1,
              py::arg("out") = plain.view({1, -1}));
  });
  return plain;
}

c10::intrusive_ptr<c10::StorageImpl> empty_storage(at::Device device) {
  return c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(),
                                               /*size_bytes=*/0, at::DataPtr(nullptr, device),
                                               /*allocator=*/nullptr, /*resizable=*/false);
}

HeldObject& before_shards_move() {
  static auto* const function = new HeldObject();
  return *function;
}

}  // namespace

at::Tensor local_tensor_of(const at::Tensor& dtensor) {
  const py::gil_scoped_acquire gil;
  const py::object object = py::reinterpret_steal<py::object>(THPVariable_Wrap(dtensor));
  const py::object local = object.attr("_local_tensor");
  return THPVariable_Unpack(local.ptr());
}

void note_optimizer_step() {
  optimizer_steps.fetch_add(1, std::memory_order_relaxed);
  optimizer_steps_of_thread += 1;
}

void count_optimizer_steps_by_thread() { counts_steps_by_thread = true; }

void call_before_shards_move(py::object function) { before_shards_move() = std::move(function); }

void note_module_change() {
  if (!ModuleAttribute::is_being_set()) {
    noted_module_changes.fetch_add(1, std::memory_order_relaxed);
  }
}

std::uint64_t module_changes() { return noted_module_changes.load(std::memory_order_relaxed); }

TorchUnit::TorchUnit(UnitLayout layout, UnitTensors tensors, std::vector<UnitParameter> parameters,
                     ForwardCasts casts, std::size_t module_count)
    : layout_(std::move(layout)),
      tensors_(std::move(tensors)),
      parameters_(layout_, std::move(parameters)),
      gradients_(std::move(tensors_.flat_gradient)),
      storage_(empty_storage(device())),
      shown_(parameters_, device()),
      forward_(*this, casts, module_count),
      checksum_(*this) {
  got_gradient_.assign(parameters_.trainable().size(), 0);
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const UnitParameter& parameter = parameters_[i];
    if (parameter.is_input) {
      std::size_t bytes = c10::elementSize(parameter.dtype);
      for (const std::int64_t size : parameter.shape) {
        bytes *= static_cast<std::size_t>(size);
      }
      inputs_.push_back(
          {i, empty_storage(device()), layout_.placements().at(i).unsharded_offset, bytes});
    }
  }
}

std::vector<at::Tensor> TorchUnit::unsharded_views() const {
  std::vector<at::Tensor> views;
  views.reserve(parameters_.size());
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    views.push_back(view_of_storage(storage_, layout_.placements()[i].unsharded_offset,
                                    parameters_[i].shape, parameters_[i].dtype, device()));
  }
  for (const GatheredInput& input : inputs_) {
    const UnitParameter& parameter = parameters_[input.parameter];
    views[input.parameter] =
        view_of_storage(input.storage, 0, parameter.shape, parameter.dtype, device());
  }
  return views;
}

void TorchUnit::bind(std::vector<BoundObjects> objects, py::object make_gradients,
                     py::object extensions, py::object flat_parameter,
                     std::vector<ModuleAttribute> attributes) {
  parameters_.bind(std::move(objects), std::move(flat_parameter), std::move(attributes));
  gradients_.bind(std::move(make_gradients), parameters_.gradient_count(), parameters_.has_flat());
  for (std::size_t i = 0; i < parameters_.trainable().size(); ++i) {
    if (parameters_.trained(i).unsharded.defined()) {
      set_gradient_hook(parameters_.trained(i).unsharded, weak_from_this(), i);
    }
    if (parameters_.gradient_owner(i).device() != device()) {
      watch_sharded(i);  // in time for the first backward, in which another thread may run the hook
    }
  }
  has_extensions_ = !extensions.is_none();
  extensions_ = std::move(extensions);
}

void TorchUnit::join(const std::shared_ptr<TorchRoot>& root, std::string name, int number) {
  root_ = root;
  name_ = std::move(name);
  const std::string ranges = number == 0 ? "" : name_;
  forward_.name_ranges(ranges);
  pre_backward_range_ = range_name("pre_backward", ranges);
  post_backward_range_ = range_name("post_backward", ranges);
  number_ = number;
  when_freed_ = detail::concat("An unsharded parameter of unit '", name_,
                               "' was read while it is freed. Read parameters in the forward of "
                               "their module, or call unshard() on it before. If the backward "
                               "after one with create_graph=True has read it, pass "
                               "reshard_after_forward=False to fully_shard.");
  free_storages();
}

// - UnitPort

// See Note [one pointer swap].
void TorchUnit::point_storages(void* unsharded) {
  const auto point = [&](c10::StorageImpl& storage, std::size_t offset, std::size_t bytes) {
    void* const data = unsharded == nullptr ? nullptr : static_cast<char*>(unsharded) + offset;
    storage.set_data_ptr_noswap(at::DataPtr(data, device()));
    allow_access(storage, bytes);
  };
  point(*storage_, 0, layout_.unsharded_bytes());
  for (const GatheredInput& input : inputs_) {
    point(*input.storage, input.offset, input.bytes);
  }
}

void TorchUnit::free_storages() {
  const auto free = [&](c10::StorageImpl& storage) {
    storage.set_data_ptr_noswap(at::DataPtr(nullptr, device()));
    forbid_access(storage, when_freed_);
  };
  free(*storage_);
  for (const GatheredInput& input : inputs_) {
    free(*input.storage);
  }
}

void TorchUnit::attach(void* unsharded) {
  point_storages(unsharded);
  try {
    if (has_extensions_) {
      attach_extensions();
    }
    checksum_.compare_with_shard();
    show_unsharded();
  } catch (...) {  // the unit stays detached
    free_storages();
    throw;
  }
}

// The first call makes the unsharded parameters.
void TorchUnit::attach_extensions() {
  with_python([this] {
    const py::dict made = extensions_.attr("attach")();
    for (const auto& [number, parameter] : made) {
      const auto index = number.cast<std::size_t>();
      FSDP_CHECK(index < parameters_.size(), "attach returned parameter ", index, " of ",
                 parameters_.size(), ".");
      parameters_[index].set_unsharded(py::reinterpret_borrow<py::object>(parameter));
      const auto found =
          std::find(parameters_.trainable().begin(), parameters_.trainable().end(), index);
      if (found != parameters_.trainable().end()) {
        set_gradient_hook(parameters_[index].unsharded, weak_from_this(),
                          static_cast<std::size_t>(found - parameters_.trainable().begin()));
      }
    }
  });
}

void TorchUnit::compute_inputs() {
  with_python([this] { extensions_.attr("compute_inputs")(); });
}

void TorchUnit::detach() {
  checksum_.hash_parameters();
  if (has_extensions_) {
    with_python([this] { extensions_.attr("detach")(); });
  }
  free_storages();
  show_sharded();
}

void TorchUnit::move_shard(std::shared_ptr<void> memory) {
  if (before_shards_move()) {
    with_python([] { before_shards_move()(); });
  }
  tensors_.shard.move(std::move(memory));
}

std::uint64_t TorchUnit::shard_version() {
  std::uint64_t version = counts_steps_by_thread ? optimizer_steps_of_thread
                                                 : optimizer_steps.load(std::memory_order_relaxed);
  const auto add = [&version](const at::Tensor& tensor) {
    c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
    if (!impl->is_inference()) {
      version += impl->version_counter().current_version();
    }
  };
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    if (!parameters_[i].sharded.is_none()) {
      add(parameters_.sharded(i));
    }
  }
  if (parameters_.has_flat()) {
    add(parameters_.flat());
  }
  return version;
}

// See Note [gradients of DTensors].
void TorchUnit::place_gradient(std::size_t parameter) {
  const py::gil_scoped_acquire gil;
  at::Tensor& gradient = parameters_[parameter].unsharded.mutable_grad();
  const py::object placed = parameters_[parameter].place_gradient(
      py::reinterpret_steal<py::object>(THPVariable_Wrap(gradient)));
  gradient = THPVariable_Unpack(placed.ptr());
}

std::shared_ptr<void> TorchUnit::extract_gradients(const void** addresses) {
  auto taken = std::make_shared<std::vector<at::Tensor>>();
  taken->reserve(parameters_.trainable().size());
  for (std::size_t i = 0; i < parameters_.trainable().size(); ++i) {
    addresses[i] = nullptr;
    if (!parameters_.trained(i).has_gradient()) {
      continue;
    }
    at::Tensor& arrived = parameters_.trained(i).unsharded.mutable_grad();
    if (parameters_.trained(i).is_dtensor()) {
      if (!has_gradient_hook(parameters_.trained(i).unsharded)) {
        place_gradient(parameters_.trainable()[i]);
      }
      arrived = local_tensor_of(arrived);
    }
    const std::string& parameter = layout_.params()[parameters_.trainable()[i]].name;
    FSDP_CHECK(arrived.layout() == at::kStrided, "parameter '", parameter,
               "' got a sparse gradient, but only dense ones can be reduced. Pass sparse=False to "
               "its module.");
    if (arrived.key_set().has(c10::DispatchKey::Python)) {
      taken->push_back(arrived);  // its memory may be another stream's
      arrived = plain_copy_of(arrived, device());
    }
    const ParamSpec& spec = layout_.params()[parameters_.trainable()[i]];
    const DType gradient_dtype = spec.unsharded_grad_dtype.value_or(spec.param_dtype);
    FSDP_CHECK(to_dtype(arrived.scalar_type()) == gradient_dtype, "parameter '", parameter,
               "' got a gradient of dtype ", fsdp::name(to_dtype(arrived.scalar_type())),
               ", but it needs one of dtype ", fsdp::name(gradient_dtype),
               ". Remove the hook that converts its gradient.");
    at::Tensor gradient = std::move(arrived);
    arrived = at::Tensor();
    if (!gradient.is_contiguous() || gradient.is_neg()) {
      const at::NoGradGuard no_grad;
      if (gradient.is_cuda()) {  // its memory may be another stream's
        gradient.record_stream(c10::impl::VirtualGuardImpl(at::kCUDA).getStream(device()));
      }
      gradient = gradient.resolve_neg().contiguous();
    }
    addresses[i] = gradient.data_ptr();
    taken->push_back(std::move(gradient));
  }
  shown_.reset_taken();
  return taken;
}

void TorchUnit::discard_gradients() {
  for (const std::size_t parameter : parameters_.trainable()) {
    if (parameters_[parameter].has_gradient()) {
      parameters_[parameter].unsharded.mutable_grad() = at::Tensor();
    }
  }
  shown_.discard();
}

void TorchUnit::discard_sharded_gradients() {
  for (std::size_t i = 0; i < gradients_.count() && !gradients_.is_released(); ++i) {
    if (shows_gradient(i)) {
      parameters_.gradient_owner(i).mutable_grad() = at::Tensor();
    }
  }
}

// See Note [held gradients].
bool TorchUnit::has_held_gradients() {
  if (gradients_.is_released()) {
    return !parameters_.trainable().empty();
  }
  for (std::size_t i = 0; i < gradients_.count() && !gradients_.is_shared(); ++i) {
    if (!shows_gradient(i) && gradients_.is_held(i)) {
      return true;
    }
  }
  return false;
}

bool TorchUnit::uses_gradient_memory() {
  if (gradients_.is_released() || gradients_.is_shared()) {
    return !parameters_.trainable().empty();
  }
  for (std::size_t i = 0; i < gradients_.count(); ++i) {
    if (shows_gradient(i) || gradients_.is_held(i)) {
      return true;
    }
  }
  return false;
}

// Whether gradient i is in .grad.
bool TorchUnit::shows_gradient(std::size_t i) const {
  return parameters_.gradient_owner(i).grad().is_same(gradients_.at(i));
}

at::Tensor TorchUnit::share_flat_gradient() {
  const auto root = root_.lock();
  Bucket* const bucket = root != nullptr ? root->pipeline().unit(number_).bucket : nullptr;
  if (bucket != nullptr) {
    root->pipeline().reducer().return_gradients(*bucket);
  }
  return gradients_.share();
}

std::vector<bool> TorchUnit::shows_gradients() const {
  std::vector<bool> shows(layout_.params().size());
  for (std::size_t i = 0; i < gradients_.count() && !gradients_.is_released(); ++i) {
    shows[parameters_.trainable()[i]] = shows_gradient(i);
  }
  return shows;
}

std::uint64_t TorchUnit::gradients_version() const {
  return mix(gradients_.version(), std::hash<std::vector<bool>>()(shows_gradients()));
}

bool TorchUnit::has_sharded_gradient(std::size_t i) {
  return parameters_.gradient_owner(i).grad().defined();
}

void TorchUnit::import_sharded_gradient(std::size_t i) {
  if (gradients_.is_released()) {
    return;  // a hook of this backward has replaced the parameters
  }
  const std::size_t index = parameters_.gradient_place(i);
  at::Tensor& shown = parameters_.gradient_owner(i).mutable_grad();
  if (!shown.is_same(gradients_.at(index))) {
    before_change_of_gradients();  // an earlier reduction may still write there
    gradients_.import(index, shown);
  }
}

void TorchUnit::set_sharded_gradient(std::size_t i) {
  if (gradients_.is_released()) {
    return;  // as above
  }
  const std::size_t index = parameters_.gradient_place(i);
  parameters_.gradient_owner(i).mutable_grad() = gradients_.at(index);
  got_gradient_[index] = 1;
}

void TorchUnit::begin_backward() {
  std::fill(got_gradient_.begin(), got_gradient_.end(), 0);  // of a backward that failed
  shown_.take_back_all(name_);
  return_users_gradients(/*with_values=*/false);
  const auto root = root_.lock();
  UnitGradients& progress = root->pipeline().unit(number_).gradients;
  for (std::size_t i = 0; i < parameters_.trainable().size(); ++i) {
    const at::Tensor& owner = parameters_.gradient_owner(i);
    const bool has_accumulated = progress.awaits_reduction() && !progress.is_frozen(i);
    progress.set_frozen(i, !owner.requires_grad() && !has_accumulated);
    watch_sharded(i);
  }
}

void TorchUnit::watch_sharded(std::size_t trainable) {
  const at::Tensor& owner = parameters_.gradient_owner(trainable);
  if (owner.requires_grad() && owner.is_leaf()) {
    ensure_sharded_hook(owner, weak_from_this(), trainable);
  }
}

void TorchUnit::before_change_of_gradients() {
  const auto root = this->root();
  if (root != nullptr && !root->is_retired()) {
    const NoGilIfHeld no_gil;
    const TorchRoot::Turn turn = root->take_turn();
    root->pipeline().wait_before_change(number_);
  }
}

// See Note [gradients of users] in sharded_gradients.h.
void TorchUnit::return_users_gradients(bool with_values) {
  for (auto& [i, theirs] : gradients_.take_imports()) {
    if (gradients_.is_released() || !shows_gradient(i)) {
      continue;  // an attached optimizer may have consumed the gradient
    }
    if (with_values) {
      before_change_of_gradients();
      gradients_.copy_to(theirs, i);
    }
    parameters_.gradient_owner(i).mutable_grad() = std::move(theirs);
  }
}

void TorchUnit::run_post_accumulate_hooks() {
  for (std::size_t i = 0; i < parameters_.trainable().size(); ++i) {
    if (got_gradient_[i] == 0) {
      continue;
    }
    got_gradient_[i] = 0;
    const py::object& owner = gradient_owner_object(i);
    if (has_post_accumulate_hooks(owner)) {
      before_change_of_gradients();  // set_is_last_backward(False) does not wait
      call_post_accumulate_hooks(owner);
    }
  }
}

const py::object& TorchUnit::gradient_owner_object(std::size_t trainable) {
  return parameters_.has_flat() ? parameters_.flat_object()
                                : parameters_.trained(trainable).sharded;
}

void TorchUnit::reclaim_memory() {
  tensors_.shard.reclaim(/*parts_are_newer=*/!parameters_.has_flat());
  gradients_.reclaim();
}

// - Autograd's hooks

void TorchUnit::on_pre_backward(CallId call, const torch::autograd::Node* node) {
  if (const auto root = root_.lock()) {
    const Range range(*root->lanes().device, pre_backward_range_);
    const TorchRoot::Turn turn = root->ensure_backward(node);
    root->pipeline().backward().pre_backward(number_, call);
  }
}

void TorchUnit::on_gradient(std::size_t trainable) {
  if (const auto root = root_.lock()) {
    const TorchRoot::Turn turn = root->ensure_backward();
    if (!parameters_.trained(trainable).has_gradient()) {
      return;  // frozen since forward
    }
    const std::size_t parameter = parameters_.trainable()[trainable];
    if (parameters_[parameter].is_dtensor()) {
      place_gradient(parameter);
    }
    root->pipeline().backward().gradient_arrived(number_, trainable);
  }
}

bool TorchUnit::on_sharded_gradient(std::size_t trainable, const at::Tensor& gradient) {
  const auto root = this->root();
  const at::Tensor& owner = parameters_.gradient_owner(trainable);
  const bool adds = root != nullptr && owner.device() != device() && gradient.defined() &&
                    !at::GradMode::is_enabled() &&
                    !has_post_accumulate_hooks(gradient_owner_object(trainable));
  if (!adds) {
    before_change_of_gradients();
    return false;
  }
  const TorchRoot::Turn turn = root->take_turn();
  before_change_of_gradients();
  at::Tensor& sum = owner.mutable_grad();
  if (sum.defined()) {
    sum.add_(gradient);
  } else {
    sum = gradient.clone();
  }
  return true;
}

void TorchUnit::adopt_gradients() {
  for (std::size_t i = 0; i < parameters_.trainable().size(); ++i) {
    if (parameters_.trained(i).has_gradient()) {
      on_gradient(i);
    }
  }
}

void TorchUnit::on_post_backward(CallId call) {
  if (const auto root = root_.lock()) {
    const Range range(*root->lanes().device, post_backward_range_);
    const TorchRoot::Turn turn = root->ensure_backward();
    root->pipeline().backward().post_backward(number_, call);
  }
}

std::uint64_t gradients_version_of(const std::vector<std::shared_ptr<TorchUnit>>& units) {
  std::uint64_t version = 0;
  for (const auto& unit : units) {
    version = mix(version, unit != nullptr ? unit->gradients_version() : 0);
  }
  return version;
}

}  // namespace fsdp
