#include "core/record/flight_tape.h"

#include <algorithm>
#include <exception>
#include <thread>

#include "device/host_clock.h"

namespace fsdp {

FlightTape::FlightTape(Device& device, std::size_t entries)
    : device_(device),
      timeout_(device.timeout()),
      entries_(std::max<std::size_t>(entries, 1)),
      moments_(device.new_moments()) {
  moments_->reserve(2 * entries_.size());
}

std::uint64_t FlightTape::begin(Stream& stream, const Communicator& over, const FlightPlan& plan,
                                const std::string& label) {
  if (!is_on_ || device_.is_capturing()) {
    return 0;
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  const std::uint64_t number = ++issued_;
  Flight& flight = entry(number);
  if (flight.group != over.flight_group()) {  // comparing is cheaper than counting owners
    flight.group = over.flight_group();
  }
  flight.number = number;
  flight.sequence = over.count_flight();
  flight.issued = host_clock::now();
  flight.plan = plan;
  flight.is_whole = false;
  const std::size_t length = std::min(label.size(), sizeof(flight.label) - 1);
  label.copy(flight.label, length);
  flight.label[length] = '\0';
  moments_->mark(first_moment(number), stream);
  return number;
}

void FlightTape::end(std::uint64_t number, Stream& stream) {
  const std::lock_guard<std::mutex> lock(mutex_);
  moments_->mark(first_moment(number) + 1, stream);
  entry(number).is_whole = true;
}

SeenFlight FlightTape::see(const Flight& flight) const {
  const std::size_t start = first_moment(flight.number);
  SeenFlight seen;
  seen.flight = flight;
  seen.timeout = timeout_;
  if (!moments_->is_reached(start)) {
    return seen;
  }
  seen.state = FlightState::Started;
  seen.started = moments_->ticks(start);
  if (flight.is_whole && moments_->is_reached(start + 1)) {
    seen.state = FlightState::Completed;
    seen.completed = moments_->ticks(start + 1);
    seen.seconds = moments_->seconds_to(start, *moments_, start + 1);
  }
  return seen;
}

std::optional<std::vector<SeenFlight>> FlightTape::look() const {
  constexpr int kAttempts = 100;
  std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
  for (int i = 0; i < kAttempts && !lock.owns_lock(); ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
    (void)lock.try_lock();
  }
  if (!lock.owns_lock()) {
    return std::nullopt;
  }
  std::vector<SeenFlight> seen;
  const std::uint64_t kept = std::min<std::uint64_t>(issued_, entries_.size());
  for (std::uint64_t number = issued_ - kept + 1; number <= issued_; ++number) {
    seen.push_back(see(entries_[(number - 1) % entries_.size()]));
  }
  return seen;
}

InFlight::InFlight(FlightTape* tape, Stream& stream, const Communicator& over,
                   const FlightPlan& plan, const std::string& label)
    : tape_(tape), stream_(stream), exceptions_(std::uncaught_exceptions()) {
  if (tape_ != nullptr && over.flight_group() != nullptr) {
    number_ = tape_->begin(stream, over, plan, label);
  }
}

InFlight::~InFlight() {
  if (number_ == 0 || std::uncaught_exceptions() != exceptions_) {
    return;
  }
  try {
    tape_->end(number_, stream_);
  } catch (const std::exception&) {
    // The device has failed. The next call on the stream says so.
  }
}

}  // namespace fsdp
