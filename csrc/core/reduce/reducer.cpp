#include "core/reduce/reducer.h"

#include <algorithm>

#include "core/reduce/user_collective.h"
#include "core/schedule/announcer.h"
#include "device/host_clock.h"

namespace fsdp {
namespace {

bool are_alike(const Unit& a, const Unit& b) {
  return &a == &b || (a.requires_gradient_sync == b.requires_gradient_sync && a.scale_alike(b) &&
                      !a.is_unmergeable && !b.is_unmergeable &&
                      a.port.keeps_gradients() == b.port.keeps_gradients());
}

// Whether trainable parameter i of the unit has a gradient to reduce.
bool has_gradient(const Bucket& bucket, const Unit& unit, std::size_t i) {
  return unit.gradients.has_arrived(i) || bucket.reduction.accumulated().has(unit, i);
}

}  // namespace

Reducer::Reducer(Device& device, Packer& packer, Lane& lane, Lane* replicas, Ledger& ledger,
                 Announcer& announcer)
    : device_(device),
      packer_(packer),
      lane_(lane),
      streams_(device, lane_),
      ledger_(ledger),
      announcer_(announcer),
      replicas_(replicas),
      input_(device),
      output_(device),
      packed_gradients_(device, streams_, ledger),
      nonfinite_(device) {}

// Work in flight uses the buffers that are freed now.
Reducer::~Reducer() {
  lane_.drain();
  if (replicas_ != nullptr) {
    replicas_->drain();
  }
}

// - Packing

void Reducer::pack_and_reduce(Bucket& bucket) {
  packed_gradients_.free();
  packed_gradients_.follow_arrivals(bucket);
  pack_and_reduce_by_setting(bucket);
  bucket.reduction.arrived_on_.clear();
}

// See Note [units that differ].
void Reducer::pack_and_reduce_by_setting(Bucket& bucket) {
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
    const auto has_gradients = [](const Unit* unit) {
      return unit->gradients.has_left_over(unit->requires_gradient_sync);
    };
    if (std::any_of(units.begin(), units.end(), has_gradients)) {
      pack_and_reduce_alike(bucket, units);
    }
  }
}

void Reducer::pack_and_reduce_alike(Bucket& bucket, const Units& units) {
  const bool syncs = units.front()->requires_gradient_sync;
  const bool packs = syncs || !units.front()->port.keeps_gradients();
  if (packs) {
    packings_ += 1;
    packed_gradients_.collect(bucket, units);
  }
  if (syncs) {
    reduce(bucket, units);
  } else if (packs) {
    accumulate(bucket, units);
  }
  for (Unit* unit : units) {
    unit->gradients.awaits_reduction_ =
        !syncs && (unit->gradients.awaits_reduction_ || unit->gradients.any_arrived());
    unit->gradients.reset_arrived();
  }
}

void Reducer::accumulate(Bucket& bucket, const Units& units) {
  const Range range(device_, bucket.ranges.accumulate);
  bucket.reduction.accumulated_.allocate(device_);
  streams_.follow_compute();
  Stream& before = begin_packing(bucket, /*into_accumulated=*/true);
  for (std::size_t i = 0; i < bucket.reduction.pieces_.size(); ++i) {
    pack(bucket, units, i, bucket.reduction.accumulated_.piece(i),
         bucket.reduction.accumulated_.any());
  }
  before.record(*bucket.reduction.packed_);
  bucket.reduction.accumulated_.add_arrived(units, packings_);
}

// - Reduction

void Reducer::reduce(Bucket& bucket, const Units& units) {
  check_updates(units);
  finish_updates(/*most=*/1);
  ensure_gradient_memory(bucket);
  const bool in_place = prepare_finish(bucket, units);
  const Range range(device_, bucket.ranges.reduce);
  const Reduction reduction = begin_reduction(bucket, units, in_place);
  void* const reduced = reduce_piece(reduction, 0);
  for (std::size_t i = 1; i < bucket.reduction.pieces_.size(); ++i) {
    reduce_piece(reduction, i);
  }
  if (units.front()->reduce_hook != nullptr && reduced != nullptr) {
    apply_hook(reduction, reduced);
  }
  if (!scatters(reduction.route)) {  // its gradient was finished from the input
    release_input(bucket, reduction.first_message);
  }
  set_sharded_gradients(bucket, units);
  reset_accumulated(bucket, units);
  end_reduction(reduction);
}

// Returns whether the reduction writes straight into the flat gradient: nothing is cast or scaled,
// there is no sharded gradient to add to, and the memory is registered as on the other ranks.
// Otherwise each parameter's chunk is cast or added from the reduce output.
bool Reducer::prepare_finish(Bucket& bucket, const Units& units) {
  bool in_place = reduces_in_place(bucket.layout, units.front()->post_scale) &&
                  units.size() == bucket.units.size() &&
                  (!bucket.reduction.into_window_ || lane_.is_registered(bucket.flat_gradient()));
  std::vector<CastMode>& modes = bucket.reduction.finish_modes_;
  std::fill(modes.begin(), modes.end(), CastMode::Skip);
  for (Unit* unit : units) {
    for (std::size_t i = 0; i < unit->gradients.count(); ++i) {
      const bool is_shown = unit->port.has_sharded_gradient(i);
      if (is_shown) {
        unit->port.import_sharded_gradient(i);
      }
      // A second reduction in one backward adds to a gradient that only other ranks show so far.
      const bool adds = is_shown || unit->gradients.is_reduced();
      in_place = in_place && !adds;
      const std::size_t at = unit->first_trainable + i;
      modes[at] = adds ? CastMode::Add : CastMode::Write;
      const std::uint64_t accumulated = bucket.reduction.accumulated_.since(*unit, i);
      unit->gradients.reduced_since_[i] = accumulated != 0                 ? accumulated
                                          : unit->gradients.has_arrived(i) ? packings_
                                                                           : kNoPacking;
    }
  }
  return in_place;
}

Reducer::Route Reducer::route_of(const Bucket& bucket) const {
  const bool has_replicas = replicas_ != nullptr;
  if (bucket.layout.world_size() > 1) {
    return has_replicas ? Route::ScatterAndSum : Route::Scatter;
  }
  return has_replicas ? Route::Sum : Route::Local;
}

Reducer::Reduction Reducer::begin_reduction(Bucket& bucket, const Units& units, bool in_place) {
  const Route route = route_of(bucket);
  const bool reads_whole = units.front()->reduce_hook != nullptr && bucket.reduction.is_in_pieces();
  const Into into = in_place || route == Route::Local ? Into::FlatGradient
                    : reads_whole                     ? Into::WholeOutput
                                                      : Into::HalfOfOutput;
  if (into != Into::FlatGradient) {
    prepare_output(reads_whole ? bucket.buffers.reduce_output : 0);
  }
  std::size_t& messages = bucket.mesh == nullptr ? messages_ : messages_of_other_meshes_;
  const std::size_t first_message = messages;
  messages += bucket.reduction.pieces_.size();
  Issue issue;
  if (ledger_.has_times()) {
    issue.at = host_clock::now();
    issue.possible = ledger_.mark_compute();
  }
  streams_.follow_compute();  // after all allocations: Note [memory and the compute stream]
  if (halves_output() && into == Into::FlatGradient) {
    streams_.messages().wait(*bucket.reduction.reduced_, bucket.reduction.label);
  } else if (into == Into::WholeOutput) {
    output_.wait_for_both(streams_.messages(), bucket.reduction.label);
  }
  Stream& before = begin_packing(bucket, bucket.reduction.accumulated_.any());
  Stream& after = sums(route) ? replicas_->stream()
                              : streams_.after(bucket.reduction.is_in_pieces() && !in_place);
  return {bucket, units, route, in_place, into, first_message, issue, before, after};
}

// Returns the stream that packs the bucket, ordered after the compute stream. If it packs into the
// accumulated gradients, it also waits for all messages that read them.
Stream& Reducer::begin_packing(const Bucket& bucket, bool into_accumulated) {
  Stream& before = streams_.before(packs_apart(bucket));
  if (packs_apart(bucket)) {
    streams_.order_after_compute(before);
    if (into_accumulated) {
      input_.wait_for_both(before, bucket.reduction.label);
    }
  }
  return before;
}

void* Reducer::reduce_piece(const Reduction& reduction, std::size_t number) {
  Bucket& bucket = reduction.bucket;
  const std::size_t half = reduction.first_message + number;
  if (reduction.into == Into::HalfOfOutput && halves_output()) {
    output_.wait_for_half(streams_.messages(), half, bucket.reduction.label);
  }
  void* input = input_of(reduction, number);
  if (packs_apart(bucket) && !bucket.reduction.accumulated_.any()) {
    input_.wait_for_half(reduction.before, half, bucket.reduction.label);
  }
  pack(bucket, reduction.units, number, input, bucket.reduction.accumulated_.any());
  if (number + 1 == bucket.reduction.pieces_.size()) {
    // Before the message, which may run on the same stream.
    reduction.before.record(*bucket.reduction.packed_);
  }
  void* const reduced = sum(reduction, number, input);
  const bool has_hook = reduction.units.front()->reduce_hook != nullptr;
  if (reduced != place_in(bucket.flat_gradient(), bucket, number) && !has_hook) {
    streams_.order_after(reduction.after, streams_.messages(), bucket.reduction.label);
    finish(reduction, number, reduced);
  }
  return reduced;
}

void* Reducer::input_of(const Reduction& reduction, std::size_t piece) {
  const Bucket& bucket = reduction.bucket;
  if (bucket.reduction.accumulated_.any()) {
    return bucket.reduction.accumulated_.piece(piece);
  }
  const bool is_summed_in_place =
      reduction.route == Route::Sum || (reduction.route == Route::Local && reduction.in_place);
  if (is_summed_in_place) {
    return output_of(reduction, piece);  // pack writes the output or the flat gradient
  }
  return packs_apart(bucket) ? input_.half_of(reduction.first_message + piece) : input_.data();
}

void Reducer::pack(Bucket& bucket, const Units& units, std::size_t number, void* destination,
                   bool accumulate) {
  const UnitLayout& layout = bucket.layout;
  const ReducePiece& piece = bucket.reduction.pieces_[number];
  const void* const* gradients = bucket.reduction.gradients_.data() + piece.first_trainable;
  const void* first_row = nullptr;
  if (piece.part.is_of_rows() && *gradients != nullptr) {
    first_row =
        static_cast<const char*>(*gradients) +
        static_cast<std::size_t>(piece.gradient_offset) * itemsize(piece.gradient_dtypes.front());
    gradients = &first_row;
  }
  Stream& stream = streams_.before(packs_apart(bucket));
  const Timed timed(ledger_, stream, Work::Pack, bucket.numbers());
  for (const DType dtype : piece.gradient_dtypes) {
    // The first pass writes zeros where it has no gradient. Later passes add theirs.
    const bool adds = accumulate || dtype != piece.gradient_dtypes.front();
    packer_.pack(stream, piece.pack, gradients_of(bucket, piece, gradients, dtype), dtype,
                 destination, layout.reduce_dtype(), units.front()->pre_scale, adds,
                 {bucket.units.front()->gradients.nonfinite_marks_ + piece.first_trainable,
                  device_.is_capturing() ? kCapturedPacking : packings_});
    ledger_.counters().copied_bytes += static_cast<std::size_t>(piece.pack.segment_numel) *
                                       static_cast<std::size_t>(layout.world_size()) *
                                       (itemsize(dtype) + itemsize(layout.reduce_dtype()));
  }
}

// The piece's gradients of one dtype. Gradients of other dtypes are left out.
const void* const* Reducer::gradients_of(Bucket& bucket, const ReducePiece& piece,
                                         const void* const* gradients, DType dtype) {
  if (piece.gradient_dtypes.size() == 1) {
    return gradients;
  }
  for (std::size_t i = 0; i < piece.pack.entries.size(); ++i) {
    const bool has_dtype = bucket.reduction.gradient_dtypes_[piece.first_trainable + i] == dtype;
    bucket.reduction.gradients_of_dtype_[i] = has_dtype ? gradients[i] : nullptr;
  }
  return bucket.reduction.gradients_of_dtype_.data();
}

// Returns where the sum is.
void* Reducer::sum(const Reduction& reduction, std::size_t number, void* input) {
  const Bucket& bucket = reduction.bucket;
  streams_.order_after(streams_.messages(), reduction.before, bucket.reduction.label);
  switch (reduction.route) {
    case Route::Local:
      send_by_hook(reduction, streams_.messages(), nullptr, input,
                   static_cast<std::size_t>(bucket.layout.grad_numel()));
      return input;
    case Route::Scatter:
    case Route::ScatterAndSum:
      send(reduction, number, input);
      release_input(bucket, reduction.first_message + number);
      break;
    case Route::Sum:
      copy_to_output(reduction, input);
      break;
  }
  if (sums(reduction.route)) {
    sum_over_replicas(reduction, number);
  }
  return output_of(reduction, number);
}

void Reducer::send(const Reduction& reduction, std::size_t number, void* input) {
  const Bucket& bucket = reduction.bucket;
  const ReducePiece& piece = bucket.reduction.pieces_[number];
  const DType dtype = bucket.layout.reduce_dtype();
  const std::size_t bytes = bucket.reduction.input_bytes(piece);
  const Range range(device_, bucket.ranges.reduce_scatter, bytes);
  const Sending sending =
      announcer_.announce(bucket, {Collective::ReduceScatter, lane_, bucket.reduction.communicator_,
                                   bucket.reduction.label, number, bytes, dtype, reduction.issue,
                                   /*follows=*/!packs_apart(bucket)});
  const auto numel = static_cast<std::size_t>(piece.pack.segment_numel);
  void* const output = output_of(reduction, number);
  if (!send_by_hook(reduction, streams_.messages(), input, output, numel)) {
    bucket.reduction.communicator_.reduce_scatter(streams_.messages(), input, output, numel, dtype);
  }
}

// Has a hook send the message in place of the transport, if the unit has one: Note [communication
// hooks], and for a reduce-scatter, which has an input, Note [custom collectives].
bool Reducer::send_by_hook(const Reduction& reduction, Stream& stream, void* input, void* output,
                           std::size_t numel) {
  const Unit& unit = *reduction.units.front();
  const bool scatters = input != nullptr && unit.communication_hook == nullptr;
  UserCollective* const hook = scatters ? unit.scatter_hook.get() : unit.communication_hook.get();
  if (hook == nullptr) {
    return false;
  }
  const UnitLayout& layout = reduction.bucket.layout;
  const std::size_t input_numel =
      input == nullptr ? 0 : numel * static_cast<std::size_t>(layout.world_size());
  hook->issue(stream, {output, numel, layout.reduce_dtype(), input, input_numel});
  return true;
}

// See Note [replicas].
void Reducer::sum_over_replicas(const Reduction& reduction, std::size_t number) {
  const Bucket& bucket = reduction.bucket;
  const ReducePiece& piece = bucket.reduction.pieces_[number];
  const DType dtype = bucket.layout.reduce_dtype();
  const auto numel = static_cast<std::size_t>(piece.pack.segment_numel);
  Lane& lane = *replicas_;
  streams_.order_after(lane.stream(), streams_.messages(), bucket.reduction.label);
  const std::size_t bytes = numel * itemsize(dtype);
  const Range range(device_, bucket.ranges.all_reduce, bytes);
  const Sending sending = announcer_.announce(
      bucket, {Collective::AllReduce, lane, lane.communicator(), bucket.reduction.all_reduce_label,
               number, bytes, dtype, reduction.issue});
  void* const output = output_of(reduction, number);
  if (!send_by_hook(reduction, lane.stream(), nullptr, output, numel)) {
    lane.communicator().all_reduce(lane.stream(), output, numel, dtype);
  }
}

// Copies one rank's accumulated gradients, because other units of the bucket may go on accumulating
// in `input`.
void Reducer::copy_to_output(const Reduction& reduction, const void* input) {
  const UnitLayout& layout = reduction.bucket.layout;
  void* const output = output_of(reduction, 0);  // one rank sends no pieces
  if (input == output) {
    return;
  }
  const std::size_t bytes =
      static_cast<std::size_t>(layout.grad_numel()) * itemsize(layout.reduce_dtype());
  device_.copy(streams_.messages(), input, output, bytes);
  ledger_.counters().copied_bytes += 2 * bytes;
}

char* Reducer::output_of(const Reduction& reduction, std::size_t piece) const {
  switch (reduction.into) {
    case Into::FlatGradient:
      return place_in(reduction.bucket.flat_gradient(), reduction.bucket, piece);
    case Into::WholeOutput:
      return place_in(output_.data(), reduction.bucket, piece);
    case Into::HalfOfOutput:
      break;
  }
  return halves_output() ? output_.half_of(reduction.first_message + piece) : output_.data();
}

// `segment` is one rank's, of the whole bucket, in reduce_dtype.
char* Reducer::place_in(void* segment, const Bucket& bucket, std::size_t piece) {
  const auto offset = static_cast<std::size_t>(bucket.reduction.pieces_[piece].first_gradient);
  return static_cast<char*>(segment) + offset * itemsize(bucket.layout.reduce_dtype());
}

// The messages issued so far are the last to read the piece's input.
void Reducer::release_input(const Bucket& bucket, std::size_t half) {
  if (packs_apart(bucket)) {
    input_.release_half(streams_.messages(), half);
  } else if (packs_ahead_ || streams_.is_any_in_pieces()) {
    input_.release_both(streams_.messages());
  }
}

void Reducer::finish(const Reduction& reduction, std::size_t number, const void* output) {
  Bucket& bucket = reduction.bucket;
  const ReducePiece& piece = bucket.reduction.pieces_[number];
  const CastMode* modes = bucket.reduction.finish_modes_.data() + piece.first_trainable;
  const Timed timed(ledger_, reduction.after, Work::FinishReduction, bucket.numbers());
  packer_.cast(reduction.after, piece.finish, modes, output, bucket.flat_gradient(),
               reduction.units.front()->post_scale);
  for (std::size_t i = 0; i < piece.finish.entries.size(); ++i) {
    if (modes[i] != CastMode::Skip) {
      const CastEntry& entry = piece.finish.entries[i];
      ledger_.counters().copied_bytes +=
          static_cast<std::size_t>(entry.numel) *
          (itemsize(entry.source_dtype) + itemsize(entry.destination_dtype));
    }
  }
  if (reduction.into == Into::HalfOfOutput && halves_output()) {
    output_.release_half(reduction.after, reduction.first_message + number);
  }
}

// Note [reduce hooks] in core/reduce/user_collective.h. `reduced` is this rank's segment of the
// whole bucket.
void Reducer::apply_hook(const Reduction& reduction, void* reduced) {
  Bucket& bucket = reduction.bucket;
  const Unit& unit = *reduction.units.front();
  const DType dtype = bucket.layout.reduce_dtype();
  streams_.order_after(reduction.after, streams_.messages(), bucket.reduction.label);
  unit.reduce_hook->issue(reduction.after,
                          {static_cast<char*>(reduced) + unit.gradient_offset * itemsize(dtype),
                           static_cast<std::size_t>(unit.layout.grad_numel()), dtype});
  if (reduced != bucket.flat_gradient()) {
    for (std::size_t i = 0; i < bucket.reduction.pieces_.size(); ++i) {
      finish(reduction, i, place_in(reduced, bucket, i));
    }
  }
}

// Parameters without a gradient on this rank may have one on another:
// Note [parameters that some ranks do not use] in core/agree/rank_exchange.h.
void Reducer::set_sharded_gradients(const Bucket& bucket, const Units& units) {
  for (Unit* unit : units) {
    unit->gradients.is_reduced_ = true;
    for (std::size_t i = 0; i < unit->gradients.count(); ++i) {
      const bool gets_zeros = unit->reduces_unused && !unit->gradients.is_frozen(i);
      if (gets_zeros || has_gradient(bucket, *unit, i)) {
        unit->gradients.used_[i] = 1;
        unit->port.set_sharded_gradient(i);
      }
    }
  }
}

// Other units keep their accumulated gradients.
void Reducer::reset_accumulated(Bucket& bucket, const Units& units) {
  if (!bucket.reduction.accumulated_.any()) {
    return;
  }
  bucket.reduction.accumulated_.reset(device_, streams_.messages(), units);
  if (bucket.reduction.accumulated_.any() && (packs_ahead_ || streams_.is_any_in_pieces())) {
    input_.release_both(streams_.messages());
  }
}

void Reducer::end_reduction(const Reduction& reduction) {
  Bucket& bucket = reduction.bucket;
  streams_.order_after(reduction.after, streams_.messages(), bucket.reduction.label);
  reduction.after.record(*bucket.reduction.reduced_);
  if (reduction.into == Into::WholeOutput) {
    output_.release_both(reduction.after);
  }
  bucket.reduction.is_pending_ = true;
  update(reduction);
}

}  // namespace fsdp
