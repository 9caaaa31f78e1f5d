// Reduces a bucket's gradients to its sharded gradient: pack, reduce-scatter, finish (cast or add
// into the flat gradient). The schedule decides when.
//
// Note [packing ahead]
// A GPU packs on the stream `before`, and messages use the two halves of the input in turns. A half
// is packed as soon as the last message that read it has ended. So the next bucket is packed while
// a bucket is on the wire. On the host, without replicas, pack, reduce-scatter and finish of all
// buckets run on the reduce stream in order, so one reduce input and one reduce output serve them
// without events. Pieces (Note [pieces] in core/lanes.h) use the two halves of the input in turns,
// and events.
//
// Note [replicas]
// The ranks that have the same shard are replicas of each other. The result of a shard group's
// reduce-scatter is all-reduced over them on a lane of its own, and the cast or addition into the
// flat gradient follows there. Meanwhile the next message is reduce-scattered into the other half
// of the output. If each shard group is a single rank, a bucket is packed into the output. See
// "Hybrid sharding" in docs/design/schedule.md.
//
// Note [the reduce output]
// Sums that are not final go to the reduce output, and are finished from there. With pieces or
// replicas, finishes run on other streams than messages, which then use its two halves in turns. A
// reduce hook reads a whole bucket. Pieces of such a bucket go to their places in one output, which
// is both halves. If a hook is set between forward and backward, the output grows within the
// backward, and ranks plan memory again before the next forward.
//
// Note [lent gradients]
// On a GPU, the reducer frees the memory of a flat gradient if none of its parts is in .grad or
// held by the user, and allocates it again when the bucket is reduced. docs/design/memory.md
// ("lent") says when, why, and which gradients are never lent.
// The allocator has a pool for each stream. Freed memory returns to the pool of the stream that it
// was allocated for (Unit::gradient_stream). New memory comes from the pool of the stream that was
// current when the gradient was lent, even if another stream is current now.
//
// Note [units that differ]
// Gradient settings may change at any time, also between forward and backward, so the units of a
// bucket may differ: some synchronise and some accumulate, or they divide by different factors.
// Each set of units with equal settings is then reduced or accumulated separately. A message of the
// bucket carries zeros, or accumulated gradients, for the other units. Those units keep their
// accumulated gradients. When a unit's scale changes, TorchRoot::apply also scales what the unit
// has accumulated, so the last scale holds for the whole sum.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "core/lanes.h"
#include "core/memory/memory_plan.h"
#include "core/memory/pieces.h"
#include "core/record/ledger.h"
#include "core/reduce/nonfinite_gradients.h"
#include "core/reduce/packed_gradients.h"
#include "core/units/bucket.h"

namespace fsdp {

class Announcer;

class Reducer {
 public:
  // The lane of the ranks reduce-scatters. `replicas` is null if there are none: Note [replicas].
  // All of these outlive the reducer, and others may use the lanes, too.
  Reducer(Device& device, Packer& packer, Lane& lane, Lane* replicas, Ledger& ledger,
          Announcer& announcer);
  ~Reducer();

  Reducer(const Reducer&) = delete;
  Reducer& operator=(const Reducer&) = delete;

  // Blocks until the lanes of the ranks and of the replicas are idle.
  void synchronize();
  // Allocates the reduce input for `buckets` and, where it is always needed, the reduce output.
  // Moves flat gradients into registered memory: Note [shards and gradients in windows].
  void plan_memory(const std::vector<std::unique_ptr<Bucket>>& buckets);

  // See Note [lent gradients]. Call it before a pass, when no bucket is being reduced.
  void lend_gradients(const std::vector<std::unique_ptr<Bucket>>& buckets);
  // Gives lent gradients memory for a user, who uses them on the compute stream.
  void return_gradients(Bucket& bucket);
  // Marks the start of a backward. has_accumulated_before() compares with this mark to find
  // gradients of earlier backwards. `may_lend` allows Note [lent gradients] in this backward.
  // Pass false after a capture: the graph writes to the gradients' addresses.
  void begin_backward(bool may_lend) {
    first_packing_ = packings_ + 1;
    may_lend_ = may_lend;
  }
  // See PackedGradients.
  void note_arrival(Bucket& bucket) { packed_gradients_.note_arrival(bucket); }
  void make_room(const Bucket& bucket) { packed_gradients_.make_room(bucket); }
  // Packs the gradients that have arrived. For units that synchronise, it adds the accumulated
  // gradients, reduces over the ranks and sets the sharded gradients. For the other units, it
  // accumulates.
  void pack_and_reduce(Bucket& bucket);
  // Runs the updates that are left: Note [updates in backward] in core/reduce/unit_update.h.
  void end_updates(const std::vector<std::unique_ptr<Unit>>& units);
  // Makes the compute stream, and the host if it has the gradients, wait for every reduction that
  // was issued so far.
  void wait(const std::vector<std::unique_ptr<Bucket>>& buckets);
  // Makes the compute stream wait for the bucket's reduction, because autograd is about to add to
  // the gradients.
  void wait_before_change(const Bucket& bucket);
  // Waits for the bucket's reduction, after a forward or backward that failed.
  void settle(Bucket& bucket);
  // Drops all gradients that are not reduced yet, after a backward that failed.
  void discard(Bucket& bucket);

  // - Gradients that backwards without gradient sync have accumulated, between passes.
  // Waits for the packing. Empty before buckets are formed, and if the bucket has accumulated
  // nothing.
  std::vector<AccumulatedGradients::Part> accumulated_parts(const Unit& unit);
  // For each trainable parameter of the unit, whether it has such gradients on this rank.
  static std::vector<char> has_accumulated(const Unit& unit);
  static bool has_any_accumulated(const Unit& unit);
  // Marks the unit as awaiting a reduction, and the trainable parameters with `has` as having such
  // gradients. The caller then writes them into accumulated_parts(). If the bucket had accumulated
  // nothing, these parts are zero before. All ranks call it.
  void set_accumulated(Unit& unit, const std::vector<char>& has);
  // Whether there are accumulated gradients of backwards before the last one.
  bool has_accumulated_before(const std::vector<std::unique_ptr<Bucket>>& buckets) const;

  NonfiniteGradients& nonfinite_gradients() { return nonfinite_; }

  std::size_t buffer_bytes() const { return input_.bytes() + output_.bytes(); }

 private:
  // Some or all units of a bucket, which are alike: Note [units that differ].
  using Units = std::vector<Unit*>;

  // How a bucket's gradients are summed: Note [replicas].
  enum class Route : std::uint8_t {
    Local,          // one rank: what is packed is the sum
    Scatter,        // a reduce-scatter over the ranks that share the model
    ScatterAndSum,  // the same, and an all-reduce of its output over the replicas
    Sum,            // an all-reduce: each replica has the whole model
  };

  // Where messages put what they reduce: Note [the reduce output].
  enum class Into : std::uint8_t {
    FlatGradient,  // or nothing is sent
    HalfOfOutput,  // each message a half
    WholeOutput,   // all messages of the bucket one output
  };

  struct Reduction {
    Bucket& bucket;
    const Units& units;
    Route route;
    bool in_place;  // the reduce-scatter can write the flat gradient
    Into into;
    std::size_t first_message;  // the number of the first piece's message
    Issue issue;
    Stream& before;
    Stream& after;
  };

  void place_gradients(const std::vector<std::unique_ptr<Bucket>>& buckets);
  void pack_and_reduce_by_setting(Bucket& bucket);
  void pack_and_reduce_alike(Bucket& bucket, const Units& units);
  void accumulate(Bucket& bucket, const Units& units);
  void reduce(Bucket& bucket, const Units& units);
  Route route_of(const Bucket& bucket) const;
  static bool scatters(Route route) {
    return route == Route::Scatter || route == Route::ScatterAndSum;
  }
  static bool sums(Route route) { return route == Route::Sum || route == Route::ScatterAndSum; }
  static void set_sharded_gradients(const Bucket& bucket, const Units& units);
  Reduction begin_reduction(Bucket& bucket, const Units& units, bool in_place);
  // Returns where the piece's sum is.
  void* reduce_piece(const Reduction& reduction, std::size_t number);
  void apply_hook(const Reduction& reduction, void* reduced);
  void check_updates(const Units& units) const;
  void update(const Reduction& reduction);
  void run_updates(Bucket& bucket, const Units& units, Stream* stream, bool is_end);
  // Finishes updates until at most `most` buckets have one in flight.
  void finish_updates(std::size_t most);
  static void discard_updates(const Bucket& bucket);
  bool send_by_hook(const Reduction& reduction, Stream& stream, void* input, void* output,
                    std::size_t numel);
  static void reset_hooks(const Bucket& bucket);
  static void check_hooks(const std::vector<std::unique_ptr<Bucket>>& buckets);
  void send(const Reduction& reduction, std::size_t number, void* input);
  void sum_over_replicas(const Reduction& reduction, std::size_t number);
  void copy_to_output(const Reduction& reduction, const void* input);
  void* sum(const Reduction& reduction, std::size_t number, void* input);
  void end_reduction(const Reduction& reduction);

  // Whether the bucket is packed on another stream than the messages'. One rank sends nothing that
  // packing could overlap.
  bool packs_apart(const Bucket& bucket) const {
    return (packs_ahead_ && scatters(route_of(bucket))) || bucket.reduction.is_in_pieces();
  }
  Stream& begin_packing(const Bucket& bucket, bool into_accumulated);
  void* input_of(const Reduction& reduction, std::size_t piece);
  void release_input(const Bucket& bucket, std::size_t half);
  void pack(Bucket& bucket, const Units& units, std::size_t piece, void* destination,
            bool accumulate);
  static const void* const* gradients_of(Bucket& bucket, const ReducePiece& piece,
                                         const void* const* gradients, DType dtype);
  void wait_for_reduction(Bucket& bucket);
  void wait_for_gradients(const Bucket& bucket);
  static bool may_lend(const Bucket& bucket);
  void lend(Bucket& bucket);
  void ensure_gradient_memory(Bucket& bucket);
  void renew_gradients(Bucket& bucket);
  // Returns whether the reduction can write the flat gradient.
  bool prepare_finish(Bucket& bucket, const Units& units);
  void finish(const Reduction& reduction, std::size_t piece, const void* output);
  void prepare_output(std::size_t bytes);
  // Where the piece's message puts its part of each rank's segment.
  char* output_of(const Reduction& reduction, std::size_t piece) const;
  static char* place_in(void* segment, const Bucket& bucket, std::size_t piece);
  // Whether other streams than the messages' use the reduce output.
  bool halves_output() const { return streams_.is_any_in_pieces() || replicas_ != nullptr; }
  // The all-reduce over replicas reads it, too.
  BufferUse output_use() const {
    return replicas_ != nullptr ? BufferUse::Input : BufferUse::Output;
  }

  void reset_accumulated(Bucket& bucket, const Units& units);

  Device& device_;
  Packer& packer_;
  Lane& lane_;
  LaneStreams streams_;
  Ledger& ledger_;
  Announcer& announcer_;
  Lane* replicas_;  // may be null
  HalvedBuffer input_;
  bool packs_ahead_ = false;
  HalvedBuffer output_;  // allocated when first needed
  std::size_t output_bytes_ = 0;
  // So far; they use halves in turns. Those of the root's mesh count by themselves: ranks of other
  // meshes may send other numbers, and NCCL's windows need the same half on all ranks.
  std::size_t messages_ = 0;
  std::size_t messages_of_other_meshes_ = 0;
  PackedGradients packed_gradients_;
  bool may_lend_ = true;
  std::vector<Bucket*> updated_;     // with updates in flight, the oldest first
  std::uint64_t packings_ = 0;       // so far
  std::uint64_t first_packing_ = 1;  // of the last backward
  NonfiniteGradients nonfinite_;
};

}  // namespace fsdp
