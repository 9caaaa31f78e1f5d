// Which gradients have had NaN or Inf: Note [NaN and Inf] in core/reducer.h.
#include "core/reducer.h"

namespace fsdp {

void Reducer::place_marks(const std::vector<std::unique_ptr<Bucket>>& buckets) {
  std::size_t count = 0;
  for (const auto& bucket : buckets) {
    count += bucket->reduced_since.size();
  }
  marks_count_ = count;
  if (count == 0) {
    return;
  }
  const std::size_t bytes = count * sizeof(std::uint64_t);
  marks_ = device_.allocate(bytes);
  device_.fill(device_.compute_stream(), marks_.get(), 0, bytes);
  auto* place = static_cast<std::uint64_t*>(marks_.get());
  for (const auto& bucket : buckets) {
    bucket->nonfinite_marks = place;
    place += bucket->reduced_since.size();
  }
}

std::vector<char> Reducer::units_with_nonfinite(const std::vector<std::unique_ptr<Bucket>>& buckets,
                                                std::size_t units) const {
  std::vector<std::uint64_t> marks(marks_count_);
  if (!marks.empty()) {
    device_.copy_to_host(device_.compute_stream(), marks_.get(), marks.data(),
                         marks.size() * sizeof(std::uint64_t));
    device_.compute_stream().synchronize();
  }
  std::vector<char> found(units, 0);
  for (const auto& bucket : buckets) {
    if (bucket->nonfinite_marks == nullptr) {  // no memory is planned for it yet
      continue;
    }
    const std::uint64_t* of_bucket =
        marks.data() + (bucket->nonfinite_marks - static_cast<std::uint64_t*>(marks_.get()));
    for (const Unit* unit : bucket->units) {
      for (std::size_t i = 0; i < unit->arrived.size(); ++i) {
        const std::size_t at = unit->first_trainable + i;
        if (of_bucket[at] >= bucket->reduced_since[at]) {
          found[static_cast<std::size_t>(unit->number)] = 1;
        }
      }
    }
  }
  return found;
}

}  // namespace fsdp
