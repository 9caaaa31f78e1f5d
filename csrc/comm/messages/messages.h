// Messages between two ranks. A transport with messages can compose collectives of them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace fsdp {

// A message in flight. Destroying it gives the message up: its memory is not used any more.
class Message {
 public:
  virtual ~Message() = default;

  // Blocks, asleep, until the memory may be used again: it has been sent, or has arrived. Throws
  // the reason if it failed or timed out.
  virtual void wait() = 0;
  // Makes wait() throw. Another thread may call it.
  virtual void give_up() = 0;
};

// Both calls return at once. A send and a receive of two ranks match if their tags are equal;
// messages of one tag match in order. Nothing of a message travels before its receiver has asked
// for it, and it may be shorter than the receiver has room for, but not longer.
class Messages {
 public:
  virtual ~Messages() = default;

  virtual int rank() const = 0;
  virtual int size() const = 0;
  virtual std::unique_ptr<Message> send(const void* data, std::size_t bytes, int to,
                                        std::int32_t tag) = 0;
  virtual std::unique_ptr<Message> receive(void* data, std::size_t bytes, int from,
                                           std::int32_t tag) = 0;
};

}  // namespace fsdp
