// All-gathers, reduce-scatters and all-reduces composed of messages between pairs of ranks.
//
// Note [composed collectives]
// docs/design/transports.md says what travels. Each rank sends and receives N - 1 parts of N, which
// is the minimum. Sums are made in rank order (comm/shared_memory/rank_order_sum.h). Ranks of one
// host may share memory instead: Note [groups that span hosts] in comm/shared_memory/host_ranks.h.
//
// Note [first messages]
// Every collective begins with one message to each peer, which names the sender's collective. Its
// size does not depend on the collective, and the tag of a payload is a hash of the same facts. So
// no message is larger than its receiver expects. Some backends would end the process. Each rank
// asks for the first messages of the next collective as soon as it has read those of the last one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/check.h"
#include "base/dtype.h"
#include "comm/messages/message_staging.h"
#include "comm/messages/messages.h"
#include "comm/shared_memory/host_ranks.h"

namespace fsdp {

// Another rank is in another collective. Both ranks throw this.
class DifferentCollectives : public Error {
 public:
  using Error::Error;
};

class ComposedCollectives {
 public:
  // The name of a collective in error messages, and its tag, which is the same on all ranks:
  // Note [collective tags].
  struct Name {
    const std::string& what;
    std::uint64_t tag;
  };

  // Error messages call the ranks `global_ranks`. `host` has the ranks that share memory with this
  // one; null: every rank is reached by messages.
  ComposedCollectives(std::unique_ptr<Messages> messages, std::vector<int> global_ranks,
                      MessageStaging::Use use, std::unique_ptr<HostRanks> host = nullptr);
  ~ComposedCollectives();

  // The ranks that share memory with this one; null if there are none.
  const HostRanks* host() const { return host_.get(); }

  // The collectives block until this rank has received its messages and sent its own. They throw if
  // a peer is in another collective, or a message or a rank of this host fails. After an error, no
  // other call may follow.
  void all_gather(const Name& name, const void* input, void* output, std::size_t bytes);
  void reduce_scatter(const Name& name, const void* input, void* output, std::size_t numel,
                      DType dtype);
  // The sum replaces `data`. Only with Use::Reductions.
  void all_reduce(const Name& name, void* data, std::size_t numel, DType dtype);

  // Makes the collective that runs and all later ones throw `reason`. Another thread may call it.
  void give_up(const std::string& reason);

 private:
  struct FirstMessage;
  enum class Kind : std::uint32_t { AllGather, ReduceScatter, AllReduce };

  void begin(const Name& name, Kind kind, DType dtype, std::size_t bytes);
  void send_first(int to, const char* memory, std::size_t payload_bytes);
  void check_first(int from);
  void expect_first(int from);
  void finish();
  std::unique_ptr<Message> send(const void* data, std::size_t bytes, int to, std::int32_t tag);
  std::unique_ptr<Message> receive(void* data, std::size_t bytes, int from, std::int32_t tag);
  void wait(Message& message, int peer, const char* failure);
  void set_awaited(Message* message);
  template <typename Call>
  auto named(int peer, const char* failure, const Call& call);

  void gather_small(const void* input, char* output, std::size_t bytes);
  void gather_large(const void* input, char* output, std::size_t bytes);
  void send_and_sum(const char* input, char* output, std::size_t numel, DType dtype);
  void sum_small(const char* input, std::size_t stride, void* output, std::size_t numel,
                 DType dtype);

  // - Through memory that the ranks of this host share: Note [groups that span hosts]
  std::shared_ptr<void> readable_memory(void* memory, std::size_t bytes) const;
  template <typename Copy>
  void share_gathered(const char* mine, std::size_t reach, std::size_t bytes, const Copy& copy_of);
  template <typename Copy>
  void for_received_by(int rank, const Copy& copy_of) const;
  void find_segments_here(const char* input, std::size_t stride);
  void finish_on_host();

  static std::size_t place_of_peer(int peer, int rank);
  char* first_to_all() const { return memory_.get(); }
  char* first_to(int rank) const;
  char* first_from(int rank) const;
  char* piece_from(int rank, std::size_t number) const;

  std::unique_ptr<Messages> messages_;
  std::vector<int> global_ranks_;
  int rank_;
  int size_;
  std::unique_ptr<HostRanks> host_;
  HostMap map_;
  // The ranks of other hosts. In each turn this rank sends to one and receives from one, so every
  // rank receives from one peer at a time.
  std::vector<int> receivers_;
  std::vector<int> senders_;
  // In an all-gather: the ranks of other hosts that receive this rank's input, and those whose
  // inputs this rank receives.
  std::vector<int> gathers_to_;
  std::vector<int> gathers_from_;
  MessageStaging staging_;
  std::shared_ptr<char> memory_;
  std::uint64_t count_ = 0;  // collectives so far
  std::unique_ptr<FirstMessage> mine_;
  std::int32_t payload_tag_ = 0;
  std::vector<const void*> sources_;
  // In a reduction, by rank: the segment for this rank where it is; null if it has to travel.
  std::vector<const char*> segments_here_;
  // First messages stay in flight after an error, so that peers that come later still learn of it.
  std::vector<std::unique_ptr<Message>> firsts_to_;    // by rank
  std::vector<std::unique_ptr<Message>> firsts_from_;  // by rank

  std::mutex mutex_;            // guards the members below
  Message* awaited_ = nullptr;  // the wait that runs
  std::string given_up_;        // why, or empty
};

}  // namespace fsdp
