#include "library.h"

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>

#include "emulated_gpu.h"
#include "lasting.h"

namespace emulated_gpu {
namespace {

constexpr int kUndefined = NCCL_CONFIG_UNDEF_INT;
constexpr unsigned kMagic = 0xcafebeef;
constexpr int kMostChannels = 64;

// ncclConfig_t as of 2.30.7.
struct WholeConfig {
  ncclConfig_t of_2_28;
  int graph_usage_mode;
  int num_rma_ctx;
  int max_p2p_peers;
  int graph_stream_ordering;
};

struct LastError {
  std::mutex mutex;
  std::string text;
};
LastError& last_error() { return lasting<LastError>(); }

std::atomic<bool> device_failed{false};

// The first version that has the field of a configuration, and the values that it may have.
struct Field {
  const char* name;
  int WholeConfig::* newer;
  int ncclConfig_t::* older;
  unsigned since;
  int least;
  int most;
};
constexpr int kAny = INT_MAX;
const Field kFields[] = {
    {"blocking", nullptr, &ncclConfig_t::blocking, NCCL_VERSION(2, 14, 0), 0, 1},
    {"cgaClusterSize", nullptr, &ncclConfig_t::cgaClusterSize, NCCL_VERSION(2, 17, 0), 0, kAny},
    {"minCTAs", nullptr, &ncclConfig_t::minCTAs, NCCL_VERSION(2, 17, 0), 1, kAny},
    {"maxCTAs", nullptr, &ncclConfig_t::maxCTAs, NCCL_VERSION(2, 17, 0), 1, kAny},
    {"splitShare", nullptr, &ncclConfig_t::splitShare, 0, 0, 1},
    {"trafficClass", nullptr, &ncclConfig_t::trafficClass, NCCL_VERSION(2, 25, 0), -kAny, kAny},
    {"collnetEnable", nullptr, &ncclConfig_t::collnetEnable, NCCL_VERSION(2, 27, 0), 0, 1},
    {"CTAPolicy", nullptr, &ncclConfig_t::CTAPolicy, NCCL_VERSION(2, 27, 0), 0,
     NCCL_CTA_POLICY_ZERO},
    {"shrinkShare", nullptr, &ncclConfig_t::shrinkShare, NCCL_VERSION(2, 27, 0), 0, 1},
    {"nvlsCTAs", nullptr, &ncclConfig_t::nvlsCTAs, NCCL_VERSION(2, 27, 0), 1, kAny},
    {"nChannelsPerNetPeer", nullptr, &ncclConfig_t::nChannelsPerNetPeer, NCCL_VERSION(2, 28, 0), 1,
     kMostChannels},
    {"nvlinkCentricSched", nullptr, &ncclConfig_t::nvlinkCentricSched, NCCL_VERSION(2, 28, 0), 0,
     1},
    {"graphUsageMode", &WholeConfig::graph_usage_mode, nullptr, NCCL_VERSION(2, 29, 0), 0, 2},
    {"numRmaCtx", &WholeConfig::num_rma_ctx, nullptr, NCCL_VERSION(2, 29, 0), 0, kAny},
    {"maxP2pPeers", &WholeConfig::max_p2p_peers, nullptr, NCCL_VERSION(2, 30, 0), 1, kAny},
    {"graphStreamOrdering", &WholeConfig::graph_stream_ordering, nullptr, NCCL_VERSION(2, 30, 5), 0,
     1},
};

int number_of(const char* variable, int otherwise) {
  const char* text = std::getenv(variable);
  return text != nullptr && *text != '\0' ? std::atoi(text) : otherwise;
}

int defined(int value, int otherwise) { return value != kUndefined ? value : otherwise; }

}  // namespace

int library_version() {
  static const int version = [] {
    const char* text = std::getenv("EMULATED_GPU_NCCL");
    int major = 0;
    int minor = 0;
    int patch = 0;
    if (text == nullptr || *text == '\0') {
      return NCCL_VERSION(2, 28, 9);
    }
    if (std::sscanf(text, "%d.%d.%d", &major, &minor, &patch) != 3) {
      std::fprintf(stderr, "EMULATED_GPU_NCCL='%s' is not a version such as 2.30.7\n", text);
      std::abort();
    }
    return NCCL_VERSION(major, minor, patch);
  }();
  return version;
}

// As in NCCL, a least number of blocks without a most is an error.
ncclResult_t read_config(const ncclConfig_t* from, Config& config) {
  const ncclConfig_t initial = NCCL_CONFIG_INITIALIZER;
  WholeConfig read{initial, kUndefined, kUndefined, kUndefined, kUndefined};
  if (from != nullptr) {
    const std::size_t known =
        library_version() >= NCCL_VERSION(2, 29, 0) ? sizeof(read) : sizeof(initial);
    std::memcpy(&read, from, std::min(from->size, known));
    if (from->size < offsetof(ncclConfig_t, blocking) || read.of_2_28.magic != kMagic) {
      return refuse(ncclInvalidArgument,
                    "ncclConfig_t argument not initialized via NCCL_CONFIG_INITIALIZER");
    }
    for (const Field& field : kFields) {
      int& value = field.older != nullptr ? read.of_2_28.*(field.older) : read.*(field.newer);
      if (read.of_2_28.version < field.since) {
        value = kUndefined;
      }
      if (value != kUndefined && (value < field.least || value > field.most)) {
        return refuse(ncclInvalidArgument, std::string("Invalid config ") + field.name +
                                               " attribute value " + std::to_string(value));
      }
    }
    if (read.of_2_28.minCTAs > read.of_2_28.maxCTAs) {
      return refuse(ncclInvalidArgument, "Invalid config min/max channels attribute value " +
                                             std::to_string(read.of_2_28.minCTAs) + "/" +
                                             std::to_string(read.of_2_28.maxCTAs));
    }
  }
  const Config otherwise;
  config.is_blocking = defined(read.of_2_28.blocking, otherwise.is_blocking) != 0;
  config.min_ctas = number_of("NCCL_MIN_CTAS", defined(read.of_2_28.minCTAs, otherwise.min_ctas));
  config.max_ctas = number_of("NCCL_MAX_CTAS", defined(read.of_2_28.maxCTAs, otherwise.max_ctas));
  config.cta_policy = defined(read.of_2_28.CTAPolicy, otherwise.cta_policy);
  return ncclSuccess;
}

bool is_set(const char* variable) { return number_of(variable, 0) != 0; }

ncclResult_t refuse(ncclResult_t error, const std::string& why) {
  {
    const std::lock_guard<std::mutex> lock(last_error().mutex);
    last_error().text = why;
  }
  if (std::getenv("NCCL_DEBUG") != nullptr) {
    std::fprintf(stderr, "[emulated GPU] NCCL WARN %s\n", why.c_str());
  }
  return error;
}

void fail_device(const std::string& why) {
  fail("NCCL: " + why);
  device_failed = true;
}

bool has_device_failed() { return device_failed; }

}  // namespace emulated_gpu

using namespace emulated_gpu;

extern "C" {

ncclResult_t ncclGetVersion(int* version) {
  if (version == nullptr) {
    return refuse(ncclInvalidArgument, "ncclGetVersion : version argument is NULL");
  }
  *version = library_version();
  return ncclSuccess;
}

const char* ncclGetErrorString(ncclResult_t result) {
  switch (result) {
    case ncclSuccess:
      return "no error";
    case ncclUnhandledCudaError:
      return "unhandled cuda error";
    case ncclSystemError:
      return "unhandled system error";
    case ncclInternalError:
      return "internal error";
    case ncclInvalidArgument:
      return "invalid argument";
    case ncclInvalidUsage:
      return "invalid usage";
    case ncclRemoteError:
      return "remote process exited or there was a network error";
    case ncclInProgress:
      return "NCCL operation in progress";
    default:
      return "unknown result code";
  }
}

// As in NCCL, the last error of the process.
const char* ncclGetLastError(ncclComm_t /*handle*/) {
  thread_local std::string text;
  const std::lock_guard<std::mutex> lock(last_error().mutex);
  text = last_error().text;
  return text.c_str();
}
}
