// Ranges in the timeline of torch.profiler.
#pragma once

#include <cstddef>
#include <memory>
#include <string>

namespace fsdp {

// Call it when a pass begins. Profilers of all threads are shown its ranges. To ask for them takes
// a lock, so begin_profiler_range asks for profilers of the calling thread alone.
void look_for_profilers();

// See Device::begin_range. A profiler shows `bytes` if it records inputs (record_shapes=True).
std::shared_ptr<void> begin_profiler_range(const std::string& name, std::size_t bytes);

}  // namespace fsdp
