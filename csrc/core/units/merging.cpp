#include "core/units/merging.h"

#include <algorithm>
#include <utility>

namespace fsdp {
namespace {

// One time that forward entered a unit, with the visits inside it.
struct Visit {
  int unit = -1;
  std::vector<Visit> inner;
};

// Units that would share a bucket.
struct Run {
  std::vector<int> units;
  std::size_t bytes = 0;
  std::size_t limit = 0;
  const UnitConfig* like = nullptr;       // any unit
  const UnitConfig* sent = nullptr;       // any unit that has bytes to send
  const UnitConfig* trainable = nullptr;  // any unit with trainable parameters
};

// What all ranks together gather.
std::size_t bytes_of(const UnitConfig& unit) {
  return unit.layout.gather_bytes() * static_cast<std::size_t>(unit.layout.world_size());
}

// For the bytes of the unit's bucket; 0: the unit shares with none. A single rank sends nothing.
std::size_t limit_of(const UnitConfig& unit) {
  return unit.layout.world_size() == 1 || unit.is_unmergeable ? 0 : unit.bucket_bytes;
}

bool are_alike(const UnitConfig& a, const UnitConfig& b) {
  return a.mesh == b.mesh && a.message_limits == b.message_limits &&
         a.layout.is_offloaded() == b.layout.is_offloaded() && a.reshard_alike(b);
}

bool are_sent_alike(const UnitConfig* a, const UnitConfig* b) {
  return a == nullptr || b == nullptr || a->layout.needs_cast() == b->layout.needs_cast();
}

bool train_alike(const UnitConfig* a, const UnitConfig* b) {
  return a == nullptr || b == nullptr ||
         (a->layout.grad_dtype() == b->layout.grad_dtype() &&
          a->layout.reduce_dtype() == b->layout.reduce_dtype() &&
          a->layout.unsharded_grad_dtypes().front() == b->layout.unsharded_grad_dtypes().front() &&
          a->scale_alike(*b));
}

class Merger {
 public:
  Merger(const std::vector<const UnitConfig*>& units, const std::vector<Visit>& visits)
      : units_(units), visits_of_(units.size(), 0), placed_(units.size(), 0) {
    count(visits);
    place(visits);
  }

  Partition partition() {
    for (std::size_t unit = 0; unit < units_.size(); ++unit) {
      place_alone(static_cast<int>(unit));
    }
    std::sort(partition_.begin(), partition_.end(),
              [](const auto& a, const auto& b) { return a.front() < b.front(); });
    return std::move(partition_);
  }

 private:
  void count(const std::vector<Visit>& siblings) {
    for (const Visit& visit : siblings) {
      visits_of_[static_cast<std::size_t>(visit.unit)] += 1;
      count(visit.inner);
    }
  }

  void place(const std::vector<Visit>& siblings) {
    Run row;
    for (const Visit& visit : siblings) {
      Run with_inner = whole(visit);
      if (with_inner.units.empty()) {
        close(row);
        place_alone(visit.unit);
        place(visit.inner);
      } else if (!append(row, with_inner)) {
        close(row);
        row = std::move(with_inner);
      }
    }
    close(row);
  }

  void place_alone(int unit) {
    char& placed = placed_[static_cast<std::size_t>(unit)];
    if (placed == 0) {
      placed = 1;
      partition_.push_back({unit});
    }
  }

  // The unit and all units nested in it, if they may share a bucket. Otherwise empty.
  Run whole(const Visit& visit) const {
    const auto unit = static_cast<std::size_t>(visit.unit);
    const UnitConfig& config = *units_[unit];
    const std::size_t bytes = bytes_of(config);
    const std::size_t limit = limit_of(config);
    if (visits_of_[unit] != 1 || limit == 0 || bytes > limit) {
      return {};
    }
    Run run{{visit.unit},
            bytes,
            limit,
            &config,
            bytes > 0 ? &config : nullptr,
            config.layout.trainable_count() > 0 ? &config : nullptr};
    for (const Visit& inner : visit.inner) {
      const Run below = whole(inner);
      if (below.units.empty() || !append(run, below)) {
        return {};
      }
    }
    return run;
  }

  static bool append(Run& run, const Run& more) {
    if (run.units.empty()) {
      run = more;
      return true;
    }
    const std::size_t limit = std::min(run.limit, more.limit);
    if (run.bytes + more.bytes > limit || !are_alike(*run.like, *more.like) ||
        !are_sent_alike(run.sent, more.sent) || !train_alike(run.trainable, more.trainable)) {
      return false;
    }
    run.units.insert(run.units.end(), more.units.begin(), more.units.end());
    run.bytes += more.bytes;
    run.limit = limit;
    run.sent = run.sent != nullptr ? run.sent : more.sent;
    run.trainable = run.trainable != nullptr ? run.trainable : more.trainable;
    return true;
  }

  void close(Run& row) {
    if (!row.units.empty()) {
      for (const int unit : row.units) {
        placed_[static_cast<std::size_t>(unit)] = 1;
      }
      partition_.push_back(std::move(row.units));
    }
    row = {};
  }

  const std::vector<const UnitConfig*>& units_;
  std::vector<int> visits_of_;
  std::vector<char> placed_;
  Partition partition_;
};

// The visits from `position` to the end of the enclosing visit. A unit of several modules is
// entered with each of them and left once.
std::vector<Visit> visits(const std::vector<ForwardEvent>& events, std::size_t& position,
                          std::vector<int>& open) {
  std::vector<Visit> siblings;
  while (position < events.size() && events[position].enters) {
    const int unit = events[position].unit;
    position += 1;
    if (std::find(open.begin(), open.end(), unit) != open.end()) {
      continue;
    }
    open.push_back(unit);
    siblings.push_back({unit, visits(events, position, open)});
    open.pop_back();
    position += 1;  // the leave event
  }
  return siblings;
}

}  // namespace

std::vector<int> parents_of(const std::vector<const UnitConfig*>& units) {
  std::vector<int> parents;
  parents.reserve(units.size());
  for (const UnitConfig* unit : units) {
    parents.push_back(unit->parent);
  }
  return parents;
}

std::vector<ForwardEvent> events_of_registration(const std::vector<int>& parents) {
  std::vector<ForwardEvent> events;
  std::vector<int> open;
  for (std::size_t unit = 0; unit < parents.size(); ++unit) {
    while (!open.empty() && open.back() != parents[unit]) {
      events.push_back({open.back(), false});
      open.pop_back();
    }
    open.push_back(static_cast<int>(unit));
    events.push_back({static_cast<int>(unit), true});
  }
  for (; !open.empty(); open.pop_back()) {
    events.push_back({open.back(), false});
  }
  return events;
}

// A unit of several modules is entered with each of them and left once.
bool are_in_order_of_registration(const std::vector<ForwardEvent>& events) {
  std::vector<int> open;
  int last = -1;
  for (const ForwardEvent& event : events) {
    if (!event.enters) {
      open.erase(std::remove(open.begin(), open.end(), event.unit), open.end());
    } else if (std::find(open.begin(), open.end(), event.unit) == open.end()) {
      if (event.unit <= last) {
        return false;
      }
      last = event.unit;
      open.push_back(event.unit);
    }
  }
  return true;
}

Partition merge_units(const std::vector<const UnitConfig*>& units,
                      const std::vector<ForwardEvent>& events) {
  std::size_t position = 0;
  std::vector<int> open;
  return Merger(units, visits(events, position, open)).partition();
}

}  // namespace fsdp
