#include "core/record/flight_file.h"

#include <chrono>
#include <map>

#include "base/pickle.h"
#include "device/host_clock.h"

namespace fsdp {
namespace {

constexpr const char* kVersion = "2.10";  // of PyTorch's format

const char* torch_name(DType dtype) {
  switch (dtype) {
    case DType::Float32:
      return "Float";
    case DType::BFloat16:
      return "BFloat16";
    case DType::Float16:
      return "Half";
    case DType::Float64:
      return "Double";
    case DType::Bytes:
      break;
  }
  return "Byte";
}

const char* torch_name(Collective op) {
  switch (op) {
    case Collective::AllGather:
    case Collective::GroupAllGather:
      return "_all_gather_base";
    case Collective::ReduceScatter:
      return "_reduce_scatter_base";
    case Collective::AllReduce:
      break;
  }
  return "all_reduce";
}

const char* name_of(FlightState state) {
  return state == FlightState::Completed ? "completed"
         : state == FlightState::Started ? "started"
                                         : "scheduled";
}

// Nanoseconds since the epoch, as PyTorch's times are.
class WallClock {
 public:
  WallClock()
      : ahead_(std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()) -
               std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch())) {
  }
  std::int64_t at(std::int64_t ticks) const {
    const auto seconds = std::chrono::duration<double>(host_clock::seconds(ticks));
    return std::chrono::duration_cast<std::chrono::nanoseconds>(seconds + ahead_).count();
  }

 private:
  std::chrono::duration<double> ahead_;  // of steady_clock
};

// The groups of the collectives, numbered in the order of their first collective.
class Groups {
 public:
  explicit Groups(const std::vector<SeenFlight>& seen) {
    for (const SeenFlight& each : seen) {
      const FlightGroup* group = each.flight.group.get();
      const bool is_new = numbers_.emplace(group, groups_.size()).second;
      if (is_new) {
        groups_.push_back({group, 0, 0, 0});
      }
      Status& status = groups_[numbers_.at(group)];
      const std::uint64_t sequence = each.flight.sequence;
      status.enqueued = sequence;
      status.started = each.state != FlightState::Scheduled ? sequence : status.started;
      status.completed = each.state == FlightState::Completed ? sequence : status.completed;
    }
  }

  std::int64_t number(const FlightGroup* group) const {
    return static_cast<std::int64_t>(numbers_.at(group));
  }

  void write_config(PickleWriter& file) const {
    file.begin_dict();
    for (const Status& status : groups_) {
      std::string ranks;
      for (const int rank : status.group->ranks) {
        ranks += (ranks.empty() ? "" : ", ") + std::to_string(rank);
      }
      file.add(status.group->name);
      file.begin_dict();
      file.add("name", status.group->name);
      file.add("desc", status.group->description);
      file.add("ranks", "[" + ranks + "]");
      file.end_dict();
    }
    file.end_dict();
  }

  void write_status(PickleWriter& file) const {
    const auto add = [&file](const char* key, std::uint64_t sequence) {
      file.add(key, sequence > 0 ? static_cast<std::int64_t>(sequence) : std::int64_t{-1});
    };
    file.begin_dict();
    for (const Status& status : groups_) {
      file.add(std::to_string(number(status.group)));
      file.begin_dict();
      add("last_enqueued_collective", status.enqueued);
      add("last_started_collective", status.started);
      add("last_completed_collective", status.completed);
      file.end_dict();
    }
    file.end_dict();
  }

 private:
  struct Status {
    const FlightGroup* group;
    std::uint64_t enqueued;
    std::uint64_t started;
    std::uint64_t completed;
  };

  std::vector<Status> groups_;
  std::map<const FlightGroup*, std::size_t> numbers_;
};

struct Numels {
  std::size_t input;
  std::size_t output;
};

Numels numels_of(const Flight& flight) {
  const std::size_t numel = flight.plan.bytes / itemsize(flight.plan.dtype);
  const std::size_t part = numel / flight.group->ranks.size();
  switch (flight.plan.op) {
    case Collective::AllGather:
    case Collective::GroupAllGather:
      return {part, numel};
    case Collective::ReduceScatter:
      return {numel, part};
    case Collective::AllReduce:
      break;
  }
  return {numel, numel};
}

void add_tensor(PickleWriter& file, const std::string& which, std::size_t numel, DType dtype) {
  file.add(which + "_sizes");
  file.begin_list();
  file.begin_list();
  file.add(static_cast<std::int64_t>(numel));
  file.end_list();
  file.end_list();
  file.add(which + "_dtypes");
  file.begin_list();
  file.add(torch_name(dtype));
  file.end_list();
}

// PyTorch has Python's stack here. The unit's name says more, and costs nothing to find.
void add_frames(PickleWriter& file, const Flight& flight) {
  file.add("frames");
  file.begin_list();
  file.begin_dict();
  const std::string in =
      flight.plan.phase == Phase::Other ? "" : std::string(" in ") + name(flight.plan.phase);
  file.add("name", flight.label + in);
  file.add("filename", "fsdp_ext");
  file.add("line", static_cast<std::int64_t>(flight.sequence));
  file.end_dict();
  file.end_list();
}

// A moment of a GPU has no time on the host's clock. The time of this call replaces it.
void add_time(PickleWriter& file, const char* key, bool is_reached, std::int64_t ticks,
              const WallClock& clock) {
  if (is_reached) {
    file.add(key, clock.at(ticks != 0 ? ticks : host_clock::now()));
  } else {
    file.add(key);
    file.add_none();
  }
}

void add_entry(PickleWriter& file, const SeenFlight& seen, std::int64_t id, const Groups& groups,
               const WallClock& clock) {
  const Flight& flight = seen.flight;
  const auto sequence = static_cast<std::int64_t>(flight.sequence);
  const bool is_completed = seen.state == FlightState::Completed;
  file.begin_dict();
  add_frames(file, flight);
  file.add("record_id", id);
  file.add("pg_id", groups.number(flight.group.get()));
  file.add("process_group");
  file.add(flight.group->name);
  file.add(flight.group->description);
  file.pair_last_two();
  file.add("collective_seq_id", sequence);
  file.add("p2p_seq_id", std::int64_t{0});
  file.add("op_id", sequence);
  file.add("profiling_name", flight.group->backend + ":" + torch_name(flight.plan.op));
  file.add("time_created_ns", clock.at(flight.issued));
  if (seen.seconds.has_value()) {
    file.add("duration_ms", *seen.seconds * 1e3);
  }
  const auto [input, output] = numels_of(flight);
  add_tensor(file, "input", input, flight.plan.dtype);
  add_tensor(file, "output", output, flight.plan.dtype);
  file.add("state", name_of(seen.state));
  add_time(file, "time_discovered_started_ns", seen.state != FlightState::Scheduled, seen.started,
           clock);
  add_time(file, "time_discovered_completed_ns", is_completed, seen.completed, clock);
  file.add("retired", is_completed);
  file.add("timeout_ms", static_cast<std::int64_t>(seen.timeout.count()));
  file.add("is_p2p", false);
  file.end_dict();
}

}  // namespace

// PyTorch's tools drop entries of a smaller id than the first one of another rank. So the ids count
// what is no longer kept, too.
std::string flight_file(const std::vector<SeenFlight>& seen, std::uint64_t forgotten) {
  PickleWriter file;
  const Groups groups(seen);
  const WallClock clock;
  file.begin_dict();
  file.add("version", kVersion);
  file.add("pg_config");
  groups.write_config(file);
  file.add("pg_status");
  groups.write_status(file);
  file.add("entries");
  file.begin_list();
  auto id = static_cast<std::int64_t>(forgotten);
  for (const SeenFlight& each : seen) {
    add_entry(file, each, id++, groups, clock);
  }
  file.end_list();
  file.end_dict();
  return file.finish();
}

}  // namespace fsdp
