// Tests of buffers in private memory: Note [private memory] in comm/nccl/nccl_paths.h. They use the
// driver of fake_driver.cpp and the NCCL of fake_nccl.cpp.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "fake_driver.h"
#include "message_of.h"
#include "stream_ranks.h"

namespace fsdp::test {
namespace {

constexpr std::size_t kBytes = 5000;

struct Lane {
  Device& device;
  Communicator& gather;
  Communicator& reduce;
  int rank;

  std::shared_ptr<void> allocate(Communicator& lane, BufferUse use) const {
    return lane.allocate(device, kBytes, use);
  }
};

class PrivateMemory : public ::testing::Test {
 protected:
  void SetUp() override { fake_driver().is_used_by_nccl = true; }

  void TearDown() override {
    EXPECT_EQ(fake_driver().mappings(), 0);
    EXPECT_EQ(fake_driver().reservations, 0);
    EXPECT_EQ(fake_driver().handles, 0);
    EXPECT_EQ(fake_driver().refusals, 0);
    EXPECT_EQ(fake().live_buffers, 0);
    EXPECT_EQ(fake().registered_buffers, 0);
    fake().version = kVersion;
  }

  // Runs `body` on all ranks and returns what each throws.
  std::vector<std::string> on_lanes(int version, int gather_policy,
                                    const std::function<void(const Lane&)>& body) {
    nccl::Api of_version = api();
    of_version.version = version;
    fake().version = version;
    nccl::UniqueId id;
    of_version.GetUniqueId(&id);
    std::vector<std::future<std::string>> ranks;
    for (int r = 0; r < kRanks; ++r) {
      ranks.push_back(std::async(std::launch::async, [&, r] {
        compute_stream = new_stream("compute");
        std::string message = message_of([&] {
          const auto device = make_cuda_device(0, kTimeout, {&current_stream, &allocate_for});
          NcclOptions options{r, kRanks, kTimeout, /*register_buffers=*/true};
          options.gather.cta_policy = gather_policy;
          options.driver = 13000;
          const auto [gather, reduce] = make_nccl_communicators(of_version, *device, id, options);
          body({*device, *gather, *reduce, r});
        });
        cudaStreamDestroy(compute_stream);
        return message;
      }));
    }
    std::vector<std::string> messages;
    for (auto& rank : ranks) {
      messages.push_back(rank.get());
    }
    wait_for_closers();
    return messages;
  }

  const int kVersion = fake().version;
  static constexpr int kRanks = 3;  // two may not use all that NCCL has
  const std::vector<std::string> kNothing{kRanks, kNothingThrown};
};

bool is_private(const std::shared_ptr<void>& memory) {
  return fake_driver().mapping_at(memory.get()).has_value();
}

// Windows and tensors of users need the access of other devices, or would gain nothing.
TEST_F(PrivateMemory, IsForBuffersThatNoWindowAndNoUserNeeds) {
  struct Case {
    int version;
    int gather_policy;
    bool gather_input;
    bool gather_output;
    bool reduce;
  };
  constexpr int kDefault = nccl::kUndefined;
  for (const Case& c : {Case{22809, kDefault, true, true, true},
                        Case{22809, nccl::kEfficiencyPolicy, true, true, true},
                        Case{22809, nccl::kZeroCtas, false, false, true},
                        Case{22907, nccl::kZeroCtas, true, false, true},
                        Case{23007, kDefault, false, false, false}}) {
    EXPECT_EQ(on_lanes(c.version, c.gather_policy,
                       [&](const Lane& lane) {
                         const auto uses_it = [&](Communicator& of, BufferUse use) {
                           return is_private(lane.allocate(of, use));
                         };
                         EXPECT_EQ(uses_it(lane.gather, BufferUse::Input), c.gather_input);
                         EXPECT_EQ(uses_it(lane.gather, BufferUse::Output), c.gather_output);
                         EXPECT_EQ(uses_it(lane.reduce, BufferUse::Input), c.reduce);
                         EXPECT_EQ(uses_it(lane.reduce, BufferUse::Output), c.reduce);
                         EXPECT_FALSE(uses_it(lane.gather, BufferUse::Shard));
                         EXPECT_FALSE(uses_it(lane.reduce, BufferUse::Gradient));
                       }),
              kNothing)
        << c.version << " with policy " << c.gather_policy;
  }
}

// NCCL gives peers a handle of private memory, and registers it with the network. For both, the
// memory has to be allocated as ncclMemAlloc does it: with the same kind of handle, and RDMA.
TEST_F(PrivateMemory, IsAsNcclsExceptThatItsDeviceAloneHasAccess) {
  EXPECT_EQ(on_lanes(22809, nccl::kUndefined,
                     [](const Lane& lane) {
                       const auto memory = lane.allocate(lane.reduce, BufferUse::Output);
                       const auto mapping = fake_driver().mapping_at(memory.get());
                       ASSERT_TRUE(mapping.has_value());
                       EXPECT_EQ(mapping->bytes, 8192U);  // whole pages
                       ASSERT_EQ(mapping->access.size(), 1U);
                       EXPECT_EQ(mapping->access[0].location.type, CU_MEM_LOCATION_TYPE_DEVICE);
                       EXPECT_EQ(mapping->access[0].location.id, lane.device.index());
                       EXPECT_EQ(mapping->access[0].flags, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
                       EXPECT_EQ(mapping->properties.requestedHandleTypes,
                                 CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
                       EXPECT_EQ(mapping->properties.allocFlags.gpuDirectRDMACapable, 1);
                       EXPECT_EQ(lane.reduce.registered_memory()->count(), 1);
                     }),
            kNothing);
}

// NCCL_CUMEM_ENABLE=0: such an NCCL can register nothing else.
TEST_F(PrivateMemory, IsNotUsedIfNcclUsesCudaMalloc) {
  fake_driver().is_used_by_nccl = false;
  EXPECT_EQ(on_lanes(22809, nccl::kUndefined,
                     [](const Lane& lane) {
                       EXPECT_FALSE(is_private(lane.allocate(lane.gather, BufferUse::Output)));
                     }),
            kNothing);
}

// The rank whose driver fails uses NCCL's memory, and the other one need not know.
TEST_F(PrivateMemory, IsReplacedByNcclsIfTheDriverFails) {
  for (std::atomic<int>* failures :
       {&fake_driver().creations_to_fail, &fake_driver().accesses_to_fail}) {
    std::atomic<int> private_buffers{0};
    *failures = 1;
    EXPECT_EQ(on_lanes(22809, nccl::kUndefined,
                       [&](const Lane& lane) {
                         const auto memory = lane.allocate(lane.gather, BufferUse::Output);
                         EXPECT_TRUE(lane.gather.registered_memory()->holds(memory.get()));
                         private_buffers += is_private(memory) ? 1 : 0;
                       }),
              kNothing);
    EXPECT_EQ(private_buffers, kRanks - 1);
    EXPECT_EQ(*failures, 0);
  }
}

// Rank 1 frees what it has allocated.
TEST_F(PrivateMemory, AllRanksFailIfNeitherTheDriverNorNcclHasMemory) {
  constexpr std::size_t kMost = 4096;
  fake().most_bytes = fake_driver().most_bytes = kMost;
  const auto messages = on_lanes(22809, nccl::kUndefined, [&](const Lane& lane) {
    lane.gather.allocate(lane.device, lane.rank == 0 ? kBytes : kMost, BufferUse::Output);
  });
  fake().most_bytes = fake_driver().most_bytes = ~std::size_t{0};
  EXPECT_TRUE(contains(messages[0], "NCCL could not allocate 5000 more bytes")) << messages[0];
  EXPECT_TRUE(contains(messages[1], "Another rank could not allocate 4096 more")) << messages[1];
}

// A weak pointer keeps the deleter, like a thread that is still in it.
TEST_F(PrivateMemory, IsNotOwnedByTheThreadThatHasFreedIt) {
  EXPECT_EQ(on_lanes(22809, nccl::kUndefined,
                     [](const Lane& lane) {
                       auto memory = lane.allocate(lane.reduce, BufferUse::Input);
                       const void* const freed = memory.get();
                       const std::weak_ptr<void> deleter = memory;
                       memory.reset();
                       lane.reduce.registered_memory()->free_unused();
                       EXPECT_FALSE(fake_driver().mapping_at(freed).has_value());
                     }),
            kNothing);
}

TEST_F(PrivateMemory, MayOutliveItsCommunicator) {
  std::mutex mutex;
  std::vector<std::shared_ptr<void>> kept;
  EXPECT_EQ(on_lanes(22809, nccl::kUndefined,
                     [&](const Lane& lane) {
                       auto memory = lane.allocate(lane.reduce, BufferUse::Input);
                       const auto freed = lane.allocate(lane.reduce, BufferUse::Input).get();
                       lane.reduce.registered_memory()->free_unused();
                       EXPECT_FALSE(fake_driver().mapping_at(freed).has_value());
                       const std::lock_guard<std::mutex> lock(mutex);
                       kept.push_back(std::move(memory));
                     }),
            kNothing);
  EXPECT_EQ(fake_driver().mappings(), kRanks);
  std::thread([&kept] { kept.clear(); }).join();
}

}  // namespace
}  // namespace fsdp::test
