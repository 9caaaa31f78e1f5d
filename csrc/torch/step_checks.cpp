#include "torch/step_checks.h"

#include "torch/with_python.h"

namespace py = pybind11;

namespace fsdp {

StepChecks::~StepChecks() {
  if (Py_IsInitialized() == 0) {
    compare_.release();
    return;
  }
  const py::gil_scoped_acquire gil;
  compare_ = py::object();
}

void StepChecks::compare(const std::vector<UnitLook::Numbers>& units) const {
  with_python([&] {
    const py::object compare = compare_();
    if (!compare.is_none()) {
      compare(step_, units);
    }
  });
}

}  // namespace fsdp
