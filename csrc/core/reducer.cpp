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

std::size_t segment_bytes(const UnitLayout& layout) {
  return static_cast<std::size_t>(layout.grad_numel()) * itemsize(layout.reduce_dtype());
}

std::size_t reduce_input_bytes(const UnitLayout& layout) {
  return segment_bytes(layout) * static_cast<std::size_t>(layout.world_size());
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

void Reducer::plan_memory(const std::vector<std::unique_ptr<Unit>>& units) {
  stream_.synchronize();
  input_bytes_ = 0;
  output_bytes_ = 0;
  for (const auto& unit : units) {
    input_bytes_ = std::max(input_bytes_, reduce_input_bytes(unit->layout));
    output_bytes_ = std::max(output_bytes_, segment_bytes(unit->layout));
  }
  input_ = input_bytes_ > 0 ? lane_.allocate(input_bytes_, BufferUse::Input) : nullptr;
  output_.reset();
}

void Reducer::reduce(Unit& unit) {
  take_gradients(unit);
  const UnitLayout& layout = unit.layout;
  const bool alone = layout.world_size() == 1;
  const bool direct = choose_finish(unit);
  const Range range(device_, unit.reduce_label);
  void* gradient = unit.port.flat_gradient();
  void* reduced = direct || alone ? gradient : output_buffer();
  // After whatever was allocated: Note [memory and the compute stream].
  device_.compute_stream().record(*compute_reached_);
  stream_.wait(*compute_reached_, kComputeStream);

  void* input = unit.has_accumulated ? unit.accumulated.get() : input_.get();
  if (alone && direct && !unit.has_accumulated) {
    input = gradient;
  }
  pack(unit, input, unit.has_accumulated);
  const void* output = input;
  if (!alone) {
    lane_.communicator().announce(unit.reduce_label);
    announce_(unit, reduce_input_bytes(layout));
    lane_.communicator().reduce_scatter(stream_, input, reduced,
                                        static_cast<std::size_t>(layout.grad_numel()),
                                        layout.reduce_dtype());
    output = reduced;
  }
  if (output != gradient) {
    finish(unit, output);
  }
  stream_.record(*unit.reduced);
  unit.reduction_pending = true;
  for (std::size_t i = 0; i < unit.trainable_count(); ++i) {
    if (unit.arrived[i] != 0 || unit.accumulated_params[i] != 0) {
      unit.port.hand_over_gradient(i);
    }
  }
  forget_arrived(unit);
  std::fill(unit.accumulated_params.begin(), unit.accumulated_params.end(), 0);
  unit.has_accumulated = false;
}

void Reducer::accumulate(Unit& unit) {
  take_gradients(unit);
  if (unit.accumulated == nullptr) {
    unit.accumulated = lane_.allocate(reduce_input_bytes(unit.layout), BufferUse::Input);
  }
  device_.compute_stream().record(*compute_reached_);
  stream_.wait(*compute_reached_, kComputeStream);
  pack(unit, unit.accumulated.get(), unit.has_accumulated);
  for (std::size_t i = 0; i < unit.trainable_count(); ++i) {
    unit.accumulated_params[i] = unit.accumulated_params[i] | unit.arrived[i];
  }
  unit.has_accumulated = true;
  forget_arrived(unit);
}

void Reducer::wait(const std::vector<std::unique_ptr<Unit>>& units) {
  Stream& compute = device_.compute_stream();
  for (const auto& unit : units) {
    if (unit->reduction_pending) {
      unit->reduction_pending = false;
      compute.wait(*unit->reduced, unit->reduce_label);
    }
  }
  release_packed_gradients(0);
}

void Reducer::discard(Unit& unit) {
  if (unit.reduction_pending) {
    unit.reduction_pending = false;
    unit.reduced->synchronize(device_.timeout(), unit.reduce_label);
  }
  forget_arrived(unit);
  std::fill(unit.accumulated_params.begin(), unit.accumulated_params.end(), 0);
  unit.has_accumulated = false;
  unit.port.drop_gradients();
  release_packed_gradients(0);
}

// See Note [gradient lifetime].
void Reducer::take_gradients(Unit& unit) {
  release_packed_gradients(kGradientsInFlight - 1);
  packed_gradients_.push_back({&unit, unit.port.take_gradients(unit.gradients.data())});
}

void Reducer::pack(Unit& unit, void* destination, bool accumulate) {
  const UnitLayout& layout = unit.layout;
  packer_.pack(stream_, unit.pack_plan, unit.gradients.data(), unit.port.gradient_dtype(),
               destination, layout.reduce_dtype(), unit.pack_scale, accumulate);
  stream_.record(*unit.packed);
  ledger_.copied(static_cast<std::size_t>(layout.grad_numel()) *
                 static_cast<std::size_t>(layout.world_size()) *
                 (itemsize(unit.port.gradient_dtype()) + itemsize(layout.reduce_dtype())));
}

// Without sharded gradients to add to, without a cast or a scale, the reduction writes the flat
// gradient itself. Else each parameter's chunk is cast or added from the reduce output.
bool Reducer::choose_finish(Unit& unit) {
  const UnitLayout& layout = unit.layout;
  bool direct = layout.reduce_dtype() == layout.grad_dtype() && unit.reduce_scale == 1.0;
  for (std::size_t i = 0; i < unit.trainable_count(); ++i) {
    const bool has_gradient = unit.port.has_sharded_gradient(i);
    direct = direct && !has_gradient;
    const bool arrived = unit.arrived[i] != 0 || unit.accumulated_params[i] != 0;
    unit.finish_modes[i] = !arrived       ? CastMode::Skip
                           : has_gradient ? CastMode::Add
                                          : CastMode::Write;
  }
  return direct;
}

void Reducer::finish(Unit& unit, const void* output) {
  packer_.cast(stream_, unit.finish_plan, unit.finish_modes.data(), output,
               unit.port.flat_gradient(), unit.reduce_scale);
  for (std::size_t i = 0; i < unit.trainable_count(); ++i) {
    if (unit.finish_modes[i] != CastMode::Skip) {
      const CastEntry& entry = unit.finish_plan.entries[i];
      ledger_.copied(static_cast<std::size_t>(entry.numel) *
                     (itemsize(entry.source_dtype) + itemsize(entry.destination_dtype)));
    }
  }
}

void Reducer::forget_arrived(Unit& unit) {
  std::fill(unit.arrived.begin(), unit.arrived.end(), 0);
  unit.arrived_count = 0;
}

// All but the newest `keep`.
void Reducer::release_packed_gradients(std::size_t keep) {
  Stream& compute = device_.compute_stream();
  while (packed_gradients_.size() > keep) {
    const Unit& unit = *packed_gradients_.front().unit;
    compute.wait(*unit.packed, unit.reduce_label);
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
