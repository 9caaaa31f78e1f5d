// Runs this project's kernels where its CUDA build launches them: nvcc's PTX as C++, see
// tests/cpp/translated.
#include <chrono>
#include <cstdint>
#include <map>
#include <string>
#include <thread>

#include "emulated_gpu.h"
#include "ptx.h"

namespace emulated_gpu {
namespace {

using fsdp::ptx::Kernel;

// nvcc names an anonymous namespace for its file and two hashes of its command line:
// _GLOBAL__N__0123abcd_7_file_cu_4567cdef. This translation has another command line.
std::string without_hashes(std::string name) {
  static const std::string kSpace = "_GLOBAL__N__";
  static const std::string kFile = "_cu_";
  constexpr std::size_t kDigits = 8;
  for (auto at = name.find(kSpace); at != std::string::npos; at = name.find(kSpace, at)) {
    name.erase(at + kSpace.size(), kDigits);
    at = name.find(kFile, at);
    if (at == std::string::npos) {
      break;
    }
    name.erase(at + kFile.size(), kDigits);
  }
  return name;
}

const Kernel* find(const std::string& name) {
  static const auto* by_name = [] {
    auto* made = new std::map<std::string, const Kernel*>;
    for (const Kernel& kernel : fsdp::ptx::kernels()) {
      (*made)[without_hashes(kernel.name)] = &kernel;
    }
    return made;
  }();
  const auto found = by_name->find(without_hashes(name));
  return found != by_name->end() ? found->second : nullptr;
}

bool launch(const Launch& request) {
  const Kernel* kernel = find(request.name);
  if (kernel == nullptr) {
    return false;
  }
  enqueue(request.stream, kernel->name,
          [kernel, blocks = request.grid.x, threads = request.block.x,
           arguments = fsdp::ptx::copy_arguments(*kernel, request.arguments)] {
            fsdp::ptx::Clock clock;
            const std::uint64_t start = clock.read();
            fsdp::ptx::run_grid(*kernel, blocks, threads, arguments, clock);
            // The kernel's own sleeps take time on the stream, too.
            std::this_thread::sleep_for(std::chrono::nanoseconds(clock.read() - start));
          });
  return true;
}

[[maybe_unused]] const bool is_added = [] {
  add_launcher(&launch);
  fsdp::ptx::set_observer([](std::uint64_t address, std::size_t bytes, bool is_write) {
    (is_write ? writes : reads)(reinterpret_cast<const void*>(address), bytes);
  });
  return true;
}();

}  // namespace
}  // namespace emulated_gpu
