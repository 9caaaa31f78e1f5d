// Units over several meshes: Note [several meshes] in core/lanes.h.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <future>
#include <memory>
#include <string>
#include <vector>

#include "schedule_ranks.h"

namespace fsdp::test {
namespace {

constexpr int kRanks = 4;
constexpr int kUnits = 6;

// The meeting points of each set of ranks that share experts, and of all ranks.
struct Points {
  explicit Points(int sets) {
    for (int i = 0; i <= sets; ++i) {
      const int size = i < sets ? kRanks / sets : kRanks;
      gathers.push_back(std::make_shared<MeetingPoint>(size, kTimeout));
      reductions.push_back(std::make_shared<MeetingPoint>(size, kTimeout));
    }
  }

  std::vector<std::shared_ptr<MeetingPoint>> gathers;
  std::vector<std::shared_ptr<MeetingPoint>> reductions;
};

struct Setting {
  std::vector<int> experts = {3, 4};  // units whose parameters only the ranks of a set share
  GatherBy gather_by = GatherBy::Packing;
  int message_rows = 0;
  int sets = 2;
  std::function<std::int64_t(int rank)> more_rows = [](int) { return 0; };  // of an expert
  std::function<bool(int rank)> freezes_one = [](int) { return false; };  // parameter of an expert
};

// A rank with a root and six units below it. A bucket has room for two.
class MeshRank : public Rank {
 public:
  MeshRank(int rank, const Points& points, const Setting& setting)
      : Rank(rank, kRanks, /*layers=*/0, points.gathers.back(), points.reductions.back(), {}, {},
             setting.gather_by, /*bucket_units=*/2, setting.message_rows),
        sets_(setting.sets),
        rank_(rank),
        experts_(setting.experts) {
    const auto point = static_cast<std::size_t>(set());
    std::vector<int> members;
    for (int member = set(); member < kRanks; member += sets_) {
      members.push_back(member);
    }
    auto* over_set = new ThreadsCommunicator(points.gathers[point], place(), setting.gather_by);
    lanes.meshes.push_back({std::shared_ptr<Lanes>(new Lanes(
                                make_lanes(over_set, points.reductions[point], place(), kTimeout))),
                            members});
    for (int i = 1; i <= kUnits; ++i) {
      add(i, setting);
    }
  }

  bool is_expert(int unit) const { return std::count(experts_.begin(), experts_.end(), unit) > 0; }

  // The mean of rank + 1 over the ranks that share the unit.
  float mean(int unit) const {
    const float first = static_cast<float>(is_expert(unit) ? set() : 0);
    const float last = static_cast<float>(is_expert(unit) ? set() + kRanks - sets_ : kRanks - 1);
    return (first + last) / 2 + 1;
  }

  int set() const { return rank_ % sets_; }

 private:
  int place() const { return rank_ / sets_; }

  void add(int unit, const Setting& setting) {
    const bool of_set = is_expert(unit);
    const int size = of_set ? kRanks / sets_ : kRanks;
    std::vector<ParamSpec> params(2);
    for (std::size_t i = 0; i < params.size(); ++i) {
      params[i].name = "unit" + std::to_string(unit) + "." + std::to_string(i);
      params[i].rows =
          kRows + static_cast<std::int64_t>(i) + (of_set ? setting.more_rows(rank_) : 0);
      params[i].row_numel = kColumns;
      params[i].trainable = i == 0 || !of_set || !setting.freezes_one(rank_);
    }
    const UnitLayout layout(params, size, DType::Float32, DType::Float32, /*direct_bytes=*/0);
    const int values = unit + (of_set ? 10 * set() : 0);  // other parameters in each set
    units.push_back(std::make_unique<FakeUnit>(values, layout, of_set ? place() : rank_));
    UnitConfig config{"unit" + std::to_string(unit), layout};
    config.parent = 0;
    config.pre_scale = 1.0 / size;
    config.bucket_bytes = 2 * static_cast<std::size_t>(size) * layout.gather_bytes();
    const std::size_t limit =
        static_cast<std::size_t>(setting.message_rows * kRanks * kColumns) * sizeof(float);
    config.message_limits = {limit, limit};
    config.mesh = of_set ? 1 : 0;
    pipeline->units().add(std::move(config), *units.back());
  }

  int sets_;
  int rank_;
  std::vector<int> experts_;
};

void on_meshes(const Setting& setting, const std::function<void(MeshRank&, int)>& body) {
  const Points points(setting.sets);
  std::vector<std::future<void>> ranks;
  for (int r = 0; r < kRanks; ++r) {
    ranks.push_back(std::async(std::launch::async, [&, r] {
      MeshRank rank(r, points, setting);
      body(rank, r);
    }));
  }
  for (auto& rank : ranks) {
    EXPECT_NO_THROW(rank.get());
  }
}

void expect_meshes_train(MeshRank& rank, int r,
                         const std::vector<std::function<Stream&()>>& late = {}) {
  rank.pipeline->gatherer().set_poison_released_slots(true);
  for (int step = 0; step < 3; ++step) {
    for (const auto& stream : late) {
      rank.lanes.device->delay(stream(), std::chrono::milliseconds(5));
    }
    const std::vector<int> order = rank.in_order();
    rank.backward(order, rank.forward(order), static_cast<float>(r + 1 + step));
    for (int i = 0; i <= kUnits; ++i) {
      for (const std::size_t param : {0U, 1U}) {
        rank.unit(i).expect_gradient(param, static_cast<float>(step) + rank.mean(i));
      }
      EXPECT_FALSE(rank.unit(i).is_attached());
      rank.unit(i).zero_grad();
      rank.unit(i).change_shard();
    }
  }
}

// Runs a step in which this rank has no gradient of parameter 1 of `unit` if `leaves_out`.
void step_without(MeshRank& rank, int unit, bool leaves_out) {
  const std::vector<int> order = rank.in_order();
  const std::vector<CallId> calls = rank.forward(order);
  rank.pipeline->backward().begin_backward();
  rank.pipeline->backward().pre_backward(0, calls[0]);
  for (auto i = order.rbegin(); i != order.rend(); ++i) {
    const CallId call = calls[static_cast<std::size_t>(*i)];
    rank.pipeline->backward().pre_backward(*i, call);
    for (std::size_t param = 0; param < (*i == unit && leaves_out ? 1U : 2U); ++param) {
      rank.unit(*i).add_gradient(param, 1.0F);
      rank.pipeline->backward().gradient_arrived(*i, param);
    }
    rank.pipeline->backward().post_backward(*i, call);
  }
  rank.add_gradients(0, 1.0F);
  rank.pipeline->backward().end_backward();
}

TEST(SeveralMeshes, EachUnitIsGatheredAndReducedOverItsOwn) {
  for (const GatherBy by : kAllWaysToGather) {
    for (const int message_rows : {0, 1, 2, 100}) {
      on_meshes({{3, 4}, by, message_rows},
                [](MeshRank& rank, int r) { expect_meshes_train(rank, r); });
    }
  }
}

TEST(SeveralMeshes, DoNotDependOnHowLongAStreamTakes) {
  for (const int message_rows : {0, 2}) {
    for (const bool reduces : {false, true}) {
      for (const int which : {0, 1, 2}) {
        if (which != 1 && message_rows == 0) {
          continue;  // there are no streams of copies
        }
        on_meshes({{1, 3, 6}, GatherBy::Packing, message_rows}, [&](MeshRank& rank, int r) {
          rank.forward(rank.in_order());
          rank.pipeline->reset();
          Lane& lane = reduces ? rank.lanes.reduce : rank.lanes.gather;
          expect_meshes_train(
              rank, r, {[&]() -> Stream& {
                return which == 0 ? lane.before() : which == 1 ? lane.stream() : lane.after();
              }});
        });
      }
    }
  }
}

TEST(SeveralMeshes, UnitsOfDifferentMeshesShareNoBucket) {
  on_meshes({{2, 4, 5}}, [](MeshRank& rank, int) {
    rank.step(1.0F);
    rank.step(1.0F);
    EXPECT_EQ(buckets_of(rank), (std::vector<std::vector<int>>{{0}, {1}, {2}, {3}, {4, 5}, {6}}));
    const Sent sent = sent_by(rank, [&] { rank.step(1.0F); });
    EXPECT_EQ(sent.forward, (std::vector<int>{0, 1, 2, 3, 4, 6}));
    EXPECT_EQ(sent.reduced, (std::vector<int>{6, 4, 3, 2, 1, 0}));
  });
}

// They are packed and finished on the stream of the messages, between units that are packed apart.
TEST(SeveralMeshes, ExpertsOfOneRankAreNotSent) {
  for (const int message_rows : {0, 2}) {
    on_meshes({{1, 3, 4}, GatherBy::Packing, message_rows, kRanks}, [](MeshRank& rank, int r) {
      expect_meshes_train(rank, r);
      const std::vector<int> order = rank.in_order();
      for (const float times : {1.0F, 2.0F}) {  // the second backward adds to the first one's
        rank.lanes.device->delay(rank.lanes.reduce.stream(), std::chrono::milliseconds(5));
        rank.backward(order, rank.forward(order), static_cast<float>(r + 1));
        for (int i = 0; i <= kUnits; ++i) {
          rank.unit(i).expect_gradient(0, times * rank.mean(i));
          rank.unit(i).expect_gradient(1, times * rank.mean(i));
        }
      }
      const Sent sent = sent_by(rank, [&] { rank.step(1.0F); });
      EXPECT_EQ(std::count(sent.reduced.begin(), sent.reduced.end(), 3), 0);
    });
  }
}

TEST(SeveralMeshes, UnitsThatStayUnshardedTrain) {
  on_meshes({}, [](MeshRank& rank, int r) {
    for (int i = 1; i <= kUnits; ++i) {
      set_reshard_after_forward(*rank.pipeline, i, false);
    }
    expect_meshes_train(rank, r);
  });
}

TEST(SeveralMeshes, AccumulatedGradientsAreReducedOverTheUnitsMesh) {
  on_meshes({}, [](MeshRank& rank, int r) {
    const std::vector<int> order = rank.in_order();
    for (const bool syncs : {false, true}) {
      for (int i = 0; i <= kUnits; ++i) {
        set_requires_gradient_sync(*rank.pipeline, i, syncs);
      }
      rank.backward(order, rank.forward(order), static_cast<float>(r + 1));
    }
    for (int i = 0; i <= kUnits; ++i) {
      rank.unit(i).expect_gradient(0, 2 * rank.mean(i));
      rank.unit(i).expect_gradient(1, 2 * rank.mean(i));
    }
  });
}

TEST(SeveralMeshes, AParameterHasAGradientIfARankOfItsMeshUsedIt) {
  on_meshes({}, [](MeshRank& rank, int r) {
    step_without(rank, 3, /*leaves_out=*/rank.set() == 0);
    EXPECT_EQ(rank.unit(3).has_sharded_gradient(1), rank.set() == 1);
    EXPECT_TRUE(rank.unit(3).has_sharded_gradient(0));
    for (const auto& unit : rank.units) {
      unit->zero_grad();
    }
    step_without(rank, 3, /*leaves_out=*/r == 0);
    EXPECT_TRUE(rank.unit(3).has_sharded_gradient(1));
    rank.unit(3).expect_gradient(1, rank.set() == 0 ? 0.5F : 1.0F);
    for (const auto& unit : rank.units) {
      unit->zero_grad();
    }
    step_without(rank, 1, /*leaves_out=*/r != 3);  // all ranks share this one
    EXPECT_TRUE(rank.unit(1).has_sharded_gradient(1));
    rank.unit(1).expect_gradient(1, 0.25F);
  });
}

// So in messages of one or two rows, their gathers and reductions are in more or fewer pieces.
TEST(SeveralMeshes, SetsMayHaveExpertsOfOtherSizes) {
  for (const GatherBy by : kAllWaysToGather) {
    for (const int message_rows : {0, 1, 2}) {
      Setting setting;
      setting.gather_by = by;
      setting.message_rows = message_rows;
      setting.more_rows = [](int rank) { return 5 * (rank % 2); };
      on_meshes(setting, [](MeshRank& rank, int r) { expect_meshes_train(rank, r); });
    }
  }
}

// A transport that registers buffers waits for as many of the same sizes on each rank.
TEST(SeveralMeshes, AllRanksMakeTheSameBuffersForExpertsOfOtherSizes) {
  Setting setting;
  setting.more_rows = [](int rank) { return 5 * (rank % 2); };
  std::vector<std::vector<std::size_t>> gathers(kRanks);
  std::vector<std::vector<std::size_t>> reductions(kRanks);
  on_meshes(setting, [&](MeshRank& rank, int r) {
    auto& gather = static_cast<ThreadsCommunicator&>(rank.lanes.gather.communicator());
    auto& reduce = static_cast<ThreadsCommunicator&>(rank.lanes.reduce.communicator());
    gather.make_buffers_alike();
    reduce.make_buffers_alike();
    expect_meshes_train(rank, r);
    gathers[static_cast<std::size_t>(r)] = gather.allocated();
    reductions[static_cast<std::size_t>(r)] = reduce.allocated();
  });
  EXPECT_FALSE(gathers[0].empty());
  EXPECT_FALSE(reductions[0].empty());
  for (std::size_t r = 1; r < kRanks; ++r) {
    EXPECT_EQ(gathers[r], gathers[0]);
    EXPECT_EQ(reductions[r], reductions[0]);
  }
}

TEST(SeveralMeshes, RanksOfOneMeshWithOtherSizesAreFoundByAllRanks) {
  Setting setting;
  setting.more_rows = [](int rank) { return rank == 3 ? 1 : 0; };
  on_meshes(setting, [](MeshRank& rank, int r) {
    try {
      rank.forward(rank.in_order());
      ADD_FAILURE() << "no exception";
    } catch (const Error& error) {
      expect_contains(error.what(), r == 3 ? "but rank 1 issues" : "but rank 3 issues");
      expect_contains(error.what(), "the all-gather over 2 ranks of unit 'unit3 to unit4'");
    }
  });
}

TEST(SeveralMeshes, AllRanksTrainAsManyParameters) {
  Setting setting;
  setting.freezes_one = [](int rank) { return rank % 2 == 1; };
  on_meshes(setting, [](MeshRank& rank, int) {
    try {
      rank.forward(rank.in_order());
      ADD_FAILURE() << "no exception";
    } catch (const Error& error) {
      expect_contains(error.what(), "All ranks must train as many parameters, but rank");
      expect_contains(error.what(), "of unit 'unit3'");
    }
  });
}

}  // namespace
}  // namespace fsdp::test
