#include "comm/messages/composed.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <utility>

#include "base/check.h"
#include "base/copy.h"
#include "base/mix.h"
#include "base/text.h"
#include "comm/communicator.h"
#include "comm/shared_memory/rank_order_sum.h"

namespace fsdp {
namespace {

constexpr std::int32_t kFirstTag = 1;
constexpr std::int32_t kPayloadTags = 0x7ffffffd;  // from 2 on; backends want positive numbers

constexpr std::size_t kHeaderBytes = MessageStaging::kHeaderBytes;

constexpr const char* kNotReceived = "No message came from rank ";
constexpr const char* kNotSent = "No message reached rank ";

// Memory of no bytes may be null. A rank may gather in place.
void copy(void* to, const void* from, std::size_t bytes) {
  if (bytes > 0 && to != from) {
    std::memcpy(to, from, bytes);
  }
}

}  // namespace

// The beginning of a first message.
struct ComposedCollectives::FirstMessage {
  std::string describe() const {
    return detail::concat(text_in(what, sizeof(what)), " (", bytes, " bytes ",
                          kind == Kind::ReduceScatter ? "for" : "of", " each rank, number ", number,
                          " of its lane)");
  }

  std::uint64_t hash = 0;
  std::uint64_t number = 0;
  std::uint64_t bytes = 0;
  Kind kind = Kind::AllGather;
  char what[kHeaderBytes - 3 * sizeof(std::uint64_t) - sizeof(Kind)] = {};
};

ComposedCollectives::ComposedCollectives(std::unique_ptr<Messages> messages,
                                         std::vector<int> global_ranks, MessageStaging::Use use,
                                         std::unique_ptr<HostRanks> host)
    : messages_(std::move(messages)),
      global_ranks_(std::move(global_ranks)),
      rank_(messages_->rank()),
      size_(messages_->size()),
      host_(std::move(host)),
      map_(host_ != nullptr ? host_->map() : HostMap::of_single_ranks(size_)),
      staging_(size_, use),
      memory_(host_ != nullptr
                  ? std::static_pointer_cast<char>(host_->allocate(staging_.bytes))
                  : std::shared_ptr<char>(new char[staging_.bytes], std::default_delete<char[]>())),
      mine_(std::make_unique<FirstMessage>()),
      sources_(static_cast<std::size_t>(size_)),
      segments_here_(static_cast<std::size_t>(size_)),
      firsts_to_(static_cast<std::size_t>(size_)),
      firsts_from_(static_cast<std::size_t>(size_)) {
  static_assert(sizeof(FirstMessage) == kHeaderBytes);
  for (int turn = 1; turn < size_; ++turn) {
    const int to = (rank_ + turn) % size_;
    const int from = (rank_ - turn + size_) % size_;
    if (!map_.share(rank_, to)) {
      receivers_.push_back(to);
      if (map_.receiver(rank_, to) == to) {
        gathers_to_.push_back(to);
      }
    }
    if (!map_.share(rank_, from)) {
      senders_.push_back(from);
      if (map_.receiver(from, rank_) == rank_) {
        gathers_from_.push_back(from);
      }
    }
  }
}

ComposedCollectives::~ComposedCollectives() = default;

template <typename Call>
auto ComposedCollectives::named(int peer, const char* failure, const Call& call) {
  try {
    return call();
  } catch (const std::exception& error) {
    throw Error(
        detail::concat(failure, global_ranks_[static_cast<std::size_t>(peer)], ": ", error.what()));
  }
}

// - All-gather

void ComposedCollectives::all_gather(const Name& name, const void* input, void* output,
                                     std::size_t bytes) {
  begin(name, Kind::AllGather, DType::Bytes, bytes);
  if (size_ == 1) {  // there is no memory for messages
    copy(output, input, bytes);
  } else if (bytes <= staging_.inline_bytes) {
    gather_small(input, static_cast<char*>(output), bytes);
  } else {
    gather_large(input, static_cast<char*>(output), bytes);
  }
  finish();
}

void ComposedCollectives::gather_small(const void* input, char* output, std::size_t bytes) {
  const auto put = [&](int rank, const char* message) {
    copy(output + static_cast<std::size_t>(rank) * bytes, message + kHeaderBytes, bytes);
  };
  std::memcpy(first_to_all(), mine_.get(), kHeaderBytes);
  copy(first_to_all() + kHeaderBytes, input, bytes);
  for (const int to : receivers_) {
    send_first(to, first_to_all(), map_.receiver(rank_, to) == to ? bytes : 0);
  }
  put(rank_, first_to_all());
  share_gathered(first_to_all(), staging_.first_bytes, bytes, put);
  for (const int from : senders_) {
    check_first(from);
  }
  for (const int from : gathers_from_) {
    put(from, first_from(from));
  }
  const std::size_t reach = static_cast<std::size_t>(size_ - 1) * staging_.first_bytes;
  share_gathered(memory_.get() + staging_.received, reach, bytes,
                 [&](int from, const char* messages) {
                   for_received_by(from, [&](int owner) {
                     put(owner, messages + place_of_peer(owner, from) * staging_.first_bytes);
                   });
                 });
  finish_on_host();
  for (const int from : senders_) {
    expect_first(from);
  }
}

void ComposedCollectives::gather_large(const void* input, char* output, std::size_t bytes) {
  const std::size_t whole = static_cast<std::size_t>(size_) * bytes;
  const std::size_t piece = staging_.piece_bytes_of(bytes);
  const std::shared_ptr<void> readable = readable_memory(output, whole);
  auto* const gathered = static_cast<char*>(readable.get());
  const auto at = [&](int rank) { return static_cast<std::size_t>(rank) * bytes; };
  const auto for_pieces = [&](const std::vector<int>& peers, const auto& transfer) {
    for (std::size_t first = 0; first < bytes; first += piece) {
      for (const int peer : peers) {
        transfer(peer, first, std::min(piece, bytes - first));
      }
    }
  };
  const auto put = [&](int rank, const char* all) {
    copy(gathered + at(rank), all + at(rank), bytes, /*past_caches=*/whole >= kLargeOutput);
  };
  std::vector<std::pair<int, std::unique_ptr<Message>>> received;
  std::vector<std::pair<int, std::unique_ptr<Message>>> sent;
  for_pieces(gathers_from_, [&](int from, std::size_t first, std::size_t count) {
    received.emplace_back(from, receive(gathered + at(from) + first, count, from, payload_tag_));
  });
  std::memcpy(first_to_all(), mine_.get(), kHeaderBytes);
  for (const int to : receivers_) {
    send_first(to, first_to_all(), 0);
  }
  for_pieces(gathers_to_, [&](int to, std::size_t first, std::size_t count) {
    sent.emplace_back(to, send(static_cast<const char*>(input) + first, count, to, payload_tag_));
  });
  copy(gathered + at(rank_), input, bytes);
  share_gathered(gathered, whole, bytes, put);
  for (const int from : senders_) {
    check_first(from);
    expect_first(from);
  }
  for (const auto& [from, message] : received) {
    wait(*message, from, kNotReceived);
  }
  share_gathered(gathered, whole, bytes, [&](int from, const char* all) {
    for_received_by(from, [&](int owner) { put(owner, all); });
  });
  finish_on_host();
  copy(output, gathered, whole);
  for (const auto& [to, message] : sent) {
    wait(*message, to, kNotSent);
  }
}

// - Reduce-scatter

void ComposedCollectives::reduce_scatter(const Name& name, const void* input, void* output,
                                         std::size_t numel, DType dtype) {
  const std::size_t bytes = numel * itemsize(dtype);
  const std::size_t whole = static_cast<std::size_t>(size_) * bytes;
  begin(name, Kind::ReduceScatter, dtype, bytes);
  const std::shared_ptr<void> readable = readable_memory(const_cast<void*>(input), whole);
  copy(readable.get(), input, whole);
  if (host_ != nullptr) {
    host_->post(readable.get(), whole, Operation::Kind::ReduceScatter, dtype, whole);
  }
  if (bytes <= staging_.inline_bytes) {
    sum_small(static_cast<const char*>(readable.get()), bytes, output, numel, dtype);
  } else {
    send_and_sum(static_cast<const char*>(readable.get()), static_cast<char*>(output), numel,
                 dtype);
  }
  finish();
}

// Segments for consecutive ranks are `stride` bytes apart. With 0 all ranks get the same one.
void ComposedCollectives::sum_small(const char* input, std::size_t stride, void* output,
                                    std::size_t numel, DType dtype) {
  const std::size_t bytes = numel * itemsize(dtype);
  for (const int to : receivers_) {
    std::memcpy(first_to(to), mine_.get(), kHeaderBytes);
    copy(first_to(to) + kHeaderBytes, input + static_cast<std::size_t>(to) * stride, bytes);
    send_first(to, first_to(to), bytes);
  }
  find_segments_here(input, stride);
  for (const int from : senders_) {
    check_first(from);
  }
  for (int from = 0; from < size_; ++from) {
    const char* here = segments_here_[static_cast<std::size_t>(from)];
    sources_[static_cast<std::size_t>(from)] =
        here != nullptr ? here : first_from(from) + kHeaderBytes;
  }
  if (bytes > 0) {
    sum_in_rank_order(sources_, output, numel, dtype);
  }
  finish_on_host();
  for (const int from : senders_) {
    expect_first(from);
  }
}

void ComposedCollectives::send_and_sum(const char* input, char* output, std::size_t numel,
                                       DType dtype) {
  const std::size_t bytes = numel * itemsize(dtype);
  const std::size_t piece = staging_.piece_bytes_of(bytes);
  const std::size_t pieces = (bytes + piece - 1) / piece;
  const auto bytes_of = [&](std::size_t number) { return std::min(piece, bytes - number * piece); };
  using InFlight = std::vector<std::unique_ptr<Message>>;
  // By the place in the ring, then by rank.
  std::vector<InFlight> received(MessageStaging::kPiecesInFlight);
  const auto receive_pieces = [&](std::size_t number) {
    InFlight& messages = received[number % MessageStaging::kPiecesInFlight];
    messages.clear();
    messages.resize(static_cast<std::size_t>(size_));
    for (const int from : senders_) {
      messages[static_cast<std::size_t>(from)] =
          receive(piece_from(from, number), bytes_of(number), from, payload_tag_);
    }
  };
  for (std::size_t number = 0; number < std::min(pieces, received.size()); ++number) {
    receive_pieces(number);
  }
  for (const int to : receivers_) {
    std::memcpy(first_to(to), mine_.get(), kHeaderBytes);
    send_first(to, first_to(to), 0);
  }
  std::vector<std::pair<int, std::unique_ptr<Message>>> sent;
  sent.reserve(pieces * receivers_.size());
  for (std::size_t number = 0; number < pieces; ++number) {
    for (const int to : receivers_) {
      const char* segment = input + static_cast<std::size_t>(to) * bytes;
      sent.emplace_back(to, send(segment + number * piece, bytes_of(number), to, payload_tag_));
    }
  }
  find_segments_here(input, bytes);
  for (const int from : senders_) {
    check_first(from);
    expect_first(from);
  }
  for (std::size_t number = 0; number < pieces; ++number) {
    const std::size_t first = number * piece;
    for (int from = 0; from < size_; ++from) {
      const auto index = static_cast<std::size_t>(from);
      if (segments_here_[index] != nullptr) {
        sources_[index] = segments_here_[index] + first;
        continue;
      }
      wait(*received[number % received.size()][index], from, kNotReceived);
      sources_[index] = piece_from(from, number);
    }
    sum_in_rank_order(sources_, output + first, bytes_of(number) / itemsize(dtype), dtype);
    if (number + received.size() < pieces) {
      receive_pieces(number + received.size());
    }
  }
  finish_on_host();
  for (const auto& [to, message] : sent) {
    wait(*message, to, kNotSent);
  }
}

// - All-reduce

// The remainder after equal segments is small.
void ComposedCollectives::all_reduce(const Name& name, void* data, std::size_t numel, DType dtype) {
  const std::size_t bytes = numel * itemsize(dtype);
  auto* const all = static_cast<char*>(data);
  if (size_ == 1) {
    return;
  }
  if (bytes > staging_.inline_bytes) {
    const std::size_t segment = numel / static_cast<std::size_t>(size_);
    const std::size_t segment_bytes = segment * itemsize(dtype);
    const std::size_t in_segments = segment_bytes * static_cast<std::size_t>(size_);
    char* const mine = all + static_cast<std::size_t>(rank_) * segment_bytes;
    reduce_scatter(name, data, mine, segment, dtype);
    all_gather(name, mine, data, segment_bytes);
    if (in_segments < bytes) {
      all_reduce(name, all + in_segments, (bytes - in_segments) / itemsize(dtype), dtype);
    }
    return;
  }
  begin(name, Kind::AllReduce, dtype, bytes);
  const std::shared_ptr<void> readable = readable_memory(data, bytes);
  copy(readable.get(), data, bytes);
  if (host_ != nullptr) {
    host_->post(readable.get(), bytes, Operation::Kind::AllReduce, dtype, bytes);
  }
  // Other ranks of this host read `readable` until sum_small returns. It may be `data` itself, so
  // the sum goes elsewhere first.
  char* const sum = memory_.get() + staging_.sum;
  sum_small(static_cast<const char*>(readable.get()), /*stride=*/0, sum, numel, dtype);
  copy(data, sum, bytes);
  finish();
}

// - The ranks of this host

// Memory of the caller's, or else memory in its place, that the ranks of this host can read.
std::shared_ptr<void> ComposedCollectives::readable_memory(void* memory, std::size_t bytes) const {
  if (host_ == nullptr || host_->can_read(memory, bytes)) {
    return {memory, [](void*) {}};
  }
  return host_->allocate(bytes);
}

// One round of an all-gather: offers `reach` bytes at `mine`, and calls copy_of(rank, offer) for
// the offer of each other rank of this host.
template <typename Copy>
void ComposedCollectives::share_gathered(const char* mine, std::size_t reach, std::size_t bytes,
                                         const Copy& copy_of) {
  if (host_ == nullptr) {
    return;
  }
  host_->post(mine, reach, Operation::Kind::AllGather, DType::Bytes, bytes);
  for (const int from : host_->others()) {
    copy_of(from, host_->offer_of(from));
  }
}

// Calls copy_of(owner) for each rank of another host whose input has reached `rank`.
template <typename Copy>
void ComposedCollectives::for_received_by(int rank, const Copy& copy_of) const {
  for (const int owner : senders_) {
    if (map_.receiver(owner, rank_) == rank) {
      copy_of(owner);
    }
  }
}

// Finds the segments for this rank that need not travel: its own, and those of its host.
void ComposedCollectives::find_segments_here(const char* input, std::size_t stride) {
  const std::size_t mine = static_cast<std::size_t>(rank_) * stride;
  segments_here_[static_cast<std::size_t>(rank_)] = input + mine;
  if (host_ == nullptr) {
    return;
  }
  for (const int from : host_->others()) {
    segments_here_[static_cast<std::size_t>(from)] = host_->offer_of(from) + mine;
  }
}

void ComposedCollectives::finish_on_host() {
  if (host_ != nullptr) {
    host_->finish();
  }
}

// - First messages

void ComposedCollectives::begin(const Name& name, Kind kind, DType dtype, std::size_t bytes) {
  *mine_ = {};
  mine_->number = ++count_;
  mine_->bytes = bytes;
  mine_->kind = kind;
  std::snprintf(mine_->what, sizeof(mine_->what), "%s", name.what.c_str());
  std::uint64_t hash = mix(name.tag, count_);
  for (const std::uint64_t fact :
       {static_cast<std::uint64_t>(kind), static_cast<std::uint64_t>(dtype), bytes}) {
    hash = mix(hash, fact);
  }
  mine_->hash = hash;
  if (count_ == 1) {
    for (const int from : senders_) {
      expect_first(from);
    }
  }
  if (host_ != nullptr) {
    host_->begin(name.what, name.tag);
  }
  payload_tag_ = 2 + static_cast<std::int32_t>(hash % kPayloadTags);
}

// The previous first message from that rank is not read any more.
void ComposedCollectives::expect_first(int from) {
  firsts_from_[static_cast<std::size_t>(from)] =
      receive(first_from(from), staging_.first_bytes, from, kFirstTag);
}

void ComposedCollectives::send_first(int to, const char* memory, std::size_t payload_bytes) {
  firsts_to_[static_cast<std::size_t>(to)] =
      send(memory, kHeaderBytes + payload_bytes, to, kFirstTag);
}

// Waits for the peer's first message, and throws if the peer is in another collective.
void ComposedCollectives::check_first(int from) {
  wait(*firsts_from_[static_cast<std::size_t>(from)], from, kNotReceived);
  FirstMessage theirs;
  std::memcpy(&theirs, first_from(from), kHeaderBytes);
  if (theirs.hash == mine_->hash) {
    return;
  }
  try {
    firsts_to_[static_cast<std::size_t>(from)]->wait();  // so that the peer reports the same
  } catch (const std::exception&) {
    // The difference is the reason even if sending fails.
  }
  const int other = global_ranks_[static_cast<std::size_t>(from)];
  throw DifferentCollectives(detail::concat("this rank is in ", mine_->describe(), ", and rank ",
                                            other, " is in ", theirs.describe(), ". ",
                                            kRunTheSameUnits));
}

void ComposedCollectives::finish() {
  for (const int to : receivers_) {
    wait(*firsts_to_[static_cast<std::size_t>(to)], to, kNotSent);
  }
  if (host_ != nullptr) {
    host_->end();
  }
}

// - Messages, whose errors name the peer

std::unique_ptr<Message> ComposedCollectives::send(const void* data, std::size_t bytes, int to,
                                                   std::int32_t tag) {
  return named(to, kNotSent, [&] { return messages_->send(data, bytes, to, tag); });
}

std::unique_ptr<Message> ComposedCollectives::receive(void* data, std::size_t bytes, int from,
                                                      std::int32_t tag) {
  return named(from, kNotReceived, [&] { return messages_->receive(data, bytes, from, tag); });
}

void ComposedCollectives::wait(Message& message, int peer, const char* failure) {
  set_awaited(&message);
  try {
    named(peer, failure, [&] { message.wait(); });
  } catch (const Error&) {
    set_awaited(nullptr);
    throw;
  }
  set_awaited(nullptr);
}

void ComposedCollectives::set_awaited(Message* message) {
  const std::lock_guard<std::mutex> lock(mutex_);
  awaited_ = given_up_.empty() ? message : nullptr;
  if (!given_up_.empty()) {
    throw Error(given_up_);
  }
}

void ComposedCollectives::give_up(const std::string& reason) {
  if (host_ != nullptr) {
    host_->abort(reason);
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  given_up_ = reason;
  if (awaited_ != nullptr) {
    awaited_->give_up();
  }
}

// - Memory

// The place of `peer` among the peers of `rank`.
std::size_t ComposedCollectives::place_of_peer(int peer, int rank) {
  return static_cast<std::size_t>(peer < rank ? peer : peer - 1);
}

char* ComposedCollectives::first_to(int rank) const {
  return memory_.get() + place_of_peer(rank, rank_) * staging_.first_bytes;
}

char* ComposedCollectives::first_from(int rank) const {
  return memory_.get() + staging_.received + place_of_peer(rank, rank_) * staging_.first_bytes;
}

char* ComposedCollectives::piece_from(int rank, std::size_t number) const {
  const std::size_t slot = place_of_peer(rank, rank_) * MessageStaging::kPiecesInFlight +
                           number % MessageStaging::kPiecesInFlight;
  return memory_.get() + staging_.pieces + slot * staging_.piece_bytes;
}

}  // namespace fsdp
