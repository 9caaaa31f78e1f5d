#include "settings.h"

#include <unistd.h>

#include <cstdlib>
#include <string>

namespace emulated_gpu {
namespace {

int number(const char* name, int otherwise) {
  const char* text = std::getenv(name);
  return text != nullptr && *text != '\0' ? std::atoi(text) : otherwise;
}

std::string text(const char* name) {
  const char* text = std::getenv(name);
  return text != nullptr ? text : "";
}

// As CUDA, apart from lists of devices.
bool are_hidden() {
  const char* visible = std::getenv("CUDA_VISIBLE_DEVICES");
  return visible != nullptr && *visible == '\0';
}

}  // namespace

const Settings& settings() {
  static const auto& read = *new Settings{
      are_hidden() ? 0 : number("EMULATED_GPU_DEVICES", 1),
      number("EMULATED_GPU_SMS", 132),
      static_cast<std::size_t>(number("EMULATED_GPU_MEMORY_MIB", 16384)) << 20,
      number("EMULATED_GPU_DELAY_US", 0),
      number("EMULATED_GPU_SEED", getpid()),
      number("EMULATED_GPU_TRACE", 0) != 0,
      number("EMULATED_GPU_RACES", 1) != 0,
      text("EMULATED_GPU_LIST_WAITS"),
      text("EMULATED_GPU_DROP_WAITS"),
  };
  return read;
}

}  // namespace emulated_gpu
