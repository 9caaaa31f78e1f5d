#include "random.h"

#include <ATen/CPUGeneratorImpl.h>

#include <cstdint>
#include <mutex>
#include <optional>

namespace emulated_gpu {
namespace {

constexpr std::uint64_t kSpread = 0x9e3779b97f4a7c15ull;
constexpr std::uint64_t kNumbersOfACall = 4;  // Philox makes four at a time

}  // namespace

RandomState::RandomState(const Signature& signature, c10::Device device,
                         torch::jit::Stack& arguments) {
  for (std::size_t i = 0; i < signature.arguments.size(); ++i) {
    if (!signature.arguments[i].is_generator) {
      continue;
    }
    std::optional<at::Generator> given;
    if (!arguments[i].isNone()) {
      given = arguments[i].toGenerator();
    }
    auto* generator = at::get_generator_or_default<at::CUDAGeneratorImpl>(
        given, at::cuda::detail::getDefaultCUDAGenerator(device.index()));
    const std::lock_guard<std::mutex> lock(generator->mutex_);
    state_ = generator->philox_cuda_state(kNumbersOfACall);
    places_.push_back(i);
    arguments[i] = c10::IValue();
  }
}

void RandomState::set_generators(torch::jit::Stack& arguments) const {
  if (places_.empty()) {
    return;
  }
  std::uint64_t seed = state_.seed_.val;
  std::uint64_t offset = state_.offset_.val;
  if (state_.captured_) {
    seed = static_cast<std::uint64_t>(*state_.seed_.ptr);
    offset = static_cast<std::uint64_t>(*state_.offset_.ptr) + state_.offset_intragraph_;
  }
  const at::Generator generator = at::detail::createCPUGenerator(seed * kSpread + offset);
  for (const std::size_t place : places_) {
    arguments[place] = c10::IValue(generator);
  }
}

}  // namespace emulated_gpu
