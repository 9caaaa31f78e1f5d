#include "torch/with_python.h"

#include <atomic>

namespace fsdp {
namespace {

std::atomic<bool> exit_noted{false};

}  // namespace

void note_exit() { exit_noted = true; }

bool python_ends() { return Py_IsInitialized() == 0 || (exit_noted && PyGILState_Check() == 0); }

HeldObject::~HeldObject() {
  if (m_ptr == nullptr) {
    return;
  }
  if (python_ends()) {
    release();
    return;
  }
  const pybind11::gil_scoped_acquire gil;
  release().dec_ref();
}

}  // namespace fsdp
