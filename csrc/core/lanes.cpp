#include "core/lanes.h"

#include "base/align.h"
#include "base/check.h"
#include "comm/messages/message_staging.h"

namespace fsdp {
namespace {

// The most bytes of a block with several tensors.
constexpr std::size_t kBlockBytes = std::size_t{512} << 20;
constexpr std::size_t kBlockAlignment = 512;

std::vector<Communicator*> communicators_of(Lanes& lanes, Lanes* replicas) {
  std::vector<Communicator*> all;
  const auto add = [&all](Lanes& of_ranks) {
    all.push_back(&of_ranks.gather.communicator());
    all.push_back(&of_ranks.reduce.communicator());
  };
  add(lanes);
  for (const auto& group : lanes.groups) {
    add(*group);
  }
  for (const Mesh& mesh : lanes.meshes) {
    add(*mesh.lanes);
  }
  if (replicas != nullptr) {
    add(*replicas);
  }
  return all;
}

}  // namespace

void Lane::host_all_gather(const std::string& what, const std::string& label, const void* input,
                           void* output, std::size_t bytes) {
  communicator_->announce(what, 0);
  const std::size_t of_all = bytes * static_cast<std::size_t>(communicator_->size());
  const InFlight flight(flights(), *stream_, *communicator_,
                        {Collective::AllGather, Phase::Other, of_all, DType::Bytes}, label);
  communicator_->host_all_gather(*stream_, input, output, bytes);
}

void Lane::place_in_windows(const std::vector<Movable>& tensors, BufferUse use) {
  if (registered_ == nullptr || !registered_->can_register()) {
    return;
  }
  const auto has_to_move = [this](const Movable& tensor) { return !is_registered(tensor.memory); };
  const bool any_has_to = std::any_of(tensors.begin(), tensors.end(), has_to_move);
  if (!tensors.empty() && registered_->most(any_has_to ? 1 : 0) > 0) {
    for (auto first = tensors.begin(); first != tensors.end();) {
      first = move_into_a_block(first, tensors.end(), use);
    }
  }
  registered_->free_unused();
}

Lane::Movables Lane::move_into_a_block(Movables first, Movables end, BufferUse use) {
  std::size_t bytes = 0;
  Movables last = first;
  do {
    bytes += align_up(last->bytes, kBlockAlignment);
    ++last;
  } while (last != end && bytes + last->bytes <= kBlockBytes);
  const std::shared_ptr<void> block = registered_->allocate(bytes, use);
  auto* next = static_cast<char*>(block.get());
  for (; first != last; ++first) {
    first->move(std::shared_ptr<void>(block, next));
    next += align_up(first->bytes, kBlockAlignment);
  }
  return last;
}

void Lane::drain() noexcept {
  for (Stream* stream : {before_.get(), stream_.get(), after_.get()}) {
    if (stream != nullptr) {
      drain(*stream);
    }
  }
}

void Lane::drain(Stream& stream) noexcept {
  try {
    const std::unique_ptr<Event> drained = device_.new_event();
    stream.record(*drained);
    while (!drained->query()) {
      try {
        drained->synchronize(timeout_, stream.name());
      } catch (const TimeoutError&) {
        // The work still runs.
      }
    }
  } catch (const std::exception&) {
    // The work has failed and ended, or nothing runs on the device any more.
  }
}

Lanes& Lanes::group_of(int ranks) const {
  for (const auto& group : groups) {
    if (group->gather.communicator().size() == ranks) {
      return *group;
    }
  }
  throw Error(detail::concat("There are no lanes for groups of ", ranks,
                             " ranks. Add them before the units that are resharded to them."));
}

std::size_t message_staging_bytes(Lanes& lanes) {
  const Communicator& communicator = lanes.gather.communicator();
  std::size_t bytes = message_staging_bytes(communicator.traits(), communicator.size());
  for (const auto& group : lanes.groups) {
    bytes += message_staging_bytes(*group);
  }
  for (const Mesh& mesh : lanes.meshes) {
    bytes += message_staging_bytes(*mesh.lanes);
  }
  return bytes;
}

std::string failure_in(Lanes& lanes, Lanes* replicas) {
  for (Communicator* communicator : communicators_of(lanes, replicas)) {
    std::string error = communicator->async_error();
    if (!error.empty()) {
      return error;
    }
  }
  return "";
}

void abort_after_failure(Lanes& lanes, Lanes* replicas) {
  const std::string reason = failure_in(lanes, replicas);
  if (reason.empty()) {
    return;
  }
  for (Communicator* communicator : communicators_of(lanes, replicas)) {
    communicator->abort(reason);
  }
}

Lane& lane_named(Lanes& lanes, const std::string& name) {
  FSDP_CHECK(name == "gather" || name == "reduce", "There is no lane '", name,
             "'. The lanes are 'gather' and 'reduce'.");
  return name == "gather" ? lanes.gather : lanes.reduce;
}

void refuse_after_capture() {
  throw Error(
      "A CUDA graph has captured a step of this model, and its replays use the buffers that this "
      "change would free. Before the capture, change settings and parameters, drop gradients that "
      "are no longer in .grad, and run a whole step. To change the model now, make and shard it "
      "anew, and capture again.");
}

}  // namespace fsdp
