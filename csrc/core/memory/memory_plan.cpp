#include "core/memory/memory_plan.h"

#include <algorithm>
#include <functional>

#include "base/align.h"

namespace fsdp {
namespace {

// A single rank sends no messages.
std::size_t most_bytes_of(const UnitLayout& layout, std::size_t limit) {
  return layout.world_size() > 1 ? limit : 0;
}

// Pieces use two halves in turns: Note [pieces] in core/lanes.h.
std::size_t halves(std::size_t messages) { return messages > 1 ? 2 : 1; }

// The size of the largest packed message, which staging has to hold, summed over all ranks.
std::size_t most_packed(const UnitLayout& layout, const std::vector<LayoutPart>& parts,
                        GatherBy by) {
  std::size_t packed = 0;
  for (const LayoutPart& part : parts) {
    packed = std::max(packed, layout.gather_plan(by, part).packed_bytes);
  }
  return packed * static_cast<std::size_t>(layout.world_size());
}

std::size_t gradient_bytes(const UnitLayout& layout) {
  const std::vector<DType> dtypes = layout.unsharded_grad_dtypes();
  std::size_t trained = 0;
  std::size_t bytes = 0;
  for (std::size_t i = 0; i < layout.params().size(); ++i) {
    if (layout.params()[i].trainable) {
      bytes += static_cast<std::size_t>(layout.placements()[i].numel) * itemsize(dtypes[trained++]);
    }
  }
  return bytes;
}

// The larger of the largest bucket's and twice the typical bucket's. At most a quarter of the
// buckets with gradients are larger than the typical one, so few buckets wait.
std::size_t most_gradients(const std::vector<BucketUse>& buckets) {
  std::vector<std::size_t> bytes;
  for (const BucketUse& bucket : buckets) {
    if (bucket.buffers.gradients > 0) {
      bytes.push_back(bucket.buffers.gradients);
    }
  }
  if (bytes.empty()) {
    return 0;
  }
  std::sort(bytes.begin(), bytes.end(), std::greater<>());
  return std::max(bytes.front(), 2 * bytes[bytes.size() / 4]);
}

}  // namespace

std::vector<LayoutPart> gather_parts(const UnitLayout& layout, MessageLimits limits) {
  return layout.parts(Wire::Gather, most_bytes_of(layout, limits.gather));
}

std::vector<LayoutPart> reduce_parts(const UnitLayout& layout, MessageLimits limits) {
  std::vector<LayoutPart> parts = layout.parts(Wire::Reduce, most_bytes_of(layout, limits.reduce));
  parts.erase(std::remove_if(parts.begin(), parts.end(),
                             [&layout](const LayoutPart& part) {
                               return layout.reduce_plan(part).pack.segment_numel == 0;
                             }),
              parts.end());
  return parts.empty() ? std::vector<LayoutPart>{whole(layout)} : parts;
}

BucketBuffers buffers_of(const UnitLayout& layout, GatherBy by, MessageLimits limits,
                         const SmallerGroup& group) {
  const auto ranks = static_cast<std::size_t>(layout.world_size());
  const std::size_t element = itemsize(layout.reduce_dtype());
  BucketBuffers buffers;
  buffers.slot = layout.is_identity() ? 0 : layout.unsharded_bytes();
  buffers.gather_input = layout.needs_cast() && ranks > 1 ? layout.gather_bytes() : 0;
  buffers.reduce_output = static_cast<std::size_t>(layout.grad_numel()) * element;
  buffers.gradients = gradient_bytes(layout);

  const std::vector<LayoutPart> gathers = gather_parts(layout, limits);
  std::size_t packed = most_packed(layout, gathers, by);
  buffers.gather_messages = gathers.size();
  std::size_t messages = gathers.size();
  if (group.ranks > 0) {
    const UnitLayout of_group = layout.regrouped(group.ranks);
    const std::vector<LayoutPart> parts = gather_parts(of_group, limits);
    packed = std::max(packed, most_packed(of_group, parts, group.by));
    messages = std::max(messages, parts.size());
    buffers.group_shard = of_group.gather_bytes();
  }
  buffers.gathers_in_pieces = messages > 1;
  if (buffers.slot > 0) {
    buffers.staging = align_up(packed, kRegionAlignment) * halves(messages);
  }

  const std::vector<LayoutPart> reductions = reduce_parts(layout, limits);
  std::size_t segment = 0;
  for (const LayoutPart& part : reductions) {
    segment =
        std::max(segment, static_cast<std::size_t>(layout.reduce_plan(part).pack.segment_numel));
  }
  buffers.reduce_messages = reductions.size();
  buffers.message_output = segment * element;
  buffers.reduce_input = segment * ranks * element;
  if (reductions.size() > 1) {
    buffers.reduce_input = 2 * align_up(buffers.reduce_input, kRegionAlignment);
  }
  return buffers;
}

bool reduces_in_place(const UnitLayout& layout, double post_scale) {
  const auto is_cast = [&layout](const ParamSpec& param) {
    return param.trainable && layout.grad_dtype_of(param) != layout.reduce_dtype();
  };
  const std::vector<ParamSpec>& params = layout.params();
  return std::none_of(params.begin(), params.end(), is_cast) && post_scale == 1.0 &&
         !layout.is_offloaded();
}

GatherMemory plan_gathers(const std::vector<BucketUse>& buckets, int slots,
                          const BucketSets& together, bool keeps_inputs) {
  GatherMemory memory;
  std::vector<std::size_t> in_ring;  // the bytes of each bucket's slot
  for (const BucketUse& bucket : buckets) {
    in_ring.push_back(bucket.bytes_in_ring());
    if (bucket.buffers.slot > 0) {
      memory.any_in_pieces = memory.any_in_pieces || bucket.buffers.gathers_in_pieces;
      memory.staging_bytes = std::max(memory.staging_bytes, bucket.buffers.staging);
      memory.kept_input_bytes +=
          keeps_inputs ? align_up(bucket.buffers.gather_input, kRegionAlignment) : 0;
    }
  }
  memory.ring = plan_ring(in_ring, slots, together);
  memory.keeps_inputs = keeps_inputs;
  return memory;
}

// To pack a message while the one before is in flight, the input buffer has two halves, each
// aligned. If a backward sends a single message, one half is enough.
ReduceMemory plan_reductions(const std::vector<BucketUse>& buckets, bool may_pack_ahead,
                             bool has_replicas, bool in_pieces_elsewhere) {
  ReduceMemory memory;
  memory.any_in_pieces = in_pieces_elsewhere;
  std::size_t messages = 0;
  std::size_t largest = 0;  // message
  std::size_t whole = 0;    // the largest output that is read as a whole
  for (const BucketUse& bucket : buckets) {
    const BucketBuffers& buffers = bucket.buffers;
    const std::size_t of_bucket = buffers.reduce_messages;
    messages += buffers.reduce_input > 0 ? of_bucket : 0;
    largest = std::max(largest, buffers.reduce_input / halves(of_bucket));
    memory.any_in_pieces = memory.any_in_pieces || of_bucket > 1;
    memory.input_bytes = std::max(memory.input_bytes, buffers.reduce_input);
    memory.output_bytes = std::max(memory.output_bytes, buffers.message_output);
    whole = std::max(whole, bucket.reads_whole_output ? buffers.reduce_output : 0);
  }
  memory.most_gradients = most_gradients(buckets);
  if (has_replicas || memory.any_in_pieces) {
    memory.output_bytes = std::max(2 * align_up(memory.output_bytes, kRegionAlignment),
                                   align_up(whole, 2 * kRegionAlignment));
  }
  memory.packs_ahead = may_pack_ahead && messages > 1;
  if (memory.packs_ahead) {
    memory.input_bytes = 2 * align_up(largest, kRegionAlignment);
  } else if (memory.any_in_pieces) {
    memory.input_bytes = align_up(memory.input_bytes, 2 * kRegionAlignment);
  }
  return memory;
}

}  // namespace fsdp
