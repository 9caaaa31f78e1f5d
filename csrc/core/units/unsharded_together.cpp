#include "core/units/unsharded_together.h"

#include <algorithm>
#include <set>

namespace fsdp {
namespace {

// One pass over the units.
class Pass {
 public:
  Pass(const Partition& partition, std::size_t units, const std::vector<char>& has_slot,
       std::size_t depth)
      : bucket_of_(units, 0),
        units_of_(partition.size(), 0),
        open_(partition.size(), 0),
        left_(partition.size(), 0),
        has_slot_(has_slot),
        depth_(depth) {
    for (std::size_t bucket = 0; bucket < partition.size(); ++bucket) {
      units_of_[bucket] = partition[bucket].size();
      for (const int unit : partition[bucket]) {
        bucket_of_[static_cast<std::size_t>(unit)] = bucket;
      }
    }
  }

  void run(const std::vector<ForwardEvent>& events, std::set<std::vector<int>>& seen,
           BucketSets& sets) {
    for (std::size_t i = 0; i < events.size(); ++i) {
      const std::size_t bucket = bucket_of(events[i]);
      if (!events[i].enters) {
        open_[bucket] -= 1;
        left_[bucket] += 1;
        continue;
      }
      open_[bucket] += 1;
      std::vector<int> set = unsharded_at(events, i);
      if (!set.empty() && seen.insert(set).second) {
        sets.push_back(std::move(set));
      }
    }
  }

 private:
  std::size_t bucket_of(const ForwardEvent& event) const {
    return bucket_of_[static_cast<std::size_t>(event.unit)];
  }
  // A bucket of several units stays until the last of them is left, and each is entered once.
  bool is_unsharded(std::size_t bucket) const {
    return open_[bucket] > 0 || (left_[bucket] > 0 && left_[bucket] < units_of_[bucket]);
  }

  std::vector<int> unsharded_at(const std::vector<ForwardEvent>& events, std::size_t now) const {
    std::vector<char> is_in(units_of_.size(), 0);
    for (std::size_t bucket = 0; bucket < is_in.size(); ++bucket) {
      is_in[bucket] = is_unsharded(bucket) ? 1 : 0;
    }
    std::size_t ahead = 0;
    std::size_t last = bucket_of(events[now]);
    for (std::size_t i = now + 1; i < events.size() && ahead < depth_; ++i) {
      const std::size_t bucket = bucket_of(events[i]);
      if (events[i].enters && bucket != last && has_slot_[bucket] != 0) {
        is_in[bucket] = 1;
        last = bucket;
        ahead += 1;
      }
    }
    std::vector<int> set;
    for (std::size_t bucket = 0; bucket < is_in.size(); ++bucket) {
      if (is_in[bucket] != 0 && has_slot_[bucket] != 0) {
        set.push_back(static_cast<int>(bucket));
      }
    }
    return set;
  }

  std::vector<std::size_t> bucket_of_;
  std::vector<std::size_t> units_of_;
  std::vector<std::size_t> open_;
  std::vector<std::size_t> left_;
  const std::vector<char>& has_slot_;
  std::size_t depth_;
};

std::vector<ForwardEvent> reversed(const std::vector<ForwardEvent>& events) {
  std::vector<ForwardEvent> backward;
  std::for_each(events.rbegin(), events.rend(), [&backward](const ForwardEvent& event) {
    backward.push_back({event.unit, !event.enters});
  });
  return backward;
}

}  // namespace

BucketSets unsharded_together(const Partition& partition, const std::vector<int>& parents,
                              const std::vector<BucketUse>& uses, std::size_t depth) {
  std::vector<char> has_slot;
  for (const BucketUse& use : uses) {
    has_slot.push_back(use.bytes_in_ring() > 0 ? 1 : 0);
  }
  const std::vector<ForwardEvent> forward = events_of_registration(parents);
  BucketSets sets;
  std::set<std::vector<int>> seen;
  Pass(partition, parents.size(), has_slot, depth).run(forward, seen, sets);
  Pass(partition, parents.size(), has_slot, depth).run(reversed(forward), seen, sets);
  return sets;
}

}  // namespace fsdp
