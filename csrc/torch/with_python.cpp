#include "torch/with_python.h"

#include <atomic>

namespace fsdp {
namespace {

std::atomic<bool> exit_noted{false};

}  // namespace

void note_exit() { exit_noted = true; }

GilUnlessExit::GilUnlessExit() {
  if (Py_IsInitialized() != 0 && (!exit_noted || PyGILState_Check() != 0)) {
    emplace();
  }
}

NoGilIfHeld::NoGilIfHeld() {
  if (Py_IsInitialized() != 0 && PyGILState_Check() != 0) {
    emplace();
  }
}

HeldObject::~HeldObject() {
  if (m_ptr == nullptr) {
    return;
  }
  const GilUnlessExit gil;
  const pybind11::handle held = release();
  if (gil) {
    held.dec_ref();
  }
}

}  // namespace fsdp
