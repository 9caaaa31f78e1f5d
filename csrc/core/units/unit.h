// One unit as the schedule sees it: what it is made of, its settings, and its state, whose parts
// belong to the gatherer, the order of backward and the reducer. Collectives carry its whole bucket
// (core/units/bucket.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>

#include "core/gather/unit_gather.h"
#include "core/record/ledger.h"
#include "core/reduce/unit_gradients.h"
#include "core/reduce/unit_update.h"
#include "core/schedule/backward_order.h"
#include "core/units/unit_config.h"
#include "core/units/unit_port.h"

namespace fsdp {

struct Bucket;

struct Unit : UnitConfig {
  Unit(int unit_number, UnitConfig config, UnitPort& unit_port)
      : UnitConfig(std::move(config)),
        number(unit_number),
        port(unit_port),
        gradients(layout.trainable_count()) {}

  // Changes whenever the sharded parameters are known to have changed.
  std::uint64_t shard_version() const { return port.shard_version() + updates.count; }

  const int number;
  UnitPort& port;

  // - Place in the bucket.
  Bucket* bucket = nullptr;
  std::size_t position = 0;          // among the bucket's units
  std::size_t unsharded_offset = 0;  // bytes, in the bucket's unsharded buffer
  std::size_t first_trainable = 0;   // index among the bucket's trainable parameters
  std::size_t gradient_offset = 0;   // elements, in the bucket's segments
  // The native handle of the stream for which the flat gradient's memory is allocated.
  std::optional<void*> gradient_stream;

  UnitGather gather;
  BackwardProgress backward;
  UnitGradients gradients;
  UpdateState updates;
  CallId entering = kNoCall;  // the call that runs in forward
  IterationIndex computing;   // the span of its forward or backward
};

}  // namespace fsdp
