#include "core/reducer.h"

#include <algorithm>
#include <string>
#include <utility>

#include "core/check.h"

namespace fsdp {
namespace {

const std::string kComputeStream = "the compute stream";

// See Note [gradient lifetime].
constexpr std::size_t kGradientsInFlight = 2;

bool are_alike(const Unit& a, const Unit& b) {
  return a.requires_gradient_sync == b.requires_gradient_sync && a.pack_scale == b.pack_scale &&
         a.reduce_scale == b.reduce_scale;
}

bool has_accumulated(const Bucket& bucket, const Unit& unit) {
  for (std::size_t i = 0; i < unit.arrived.size(); ++i) {
    if (bucket.accumulated_params[unit.first_trainable + i] != 0) {
      return true;
    }
  }
  return false;
}

void forget_arrived(Unit& unit) {
  std::fill(unit.arrived.begin(), unit.arrived.end(), 0);
  unit.arrived_count = 0;
  unit.complete = false;
}

// Whether trainable parameter i of the unit has something to hand over.
bool has_arrived(const Bucket& bucket, const Unit& unit, std::size_t i) {
  return unit.arrived[i] != 0 || bucket.accumulated_params[unit.first_trainable + i] != 0;
}

}  // namespace

Reducer::Reducer(Device& device, Packer& packer, Lane& lane, Ledger& ledger, Announce announce)
    : device_(device),
      packer_(packer),
      lane_(lane),
      stream_(lane.stream()),
      ledger_(ledger),
      announce_(std::move(announce)),
      compute_reached_(device.new_event()) {}

// What is in flight uses the buffers that go now.
Reducer::~Reducer() { lane_.drain(); }

void Reducer::plan_memory(const std::vector<std::unique_ptr<Bucket>>& buckets) {
  stream_.synchronize();
  input_bytes_ = 0;
  output_bytes_ = 0;
  for (const auto& bucket : buckets) {
    input_bytes_ = std::max(input_bytes_, bucket->reduce_input_bytes());
    output_bytes_ = std::max(output_bytes_, bucket->segment_bytes());
  }
  input_ = input_bytes_ > 0 ? lane_.allocate(input_bytes_, BufferUse::Input) : nullptr;
  output_.reset();
}

// See Note [units that differ].
void Reducer::take(Bucket& bucket) {
  const Unit& first = *bucket.units.front();
  const auto is_alike = [&first](const Unit* unit) { return are_alike(first, *unit); };
  if (std::all_of(bucket.units.begin(), bucket.units.end(), is_alike)) {
    take_units(bucket, bucket.units);
    return;
  }
  Units left = bucket.units;
  while (!left.empty()) {
    const Unit& like = *left.front();
    const auto others = std::stable_partition(
        left.begin(), left.end(), [&like](const Unit* unit) { return are_alike(like, *unit); });
    const Units units(left.begin(), others);
    left.erase(left.begin(), others);
    const auto has_something = [&bucket](const Unit* unit) {
      return unit->arrived_count > 0 ||
             (unit->requires_gradient_sync && has_accumulated(bucket, *unit));
    };
    if (std::any_of(units.begin(), units.end(), has_something)) {
      take_units(bucket, units);
    }
  }
}

void Reducer::take_units(Bucket& bucket, const Units& units) {
  if (units.front()->requires_gradient_sync) {
    reduce(bucket, units);
  } else {
    accumulate(bucket, units);
  }
  for (Unit* unit : units) {
    forget_arrived(*unit);
  }
}

void Reducer::reduce(Bucket& bucket, const Units& units) {
  take_gradients(bucket, units);
  const UnitLayout& layout = bucket.layout;
  const bool alone = layout.world_size() == 1;
  const bool direct = choose_finish(bucket, units);
  const Range range(device_, bucket.reduce_label);
  void* gradient = bucket.flat_gradient();
  void* reduced = direct || alone ? gradient : output_buffer();
  // After whatever was allocated: Note [memory and the compute stream].
  device_.compute_stream().record(*compute_reached_);
  stream_.wait(*compute_reached_, kComputeStream);

  void* input = bucket.has_accumulated ? bucket.accumulated.get() : input_.get();
  if (alone && direct && !bucket.has_accumulated) {
    input = gradient;
  }
  pack(bucket, units, input, bucket.has_accumulated);
  const void* output = input;
  if (!alone) {
    lane_.communicator().announce(bucket.reduce_label);
    announce_(bucket, bucket.reduce_input_bytes());
    lane_.communicator().reduce_scatter(stream_, input, reduced,
                                        static_cast<std::size_t>(layout.grad_numel()),
                                        layout.reduce_dtype());
    output = reduced;
  }
  if (output != gradient) {
    finish(bucket, units, output);
  }
  hand_over(bucket, units);
  clear_accumulated(bucket, units);
  stream_.record(*bucket.reduced);
  bucket.reduction_pending = true;
}

void Reducer::accumulate(Bucket& bucket, const Units& units) {
  take_gradients(bucket, units);
  if (bucket.accumulated == nullptr) {
    bucket.accumulated = lane_.allocate(bucket.reduce_input_bytes(), BufferUse::Input);
  }
  device_.compute_stream().record(*compute_reached_);
  stream_.wait(*compute_reached_, kComputeStream);
  pack(bucket, units, bucket.accumulated.get(), bucket.has_accumulated);
  for (const Unit* unit : units) {
    for (std::size_t i = 0; i < unit->arrived.size(); ++i) {
      bucket.accumulated_params[unit->first_trainable + i] |= unit->arrived[i];
    }
  }
  bucket.has_accumulated = true;
}

void Reducer::wait(const std::vector<std::unique_ptr<Bucket>>& buckets) {
  Stream& compute = device_.compute_stream();
  for (const auto& bucket : buckets) {
    if (bucket->reduction_pending) {
      bucket->reduction_pending = false;
      compute.wait(*bucket->reduced, bucket->reduce_label);
    }
  }
  release_packed_gradients(0);
}

void Reducer::discard(Bucket& bucket) {
  if (bucket.reduction_pending) {
    bucket.reduction_pending = false;
    bucket.reduced->synchronize(device_.timeout(), bucket.reduce_label);
  }
  std::fill(bucket.accumulated_params.begin(), bucket.accumulated_params.end(), 0);
  bucket.has_accumulated = false;
  for (Unit* unit : bucket.units) {
    forget_arrived(*unit);
    unit->port.drop_gradients();
  }
  release_packed_gradients(0);
}

// See Note [gradient lifetime].
void Reducer::take_gradients(Bucket& bucket, const Units& units) {
  release_packed_gradients(kGradientsInFlight - 1);
  std::fill(bucket.gradients.begin(), bucket.gradients.end(), nullptr);
  packed_gradients_.push_back({&bucket, {}});
  std::vector<std::shared_ptr<void>>& keep_alive = packed_gradients_.back().keep_alive;
  keep_alive.reserve(units.size());
  for (const Unit* unit : units) {
    keep_alive.push_back(
        unit->port.take_gradients(bucket.gradients.data() + unit->first_trainable));
  }
}

void Reducer::pack(Bucket& bucket, const Units& units, void* destination, bool accumulate) {
  const UnitLayout& layout = bucket.layout;
  packer_.pack(stream_, bucket.pack_plan, bucket.gradients.data(), bucket.gradient_dtype,
               destination, layout.reduce_dtype(), units.front()->pack_scale, accumulate);
  stream_.record(*bucket.packed);
  ledger_.copied(static_cast<std::size_t>(layout.grad_numel()) *
                 static_cast<std::size_t>(layout.world_size()) *
                 (itemsize(bucket.gradient_dtype) + itemsize(layout.reduce_dtype())));
}

// Without sharded gradients to add to, without a cast or a scale, the reduction writes the flat
// gradient itself. Else each parameter's chunk is cast or added from the reduce output.
bool Reducer::choose_finish(Bucket& bucket, const Units& units) {
  const UnitLayout& layout = bucket.layout;
  bool direct = layout.reduce_dtype() == layout.grad_dtype() &&
                units.front()->reduce_scale == 1.0 && units.size() == bucket.units.size();
  std::fill(bucket.finish_modes.begin(), bucket.finish_modes.end(), CastMode::Skip);
  for (const Unit* unit : units) {
    for (std::size_t i = 0; i < unit->arrived.size(); ++i) {
      const bool has_gradient = unit->port.has_sharded_gradient(i);
      direct = direct && !has_gradient;
      if (has_arrived(bucket, *unit, i)) {
        bucket.finish_modes[unit->first_trainable + i] =
            has_gradient ? CastMode::Add : CastMode::Write;
      }
    }
  }
  return direct;
}

void Reducer::finish(Bucket& bucket, const Units& units, const void* output) {
  packer_.cast(stream_, bucket.finish_plan, bucket.finish_modes.data(), output,
               bucket.flat_gradient(), units.front()->reduce_scale);
  for (std::size_t i = 0; i < bucket.finish_modes.size(); ++i) {
    if (bucket.finish_modes[i] != CastMode::Skip) {
      const CastEntry& entry = bucket.finish_plan.entries[i];
      ledger_.copied(static_cast<std::size_t>(entry.numel) *
                     (itemsize(entry.source_dtype) + itemsize(entry.destination_dtype)));
    }
  }
}

void Reducer::hand_over(Bucket& bucket, const Units& units) {
  for (const Unit* unit : units) {
    for (std::size_t i = 0; i < unit->arrived.size(); ++i) {
      if (has_arrived(bucket, *unit, i)) {
        unit->port.hand_over_gradient(i);
      }
    }
  }
}

// What other units have accumulated stays.
void Reducer::clear_accumulated(Bucket& bucket, const Units& units) {
  if (!bucket.has_accumulated) {
    return;
  }
  for (const Unit* unit : units) {
    const auto first =
        bucket.accumulated_params.begin() + static_cast<std::ptrdiff_t>(unit->first_trainable);
    std::fill(first, first + static_cast<std::ptrdiff_t>(unit->arrived.size()), 0);
  }
  bucket.has_accumulated =
      std::any_of(bucket.accumulated_params.begin(), bucket.accumulated_params.end(),
                  [](char accumulated) { return accumulated != 0; });
  if (!bucket.has_accumulated) {
    return;
  }
  const std::size_t element = itemsize(bucket.layout.reduce_dtype());
  auto* accumulated = static_cast<char*>(bucket.accumulated.get());
  for (const Unit* unit : units) {
    for (int rank = 0; rank < bucket.layout.world_size(); ++rank) {
      device_.fill(stream_,
                   accumulated + static_cast<std::size_t>(rank) * bucket.segment_bytes() +
                       unit->gradient_offset * element,
                   0, static_cast<std::size_t>(unit->layout.grad_numel()) * element);
    }
  }
}

// All but the newest `keep`.
void Reducer::release_packed_gradients(std::size_t keep) {
  Stream& compute = device_.compute_stream();
  while (packed_gradients_.size() > keep) {
    const Bucket& bucket = *packed_gradients_.front().bucket;
    compute.wait(*bucket.packed, bucket.reduce_label);
    packed_gradients_.pop_front();
  }
}

void* Reducer::output_buffer() {
  if (output_ == nullptr) {
    output_ = lane_.allocate(output_bytes_, BufferUse::Output);
  }
  return output_.get();
}

}  // namespace fsdp
