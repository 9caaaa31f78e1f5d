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

}  // namespace

std::shared_ptr<UnitUpdate> make_python_unit_update(py::object weak_function, bool measures) {
  return std::make_shared<PythonUnitUpdate>(std::move(weak_function), measures);
}

}  // namespace fsdp
