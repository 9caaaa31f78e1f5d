// Allocates GPU memory by the driver's virtual memory management. Other GPUs cannot access it.
#pragma once

#include "device/stream.h"

namespace fsdp {

// See Device::allocator_like. The driver's functions are looked up at run time.
Device::Allocator cuda_allocator_like(const void* sample);

}  // namespace fsdp
