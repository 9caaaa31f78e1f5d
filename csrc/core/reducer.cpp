#include "core/reducer.h"

#include <algorithm>
#include <string>
#include <utility>

#include "core/check.h"

namespace fsdp {
namespace {

const std::string kComputeStream = "the compute stream";

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
  input_ = input_bytes_ > 0 ? device_.allocate(input_bytes_) : nullptr;
  output_.reset();
}

void Reducer::reduce(Unit& unit) {
  take_gradients(unit);
  const UnitLayout& layout = unit.layout;
  const bool direct = make_finish_plan(unit);
  device_.compute_stream().record(*compute_reached_);
  stream_.wait(*compute_reached_, kComputeStream);

  const bool alone = layout.world_size() == 1;
  void* gradient = unit.port.flat_gradient();
  void* input = unit.has_accumulated ? unit.accumulated.get() : input_.get();
  if (alone && direct && !unit.has_accumulated) {
    input = gradient;
  }
  pack(unit, input, unit.has_accumulated);
  const void* output = input;
  if (!alone) {
    announce_(unit, reduce_input_bytes(layout));
    void* destination = direct ? gradient : output_buffer();
    lane_.communicator().reduce_scatter(stream_, input, destination,
                                        static_cast<std::size_t>(layout.grad_numel()),
                                        layout.reduce_dtype());
    output = destination;
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
    unit.accumulated = device_.allocate(reduce_input_bytes(unit.layout));
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
  release_packed_gradients();
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
  release_packed_gradients();
}

void Reducer::take_gradients(Unit& unit) {
  // The addresses and the plan of a second reduction in one backward are written over those of
  // the first. That is rare (a parameter whose gradient came after its unit's inputs'), so wait.
  if (!unit.packed->query()) {
    unit.packed->synchronize(device_.timeout(), unit.reduce_label);
  }
  release_packed_gradients();
  packed_gradients_.push_back({unit.packed.get(), unit.port.take_gradients(unit.gradients.data())});
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
bool Reducer::make_finish_plan(Unit& unit) {
  if (unit.reduction_pending && !unit.reduced->query()) {
    unit.reduced->synchronize(device_.timeout(), unit.reduce_label);
  }
  const UnitLayout& layout = unit.layout;
  const DType from = layout.reduce_dtype();
  const DType to = layout.grad_dtype();
  bool direct = from == to && unit.reduce_scale == 1.0;
  unit.finish_plan.clear();
  for (std::size_t i = 0; i < unit.trainable_count(); ++i) {
    const bool has_gradient = unit.port.has_sharded_gradient(i);
    direct = direct && !has_gradient;
    if (unit.arrived[i] == 0 && unit.accumulated_params[i] == 0) {
      continue;
    }
    const PackEntry& entry = unit.pack_plan.entries[i];
    const auto offset = static_cast<std::size_t>(entry.offset);
    unit.finish_plan.push_back({offset * itemsize(from), offset * itemsize(to), entry.chunk_numel,
                                from, to, has_gradient});
  }
  return direct;
}

void Reducer::finish(Unit& unit, const void* output) {
  packer_.cast(stream_, unit.finish_plan, output, unit.port.flat_gradient(), unit.reduce_scale);
  for (const CastEntry& entry : unit.finish_plan) {
    ledger_.copied(static_cast<std::size_t>(entry.numel) *
                   (itemsize(entry.source_dtype) + itemsize(entry.destination_dtype)));
  }
}

void Reducer::forget_arrived(Unit& unit) {
  std::fill(unit.arrived.begin(), unit.arrived.end(), 0);
  unit.arrived_count = 0;
}

void Reducer::release_packed_gradients() {
  while (!packed_gradients_.empty() && packed_gradients_.front().packed->query()) {
    packed_gradients_.pop_front();
  }
}

void* Reducer::output_buffer() {
  if (output_ == nullptr) {
    output_ = device_.allocate(output_bytes_);
  }
  return output_.get();
}

}  // namespace fsdp
