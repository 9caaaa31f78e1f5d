// Which units share a bucket.
#include "core/units/merging.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <random>
#include <set>

namespace fsdp {
namespace {

std::vector<MergeTraits> alike(std::size_t count, std::size_t bytes, std::size_t limit) {
  MergeTraits traits;
  traits.bytes = bytes;
  traits.limit = limit;
  return std::vector<MergeTraits>(count, traits);
}

// The root encloses all others and stays unsharded after forward.
std::vector<MergeTraits> below_a_root(std::size_t count, std::size_t bytes, std::size_t limit) {
  std::vector<MergeTraits> units = alike(count + 1, bytes, limit);
  units[0].reshard_after_forward = false;
  return units;
}

TEST(Merging, FillsBucketsWithSiblingsInOrder) {
  const auto events = events_of_registration({-1, 0, 0, 0, 0, 0});
  EXPECT_EQ(merge_units(below_a_root(5, 10, 20), events), (Partition{{0}, {1, 2}, {3, 4}, {5}}));
  EXPECT_EQ(merge_units(below_a_root(5, 10, 29), events), (Partition{{0}, {1, 2}, {3, 4}, {5}}));
  EXPECT_EQ(merge_units(below_a_root(5, 10, 1000), events), (Partition{{0}, {1, 2, 3, 4, 5}}));
  EXPECT_EQ(merge_units(below_a_root(5, 10, 9), events), (Partition{{0}, {1}, {2}, {3}, {4}, {5}}));
  EXPECT_EQ(merge_units(below_a_root(5, 0, 0), events), (Partition{{0}, {1}, {2}, {3}, {4}, {5}}));
}

TEST(Merging, FollowsTheOrderOfForward) {
  const std::vector<ForwardEvent> events = {{0, true},  {3, true}, {3, false}, {1, true},
                                            {1, false}, {2, true}, {2, false}, {0, false}};
  EXPECT_EQ(merge_units(below_a_root(3, 10, 20), events), (Partition{{0}, {2}, {3, 1}}));
}

TEST(Merging, MergesAUnitWithAllUnitsNestedInItOrLeavesItAlone) {
  // 0 (1 (2 3) 4 (5 6))
  const auto events = events_of_registration({-1, 0, 1, 1, 0, 4, 4});
  EXPECT_EQ(merge_units(below_a_root(6, 10, 30), events), (Partition{{0}, {1, 2, 3}, {4, 5, 6}}));
  EXPECT_EQ(merge_units(below_a_root(6, 10, 60), events), (Partition{{0}, {1, 2, 3, 4, 5, 6}}));
  EXPECT_EQ(merge_units(below_a_root(6, 10, 20), events),
            (Partition{{0}, {1}, {2, 3}, {4}, {5, 6}}));
  EXPECT_EQ(merge_units(alike(7, 10, 70), events), (Partition{{0, 1, 2, 3, 4, 5, 6}}));
}

TEST(Merging, LeavesUnitsAloneThatRunTwiceOrNever) {
  const std::vector<ForwardEvent> events = {{0, true},  {1, true}, {1, false}, {2, true},
                                            {2, false}, {1, true}, {1, false}, {3, true},
                                            {3, false}, {4, true}, {4, false}, {0, false}};
  EXPECT_EQ(merge_units(below_a_root(5, 10, 100), events), (Partition{{0}, {1}, {2}, {3, 4}, {5}}));
}

TEST(Merging, AUnitOfSeveralModulesEnclosesTheUnitsThatRunBetweenThem) {
  const std::vector<ForwardEvent> events = {{0, true},  {1, true},  {2, true},
                                            {2, false}, {1, true},  {1, false},
                                            {3, true},  {3, false}, {0, false}};
  EXPECT_EQ(merge_units(below_a_root(3, 10, 20), events), (Partition{{0}, {1, 2}, {3}}));
}

TEST(Merging, DoesNotMergeUnitsThatDiffer) {
  const auto events = events_of_registration({-1, 0, 0});
  const auto differs = [&](const std::function<void(MergeTraits&)>& change) {
    std::vector<MergeTraits> units = below_a_root(2, 10, 100);
    change(units[2]);
    return merge_units(units, events).size() == 3;
  };
  EXPECT_FALSE(differs([](MergeTraits&) {}));
  EXPECT_TRUE(differs([](MergeTraits& unit) { unit.grad_dtype = DType::BFloat16; }));
  EXPECT_TRUE(differs([](MergeTraits& unit) { unit.reduce_dtype = DType::BFloat16; }));
  EXPECT_TRUE(differs([](MergeTraits& unit) { unit.gradient_dtype = DType::BFloat16; }));
  EXPECT_TRUE(differs([](MergeTraits& unit) { unit.needs_cast = true; }));
  EXPECT_TRUE(differs([](MergeTraits& unit) { unit.reshard_after_forward = false; }));
  EXPECT_TRUE(differs([](MergeTraits& unit) { unit.reshard_after_backward = false; }));
  EXPECT_TRUE(differs([](MergeTraits& unit) { unit.unshards_in_backward = false; }));
  EXPECT_TRUE(differs([](MergeTraits& unit) { unit.pre_scale = 0.25; }));
  EXPECT_TRUE(differs([](MergeTraits& unit) { unit.message_limits = {64, 64}; }));
  EXPECT_TRUE(differs([](MergeTraits& unit) { unit.limit = 15; }));
  EXPECT_TRUE(differs([](MergeTraits& unit) { unit.limit = 0; }));
  // Frozen units have no gradients, so their dtypes do not matter.
  EXPECT_FALSE(differs([](MergeTraits& unit) {
    unit.trainable = false;
    unit.grad_dtype = DType::BFloat16;
  }));
}

TEST(Merging, AUnitWithoutParametersDoesNotChangeWhoMerges) {
  std::vector<MergeTraits> units = below_a_root(3, 10, 100);
  units[1].needs_cast = units[3].needs_cast = true;
  units[2].bytes = 0;
  const auto events = events_of_registration({-1, 0, 0, 0});
  EXPECT_EQ(merge_units(units, events), (Partition{{0}, {1, 2, 3}}));
  units[3].needs_cast = false;
  EXPECT_EQ(merge_units(units, events), (Partition{{0}, {1, 2}, {3}}));
}

TEST(Merging, AFrozenUnitDoesNotMergeUnitsThatDiffer) {
  std::vector<MergeTraits> units = below_a_root(3, 10, 100);
  units[1].trainable = false;
  units[3].grad_dtype = DType::BFloat16;
  EXPECT_EQ(merge_units(units, events_of_registration({-1, 0, 0, 0})),
            (Partition{{0}, {1, 2}, {3}}));
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
    std::vector<MergeTraits> units;
    std::vector<std::vector<int>> below(static_cast<std::size_t>(count));
    const std::size_t limit = random() % 60;
    for (int unit = 0; unit < count; ++unit) {
      units.push_back(alike(1, random() % 20, random() % 5 == 0 ? 0 : limit).front());
      units.back().needs_cast = random() % 5 == 0;
      if (unit > 0) {
        below[random() % static_cast<unsigned>(unit)].push_back(unit);
      }
    }
    std::vector<ForwardEvent> events;
    run_at_random(0, below, random, events);
    std::multiset<int> seen;
    for (const std::vector<int>& bucket : merge_units(units, events)) {
      seen.insert(bucket.begin(), bucket.end());
      if (bucket.size() == 1) {
        continue;
      }
      std::size_t bytes = 0;
      std::set<bool> casts;
      for (const int unit : bucket) {
        bytes += units[static_cast<std::size_t>(unit)].bytes;
        EXPECT_EQ(units[static_cast<std::size_t>(unit)].limit, limit);
        const MergeTraits& traits = units[static_cast<std::size_t>(unit)];
        if (traits.bytes > 0) {
          casts.insert(traits.needs_cast);
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
