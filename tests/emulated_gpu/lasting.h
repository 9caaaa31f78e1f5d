// One object of a type for the whole process.
#pragma once

namespace emulated_gpu {

// It is never destroyed, since streams may still run when the process ends.
template <typename T>
T& lasting() {
  static auto* made = new T;
  return *made;
}

}  // namespace emulated_gpu
