#include "core/reduce/nonfinite_gradients.h"

#include <algorithm>
#include <utility>

namespace fsdp {

std::shared_ptr<void> NonfiniteGradients::place(
    const std::vector<std::unique_ptr<Bucket>>& buckets) {
  std::size_t count = 0;
  for (const auto& bucket : buckets) {
    count += bucket->layout.trainable_count();
  }
  std::shared_ptr<void> before = std::move(marks_);
  count_ = count;
  if (count == 0) {
    return before;
  }
  Stream& compute = device_.compute_stream();
  marks_ = device_.allocate(count * sizeof(std::uint64_t));
  device_.fill(compute, marks_.get(), 0, count * sizeof(std::uint64_t));
  auto* next = static_cast<std::uint64_t*>(marks_.get());
  for (const auto& bucket : buckets) {
    for (Unit* unit : bucket->units) {
      if (unit->gradients.nonfinite_marks_ != nullptr && unit->gradients.count() > 0) {
        const std::size_t bytes = unit->gradients.count() * sizeof(std::uint64_t);
        device_.copy(compute, unit->gradients.nonfinite_marks_, next, bytes);
      }
      unit->gradients.nonfinite_marks_ = next;
      next += unit->gradients.count();
    }
  }
  return before;
}

std::vector<char> NonfiniteGradients::find(const std::vector<std::unique_ptr<Bucket>>& buckets,
                                           std::size_t units) const {
  std::vector<char> found(units, 0);
  if (count_ == 0) {
    return found;
  }
  Stream& compute = device_.compute_stream();
  const std::size_t bytes = count_ * sizeof(std::uint64_t);
  std::vector<std::uint64_t> marks(count_);
  device_.copy(compute, marks_.get(), marks.data(), bytes);
  compute.synchronize();
  const auto* first = static_cast<const std::uint64_t*>(marks_.get());
  for (const auto& bucket : buckets) {
    for (const Unit* unit : bucket->units) {
      const UnitGradients& gradients = unit->gradients;
      for (std::size_t i = 0; gradients.nonfinite_marks_ != nullptr && i < gradients.count(); ++i) {
        const auto at = static_cast<std::size_t>(gradients.nonfinite_marks_ - first) + i;
        if (marks[at] >= gradients.reduced_since_[i]) {
          found[static_cast<std::size_t>(unit->number)] = 1;
        }
      }
    }
  }
  const auto captured = std::count(marks.begin(), marks.end(), kCapturedPacking);
  if (captured > 0) {  // later replays mark anew
    std::replace(marks.begin(), marks.end(), kCapturedPacking, std::uint64_t{0});
    device_.copy(compute, marks.data(), marks_.get(), bytes);
    compute.synchronize();
  }
  return found;
}

}  // namespace fsdp
