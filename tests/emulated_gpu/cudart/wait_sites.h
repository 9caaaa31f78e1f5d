// Waits that are left out, to show that something notices: all of them, or those that this
// project's extension makes at one place.
#pragma once

namespace emulated_gpu {

// Whether the wait that runs now, a call of `function`, has to do nothing.
//
// EMULATED_GPU_DROP_WAITS=all leaves out every cudaStreamWaitEvent. Otherwise it has places, with
// commas between them. A place is a list of return addresses within the extension, the innermost
// call first, such as "1a2b0+3c4d0". It may be cut short, and then stands for all that begin with
// it. EMULATED_GPU_LIST_WAITS is a file. Each place that waits is appended to it once, in a line
// such as "cudaStreamWaitEvent 1a2b0+3c4d0".
bool is_left_out(const char* function);

}  // namespace emulated_gpu
