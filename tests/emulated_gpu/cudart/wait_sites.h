// Where this project's extension waits, so that planted_faults.py can leave out one wait at a time.
#pragma once

namespace emulated_gpu {

// Whether the function of CUDA that runs now is a wait to leave out. It is only if the extension
// called it. The first such call from each place is appended to the file EMULATED_GPU_LIST_WAITS as
// a line such as "cudaStreamWaitEvent 1a2b0+3c4d0": where the calls return to in the extension,
// innermost first. EMULATED_GPU_DROP_WAIT lists places to leave out, with commas between them. A
// place there may have only the innermost calls.
bool is_left_out(const char* function);

}  // namespace emulated_gpu
