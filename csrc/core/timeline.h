// When what the schedule issued began and ended on its stream. Switched on by whoever measures;
// otherwise a branch each.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "core/bucket.h"
#include "device/stream.h"

namespace fsdp {

enum class Work : std::uint8_t { Cast, Gather, Unpack, Pack, Reduce, HandOver };

struct WorkRecord {
  Work work;
  int unit;       // the first of the bucket's
  int last_unit;  // the last of the bucket's
  std::shared_ptr<Moment> begin;
  std::shared_ptr<Moment> end;
};

class Timeline {
 public:
  void enable(bool enabled) { enabled_ = enabled; }
  bool is_enabled() const { return enabled_; }
  void add(WorkRecord record) { records_.push_back(std::move(record)); }
  // In order of issue. Their moments are known when the streams have come so far.
  std::vector<WorkRecord> take() { return std::exchange(records_, {}); }

 private:
  bool enabled_ = false;
  std::vector<WorkRecord> records_;
};

// What is issued to `stream` while this lives is one piece of work.
class Timed {
 public:
  Timed(Timeline& timeline, Device& device, Stream& stream, Work work, const Bucket& bucket)
      : timeline_(timeline), device_(device), stream_(stream), work_(work), bucket_(bucket) {
    if (timeline_.is_enabled()) {
      begin_ = device_.mark(stream_);
    }
  }

  ~Timed() {
    if (begin_ != nullptr) {
      timeline_.add({work_, bucket_.units.front()->number, bucket_.units.back()->number,
                     std::move(begin_), device_.mark(stream_)});
    }
  }

  Timed(const Timed&) = delete;
  Timed& operator=(const Timed&) = delete;

 private:
  Timeline& timeline_;
  Device& device_;
  Stream& stream_;
  Work work_;
  const Bucket& bucket_;
  std::shared_ptr<Moment> begin_;
};

}  // namespace fsdp
