#include "wait_sites.h"

#include <dlfcn.h>
#include <execinfo.h>
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <set>
#include <sstream>
#include <string>

#include "settings.h"

namespace emulated_gpu {
namespace {

constexpr int kMostFrames = 24;
constexpr std::size_t kFramesOfPlace = 6;
constexpr const char* kExtension = "fsdp_ext/_C.";

// Of the thread's calls within the extension, where they return to. Empty if the extension did not
// call this library.
std::string place_of_caller() {
  std::array<void*, kMostFrames> stack{};
  const int depth = backtrace(stack.data(), kMostFrames);
  Dl_info own{};
  dladdr(reinterpret_cast<const void*>(&is_left_out), &own);
  std::ostringstream place;
  std::size_t found = 0;
  for (int i = 0; i < depth && found < kFramesOfPlace; ++i) {
    void* const address = stack[static_cast<std::size_t>(i)];
    Dl_info info{};
    const bool is_known = dladdr(address, &info) != 0;
    if (is_known && info.dli_fbase == own.dli_fbase) {
      continue;
    }
    if (!is_known || std::strstr(info.dli_fname, kExtension) == nullptr) {
      break;
    }
    place << (found == 0 ? "" : "+") << std::hex
          << reinterpret_cast<std::uintptr_t>(address) -
                 reinterpret_cast<std::uintptr_t>(info.dli_fbase);
    found += 1;
  }
  return place.str();
}

void list_once(const std::string& line) {
  static std::mutex mutex;
  static auto* listed = new std::set<std::string>;
  const std::lock_guard<std::mutex> lock(mutex);
  if (!listed->insert(line).second) {
    return;
  }
  const int file = open(settings().waits_list.c_str(), O_WRONLY | O_CREAT | O_APPEND, 0644);
  // Ranks are processes that share the file, so a line is one write.
  const bool is_written = file >= 0 && write(file, line.data(), line.size()) > 0;
  if (!is_written) {
    static const char kMessage[] = "[emulated GPU] EMULATED_GPU_LIST_WAITS cannot be written\n";
    static_cast<void>(!write(STDERR_FILENO, kMessage, sizeof(kMessage) - 1));
  }
  close(file);
}

// Whether the innermost calls of the place are those of one that is to be left out.
bool is_to_be_left_out(const std::string& place) {
  std::istringstream wanted(settings().dropped_waits);
  std::string each;
  while (std::getline(wanted, each, ',')) {
    if ((place + "+").compare(0, each.size() + 1, each + "+") == 0) {
      return true;
    }
  }
  return false;
}

}  // namespace

bool is_left_out(const char* function) {
  const Settings& chosen = settings();
  if (chosen.waits_list.empty() && chosen.dropped_waits.empty()) {
    return false;
  }
  if (chosen.dropped_waits == "all") {
    return std::strcmp(function, "cudaStreamWaitEvent") == 0;
  }
  const std::string place = place_of_caller();
  if (place.empty()) {
    return false;
  }
  if (!chosen.waits_list.empty()) {
    list_once(std::string(function) + " " + place + "\n");
  }
  return is_to_be_left_out(place);
}

}  // namespace emulated_gpu
