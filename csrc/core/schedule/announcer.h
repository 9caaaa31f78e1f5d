// Before each collective is issued: compares it with other ranks, and records it for the ledger,
// for flight records and for error messages.
#pragma once

#include <cstddef>
#include <string>

#include "core/agree/order_check.h"
#include "core/lanes.h"
#include "core/record/flight_tape.h"
#include "core/record/ledger.h"
#include "core/schedule/passes.h"
#include "core/schedule/pipeline_options.h"
#include "core/units/bucket.h"

namespace fsdp {

// A message that is about to be issued.
struct NextMessage {
  Collective op;
  Lane& lane;
  Communicator& communicator;  // of the lane, or of a smaller group or another mesh
  const std::string& label;
  std::size_t piece;  // its index in the gather or reduction
  std::size_t bytes;
  DType dtype;
  const Issue& issue;
  bool follows = false;  // Ledger::open
};

// Keep it while a message is issued: the flight record and the ledger note its begin and its end.
struct Sending {
  InFlight flight;
  Timed timed;
};

class Announcer {
 public:
  // The arguments outlive the announcer. Options and passes may change between announcements.
  Announcer(const PipelineOptions& options, const Passes& passes, OrderCheck& order_check,
            Ledger& ledger)
      : options_(options), passes_(passes), order_check_(order_check), ledger_(ledger) {}

  [[nodiscard]] Sending announce(const Bucket& bucket, const NextMessage& message);

 private:
  const PipelineOptions& options_;
  const Passes& passes_;
  OrderCheck& order_check_;
  Ledger& ledger_;
};

}  // namespace fsdp
