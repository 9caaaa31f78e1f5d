// Memory of a GPU from the driver's virtual memory management. Other GPUs have no access to it.
#pragma once

#include "device/stream.h"

namespace fsdp {

// See Device::allocator_like. The driver's functions are looked up at run time.
Device::Allocator cuda_allocator_like(const void* sample);

}  // namespace fsdp
