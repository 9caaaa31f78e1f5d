// The mailbox in which one rank publishes its state for one communicator, and how peers read it.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>

#include "base/dtype.h"
#include "comm/shared_memory/futex.h"
#include "comm/shared_memory/peer_memory.h"

namespace fsdp {

// A rank's post about its current collective.
struct Operation {
  enum class Kind : std::uint32_t { AllGather, ReduceScatter, AllReduce };

  // Whether both are the same collective. Offsets may differ.
  bool matches(const Operation& other) const;
  std::string describe() const;

  Kind kind = Kind::AllGather;
  DType dtype = DType::Bytes;
  std::uint64_t bytes = 0;    // of the rank's input
  std::uint64_t pattern = 0;  // hash of how the parts of the input lie
  std::uint64_t tag = 0;      // of the collective: Communicator::announce
  std::uint64_t offset = 0;   // of the input, in the rank's arena
  std::uint64_t before = 0;   // how far peers read in front of the offset and behind it
  std::uint64_t after = 0;
};

// The label of a lane's last collective. A peer that reads the label during a change sees none.
class Activity {
 public:
  void begin(const std::string& label);
  void end() { ended_.store(begun(), std::memory_order_release); }

  // How many collectives have begun and ended. The numbers wrap around.
  std::uint32_t begun() const {
    return static_cast<std::uint32_t>((version_.load(std::memory_order_acquire) + 1) / 2);
  }
  std::uint32_t ended() const { return ended_.load(std::memory_order_acquire); }
  bool is_busy() const { return ended() != begun(); }
  // The label of the current collective, or else of the last one. Cut if it is long.
  std::string label() const;

 private:
  static constexpr std::size_t kWords = 16;
  static constexpr std::size_t kLabelBytes = kWords * sizeof(std::uint64_t);

  std::atomic<std::uint64_t> version_{0};  // twice the number of labels; odd while it changes
  std::atomic<std::uint32_t> ended_{0};
  std::atomic<std::uint64_t> words_[kWords] = {};
};

// Which thread of the host issues work on a lane, and whether that thread is blocked until the lane
// is done: Note [lanes that wait for each other].
struct Issuer {
  static constexpr std::uint64_t kNobody = 0;
  static constexpr std::uint64_t kSeveral = 1;  // no number of a thread

  // The calling thread is about to issue a collective.
  void issue();

  std::atomic<std::uint32_t> issued{0};         // collectives
  std::atomic<std::uint64_t> thread{kNobody};   // that issued all of them
  std::atomic<std::uint64_t> blocked{kNobody};  // Note [published waits]
};

// It lies in the rank's arena, and peers only read it.
struct Mailbox {
  enum class State : std::uint32_t { Active, Failed, Closed };
  static constexpr std::size_t kReasonBytes = 8192;  // holds what each rank of a deadlock is in

  alignas(64) futex::Word posted{0};    // the last round that the rank has posted
  alignas(64) futex::Word finished{0};  // the last round whose inputs it has finished reading
  alignas(64) std::atomic<State> state{State::Active};
  // Of the last round and the one before, by the parity of their numbers.
  alignas(8) Operation operations[2];
  Activity activity;
  alignas(64) Issuer issuer;
  char reason[kReasonBytes] = {};  // why the rank failed; written before `state`
};

// - Checked reads of a peer's mailbox: Note [peers are not trusted]

const Mailbox& mailbox_in(const PeerMemory& memory, std::uint64_t offset);

// Whether a peer whose word says `seen` has reached `round`, in which this rank is. Throws if no
// rank could be in `seen` now. See Note [rank barrier].
bool has_reached(std::uint32_t seen, std::uint32_t round, const std::string& who);

Mailbox::State state_in(const Mailbox& mailbox, const std::string& who);
std::string reason_in(const Mailbox& mailbox);

// The peer's post for `round`.
Operation operation_in(const Mailbox& mailbox, std::uint32_t round);

// The address of the peer's input.
const char* input_in(const PeerMemory& memory, const Operation& operation);

}  // namespace fsdp
