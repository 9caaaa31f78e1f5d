// Messages of host memory between ranks, as at the end of backward. The host does not wait for
// them.
#include <gtest/gtest.h>

#include <chrono>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "stream_ranks.h"

namespace fsdp::test {
namespace {

// As two models of one group do, the second one with more parameters. While rank 1 is late, rank 0
// has copied its first message to the device, and waits in the all-gather.
TEST(CudaExchange, AnExchangeMayBeLargerThanOneInFlight) {
  const std::string kWhat = "an exchange";
  on_ranks({2, kDirectBytes}, [&](Rank& rank, int r) {
    Device& device = *rank.lanes->device;
    Lane& lane = rank.lanes->gather;
    device.delay(device.compute_stream(), std::chrono::milliseconds(5));
    device.delay(lane.stream(), std::chrono::milliseconds(r == 0 ? 0 : 20));
    const auto letter = static_cast<char>('a' + r);
    std::vector<std::shared_ptr<void>> all;
    std::vector<std::shared_ptr<void>> mine;
    for (const std::size_t bytes : {1000, 5000}) {
      mine.push_back(device.allocate_on_host(bytes));
      all.push_back(device.allocate_on_host(2 * bytes));
      std::memset(mine.back().get(), letter, bytes);
      lane.host_all_gather(kWhat, kWhat, mine.back().get(), all.back().get(), bytes);
    }
    lane.synchronize();
    EXPECT_EQ(std::string(static_cast<char*>(all[0].get()), 2000),
              std::string(1000, 'a') + std::string(1000, 'b'));
    EXPECT_EQ(std::string(static_cast<char*>(all[1].get()), 10000),
              std::string(5000, 'a') + std::string(5000, 'b'));
  });
}

}  // namespace
}  // namespace fsdp::test
