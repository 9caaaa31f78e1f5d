#include "core/reducer.h"

#include <algorithm>
#include <string>
#include <utility>

#include "base/check.h"
#include "device/host_clock.h"

namespace fsdp {
namespace {

const std::string kComputeStream = "the compute stream";

constexpr int kBothHalves = 2;

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
      compute_reached_(device.new_event()),
      handed_over_(device.new_event()),
      sent_{device.new_event(), device.new_event()},
      output_read_(device.new_event()) {}

// What is in flight uses the buffers that go now.
Reducer::~Reducer() { lane_.drain(); }

void Reducer::plan_memory(const std::vector<std::unique_ptr<Bucket>>& buckets) {
  lane_.synchronize();
  const ReduceMemory memory = plan_reductions(uses_of(buckets));
  input_bytes_ = memory.input_bytes;
  output_bytes_ = memory.output_bytes;
  any_cut_ = memory.any_cut;
  if (any_cut_) {
    lane_.make_copy_streams();
  }
  input_ = input_bytes_ > 0 ? lane_.allocate(input_bytes_, BufferUse::Input) : nullptr;
  output_.reset();
}

// See Note [units that differ].
void Reducer::pack_and_reduce(Bucket& bucket) {
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
  auto* gradient = static_cast<char*>(bucket.flat_gradient());
  char* reduced = direct || alone ? gradient : static_cast<char*>(output_buffer());
  Issue issue;
  if (ledger_.has_times()) {
    issue.at = host_clock::now();
    issue.possible = ledger_.mark_compute();
  }
  // After whatever was allocated: Note [memory and the compute stream].
  device_.compute_stream().record(*compute_reached_);
  stream_.wait(*compute_reached_, kComputeStream);
  const bool in_pieces = bucket.reductions.size() > 1;
  if (any_cut_) {
    stream_.wait(*(reduced == gradient ? bucket.reduced : output_read_), bucket.reduce_label);
  }
  Stream& before = begin_packing(bucket, bucket.has_accumulated);
  Stream& after = in_pieces && !direct ? lane_.after() : stream_;
  for (std::size_t i = 0; i < bucket.reductions.size(); ++i) {
    const ReducePiece& piece = bucket.reductions[i];
    void* input = alone && direct && !bucket.has_accumulated ? gradient : input_of(bucket, i);
    if (in_pieces && !bucket.has_accumulated) {
      before.wait(*sent_[i % 2], bucket.reduce_label);
    }
    pack(bucket, units, i, input, bucket.has_accumulated);
    const void* output = input;
    if (!alone) {
      hand_over(before, stream_, bucket.reduce_label);
      output = reduced;
      lane_.communicator().announce(bucket.reduce_label);
      announce_(bucket, bucket.reduce_input_bytes(piece));
      const Timed timed(ledger_, stream_, Work::Reduce, bucket.numbers(),
                        {bucket.reduce_input_bytes(piece), issue}, /*follows=*/!in_pieces);
      lane_.communicator().reduce_scatter(stream_, input,
                                          reduced + static_cast<std::size_t>(piece.segment_offset) *
                                                        itemsize(layout.reduce_dtype()),
                                          static_cast<std::size_t>(piece.pack_plan.segment_numel),
                                          layout.reduce_dtype());
    }
    note_sent(in_pieces ? static_cast<int>(i % 2) : kBothHalves);
    if (output != gradient) {
      hand_over(stream_, after, bucket.reduce_label);
      finish(bucket, units, i, output);
    }
  }
  before.record(*bucket.packed);
  hand_over_gradients(bucket, units);
  clear_accumulated(bucket, units);
  hand_over(stream_, after, bucket.reduce_label);
  after.record(*bucket.reduced);
  if (any_cut_ && reduced != gradient) {
    after.record(*output_read_);
  }
  bucket.reduction_pending = true;
}

void Reducer::accumulate(Bucket& bucket, const Units& units) {
  take_gradients(bucket, units);
  if (bucket.accumulated == nullptr) {
    bucket.accumulated = lane_.allocate(bucket.reduce_input_bytes(), BufferUse::Input);
  }
  device_.compute_stream().record(*compute_reached_);
  stream_.wait(*compute_reached_, kComputeStream);
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

// The stream that packs the bucket, behind what the compute stream has reached. Where pieces are
// packed into what is accumulated, all that reads it comes before.
Stream& Reducer::begin_packing(const Bucket& bucket, bool into_accumulated) {
  if (bucket.reductions.size() == 1) {
    return stream_;
  }
  Stream& before = lane_.before();
  before.wait(*compute_reached_, kComputeStream);
  if (into_accumulated) {
    before.wait(*sent_[0], bucket.reduce_label);
    before.wait(*sent_[1], bucket.reduce_label);
  }
  return before;
}

// The input of those halves has been read by what stream_ was given so far.
void Reducer::note_sent(int half) {
  if (any_cut_) {
    for (int i = 0; i < kBothHalves; ++i) {
      if (half == i || half == kBothHalves) {
        stream_.record(*sent_[i]);
      }
    }
  }
}

void* Reducer::accumulated_of(const Bucket& bucket, std::size_t piece) {
  const auto before = static_cast<std::size_t>(bucket.reductions[piece].segment_offset) *
                      itemsize(bucket.layout.reduce_dtype()) *
                      static_cast<std::size_t>(bucket.layout.world_size());
  return static_cast<char*>(bucket.accumulated.get()) + before;
}

void* Reducer::input_of(const Bucket& bucket, std::size_t piece) {
  if (bucket.has_accumulated) {
    return accumulated_of(bucket, piece);
  }
  const bool second = bucket.reductions.size() > 1 && piece % 2 == 1;
  return static_cast<char*>(input_.get()) + (second ? input_bytes_ / 2 : 0);
}

void Reducer::pack(Bucket& bucket, const Units& units, std::size_t number, void* destination,
                   bool accumulate) {
  const UnitLayout& layout = bucket.layout;
  const ReducePiece& piece = bucket.reductions[number];
  const void* const* gradients = bucket.gradients.data() + piece.first_trainable;
  const void* from_its_rows = nullptr;
  if (piece.part.is_of_rows() && *gradients != nullptr) {
    from_its_rows =
        static_cast<const char*>(*gradients) +
        static_cast<std::size_t>(piece.gradient_offset) * itemsize(bucket.gradient_dtype);
    gradients = &from_its_rows;
  }
  Stream& stream = bucket.reductions.size() > 1 ? lane_.before() : stream_;
  const Timed timed(ledger_, stream, Work::Pack, bucket.numbers());
  packer_.pack(stream, piece.pack_plan, gradients, bucket.gradient_dtype, destination,
               layout.reduce_dtype(), units.front()->pack_scale, accumulate);
  ledger_.count_copied_bytes(static_cast<std::size_t>(piece.pack_plan.segment_numel) *
                             static_cast<std::size_t>(layout.world_size()) *
                             (itemsize(bucket.gradient_dtype) + itemsize(layout.reduce_dtype())));
}

// `to` comes behind what `from` was given so far.
void Reducer::hand_over(Stream& from, Stream& to, const std::string& what) {
  if (&from != &to) {
    from.record(*handed_over_);
    to.wait(*handed_over_, what);
  }
}

// Without sharded gradients to add to, without a cast or a scale, the reduction writes the flat
// gradient itself. Else each parameter's chunk is cast or added from the reduce output.
bool Reducer::choose_finish(Bucket& bucket, const Units& units) {
  const UnitLayout& layout = bucket.layout;
  bool direct =
      reduces_in_place(layout, units.front()->reduce_scale) && units.size() == bucket.units.size();
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

void Reducer::finish(Bucket& bucket, const Units& units, std::size_t number, const void* output) {
  const ReducePiece& piece = bucket.reductions[number];
  const CastMode* modes = bucket.finish_modes.data() + piece.first_trainable;
  Stream& stream = bucket.reductions.size() > 1 ? lane_.after() : stream_;
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

void Reducer::hand_over_gradients(Bucket& bucket, const Units& units) {
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
  for (const Unit* unit : units) {
    clear_rows(bucket, *unit);
  }
  note_sent(kBothHalves);
}

// Of what is accumulated, the unit's.
void Reducer::clear_rows(Bucket& bucket, const Unit& unit) {
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
      device_.fill(
          stream_,
          static_cast<char*>(accumulated_of(bucket, i)) + static_cast<std::size_t>(first) * element,
          0, static_cast<std::size_t>(end - begin) * element);
    }
  }
}

// All but the newest `keep`.
void Reducer::release_packed_gradients(std::size_t keep) {
  while (packed_gradients_.size() > keep) {
    const Bucket& bucket = *packed_gradients_.front().bucket;
    if (keep > 0) {
      ledger_.wait(*bucket.packed, bucket.reduce_label, Work::WaitForReduction, bucket.numbers());
    } else {  // nothing any more: see wait
      device_.compute_stream().wait(*bucket.packed, bucket.reduce_label);
    }
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
