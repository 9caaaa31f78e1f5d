// Which devices may use memory of which others.
#pragma once

#include <vector>

#include "shadow.h"

namespace emulated_gpu {

// The device may use memory of the other one from now on, if it may not already.
void let_access(int device, int peer);

// The same for memory of the other one's pool, which needs an access of its own.
void set_access_to_pool(int device, int peer, bool allows);

// Says that the work that runs now, on its own thread, is a copy, which needs no access.
void needs_no_access();

// Fails the device that runs this work, if it may not use the memory.
void check_access(const std::vector<Access>& accesses);

}  // namespace emulated_gpu
