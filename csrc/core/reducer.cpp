#include "core/reducer.h"

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "device/host_clock.h"

namespace fsdp {
namespace {

bool are_alike(const Unit& a, const Unit& b) {
  return a.requires_gradient_sync == b.requires_gradient_sync && a.pack_scale == b.pack_scale &&
         a.reduce_scale == b.reduce_scale;
}

bool has_accumulated(const Bucket& bucket, const Unit& unit) {
  const auto first =
      bucket.accumulated_params.begin() + static_cast<std::ptrdiff_t>(unit.first_trainable);
  return std::any_of(first, first + static_cast<std::ptrdiff_t>(unit.arrived.size()),
                     [](char accumulated) { return accumulated != 0; });
}

// Whether trainable parameter i of the unit has a gradient to reduce.
bool has_gradient(const Bucket& bucket, const Unit& unit, std::size_t i) {
  return unit.arrived[i] != 0 || bucket.accumulated_params[unit.first_trainable + i] != 0;
}

// Parameters without a gradient on this rank may have one on another:
// Note [parameters that some ranks do not use] in core/backward_exchange.h.
void set_sharded_gradients(const Bucket& bucket, const std::vector<Unit*>& units) {
  for (Unit* unit : units) {
    unit->is_reduced = true;
    for (std::size_t i = 0; i < unit->arrived.size(); ++i) {
      if (has_gradient(bucket, *unit, i)) {
        unit->used[i] = 1;
        unit->port.set_sharded_gradient(i);
      }
    }
  }
}

void forget_arrived(Unit& unit) {
  std::fill(unit.arrived.begin(), unit.arrived.end(), 0);
  unit.arrived_count = 0;
  unit.is_complete = false;
}

char* accumulated_of(const Bucket& bucket, std::size_t piece) {
  const auto before = static_cast<std::size_t>(bucket.reductions[piece].segment_offset) *
                      itemsize(bucket.layout.reduce_dtype()) *
                      static_cast<std::size_t>(bucket.layout.world_size());
  return static_cast<char*>(bucket.accumulated.get()) + before;
}

}  // namespace

Reducer::Reducer(Device& device, Packer& packer, Lane& lane, Ledger& ledger, Announce announce)
    : device_(device),
      packer_(packer),
      lane_(lane),
      streams_(device, lane),
      ledger_(ledger),
      announce_(std::move(announce)),
      input_(device),
      output_read_(device.new_event()) {}

// Work in flight uses the buffers that are freed now.
Reducer::~Reducer() { lane_.drain(); }

void Reducer::plan_memory(const std::vector<std::unique_ptr<Bucket>>& buckets) {
  lane_.synchronize();
  const ReduceMemory memory = plan_reductions(uses_of(buckets));
  streams_.set_any_in_pieces(memory.any_in_pieces);
  const std::size_t input = memory.input_bytes;
  input_.reset(input > 0 ? lane_.allocate(input, BufferUse::Input) : nullptr, input);
  output_bytes_ = memory.output_bytes;
  output_.reset();
}

// See Note [units that differ].
void Reducer::pack_and_reduce(Bucket& bucket) {
  const Unit& first = *bucket.units.front();
  const auto is_alike = [&first](const Unit* unit) { return are_alike(first, *unit); };
  if (std::all_of(bucket.units.begin(), bucket.units.end(), is_alike)) {
    pack_and_reduce_alike(bucket, bucket.units);
    return;
  }
  Units left = bucket.units;
  while (!left.empty()) {
    const Unit& like = *left.front();
    const auto others = std::stable_partition(
        left.begin(), left.end(), [&like](const Unit* unit) { return are_alike(like, *unit); });
    const Units units(left.begin(), others);
    left.erase(left.begin(), others);
    const auto has_gradients = [&bucket](const Unit* unit) {
      return unit->needs_reduction() ||
             (unit->requires_gradient_sync && has_accumulated(bucket, *unit));
    };
    if (std::any_of(units.begin(), units.end(), has_gradients)) {
      pack_and_reduce_alike(bucket, units);
    }
  }
}

void Reducer::pack_and_reduce_alike(Bucket& bucket, const Units& units) {
  collect_gradients(bucket, units);
  if (units.front()->requires_gradient_sync) {
    reduce(bucket, units);
  } else {
    accumulate(bucket, units);
  }
  for (Unit* unit : units) {
    forget_arrived(*unit);
  }
}

void Reducer::accumulate(Bucket& bucket, const Units& units) {
  if (bucket.accumulated == nullptr) {
    bucket.accumulated = lane_.allocate(bucket.reduce_input_bytes(), BufferUse::Input);
  }
  streams_.follow_compute();
  Stream& before = begin_packing(bucket, /*into_accumulated=*/true);
  for (std::size_t i = 0; i < bucket.reductions.size(); ++i) {
    pack(bucket, units, i, accumulated_of(bucket, i), bucket.has_accumulated);
  }
  before.record(*bucket.packed);
  for (const Unit* unit : units) {
    for (std::size_t i = 0; i < unit->arrived.size(); ++i) {
      bucket.accumulated_params[unit->first_trainable + i] |= unit->arrived[i];
    }
  }
  bucket.has_accumulated = true;
}

// - Reduction

void Reducer::reduce(Bucket& bucket, const Units& units) {
  leave_held_gradients(bucket);
  const bool in_place = prepare_finish(bucket, units);
  const Range range(device_, bucket.reduce_label);
  const Reduction reduction = begin_reduction(bucket, units, in_place);
  for (std::size_t i = 0; i < bucket.reductions.size(); ++i) {
    reduce_piece(reduction, i);
  }
  reduction.before.record(*bucket.packed);
  set_sharded_gradients(bucket, units);
  clear_accumulated(bucket, units);
  end_reduction(reduction);
}

Reducer::Reduction Reducer::begin_reduction(Bucket& bucket, const Units& units, bool in_place) {
  auto* gradient = static_cast<char*>(bucket.flat_gradient());
  char* output = in_place || bucket.layout.world_size() == 1 ? gradient : output_buffer();
  Issue issue;
  if (ledger_.has_times()) {
    issue.at = host_clock::now();
    issue.possible = ledger_.mark_compute();
  }
  streams_.follow_compute();  // after all allocations: Note [memory and the compute stream]
  if (streams_.is_any_in_pieces()) {
    streams_.messages().wait(*(output == gradient ? bucket.reduced : output_read_),
                             bucket.reduce_label);
  }
  Stream& before = begin_packing(bucket, bucket.has_accumulated);
  Stream& after = streams_.after(bucket.reduces_in_pieces() && !in_place);
  return {bucket, units, in_place, output, issue, before, after};
}

void Reducer::reduce_piece(const Reduction& reduction, std::size_t number) {
  Bucket& bucket = reduction.bucket;
  void* input = input_of(reduction, number);
  const void* output = input;
  if (bucket.reduces_in_pieces() && !bucket.has_accumulated) {
    input_.wait_for_half(reduction.before, number, bucket.reduce_label);
  }
  pack(bucket, reduction.units, number, input, bucket.has_accumulated);
  if (bucket.layout.world_size() > 1) {
    streams_.order_after(streams_.messages(), reduction.before, bucket.reduce_label);
    send(reduction, bucket.reductions[number], input);
    output = reduction.output;
  }
  release_input(bucket, number);
  if (output != bucket.flat_gradient()) {
    streams_.order_after(reduction.after, streams_.messages(), bucket.reduce_label);
    finish(bucket, reduction.units, number, output);
  }
}

void Reducer::send(const Reduction& reduction, const ReducePiece& piece, const void* input) {
  const Bucket& bucket = reduction.bucket;
  const DType dtype = bucket.layout.reduce_dtype();
  const std::size_t bytes = bucket.reduce_input_bytes(piece);
  const std::size_t offset = static_cast<std::size_t>(piece.segment_offset) * itemsize(dtype);
  announce_(bucket, bytes);
  const Timed timed(ledger_, streams_.messages(), Work::Reduce, bucket.numbers(),
                    {bytes, reduction.issue}, /*follows=*/!bucket.reduces_in_pieces());
  lane_.communicator().reduce_scatter(streams_.messages(), input, reduction.output + offset,
                                      static_cast<std::size_t>(piece.pack_plan.segment_numel),
                                      dtype);
}

void Reducer::end_reduction(const Reduction& reduction) {
  Bucket& bucket = reduction.bucket;
  streams_.order_after(reduction.after, streams_.messages(), bucket.reduce_label);
  reduction.after.record(*bucket.reduced);
  if (streams_.is_any_in_pieces() && reduction.output != bucket.flat_gradient()) {
    reduction.after.record(*output_read_);
  }
  bucket.reduction_pending = true;
}

void Reducer::wait(const std::vector<std::unique_ptr<Bucket>>& buckets) {
  Stream& compute = device_.compute_stream();
  {
    const Timed timed(ledger_, compute, Work::WaitForReduction, kAllUnits);
    for (const auto& bucket : buckets) {
      if (bucket->reduction_pending) {
        bucket->reduction_pending = false;
        compute.wait(*bucket->reduced, bucket->reduce_label);
      }
    }
  }
  free_packed_gradients(0);
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
  free_packed_gradients(0);
}

// - Pack and finish

// Returns the stream that packs the bucket, ordered after the compute stream. Packing into the
// accumulated gradients also waits for all messages that read them.
Stream& Reducer::begin_packing(const Bucket& bucket, bool into_accumulated) {
  Stream& before = streams_.before(bucket.reduces_in_pieces());
  if (bucket.reduces_in_pieces()) {
    streams_.order_after_compute(before);
    if (into_accumulated) {
      input_.wait_for_both(before, bucket.reduce_label);
    }
  }
  return before;
}

void* Reducer::input_of(const Reduction& reduction, std::size_t piece) {
  const Bucket& bucket = reduction.bucket;
  if (bucket.has_accumulated) {
    return accumulated_of(bucket, piece);
  }
  if (reduction.in_place && bucket.layout.world_size() == 1) {
    return reduction.output;  // nothing to send: pack writes the flat gradient
  }
  return bucket.reduces_in_pieces() ? input_.half_of(piece) : input_.data();
}

// The messages issued so far are the last to read the piece's input.
void Reducer::release_input(const Bucket& bucket, std::size_t piece) {
  if (bucket.reduces_in_pieces()) {
    input_.release_half(streams_.messages(), piece);
  } else if (streams_.is_any_in_pieces()) {
    input_.release_both(streams_.messages());
  }
}

void Reducer::pack(Bucket& bucket, const Units& units, std::size_t number, void* destination,
                   bool accumulate) {
  const UnitLayout& layout = bucket.layout;
  const ReducePiece& piece = bucket.reductions[number];
  const void* const* gradients = bucket.gradients.data() + piece.first_trainable;
  const void* first_row = nullptr;
  if (piece.part.is_of_rows() && *gradients != nullptr) {
    first_row = static_cast<const char*>(*gradients) +
                static_cast<std::size_t>(piece.gradient_offset) * itemsize(bucket.gradient_dtype);
    gradients = &first_row;
  }
  Stream& stream = streams_.before(bucket.reduces_in_pieces());
  const Timed timed(ledger_, stream, Work::Pack, bucket.numbers());
  packer_.pack(stream, piece.pack_plan, gradients, bucket.gradient_dtype, destination,
               layout.reduce_dtype(), units.front()->pack_scale, accumulate);
  ledger_.count_copied_bytes(static_cast<std::size_t>(piece.pack_plan.segment_numel) *
                             static_cast<std::size_t>(layout.world_size()) *
                             (itemsize(bucket.gradient_dtype) + itemsize(layout.reduce_dtype())));
}

// The compute stream copies from gradients of the old memory.
void Reducer::leave_held_gradients(Bucket& bucket) {
  const auto is_held = [](const Unit* unit) { return unit->port.has_held_gradients(); };
  if (std::none_of(bucket.units.begin(), bucket.units.end(), is_held)) {
    return;
  }
  if (bucket.reduction_pending) {
    device_.compute_stream().wait(*bucket.reduced, bucket.reduce_label);
  }
  bucket.renew_gradients(device_);
}

// The reduction writes the flat gradient itself if nothing is cast or scaled and no sharded
// gradient exists to add to. Otherwise each parameter's chunk is cast or added from the reduce
// output.
bool Reducer::prepare_finish(Bucket& bucket, const Units& units) {
  bool in_place = reduces_in_place(bucket.layout, units.front()->reduce_scale) &&
                  units.size() == bucket.units.size();
  std::fill(bucket.finish_modes.begin(), bucket.finish_modes.end(), CastMode::Skip);
  for (const Unit* unit : units) {
    for (std::size_t i = 0; i < unit->arrived.size(); ++i) {
      const bool adds = unit->port.has_sharded_gradient(i);
      if (adds) {
        unit->port.import_sharded_gradient(i);
        in_place = false;
      }
      bucket.finish_modes[unit->first_trainable + i] = adds ? CastMode::Add : CastMode::Write;
    }
  }
  return in_place;
}

void Reducer::finish(Bucket& bucket, const Units& units, std::size_t number, const void* output) {
  const ReducePiece& piece = bucket.reductions[number];
  const CastMode* modes = bucket.finish_modes.data() + piece.first_trainable;
  Stream& stream = streams_.after(bucket.reduces_in_pieces());
  const Timed timed(ledger_, stream, Work::FinishReduction, bucket.numbers());
  packer_.cast(stream, piece.finish_plan, modes, output, bucket.flat_gradient(),
               units.front()->reduce_scale);
  for (std::size_t i = 0; i < piece.finish_plan.entries.size(); ++i) {
    if (modes[i] != CastMode::Skip) {
      const CastEntry& entry = piece.finish_plan.entries[i];
      ledger_.count_copied_bytes(
          static_cast<std::size_t>(entry.numel) *
          (itemsize(entry.source_dtype) + itemsize(entry.destination_dtype)));
    }
  }
}

char* Reducer::output_buffer() {
  if (output_ == nullptr) {
    output_ = lane_.allocate(output_bytes_, BufferUse::Output);
  }
  return static_cast<char*>(output_.get());
}

// - Gradients

// Other units keep what they have accumulated.
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
  for (const Unit* unit : units) {
    clear_accumulated_of(bucket, *unit);
  }
  if (streams_.is_any_in_pieces()) {
    input_.release_both(streams_.messages());
  }
}

void Reducer::clear_accumulated_of(Bucket& bucket, const Unit& unit) {
  const std::size_t element = itemsize(bucket.layout.reduce_dtype());
  const auto unit_begin = static_cast<std::int64_t>(unit.gradient_offset);
  const std::int64_t unit_end = unit_begin + unit.layout.grad_numel();
  for (std::size_t i = 0; i < bucket.reductions.size(); ++i) {
    const ReducePiece& piece = bucket.reductions[i];
    const std::int64_t numel = piece.pack_plan.segment_numel;
    const std::int64_t begin = std::max(unit_begin, piece.segment_offset);
    const std::int64_t end = std::min(unit_end, piece.segment_offset + numel);
    for (int rank = 0; begin < end && rank < bucket.layout.world_size(); ++rank) {
      const std::int64_t first = rank * numel + begin - piece.segment_offset;
      device_.fill(streams_.messages(),
                   accumulated_of(bucket, i) + static_cast<std::size_t>(first) * element, 0,
                   static_cast<std::size_t>(end - begin) * element);
    }
  }
}

// See Note [gradient lifetime].
void Reducer::collect_gradients(Bucket& bucket, const Units& units) {
  free_packed_gradients(kGradientsInFlight - 1);
  std::fill(bucket.gradients.begin(), bucket.gradients.end(), nullptr);
  packed_gradients_.push_back({&bucket, {}});
  std::vector<std::shared_ptr<void>>& keep_alive = packed_gradients_.back().keep_alive;
  keep_alive.reserve(units.size());
  for (const Unit* unit : units) {
    keep_alive.push_back(
        unit->port.extract_gradients(bucket.gradients.data() + unit->first_trainable));
  }
}

// Keeps the newest `keep`.
void Reducer::free_packed_gradients(std::size_t keep) {
  while (packed_gradients_.size() > keep) {
    const Bucket& bucket = *packed_gradients_.front().bucket;
    if (keep > 0) {
      ledger_.wait(*bucket.packed, bucket.reduce_label, Work::WaitForReduction, bucket.numbers());
    } else {  // not a wait of its own: the compute stream has waited for the reductions
      device_.compute_stream().wait(*bucket.packed, bucket.reduce_label);
    }
    packed_gradients_.pop_front();
  }
}

}  // namespace fsdp
