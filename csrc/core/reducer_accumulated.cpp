// What a reducer keeps of backwards without gradient sync.
#include <algorithm>

#include "core/reducer.h"

namespace fsdp {

void Reducer::accumulate(Bucket& bucket, const Units& units) {
  const Range range(device_, bucket.ranges.accumulate);
  allocate_accumulated(bucket);
  streams_.follow_compute();
  Stream& before = begin_packing(bucket, /*into_accumulated=*/true);
  for (std::size_t i = 0; i < bucket.reductions.size(); ++i) {
    pack(bucket, units, i, accumulated_of(bucket, i), bucket.has_accumulated);
  }
  before.record(*bucket.packed);
  for (const Unit* unit : units) {
    for (std::size_t i = 0; i < unit->arrived.size(); ++i) {
      if (unit->arrived[i] != 0 && !has_accumulated(bucket, *unit, i)) {
        set_accumulated(bucket, *unit, i);
      }
    }
  }
  bucket.has_accumulated = true;
}

void Reducer::allocate_accumulated(Bucket& bucket) {
  if (bucket.accumulated == nullptr) {
    bucket.accumulated = bucket.reduces_over.allocate_in_step(device_, bucket.reduce_input_bytes(),
                                                              BufferUse::Input);
  }
}

void Reducer::begin_accumulating(Bucket& bucket) {
  if (bucket.has_accumulated) {
    return;
  }
  packings_ += 1;
  allocate_accumulated(bucket);
  device_.fill(device_.compute_stream(), bucket.accumulated.get(), 0, bucket.reduce_input_bytes());
  bucket.has_accumulated = true;
}

void Reducer::set_accumulated(Bucket& bucket, const Unit& unit, std::size_t i) {
  bucket.accumulated_since[unit.first_trainable + i] = packings_;
}

bool Reducer::has_accumulated(const Bucket& bucket, const Unit& unit, std::size_t i) {
  return bucket.accumulated_since[unit.first_trainable + i] != 0;
}

bool Reducer::has_accumulated_before(const std::vector<std::unique_ptr<Bucket>>& buckets) const {
  const auto is_earlier = [this](std::uint64_t since) {
    return since != 0 && since < first_packing_;
  };
  return std::any_of(buckets.begin(), buckets.end(), [&](const auto& bucket) {
    return std::any_of(bucket->accumulated_since.begin(), bucket->accumulated_since.end(),
                       is_earlier);
  });
}

char* Reducer::accumulated_of(const Bucket& bucket, std::size_t piece) {
  const auto before = static_cast<std::size_t>(bucket.reductions[piece].segment_offset) *
                      itemsize(bucket.layout.reduce_dtype()) *
                      static_cast<std::size_t>(bucket.layout.world_size());
  return static_cast<char*>(bucket.accumulated.get()) + before;
}

std::vector<Reducer::AccumulatedPart> Reducer::accumulated_parts(const Bucket& bucket,
                                                                 const Unit& unit) {
  const std::size_t element = itemsize(bucket.layout.reduce_dtype());
  const auto unit_begin = static_cast<std::int64_t>(unit.gradient_offset);
  const std::int64_t unit_end = unit_begin + unit.layout.grad_numel();
  std::vector<AccumulatedPart> parts;
  for (std::size_t i = 0; i < bucket.reductions.size(); ++i) {
    const ReducePiece& piece = bucket.reductions[i];
    const std::int64_t numel = piece.pack_plan.segment_numel;
    const std::int64_t begin = std::max(unit_begin, piece.segment_offset);
    const std::int64_t end = std::min(unit_end, piece.segment_offset + numel);
    if (begin < end) {
      const auto first = static_cast<std::size_t>(begin - piece.segment_offset) * element;
      parts.push_back({accumulated_of(bucket, i) + first, end - begin, numel});
    }
  }
  return parts;
}

// Other units keep what they have accumulated.
void Reducer::clear_accumulated(Bucket& bucket, const Units& units) {
  if (!bucket.has_accumulated) {
    return;
  }
  for (const Unit* unit : units) {
    const auto first =
        bucket.accumulated_since.begin() + static_cast<std::ptrdiff_t>(unit->first_trainable);
    std::fill(first, first + static_cast<std::ptrdiff_t>(unit->arrived.size()), 0);
  }
  bucket.has_accumulated =
      std::any_of(bucket.accumulated_since.begin(), bucket.accumulated_since.end(),
                  [](std::uint64_t since) { return since != 0; });
  if (!bucket.has_accumulated) {
    return;
  }
  for (const Unit* unit : units) {
    clear_accumulated_of(bucket, *unit);
  }
  if (packs_ahead_ || streams_.is_any_in_pieces()) {
    input_.release_both(streams_.messages());
  }
}

void Reducer::clear_accumulated_of(const Bucket& bucket, const Unit& unit) {
  const std::size_t element = itemsize(bucket.layout.reduce_dtype());
  for (const AccumulatedPart& part : accumulated_parts(bucket, unit)) {
    for (int rank = 0; rank < bucket.layout.world_size(); ++rank) {
      device_.fill(
          streams_.messages(),
          static_cast<char*>(part.first) + static_cast<std::size_t>(rank * part.stride) * element,
          0, static_cast<std::size_t>(part.numel) * element);
    }
  }
}

bool Reducer::has_unreduced(const std::vector<std::unique_ptr<Bucket>>& buckets) {
  return std::any_of(buckets.begin(), buckets.end(),
                     [](const auto& bucket) { return bucket->has_accumulated; });
}

}  // namespace fsdp
