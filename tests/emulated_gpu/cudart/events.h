// Events. An event stands for its last record, on a stream or in a capture.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <memory>
#include <set>

#include "records.h"

namespace emulated_gpu {

struct Capture;

// Guarded by the mutex of captures. Nodes of graphs hold it, too, if it was recorded there as an
// external one.
struct Event {
  int device;
  bool has_time;
  std::shared_ptr<SharedRecords> shared;  // null if the event is of this process alone
  std::shared_ptr<Record> record;         // the last one of this process
  std::shared_ptr<Capture> capture;
  std::set<std::size_t> heads;

  // Makes a record, which is the last one from now on.
  std::shared_ptr<Record> next_record(const Clock& clock);
  // The last one, which may be null.
  std::shared_ptr<Record> last_record() const;
};

}  // namespace emulated_gpu
