// Python from threads that may not hold the GIL.
//
// Note [end of Python]
// Any thread may free a Python object: the last owner may be a graph that a thread of autograd
// drops. When the interpreter ends, it ends threads that wait for the GIL, which usually aborts the
// process ("terminate called without an active exception"). So once fsdp_ext's handler at exit has
// called note_exit(), threads without the GIL do not acquire it, and do not free objects.
#pragma once

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include <optional>
#include <utility>

namespace fsdp {

// See Note [end of Python].
void note_exit();

// Holds the GIL, or converts to false if Python ends for the calling thread: Note [end of Python].
struct GilUnlessExit : std::optional<pybind11::gil_scoped_acquire> {
  GilUnlessExit();
};

// Releases the GIL if there is one and the calling thread holds it.
struct NoGilIfHeld : std::optional<pybind11::gil_scoped_release> {
  NoGilIfHeld();
};

// A Python object that any thread may free: Note [end of Python].
class HeldObject : public pybind11::object {
 public:
  HeldObject() = default;
  HeldObject(pybind11::object object) : pybind11::object(std::move(object)) {}
  HeldObject(const HeldObject& other) = default;
  HeldObject(HeldObject&& other) noexcept = default;
  HeldObject& operator=(HeldObject other) noexcept {
    std::swap(m_ptr, other.m_ptr);
    return *this;
  }
  ~HeldObject();
};

// Calls `call`, which runs Python, on a thread that may be autograd's.
template <typename Call>
void with_python(Call call) {
  const pybind11::gil_scoped_acquire gil;
  try {
    call();
  } catch (pybind11::error_already_set& error) {
    // Autograd preserves the type of errors of this class only.
    error.restore();
    python_error kept;
    kept.persist();
    throw std::move(kept);
  }
}

}  // namespace fsdp
