#include "comm/nccl/nccl_join.h"

#include <chrono>
#include <string>
#include <thread>

#include "base/check.h"

namespace fsdp {
namespace {

using Clock = std::chrono::steady_clock;
using nccl::Api;
using nccl::Comm;

[[noreturn]] void throw_timeout(const NcclOptions& options, const char* what) {
  throw TimeoutError(detail::concat(
      "rank ", options.rank, " waited ", options.timeout.count(), " ms for NCCL to ", what, " ",
      options.size,
      " ranks. Some rank has failed or has not reached this call. Set NCCL_DEBUG=INFO for more."));
}

[[noreturn]] void throw_failure(const NcclOptions& options, const char* what,
                                const std::string& text) {
  const bool shares_gpu = text.find("Duplicate GPU") != std::string::npos ||
                          text.find("using the same GPU") != std::string::npos;
  FSDP_CHECK(!shares_gpu, "rank ", options.rank, ": NCCL could not ", what, " ", options.size,
             " ranks: ", text,
             ". Give each rank a GPU of its own with torch.cuda.set_device(local_rank). For "
             "tests with several ranks on one GPU, see docs/gpu-status.md.");
  throw Error(detail::concat("rank ", options.rank, ": NCCL could not ", what, " ", options.size,
                             " ranks: ", text, ". Set NCCL_DEBUG=WARN for more."));
}

// Waits for the result of a call on a non-blocking communicator.
void wait_until_ready(const Api& api, Comm comm, nccl::Result result, const NcclOptions& options,
                      const char* what) {
  const auto start = Clock::now();
  while (result == nccl::kInProgress || result == nccl::kSuccess) {
    nccl::Result state = nccl::kSuccess;
    result = api.CommGetAsyncError(comm, &state);
    if (result != nccl::kSuccess) {
      break;
    }
    if (state == nccl::kSuccess) {
      return;
    }
    result = state;
    if (state == nccl::kInProgress && Clock::now() - start > options.timeout) {
      throw_timeout(options, what);
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  throw_failure(options, what, api.describe(comm, result));
}

nccl::Config config_of(const nccl::LaneSettings& settings) {
  nccl::Config config;
  config.blocking = 1;
  config.min_ctas = settings.min_ctas;
  config.max_ctas = settings.max_ctas;
  if (settings.min_ctas != nccl::kUndefined && settings.max_ctas == nccl::kUndefined) {
    config.max_ctas = nccl::kMostCtas;  // NCCL refuses min_ctas without max_ctas
  }
  config.cga_cluster_size = settings.cluster_size;
  config.cta_policy = settings.cta_policy;
  return config;
}

// `child` must outlive the parent, because NCCL may write to it until the parent is destroyed.
void split_off(const Api& api, Comm parent, const NcclOptions& options,
               const nccl::LaneSettings& settings, Comm& child) {
  nccl::Config config = config_of(settings);
  const nccl::Result result = api.CommSplit(parent, /*color=*/0, options.rank, &child, &config);
  wait_until_ready(api, parent, result, options, "make communicators for");
  FSDP_CHECK(child != nullptr, "NCCL made no communicator for rank ", options.rank,
             " and reported no error. Set NCCL_DEBUG=WARN for more.");
}

}  // namespace

NcclJoined join_nccl_ranks(const Api& api, const nccl::UniqueId& id, const NcclOptions& options,
                           const nccl::LaneSettings& gather_settings,
                           const nccl::LaneSettings& reduce_settings) {
  nccl::Config config;
  config.blocking = 0;
  Comm joined = nullptr;
  Comm children[2] = {nullptr, nullptr};
  const nccl::Result result =
      api.CommInitRankConfig(&joined, options.size, id, options.rank, &config);
  NcclCommGuard parent(api, joined);
  wait_until_ready(api, parent.get(), result, options, "join");
  split_off(api, parent.get(), options, gather_settings, children[0]);
  NcclCommGuard gather(api, children[0]);
  split_off(api, parent.get(), options, reduce_settings, children[1]);
  NcclCommGuard reduce(api, children[1]);
  wait_until_ready(api, parent.get(), api.CommFinalize(parent.get()), options,
                   "finalize the first communicator of");
  api.CommDestroy(parent.release());
  return {std::move(gather), std::move(reduce)};
}

}  // namespace fsdp
