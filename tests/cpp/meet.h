// A barrier of all ranks, made of a collective.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "comm/communicator.h"
#include "device/host_stream.h"

namespace fsdp::test {

// Work behind this on the stream, which is one of the host, starts after the streams of all ranks
// have reached it.
inline void meet(Communicator& communicator, Stream& stream) {
  const auto bytes =
      std::make_shared<std::vector<char>>(static_cast<std::size_t>(communicator.size()) + 1);
  communicator.host_all_gather(stream, bytes->data(), bytes->data() + 1, 1);
  static_cast<HostQueue&>(stream).enqueue([bytes] {});  // which keeps them until then
}

}  // namespace fsdp::test
