// ncclSend and ncclRecv. All messages of a group travel at once, so ranks may send to each other.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <set>
#include <string>
#include <thread>
#include <utility>

#include "groups.h"
#include "reductions.h"

namespace emulated_gpu {

// A buffer in shared memory for what one rank sends to another. The sender fills it, and the
// receiver empties it.
struct Communicator::Channel {
  std::atomic<bool> is_full;
  std::size_t message_bytes;
  std::size_t bytes;
  char data[kChannelBytes];
};

std::size_t Communicator::bytes_of_channels(int size) {
  return static_cast<std::size_t>(size) * static_cast<std::size_t>(size) * sizeof(Channel);
}

Communicator::Channel& Communicator::channel(int from, int to) const {
  return static_cast<Channel*>(channels_)[from * size + to];
}

// Moves what can be moved now. Returns whether that was something.
bool Communicator::advance(Message& message) {
  Channel& channel =
      message.is_sent ? this->channel(rank, message.peer) : this->channel(message.peer, rank);
  if (channel.is_full == message.is_sent) {
    return false;
  }
  if (message.is_sent) {
    channel.message_bytes = message.bytes;
    channel.bytes = std::min(kChannelBytes, message.bytes - message.done);
    std::memcpy(channel.data, message.data + message.done, channel.bytes);
  } else if (channel.message_bytes != message.bytes) {
    fail_device("rank " + std::to_string(rank) + " receives " + std::to_string(message.bytes) +
                " bytes from rank " + std::to_string(message.peer) + ", which sends " +
                std::to_string(channel.message_bytes));
    return false;
  } else {
    std::memcpy(message.data + message.done, channel.data, channel.bytes);
  }
  message.done += channel.bytes;
  channel.is_full = message.is_sent;
  return true;
}

void Communicator::run(std::vector<Message> messages) {
  for (const Message& message : messages) {
    (message.is_sent ? reads : writes)(message.data, message.bytes);
  }
  Wait until_all_moved{true};
  while (!messages.empty()) {
    bool moved = false;
    std::set<std::pair<bool, int>> waiting;  // messages of a pair of ranks arrive in order
    for (Message& message : messages) {
      if (waiting.emplace(message.is_sent, message.peer).second) {
        moved |= advance(message);
      }
    }
    messages.erase(std::remove_if(messages.begin(), messages.end(),
                                  [](const Message& one) { return one.done == one.bytes; }),
                   messages.end());
    std::vector<int> peers;
    for (const Message& message : messages) {
      peers.push_back(message.peer);
    }
    if (!moved && !pause(until_all_moved, peers)) {
      return;
    }
  }
}

}  // namespace emulated_gpu

using namespace emulated_gpu;

extern "C" {

ncclResult_t ncclSend(const void* from, std::size_t count, ncclDataType_t type, int peer,
                      ncclComm_t handle, cudaStream_t stream) {
  char* data = static_cast<char*>(const_cast<void*>(from));
  return submit(Message{true, peer, data, count * bytes_of(type), 0}, handle, stream);
}

ncclResult_t ncclRecv(void* to, std::size_t count, ncclDataType_t type, int peer, ncclComm_t handle,
                      cudaStream_t stream) {
  return submit(Message{false, peer, static_cast<char*>(to), count * bytes_of(type), 0}, handle,
                stream);
}

ncclResult_t ncclAlltoAll(const void* from, void* to, std::size_t count, ncclDataType_t type,
                          ncclComm_t handle, cudaStream_t stream) {
  const CommunicatorPtr communicator = communicator_of(handle);
  if (communicator == nullptr) {
    return ncclInvalidArgument;
  }
  const std::size_t bytes = count * bytes_of(type);
  ncclResult_t result = ncclGroupStart();
  for (int peer = 0; peer < communicator->size && result == ncclSuccess; ++peer) {
    const std::size_t place = static_cast<std::size_t>(peer) * bytes;
    result = ncclSend(static_cast<const char*>(from) + place, count, type, peer, handle, stream);
    if (result == ncclSuccess) {
      result = ncclRecv(static_cast<char*>(to) + place, count, type, peer, handle, stream);
    }
  }
  const ncclResult_t ended = ncclGroupEnd();
  return result != ncclSuccess ? result : ended;
}
}
