#include "comm/nccl/nccl_paths.h"

#include <algorithm>
#include <cstdlib>
#include <limits>
#include <string>

#include "base/check.h"

namespace fsdp {
namespace {

constexpr int kFirstThatCopiesPlainInputs = 22900;
constexpr int kFirstThatCopiesBetweenTwo = 23102;  // again, as before 2.29
constexpr int kOldestDriver = 12050;               // with which NCCL gathers by copy engines

bool registers_buffers(const nccl::Api& api, const NcclOptions& options) {
  return options.register_buffers && options.size > 1 &&
         (options.nodes == 1 || api.registers_between_nodes());
}

// Whether the first gather by copy engines may hang.
bool first_copies_hang(const nccl::Api& api, const NcclOptions& options) {
  return options.size == 2 && api.version >= kFirstThatCopiesPlainInputs &&
         api.version < kFirstThatCopiesBetweenTwo;
}

// Why copy engines cannot gather, or cannot be told apart from symmetric kernels: Note [copy
// engines]. Empty if they can.
std::string obstacle_to_copies(const nccl::Api& api, const NcclOptions& options) {
  const std::string version = "NCCL " + api.version_text();
  if (options.nodes > 1 && !api.registers_between_nodes()) {
    return detail::concat(version, " cannot do so between the ", options.nodes,
                          " nodes of these ranks");
  }
  if (first_copies_hang(api, options)) {
    return detail::concat(version, " cannot do so on two ranks, whose first gather may hang");
  }
  if (options.driver < kOldestDriver && !api.has_safe_symmetric_kernels()) {
    return detail::concat(version, " cannot do so with a driver older than CUDA 12.5");
  }
  return "";
}

std::string value_of(const char* variable) {
  const char* text = std::getenv(variable);
  return text != nullptr ? text : "";
}

// See Note [symmetric kernels] and Note [blocking communicators].
void check_environment(const nccl::Api& api, const NcclOptions& options) {
  const std::string blocking = value_of("NCCL_COMM_BLOCKING");
  FSDP_CHECK(
      blocking.empty() || std::strtoll(blocking.c_str(), nullptr, 0) != 0, "NCCL_COMM_BLOCKING='",
      blocking,
      "' makes all NCCL communicators non-blocking, which fsdp_ext does not support. Unset it. "
      "For PyTorch's communicators alone, set TORCH_NCCL_USE_COMM_NONBLOCKING=1.");
  if (options.size == 1 || api.version < kFirstThatCopiesPlainInputs ||
      api.has_safe_symmetric_kernels()) {
    return;
  }
  const auto check = [&](const char* variable, bool is_safe) {
    FSDP_CHECK(is_safe, variable, "='", value_of(variable), "' lets NCCL ", api.version_text(),
               " start kernels before the data that they read is there. Unset it, or upgrade NCCL "
               "to 2.30.7 or newer.");
  };
  check("NCCL_SYM_NOWIN_ENABLE",
        std::strtoll(value_of("NCCL_SYM_NOWIN_ENABLE").c_str(), nullptr, 0) == 0);
  check("NCCL_SYM_KERNEL", value_of("NCCL_SYM_KERNEL").find("LL") == std::string::npos);
}

// The policy that NCCL gives all communicators, whatever their own settings are.
int policy_of_all() {
  const std::string text = value_of("NCCL_CTA_POLICY");
  FSDP_CHECK(text.empty() || text == "0" || text == "1" || text == "2", "NCCL_CTA_POLICY is '",
             text, "'. Pass 0 (default), 1 (efficiency) or 2 (zero), or unset it.");
  return text.empty() ? nccl::kUndefined : text[0] - '0';
}

// What "auto" stands for: the fewest thread blocks that are safe here.
int chosen_policy(const nccl::Api& api, LaneUse use, const NcclOptions& options) {
  if (!registers_buffers(api, options)) {
    return nccl::kUndefined;
  }
  const bool can_copy =
      use == LaneUse::Gathers && options.nodes == 1 && obstacle_to_copies(api, options).empty();
  return can_copy ? nccl::kZeroCtas : nccl::kEfficiencyPolicy;
}

}  // namespace

LanePath path_of_lane(const nccl::Api& api, LaneUse use, const NcclOptions& options) {
  const bool gathers = use == LaneUse::Gathers;
  check_environment(api, options);
  LanePath path;
  path.settings = gathers ? options.gather : options.reduce;
  const char* variable = gathers ? "FSDP_EXT_NCCL_GATHER" : "FSDP_EXT_NCCL_REDUCE";
  int& policy = path.settings.cta_policy;
  const int of_all = policy_of_all();
  FSDP_CHECK(of_all == nccl::kUndefined || policy == nccl::kUndefined || policy == of_all,
             "NCCL_CTA_POLICY=", of_all, " overrides the cta_policy that ", variable,
             " sets. Unset one of the two variables.");
  const std::string obstacle = obstacle_to_copies(api, options);
  FSDP_CHECK(policy != nccl::kZeroCtas || obstacle.empty(), variable, " has cta_policy=zero, but ",
             obstacle, ". Upgrade NCCL to 2.32.6 or newer, or choose another policy.");
  if (policy == nccl::kAutoPolicy) {
    policy = chosen_policy(api, use, options);
  } else if (policy == nccl::kUndefined) {
    policy = of_all;
  }
  path.registers = registers_buffers(api, options);
  const bool is_safe = path.registers && api.has_safe_symmetric_kernels() &&
                       !(gathers && first_copies_hang(api, options));
  // NCCL_CTA_POLICY=2 also holds where copy engines are unsafe. Gathers then get no windows, and
  // without windows NCCL uses no copy engines.
  const bool copies = gathers && policy == nccl::kZeroCtas && path.registers && obstacle.empty();
  path.symmetric_outputs = is_safe || copies;
  path.symmetric_inputs = is_safe || (copies && api.version < kFirstThatCopiesPlainInputs);
  return path;
}

std::vector<std::size_t> groups_in_buffers(
    const std::vector<GatherPart>& parts, int ranks,
    const std::function<std::size_t(const void*)>& bytes_left) {
  constexpr std::size_t kNoLimit = std::numeric_limits<std::size_t>::max();
  const auto limit = [&](const void* buffer) {
    const std::size_t left = bytes_left(buffer);
    return left == 0 ? kNoLimit : left;  // nothing helps a buffer that is not registered
  };
  std::vector<std::size_t> groups;
  std::size_t bytes = 0;        // of one rank, in the last group
  std::size_t most = kNoLimit;  // that may be
  for (const GatherPart& part : parts) {
    const std::size_t left =
        std::min(limit(part.input), limit(part.output) / static_cast<std::size_t>(ranks));
    if (groups.empty() || bytes + part.bytes > std::min(most, left)) {
      groups.push_back(0);
      bytes = 0;
      most = kNoLimit;
    }
    ++groups.back();
    bytes += part.bytes;
    most = std::min(most, left);
  }
  return groups;
}

}  // namespace fsdp
