// Ranges in the timeline of torch.profiler.
#pragma once

#include <cstddef>
#include <memory>
#include <string>

namespace fsdp {

// Looks for profilers that record all threads, which takes a lock. Call it when a forward or a
// backward begins. begin_profiler_range itself looks only for profilers of the calling thread.
void look_for_profilers();

// See Device::begin_range. A profiler shows `bytes` if it records inputs (record_shapes=True).
std::shared_ptr<void> begin_profiler_range(const std::string& name, std::size_t bytes);

}  // namespace fsdp
