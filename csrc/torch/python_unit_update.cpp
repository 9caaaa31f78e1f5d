#include "torch/python_unit_update.h"

#include <ATen/core/grad_mode.h>

#include <cstdint>
#include <memory>
#include <utility>

#include "torch/with_python.h"

namespace py = pybind11;

namespace fsdp {
namespace {

class PythonUnitUpdate final : public UnitUpdate {
 public:
  explicit PythonUnitUpdate(py::object weak_function) : weak_function_(std::move(weak_function)) {}

  void run(Stream* stream) override {
    void* const handle = stream == nullptr ? nullptr : stream->native_handle();
    with_python([&] {
      const py::object function = weak_function_();
      if (!function.is_none()) {
        const at::NoGradGuard no_gradients;
        function(reinterpret_cast<std::uintptr_t>(handle));
      }
    });
  }

 private:
  HeldObject weak_function_;
};

}  // namespace

std::shared_ptr<UnitUpdate> make_python_unit_update(py::object weak_function) {
  return std::make_shared<PythonUnitUpdate>(std::move(weak_function));
}

}  // namespace fsdp
