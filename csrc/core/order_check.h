// Compares across ranks what the schedule is about to do, before it does it: ranks that run units
// in different orders or of different sizes get a sentence instead of a hang or wrong numbers.
// Costs a round trip a collective, so the pipeline does it in the first iteration only.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "comm/communicator.h"
#include "core/unit.h"
#include "device/stream.h"

namespace fsdp {

class OrderCheck {
 public:
  OrderCheck(Device& device, Communicator& communicator);

  // Blocks until all ranks have said what their next collective is; throws where they differ.
  void compare(Stream& stream, const char* op, const Unit& unit, std::size_t bytes);

 private:
  Device& device_;
  Communicator& communicator_;
  std::unique_ptr<Event> compared_;
  std::uint64_t sequence_ = 0;
};

}  // namespace fsdp
