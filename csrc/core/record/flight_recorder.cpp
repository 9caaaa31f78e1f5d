#include "core/record/flight_recorder.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <exception>
#include <filesystem>
#include <future>
#include <system_error>
#include <thread>
#include <utility>

#include "core/lanes.h"
#include "core/record/flight_file.h"

namespace fsdp {
namespace {

constexpr const char* kMarkOfAccount = "flight record";  // every account contains this

// Writes a new file in the same folder, and gives it the record's name when it is complete. Its
// first name does not begin with the prefix of records, because PyTorch's tools read all files that
// do. It has the record's name and the host's, because hosts may share the folder, and processes of
// two hosts may have one id.
void replace_file(const std::string& path, const std::string& content) {
  static std::atomic<unsigned> files{0};
  const std::size_t after_folder = path.rfind('/') + 1;  // 0 if there is none
  char host[64] = {};
  ::gethostname(host, sizeof(host) - 1);
  const std::string unfinished =
      detail::concat(path.substr(0, after_folder), ".unfinished_", path.substr(after_folder), "_",
                     host, "_", ::getpid(), "_", ++files);
  const auto check = [&path](bool is_done) {
    FSDP_CHECK(is_done, "fsdp_ext could not write the flight record ", path, ": ",
               std::strerror(errno),
               ". Set TORCH_FR_DUMP_TEMP_FILE to the beginning of a path that can be written.");
  };
  std::error_code ignored;  // opening the file says why
  std::filesystem::create_directories(std::filesystem::path(path).parent_path(), ignored);
  std::FILE* file = std::fopen(unfinished.c_str(), "wb");
  check(file != nullptr);
  const bool is_written = std::fwrite(content.data(), 1, content.size(), file) == content.size();
  const bool is_closed = std::fclose(file) == 0;
  const bool is_in_place =
      is_written && is_closed && std::rename(unfinished.c_str(), path.c_str()) == 0;
  if (!is_in_place) {
    const int error = errno;
    std::remove(unfinished.c_str());
    errno = error;
  }
  check(is_in_place);
}

}  // namespace

FlightRecorder::FlightRecorder(int rank, std::size_t entries, std::string prefix,
                               std::chrono::milliseconds longest_write)
    : rank_(rank),
      entries_(entries),
      path_(detail::concat(prefix, rank)),
      longest_write_(longest_write) {}

void FlightRecorder::record(Lanes& lanes) {
  const auto tape = std::make_shared<FlightTape>(*lanes.device, entries_);
  lanes.gather.record_in(tape);
  lanes.reduce.record_in(tape);
  for (Lane* lane : {&lanes.gather, &lanes.reduce}) {
    lane->communicator().set_flight_writer([recorder = weak_from_this()] {
      const auto alive = recorder.lock();
      return alive != nullptr ? alive->account_before_abort() : "";
    });
  }
  lanes.flights = shared_from_this();
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto is_gone = [](const std::weak_ptr<FlightTape>& other) { return other.expired(); };
  tapes_.erase(std::remove_if(tapes_.begin(), tapes_.end(), is_gone), tapes_.end());
  tapes_.push_back(tape);
  said_.clear();
}

std::vector<std::shared_ptr<FlightTape>> FlightRecorder::tapes() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::vector<std::shared_ptr<FlightTape>> alive;
  for (const std::weak_ptr<FlightTape>& tape : tapes_) {
    if (auto kept = tape.lock()) {
      alive.push_back(std::move(kept));
    }
  }
  return alive;
}

void FlightRecorder::turn(bool on) {
  for (const auto& tape : tapes()) {
    tape->turn(on);
  }
}

bool FlightRecorder::write(const std::string& path) const {
  const std::lock_guard<std::mutex> lock(writing_);
  std::vector<SeenFlight> all;
  std::uint64_t forgotten = 0;
  std::size_t unread = 0;
  const auto alive = tapes();
  for (const auto& tape : alive) {
    const std::optional<std::vector<SeenFlight>> seen = tape->look();
    if (!seen.has_value()) {
      ++unread;
      continue;
    }
    forgotten += seen->empty() ? 0 : seen->front().flight.number - 1;
    all.insert(all.end(), seen->begin(), seen->end());
  }
  FSDP_CHECK(unread == 0 || unread < alive.size(), "rank ", rank_,
             " could not read its flight record, because another thread has been blocked in a call "
             "to the device for 1 s. Look at the records of the other ranks.");
  std::stable_sort(all.begin(), all.end(), [](const SeenFlight& a, const SeenFlight& b) {
    return a.flight.issued < b.flight.issued;
  });
  replace_file(path, flight_file(all, forgotten));
  return unread > 0;
}

// While a write hangs, no other one is begun. Returns nullopt if the record is not written in time.
std::optional<bool> FlightRecorder::write_in_time() const {
  std::shared_future<bool> is_partial;
  std::thread writer;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!newest_write_.valid() ||
        newest_write_.wait_for(std::chrono::seconds(0)) == std::future_status::ready) {
      std::promise<bool> done;
      newest_write_ = done.get_future().share();
      writer = std::thread([recorder = shared_from_this(), done = std::move(done)]() mutable {
        try {
          for (const auto& tape : recorder->tapes()) {
            tape->enter_thread();
          }
          done.set_value(recorder->write(recorder->path_));
        } catch (...) {
          done.set_exception(std::current_exception());
        }
      });
    }
    is_partial = newest_write_;
  }
  const bool is_written = is_partial.wait_for(longest_write_) == std::future_status::ready;
  if (writer.joinable()) {
    is_written ? writer.join() : writer.detach();
  }
  return is_written ? std::optional(is_partial.get()) : std::nullopt;
}

std::string FlightRecorder::account() const noexcept {
  try {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (!said_.empty()) {
        return said_;
      }
    }
    const std::optional<bool> is_partial = write_in_time();
    if (!is_partial.has_value()) {
      return detail::concat("There is no flight record yet: fsdp_ext has waited ",
                            longest_write_.count(), " ms for ", path_,
                            " to be written. Set TORCH_FR_DUMP_TEMP_FILE to the beginning of a "
                            "path on a local disk.");
    }
    return detail::concat(
        "The flight record of rank ", rank_, " is in ", path_, ".",
        *is_partial ? " It lacks lanes that a blocked call to the device holds." : "");
  } catch (const std::exception& error) {
    return detail::concat("There is no flight record: ", error.what());
  }
}

std::string FlightRecorder::account_before_abort() {
  const std::string said = account();
  const std::lock_guard<std::mutex> lock(mutex_);
  if (said_.empty()) {
    said_ = said;
  }
  return said_;
}

// - Errors

void throw_with_flight_record(const Error& error, Lanes& lanes, Lanes* replicas) {
  const std::string message = error.what();
  const bool is_late = dynamic_cast<const TimeoutError*>(&error) != nullptr;
  const bool differs = dynamic_cast<const RanksDiffer*>(&error) != nullptr;
  const bool is_of_ranks = is_late || differs || !failure_in(lanes, replicas).empty();
  if (lanes.flights == nullptr || !is_of_ranks ||
      message.find(kMarkOfAccount) != std::string::npos) {
    throw;
  }
  const bool is_list = message.find('\n') != std::string::npos;
  const std::string whole = message + (is_list ? "\n" : " ") + lanes.flights->account();
  if (is_late) {
    throw TimeoutError(whole);
  }
  throw Error(whole);
}

void throw_and_abort(const Error& error, Lanes& lanes, Lanes* replicas) try {
  throw_with_flight_record(error, lanes, replicas);
} catch (const Error&) {
  abort_after_failure(lanes, replicas);
  throw;
}

}  // namespace fsdp
