// How csrc/comm/nccl_api finds its library, and what it makes of the version (fake_nccl.h).
#include <dlfcn.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <iostream>
#include <string>
#include <utility>

#include "base/check.h"
#include "comm/nccl/nccl_api.h"
#include "fake_nccl.h"
#include "message_of.h"

namespace fsdp {
namespace {

using test::contains;
using test::message_of;

constexpr const char* kLibrary = FAKE_NCCL_LIBRARY;
constexpr const char* kOtherLibrary = OTHER_FAKE_NCCL_LIBRARY;

test::FakeNccl& fake() {
  static void* const handle = dlopen(kLibrary, RTLD_NOW);
  return *reinterpret_cast<test::FakeNcclFunction*>(dlsym(handle, "fake_nccl"))();
}

#define EXPECT_SAYS(text, part) EXPECT_TRUE(contains(text, part)) << (text)

// In a process of its own, which keeps the libraries that it loads: other tests must not find them,
// and the fakes never destroy their state, so closing them would leak it.
#define EXPECT_TRUE_ALONE(condition) \
  EXPECT_EXIT(std::_Exit((condition) ? 0 : 1), ::testing::ExitedWithCode(0), "")

class NcclLibrary : public ::testing::Test {
 protected:
  void SetUp() override { setenv("FSDP_EXT_NCCL_SO", kLibrary, 1); }
  void TearDown() override {
    fake().version = 22809;
    unsetenv("FSDP_EXT_NCCL_SO");
  }
};

TEST_F(NcclLibrary, IsTheOneThatTheVariableNames) {
  const nccl::Api api = nccl::find_library({});
  EXPECT_EQ(api.version_text(), "2.28.9");
  EXPECT_EQ(api.path, kLibrary);
}

TEST_F(NcclLibrary, IsTheLoadedOneWithoutTheVariable) {
  fake();
  unsetenv("FSDP_EXT_NCCL_SO");
  EXPECT_EQ(nccl::find_library({"/nowhere/libnccl.so.2"}).path, kLibrary);
}

TEST_F(NcclLibrary, IsRefusedIfItDoesNotExist) {
  setenv("FSDP_EXT_NCCL_SO", "/nowhere/libnccl.so.2", 1);
  EXPECT_SAYS(message_of([] { nccl::find_library({}); }),
              "FSDP_EXT_NCCL_SO='/nowhere/libnccl.so.2' is not a library that can be loaded");
}

TEST_F(NcclLibrary, IsRefusedIfItIsNotNccl) {
  setenv("FSDP_EXT_NCCL_SO", "libm.so.6", 1);
  EXPECT_SAYS(message_of([] { nccl::find_library({}); }), "has no ncclGetVersion that works");
}

TEST_F(NcclLibrary, IsRefusedIfItIsTooOld) {
  fake().version = 22807;
  EXPECT_SAYS(message_of([] { nccl::find_library({}); }),
              "is NCCL 2.28.7, but fsdp_ext needs 2.28.9 or newer");
}

TEST_F(NcclLibrary, IsTheOneThatTorchUses) {
  fake();  // torch's library finds it by its name
  void* const torch = dlopen(FAKE_TORCH_LIBRARY, RTLD_NOW);
  ASSERT_NE(torch, nullptr);
  EXPECT_EQ(nccl::find_library({}).path, kLibrary);
  unsetenv("FSDP_EXT_NCCL_SO");
  EXPECT_EQ(nccl::find_library({}).path, kLibrary);
  dlclose(torch);
}

TEST_F(NcclLibrary, IsNotAnotherThanTorchs) {
  fake();
  EXPECT_TRUE_ALONE([] {
    dlopen(FAKE_TORCH_LIBRARY, RTLD_NOW);
    dlopen(kOtherLibrary, RTLD_NOW);
    if (nccl::find_library({}).path != kLibrary) {  // nobody uses the other one
      return false;
    }
    setenv("FSDP_EXT_NCCL_SO", kOtherLibrary, 1);
    const std::string message = message_of([] { nccl::find_library({}); });
    std::cerr << message;
    return contains(message, std::string("torch uses the NCCL library '") + kLibrary) &&
           contains(message, std::string("but fsdp_ext found '") + kOtherLibrary +
                                 "' in FSDP_EXT_NCCL_SO='");
  }());
}

TEST_F(NcclLibrary, IsThePreloadedOneThatTorchCalls) {
  fake();
  unsetenv("FSDP_EXT_NCCL_SO");
  EXPECT_TRUE_ALONE([] {
    dlopen(kOtherLibrary, RTLD_NOW | RTLD_GLOBAL);
    dlopen(FAKE_TORCH_LIBRARY, RTLD_NOW);
    return nccl::find_library({}).path == kOtherLibrary;
  }());
}

TEST_F(NcclLibrary, IsRefusedIfTheProcessHasTwoAndNoTorch) {
  EXPECT_TRUE_ALONE([] {
    dlopen(kOtherLibrary, RTLD_NOW);
    const std::string message = message_of([] { nccl::find_library({}); });
    std::cerr << message;
    return contains(message, "The process has loaded 2 NCCL libraries") &&
           contains(message, "it cannot be told which one torch uses") &&
           contains(message, kLibrary) && contains(message, kOtherLibrary);
  }());
}

TEST_F(NcclLibrary, RegistersBuffersAsItsVersionCan) {
  const std::pair<int, const char*> expected[] = {{22809, "register"},
                                                  {22907, "register"},
                                                  {23006, "register"},
                                                  {23007, "window"},
                                                  {23100, "window"}};
  for (const auto& [version, how] : expected) {
    fake().version = version;
    EXPECT_STREQ(nccl::find_library({}).registration(), how) << version;
  }
}

}  // namespace
}  // namespace fsdp
