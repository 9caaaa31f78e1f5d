// Which units share a bucket.
#include "core/units/merging.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <random>
#include <set>

namespace fsdp {
namespace {

// Sizes and limits are in blocks of the two ranks, the smallest that a unit can have.
constexpr std::size_t kBlock = 2 * kAlignment;

struct Content {
  std::size_t bytes = 10;  // blocks
  bool needs_cast = false;
  bool trainable = true;
  DType grad_dtype = DType::Float32;
  DType reduce_dtype = DType::Float32;
  DType unsharded_grad_dtype = DType::Float32;
};

UnitLayout layout_of(const Content& content) {
  ParamSpec param;
  param.rows = 2;
  param.row_numel = static_cast<std::int64_t>(content.bytes * kBlock / 2 / sizeof(float));
  param.shard_dtype = content.needs_cast ? DType::BFloat16 : DType::Float32;
  param.trainable = content.trainable;
  param.grad_dtype = content.grad_dtype;
  param.unsharded_grad_dtype = content.unsharded_grad_dtype;
  const std::vector<ParamSpec> params(content.bytes > 0 ? 1 : 0, param);
  return {params, /*world_size=*/2, content.grad_dtype, content.reduce_dtype};
}

std::vector<UnitConfig> alike(std::size_t count, std::size_t bytes, std::size_t limit) {
  Content content;
  content.bytes = bytes;
  UnitConfig unit("", layout_of(content));
  unit.bucket_bytes = limit * kBlock;
  return std::vector<UnitConfig>(count, unit);
}

// The root encloses all others and stays unsharded after forward.
std::vector<UnitConfig> below_a_root(std::size_t count, std::size_t bytes, std::size_t limit) {
  std::vector<UnitConfig> units = alike(count + 1, bytes, limit);
  units[0].reshard_after_forward = false;
  return units;
}

void set_content(UnitConfig& unit, const std::function<void(Content&)>& change) {
  Content content;
  change(content);
  unit.layout = layout_of(content);
}

Partition merged(const std::vector<UnitConfig>& units, const std::vector<ForwardEvent>& events) {
  std::vector<const UnitConfig*> pointers;
  for (const UnitConfig& unit : units) {
    pointers.push_back(&unit);
  }
  return merge_units(pointers, events);
}

TEST(Merging, FillsBucketsWithSiblingsInOrder) {
  const auto events = events_of_registration({-1, 0, 0, 0, 0, 0});
  EXPECT_EQ(merged(below_a_root(5, 10, 20), events), (Partition{{0}, {1, 2}, {3, 4}, {5}}));
  EXPECT_EQ(merged(below_a_root(5, 10, 29), events), (Partition{{0}, {1, 2}, {3, 4}, {5}}));
  EXPECT_EQ(merged(below_a_root(5, 10, 1000), events), (Partition{{0}, {1, 2, 3, 4, 5}}));
  EXPECT_EQ(merged(below_a_root(5, 10, 9), events), (Partition{{0}, {1}, {2}, {3}, {4}, {5}}));
  EXPECT_EQ(merged(below_a_root(5, 0, 0), events), (Partition{{0}, {1}, {2}, {3}, {4}, {5}}));
}

TEST(Merging, FollowsTheOrderOfForward) {
  const std::vector<ForwardEvent> events = {{0, true},  {3, true}, {3, false}, {1, true},
                                            {1, false}, {2, true}, {2, false}, {0, false}};
  EXPECT_EQ(merged(below_a_root(3, 10, 20), events), (Partition{{0}, {2}, {3, 1}}));
}

TEST(Merging, MergesAUnitWithAllUnitsNestedInItOrLeavesItAlone) {
  // 0 (1 (2 3) 4 (5 6))
  const auto events = events_of_registration({-1, 0, 1, 1, 0, 4, 4});
  EXPECT_EQ(merged(below_a_root(6, 10, 30), events), (Partition{{0}, {1, 2, 3}, {4, 5, 6}}));
  EXPECT_EQ(merged(below_a_root(6, 10, 60), events), (Partition{{0}, {1, 2, 3, 4, 5, 6}}));
  EXPECT_EQ(merged(below_a_root(6, 10, 20), events), (Partition{{0}, {1}, {2, 3}, {4}, {5, 6}}));
  EXPECT_EQ(merged(alike(7, 10, 70), events), (Partition{{0, 1, 2, 3, 4, 5, 6}}));
}

TEST(Merging, LeavesUnitsAloneThatRunTwiceOrNever) {
  const std::vector<ForwardEvent> events = {{0, true},  {1, true}, {1, false}, {2, true},
                                            {2, false}, {1, true}, {1, false}, {3, true},
                                            {3, false}, {4, true}, {4, false}, {0, false}};
  EXPECT_EQ(merged(below_a_root(5, 10, 100), events), (Partition{{0}, {1}, {2}, {3, 4}, {5}}));
}

TEST(Merging, AUnitOfSeveralModulesEnclosesTheUnitsThatRunBetweenThem) {
  const std::vector<ForwardEvent> events = {{0, true},  {1, true},  {2, true},
                                            {2, false}, {1, true},  {1, false},
                                            {3, true},  {3, false}, {0, false}};
  EXPECT_EQ(merged(below_a_root(3, 10, 20), events), (Partition{{0}, {1, 2}, {3}}));
}

TEST(Merging, DoesNotMergeUnitsThatDiffer) {
  const auto events = events_of_registration({-1, 0, 0});
  const auto differs = [&](const std::function<void(UnitConfig&)>& change) {
    std::vector<UnitConfig> units = below_a_root(2, 10, 100);
    change(units[2]);
    return merged(units, events).size() == 3;
  };
  const auto has_other = [&](const std::function<void(Content&)>& change) {
    return differs([&](UnitConfig& unit) { set_content(unit, change); });
  };
  EXPECT_FALSE(differs([](UnitConfig&) {}));
  EXPECT_TRUE(has_other([](Content& content) { content.grad_dtype = DType::BFloat16; }));
  EXPECT_TRUE(has_other([](Content& content) { content.reduce_dtype = DType::BFloat16; }));
  EXPECT_TRUE(has_other([](Content& content) { content.unsharded_grad_dtype = DType::BFloat16; }));
  EXPECT_TRUE(has_other([](Content& content) { content.needs_cast = true; }));
  EXPECT_TRUE(differs([](UnitConfig& unit) { unit.reshard_after_forward = false; }));
  EXPECT_TRUE(differs([](UnitConfig& unit) { unit.reshard_after_backward = false; }));
  EXPECT_TRUE(differs([](UnitConfig& unit) { unit.unshards_in_backward = false; }));
  EXPECT_TRUE(differs([](UnitConfig& unit) { unit.pre_scale = 0.25; }));
  EXPECT_TRUE(differs([](UnitConfig& unit) { unit.message_limits = {64, 64}; }));
  EXPECT_TRUE(differs([](UnitConfig& unit) { unit.bucket_bytes = 15 * kBlock; }));
  EXPECT_TRUE(differs([](UnitConfig& unit) { unit.bucket_bytes = 0; }));
  // Frozen units have no gradients, so their dtypes do not matter.
  EXPECT_FALSE(has_other([](Content& content) {
    content.trainable = false;
    content.grad_dtype = DType::BFloat16;
  }));
}

TEST(Merging, AUnitWithoutParametersDoesNotChangeWhoMerges) {
  std::vector<UnitConfig> units = below_a_root(3, 10, 100);
  set_content(units[1], [](Content& content) { content.needs_cast = true; });
  set_content(units[2], [](Content& content) { content.bytes = 0; });
  set_content(units[3], [](Content& content) { content.needs_cast = true; });
  const auto events = events_of_registration({-1, 0, 0, 0});
  EXPECT_EQ(merged(units, events), (Partition{{0}, {1, 2, 3}}));
  set_content(units[3], [](Content&) {});
  EXPECT_EQ(merged(units, events), (Partition{{0}, {1, 2}, {3}}));
}

TEST(Merging, AFrozenUnitDoesNotMergeUnitsThatDiffer) {
  std::vector<UnitConfig> units = below_a_root(3, 10, 100);
  set_content(units[1], [](Content& content) { content.trainable = false; });
  set_content(units[3], [](Content& content) { content.grad_dtype = DType::BFloat16; });
  EXPECT_EQ(merged(units, events_of_registration({-1, 0, 0, 0})), (Partition{{0}, {1, 2}, {3}}));
}

// - Any model

// A forward in random order over a random tree. It leaves units out or runs them twice.
void run_at_random(int unit, const std::vector<std::vector<int>>& below, std::mt19937& random,
                   std::vector<ForwardEvent>& events) {
  events.push_back({unit, true});
  std::vector<int> order = below[static_cast<std::size_t>(unit)];
  std::shuffle(order.begin(), order.end(), random);
  for (const int inner : order) {
    const unsigned times = random() % 8;  // once, most of the time
    for (unsigned i = 0; i < (times < 6 ? 1 : (times - 6) * 2); ++i) {
      run_at_random(inner, below, random, events);
    }
  }
  events.push_back({unit, false});
}

TEST(Merging, GivesContiguousAndBalancedPartsOfAnyForward) {
  std::mt19937 random(7);
  for (int trial = 0; trial < 2000; ++trial) {
    const int count = 1 + static_cast<int>(random() % 12);
    std::vector<UnitConfig> units;
    std::vector<std::vector<int>> below(static_cast<std::size_t>(count));
    const std::size_t limit = random() % 60;
    for (int unit = 0; unit < count; ++unit) {
      units.push_back(alike(1, 0, random() % 5 == 0 ? 0 : limit).front());
      set_content(units.back(), [&](Content& content) {
        content.bytes = random() % 20;
        content.needs_cast = random() % 5 == 0;
      });
      if (unit > 0) {
        below[random() % static_cast<unsigned>(unit)].push_back(unit);
      }
    }
    std::vector<ForwardEvent> events;
    run_at_random(0, below, random, events);
    std::multiset<int> seen;
    for (const std::vector<int>& bucket : merged(units, events)) {
      seen.insert(bucket.begin(), bucket.end());
      if (bucket.size() == 1) {
        continue;
      }
      std::size_t bytes = 0;
      std::set<bool> casts;
      for (const int unit : bucket) {
        const UnitConfig& config = units[static_cast<std::size_t>(unit)];
        EXPECT_EQ(config.bucket_bytes, limit * kBlock);
        bytes += 2 * config.layout.gather_bytes() / kBlock;
        if (config.layout.gather_bytes() > 0) {
          casts.insert(config.layout.needs_cast());
        }
      }
      EXPECT_LE(bytes, limit);
      EXPECT_LE(casts.size(), 1U);
      // It has all events of its units, contiguous and in the bucket's order.
      const auto first = std::find(events.begin(), events.end(), ForwardEvent{bucket[0], true});
      std::vector<int> entered;
      for (auto event = first; event < first + 2 * static_cast<std::ptrdiff_t>(bucket.size());
           ++event) {
        ASSERT_LT(event, events.end());
        EXPECT_NE(std::find(bucket.begin(), bucket.end(), event->unit), bucket.end());
        if (event->enters) {
          entered.push_back(event->unit);
        }
      }
      EXPECT_EQ(entered, bucket);
      for (const int unit : bucket) {
        EXPECT_EQ(std::count(events.begin(), events.end(), ForwardEvent{unit, true}), 1);
      }
    }
    for (int unit = 0; unit < count; ++unit) {
      EXPECT_EQ(seen.count(unit), 1U);
    }
  }
}

TEST(Merging, KnowsWhetherUnitsRunInOrderOfRegistration) {
  EXPECT_TRUE(are_in_order_of_registration(events_of_registration({-1, 0, 1, 1, 0})));
  // Unit 2 does not run, and unit 1 has several modules.
  EXPECT_TRUE(are_in_order_of_registration({{0, true},
                                            {1, true},
                                            {3, true},
                                            {3, false},
                                            {1, true},
                                            {1, false},
                                            {4, true},
                                            {4, false},
                                            {0, false}}));
  EXPECT_FALSE(are_in_order_of_registration(
      {{0, true}, {2, true}, {2, false}, {1, true}, {1, false}, {0, false}}));
  EXPECT_FALSE(are_in_order_of_registration(
      {{0, true}, {1, true}, {1, false}, {1, true}, {1, false}, {0, false}}));
}

}  // namespace
}  // namespace fsdp
