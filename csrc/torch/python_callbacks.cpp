#include "torch/python_callbacks.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <exception>
#include <memory>
#include <utility>

#include "device/host_stream.h"
#include "torch/dtype.h"
#include "torch/with_python.h"

namespace py = pybind11;

namespace fsdp {
namespace {

class PythonUnitUpdate final : public UnitUpdate {
 public:
  PythonUnitUpdate(py::object weak_function, bool measures)
      : weak_function_(std::move(weak_function)), measures_(measures) {}

  void run(Stream* stream) override { call(stream, /*measures=*/false); }
  void measure(Stream* stream) override { call(stream, /*measures=*/true); }
  bool measures() const override { return measures_; }

 private:
  void call(Stream* stream, bool measures) {
    void* const handle = stream == nullptr ? nullptr : stream->native_handle();
    with_python([&] {
      const py::object function = weak_function_();
      if (!function.is_none()) {
        const at::NoGradGuard no_gradients;
        function(reinterpret_cast<std::uintptr_t>(handle), measures);
      }
    });
  }

  HeldObject weak_function_;
  bool measures_;
};

// Python's garbage collector may free another model on this thread. On a lane's thread, the model's
// destructor would wait for the lane, and so for itself. Hooks of two lanes may overlap, since they
// release the GIL, which guards these counters.
class WithoutCollection {
 public:
  WithoutCollection() {
    if (depth++ == 0) {
      was_enabled = PyGC_Disable() != 0;
    }
  }
  ~WithoutCollection() {
    if (--depth == 0 && was_enabled) {
      PyGC_Enable();
    }
  }
  WithoutCollection(const WithoutCollection&) = delete;
  WithoutCollection& operator=(const WithoutCollection&) = delete;

 private:
  static inline int depth = 0;
  static inline bool was_enabled = false;
};

// The work on a stream owns the hook and the user's function, too, because a user may set another
// one meanwhile.
class PythonUserCollective final : public UserCollective,
                                   public std::enable_shared_from_this<PythonUserCollective> {
 public:
  PythonUserCollective(py::object weak_function, at::Device device)
      : weak_function_(std::move(weak_function)), device_(device) {}

  void issue(Stream& stream, const HookTensors& tensors) override {
    const std::shared_ptr<HeldObject> function = this->function();
    if (device_.is_cpu()) {
      static_cast<HostQueue&>(stream).enqueue([hook = shared_from_this(), function, tensors] {
        const py::gil_scoped_acquire gil;
        const WithoutCollection no_collection;
        hook->call(*function, tensors, nullptr);
      });
    } else {
      call(*function, tensors, stream.native_handle());
    }
  }

  void reset() override { error_ = nullptr; }

  void check() override {
    if (const std::exception_ptr error = std::exchange(error_, nullptr)) {
      std::rethrow_exception(error);
    }
  }

 private:
  at::Tensor tensor_over(void* data, std::size_t numel, DType dtype) const {
    return at::for_blob(data, {static_cast<std::int64_t>(numel)})
        .options(at::TensorOptions().dtype(to_scalar_type(dtype)).device(device_))
        .target_device(device_)
        .make_tensor();
  }

  // Returns None if the user's function has been freed.
  std::shared_ptr<HeldObject> function() const {
    const py::gil_scoped_acquire gil;
    return std::make_shared<HeldObject>(weak_function_());
  }

  void call(const py::object& function, const HookTensors& tensors, void* stream) {
    const py::gil_scoped_acquire gil;
    const c10::InferenceMode no_inference(false);
    const at::NoGradGuard no_gradients;
    const at::Tensor output = tensor_over(tensors.output, tensors.numel, tensors.dtype);
    const auto handle = reinterpret_cast<std::uintptr_t>(stream);
    try {
      if (!function.is_none() && tensors.input == nullptr) {
        function(output, handle);
      } else if (!function.is_none()) {
        function(output, handle, tensor_over(tensors.input, tensors.input_numel, tensors.dtype));
      }
    } catch (const py::error_already_set&) {
      error_ = error_ != nullptr ? error_ : std::current_exception();
    }
  }

  HeldObject weak_function_;
  at::Device device_;
  std::exception_ptr error_;  // written on the stream
};

}  // namespace

std::shared_ptr<UnitUpdate> make_python_unit_update(py::object weak_function, bool measures) {
  return std::make_shared<PythonUnitUpdate>(std::move(weak_function), measures);
}

std::shared_ptr<UserCollective> make_python_user_collective(py::object weak_function,
                                                            at::Device device) {
  return std::make_shared<PythonUserCollective>(std::move(weak_function), device);
}

}  // namespace fsdp
