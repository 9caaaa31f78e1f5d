#include "torch/torch_unit.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>

#include <atomic>
#include <type_traits>
#include <utility>

#include "base/check.h"
#include "torch/dtype.h"
#include "torch/torch_root.h"

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
  const py::gil_scoped_acquire gil;
  try {
    const py::list hooks(parameter.attr("_post_accumulate_grad_hooks").attr("values")());
    for (const py::handle hook : hooks) {
      hook(parameter);
    }
  } catch (py::error_already_set& error) {
    // Autograd keeps the type of errors of this class only.
    error.restore();
    python_error kept;
    kept.persist();
    throw std::move(kept);
  }
}

at::Tensor local_tensor_of(const at::Tensor& dtensor) {
  const py::gil_scoped_acquire gil;
  const py::object object = py::reinterpret_steal<py::object>(THPVariable_Wrap(dtensor));
  const py::object local = object.attr("_local_tensor");
  return THPVariable_Unpack(local.ptr());
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

}  // namespace

void note_optimizer_step() {
  optimizer_steps.fetch_add(1, std::memory_order_relaxed);
  optimizer_steps_of_thread += 1;
}

void count_optimizer_steps_by_thread() { counts_steps_by_thread = true; }

void note_module_change() { noted_module_changes.fetch_add(1, std::memory_order_relaxed); }

std::uint64_t module_changes() { return noted_module_changes.load(std::memory_order_relaxed); }

TorchUnit::TorchUnit(UnitLayout layout, UnitTensors tensors, ForwardCasts casts,
                     std::size_t module_count)
    : layout_(std::move(layout)),
      tensors_(std::move(tensors)),
      gradients_(std::move(tensors_.flat_gradient)),
      casts_(casts),
      storage_(c10::make_intrusive<c10::StorageImpl>(
          c10::StorageImpl::use_byte_size_t(), /*size_bytes=*/0, at::DataPtr(nullptr, device()),
          /*allocator=*/nullptr, /*resizable=*/false)),
      handled_(module_count, nullptr),
      pending_(module_count, 0) {
  for (std::size_t i = 0; i < layout_.params().size(); ++i) {
    if (layout_.params()[i].trainable) {
      trainable_.push_back(i);
    }
  }
  got_gradient_.assign(trainable_.size(), 0);
}

TorchUnit::~TorchUnit() {
  if (Py_IsInitialized() == 0) {
    for (py::object& object : sharded_) object.release();
    for (py::object& object : unsharded_objects_) object.release();
    for (py::object& object : place_gradient_) object.release();
    for (ModuleAttribute& attribute : attributes_) {
      attribute.parameters.release();
      attribute.name.release();
    }
    return;
  }
  // The last owner may be a graph that autograd's thread drops.
  const py::gil_scoped_acquire gil;
  sharded_.clear();
  unsharded_objects_.clear();
  place_gradient_.clear();
  attributes_.clear();
}

std::vector<at::Tensor> TorchUnit::unsharded_views() const {
  std::vector<at::Tensor> views;
  views.reserve(tensors_.shapes.size());
  for (std::size_t i = 0; i < tensors_.shapes.size(); ++i) {
    views.push_back(view_of_storage(storage_, layout_.placements()[i].unsharded_offset,
                                    tensors_.shapes[i], tensors_.param_dtypes[i], device()));
  }
  return views;
}

void TorchUnit::bind(py::list sharded, py::list unsharded, py::list place_gradient,
                     py::object make_gradients, std::vector<ModuleAttribute> attributes) {
  const std::size_t count = layout_.params().size();
  FSDP_CHECK(sharded.size() == count && unsharded.size() == count && place_gradient.size() == count,
             "bind got ", sharded.size(), " sharded parameters, ", unsharded.size(),
             " unsharded ones and ", place_gradient.size(), " functions. The layout has ", count,
             ".");
  for (std::size_t i = 0; i < count; ++i) {
    sharded_.emplace_back(py::reinterpret_borrow<py::object>(sharded[i]));
    unsharded_objects_.emplace_back(py::reinterpret_borrow<py::object>(unsharded[i]));
    unsharded_.push_back(THPVariable_Unpack(unsharded_objects_.back().ptr()));
    place_gradient_.emplace_back(py::reinterpret_borrow<py::object>(place_gradient[i]));
  }
  gradients_.bind(std::move(make_gradients), trainable_.size());
  for (std::size_t i = 0; i < trainable_.size(); ++i) {
    set_gradient_hook(unsharded_[trainable_[i]], weak_from_this(), i);
  }
  attributes_ = std::move(attributes);
}

void TorchUnit::join(const std::shared_ptr<TorchRoot>& root, std::string name, int number) {
  root_ = root;
  name_ = std::move(name);
  number_ = number;
  when_freed_ = detail::concat("An unsharded parameter of unit '", name_,
                               "' was read while it is freed. Read parameters in the forward of "
                               "their module, or call unshard() on it before.");
  forbid_access(*storage_, when_freed_);
}

const at::Tensor& TorchUnit::sharded(std::size_t parameter) const {
  // Unpacked anew each time: swap_tensors (module.to()) exchanges the tensor behind the object.
  return THPVariable_Unpack(sharded_[parameter].ptr());
}

// - UnitPort

void TorchUnit::attach(void* unsharded) {
  storage_->set_data_ptr_noswap(at::DataPtr(unsharded, device()));
  allow_access(*storage_, layout_.unsharded_bytes());
  for (const std::size_t parameter : trainable_) {
    const bool requires_grad = sharded(parameter).requires_grad();
    if (unsharded_[parameter].requires_grad() != requires_grad) {
      unsharded_[parameter].set_requires_grad(requires_grad);
    }
  }
  register_parameters(/*unsharded=*/true);
}

void TorchUnit::detach() {
  storage_->set_data_ptr_noswap(at::DataPtr(nullptr, device()));
  forbid_access(*storage_, when_freed_);
  register_parameters(/*unsharded=*/false);
}

// See Note [registered parameters].
void TorchUnit::register_parameters(bool unsharded) {
  if (unsharded_registered_ == unsharded) {
    return;
  }
  const py::gil_scoped_acquire gil;
  for (const ModuleAttribute& attribute : attributes_) {
    PyObject* sharded_object = sharded_[attribute.parameter].ptr();
    PyObject* unsharded_object = unsharded_objects_[attribute.parameter].ptr();
    PyObject* now = PyDict_GetItem(attribute.parameters.ptr(), attribute.name.ptr());
    FSDP_CHECK(now == (unsharded ? sharded_object : unsharded_object), "parameter '",
               layout_.params()[attribute.parameter].name, "' of unit '", name_,
               "' was replaced after fully_shard. Change parameters in place, "
               "or through load_state_dict or module.to().");
    if (PyDict_SetItem(attribute.parameters.ptr(), attribute.name.ptr(),
                       unsharded ? unsharded_object : sharded_object) != 0) {
      throw py::error_already_set();
    }
  }
  unsharded_registered_ = unsharded;
}

std::uint64_t TorchUnit::shard_version() {
  std::uint64_t version = counts_steps_by_thread ? optimizer_steps_of_thread
                                                 : optimizer_steps.load(std::memory_order_relaxed);
  for (std::size_t i = 0; i < sharded_.size(); ++i) {
    c10::TensorImpl* impl = sharded(i).unsafeGetTensorImpl();
    if (!impl->is_inference()) {
      version += impl->version_counter().current_version();
    }
  }
  return version;
}

// See Note [gradients of DTensors].
void TorchUnit::place_gradient(std::size_t parameter) {
  const py::gil_scoped_acquire gil;
  at::Tensor& gradient = unsharded_[parameter].mutable_grad();
  const py::object placed =
      place_gradient_[parameter](py::reinterpret_steal<py::object>(THPVariable_Wrap(gradient)));
  gradient = THPVariable_Unpack(placed.ptr());
}

std::shared_ptr<void> TorchUnit::extract_gradients(const void** addresses) {
  const DType gradient_dtype = layout_.unsharded_grad_dtype();
  auto taken = std::make_shared<std::vector<at::Tensor>>();
  taken->reserve(trainable_.size());
  for (std::size_t i = 0; i < trainable_.size(); ++i) {
    at::Tensor& arrived = unsharded_[trainable_[i]].mutable_grad();
    addresses[i] = nullptr;
    if (!arrived.defined()) {
      continue;
    }
    if (is_dtensor(trainable_[i])) {
      arrived = local_tensor_of(arrived);
    }
    const std::string& parameter = layout_.params()[trainable_[i]].name;
    FSDP_CHECK(arrived.layout() == at::kStrided, "parameter '", parameter,
               "' got a sparse gradient, but only dense ones can be reduced. Pass sparse=False to "
               "its module.");
    FSDP_CHECK(to_dtype(arrived.scalar_type()) == gradient_dtype, "parameter '", parameter,
               "' got a gradient of dtype ", fsdp::name(to_dtype(arrived.scalar_type())),
               ", but it computes in ", fsdp::name(gradient_dtype),
               ". Remove the hook that converts its gradient.");
    at::Tensor gradient = std::move(arrived);
    arrived = at::Tensor();
    if (!gradient.is_contiguous()) {
      const at::NoGradGuard no_grad;
      gradient = gradient.contiguous();
    }
    addresses[i] = gradient.data_ptr();
    taken->push_back(std::move(gradient));
  }
  return taken;
}

void TorchUnit::drop_gradients() {
  for (const std::size_t parameter : trainable_) {
    unsharded_[parameter].mutable_grad() = at::Tensor();
  }
}

// See Note [held gradients].
bool TorchUnit::has_held_gradients() {
  if (gradients_.is_released()) {
    return !trainable_.empty();
  }
  if (gradients_.is_shared()) {
    return false;
  }
  for (std::size_t i = 0; i < trainable_.size(); ++i) {
    const bool has_ours = sharded(trainable_[i]).grad().is_same(gradients_.at(i));
    if (!has_ours && gradients_.is_held(i)) {
      return true;
    }
  }
  return false;
}

bool TorchUnit::has_sharded_gradient(std::size_t i) {
  return sharded(trainable_[i]).grad().defined();
}

void TorchUnit::import_sharded_gradient(std::size_t i) {
  const at::Tensor& gradient = sharded(trainable_[i]).grad();
  if (!gradient.is_same(gradients_.at(i))) {
    gradients_.copy_from(i, gradient);
    sharded(trainable_[i]).mutable_grad() = gradients_.at(i);
  }
}

void TorchUnit::set_sharded_gradient(std::size_t i) {
  sharded(trainable_[i]).mutable_grad() = gradients_.at(i);
  got_gradient_[i] = 1;
}

void TorchUnit::run_post_accumulate_hooks() {
  for (std::size_t i = 0; i < trainable_.size(); ++i) {
    if (got_gradient_[i] == 0) {
      continue;
    }
    got_gradient_[i] = 0;
    if (torch::autograd::impl::post_acc_grad_hooks(sharded(trainable_[i])) != nullptr) {
      call_post_accumulate_hooks(sharded_[trainable_[i]]);
    }
  }
}

bool TorchUnit::has_gradient_setting_changed() const {
  for (std::size_t i = 0; i < sharded_.size(); ++i) {
    const at::Tensor& parameter = sharded(i);
    const bool trainable = layout_.params()[i].trainable;
    if (parameter.requires_grad() != trainable ||
        (trainable && torch::autograd::impl::get_autograd_meta(parameter)->grad_dtype(parameter) !=
                          parameter.scalar_type())) {
      return true;
    }
  }
  return false;
}

void TorchUnit::reclaim_memory() {
  tensors_.shard.reclaim();
  gradients_.reclaim();
}

// - BackwardTarget

void TorchUnit::on_pre_backward(CallId call, const torch::autograd::Node* node) {
  if (const auto root = root_.lock()) {
    root->ensure_backward(node);
    root->pipeline().pre_backward(number_, call);
  }
}

void TorchUnit::on_gradient(std::size_t trainable) {
  if (const auto root = root_.lock()) {
    root->ensure_backward();
    const std::size_t parameter = trainable_[trainable];
    if (is_dtensor(parameter)) {
      place_gradient(parameter);
    }
    root->pipeline().gradient_arrived(number_, trainable);
  }
}

void TorchUnit::adopt_gradients() {
  for (std::size_t i = 0; i < trainable_.size(); ++i) {
    if (unsharded_[trainable_[i]].grad().defined()) {
      on_gradient(i);
    }
  }
}

void TorchUnit::on_post_backward(CallId call) {
  if (const auto root = root_.lock()) {
    root->ensure_backward();
    root->pipeline().post_backward(number_, call);
  }
}

}  // namespace fsdp
