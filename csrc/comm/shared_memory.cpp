// Note [in place]
// An input in the arena is read where it is: an all-gather reads each byte once and writes it once,
// a reduce-scatter reads each once and writes the sum. Inputs from elsewhere (tensors of the
// user's) go piece by piece through a small buffer of the arena, which is one more read and write.
// Which of the two it is has to be the same on all ranks, as it is where all run the same program;
// else they say so.

#include "comm/shared_memory.h"

#include <algorithm>
#include <cstring>
#include <mutex>
#include <new>

#include "base/check.h"
#include "base/copy.h"
#include "comm/meeting.h"
#include "comm/rank_order_sum.h"
#include "device/host_stream.h"

namespace fsdp {
namespace {

using Kind = Operation::Kind;

// Of the buffer for inputs from elsewhere. Stays in a core's own cache.
constexpr std::size_t kPieceBytes = std::size_t{1} << 20;

// One part of an all-gather that has several.
struct Part {
  const void* input;
  void* output;
  std::size_t bytes;
};

}  // namespace

struct SharedMemoryEndpoint::Address {
  ArenaAddress arena;
  std::uint64_t mailboxes[2];
  std::int32_t name;
};

SharedMemoryEndpoint::SharedMemoryEndpoint(int name)
    : name_(name), arena_(Arena::of_this_process()) {
  static std::mutex mutex;
  // Never destroyed: peers look into them until the process has ended, also while it ends.
  static auto& kept = *new std::vector<std::shared_ptr<void>>;
  const std::lock_guard<std::mutex> lock(mutex);
  for (Mailbox*& mailbox : mailboxes_) {
    kept.push_back(Arena::allocate(arena_, sizeof(Mailbox)));
    mailbox = new (kept.back().get()) Mailbox;
  }
}

std::string SharedMemoryEndpoint::address() const {
  Address address{};
  address.arena = arena_->address();
  address.mailboxes[0] = arena_->offset_of(mailboxes_[0]);
  address.mailboxes[1] = arena_->offset_of(mailboxes_[1]);
  address.name = name_;
  return {reinterpret_cast<const char*>(&address), sizeof(address)};
}

class SharedMemoryCommunicator final : public Communicator {
 public:
  SharedMemoryCommunicator(std::shared_ptr<Arena> arena, Mailbox& mine, std::vector<Peer> peers,
                           int rank, std::chrono::milliseconds timeout)
      : arena_(std::move(arena)),
        staging_(Arena::allocate(arena_, kPieceBytes)),
        sources_(peers.size()),
        meetings_(mine, std::move(peers), rank, timeout) {}

  const char* transport() const override { return "shared_memory"; }
  int rank() const override { return meetings_.rank(); }
  int size() const override { return meetings_.size(); }
  GatherBy gather_by() const override { return GatherBy::Parameter; }
  void announce(const std::string& what) override { what_ = &what; }

  std::shared_ptr<void> allocate(Device& device, std::size_t bytes, BufferUse use) override {
    return use == BufferUse::Output ? device.allocate(bytes) : Arena::allocate(arena_, bytes);
  }

  void group_start() override { in_group_ = true; }

  void group_end() override {
    in_group_ = false;
    if (!group_.empty()) {
      enqueue(*grouped_on_, [this, parts = std::move(group_)] { gather(parts); });
      group_.clear();
    }
  }

  void all_gather(Stream& stream, const void* input, void* output, std::size_t bytes) override {
    if (in_group_) {
      group_.push_back({input, output, bytes});
      grouped_on_ = &stream;
      return;
    }
    enqueue(stream, [this, part = Part{input, output, bytes}] { gather({part}); });
  }

  void reduce_scatter(Stream& stream, const void* input, void* output, std::size_t numel,
                      DType dtype) override {
    enqueue(stream, [=] { scatter(input, output, numel, dtype); });
  }

  void all_reduce(Stream& stream, void* data, std::size_t numel, DType dtype) override {
    enqueue(stream, [=] { reduce(data, numel, dtype); });
  }

  void broadcast(Stream& stream, void* data, std::size_t bytes, int root) override {
    FSDP_CHECK(root >= 0 && root < size(), "a broadcast expects a root from 0 to ", size() - 1,
               " but got ", root);
    enqueue(stream, [=] { broadcast_now(data, bytes, root); });
  }

  void barrier(Stream& stream) override {
    enqueue(stream, [this] {
      meetings_.arrive({});
      for (int from = 0; from < size(); ++from) {
        meetings_.await(from, {});
      }
      meetings_.leave();
    });
  }

  void host_all_gather(Stream& stream, const void* input, void* output,
                       std::size_t bytes) override {
    all_gather(stream, input, output, bytes);
  }

  void abort(const std::string& reason) override { meetings_.abort(reason); }
  std::string async_error() override { return meetings_.async_error(); }

 private:
  template <typename Work>
  void enqueue(Stream& stream, Work work) {
    static_cast<HostQueue&>(stream).enqueue([this, what = what_, work = std::move(work)] {
      try {
        meetings_.begin(*what);
        work();
      } catch (const std::exception& error) {
        meetings_.abort(error.what());
        throw;
      }
    });
  }

  // - Collectives, on the stream's thread

  void gather(const std::vector<Part>& parts) {
    for (const Part& part : parts) {
      if (!arena_->contains(part.input, part.bytes)) {
        gather_in_pieces(parts);
        return;
      }
    }
    gather_in_place(parts);
  }

  void gather_in_place(const std::vector<Part>& parts) {
    const auto* first = static_cast<const char*>(parts.front().input);
    Operation operation{Kind::AllGather, DType::Bytes, 0, 0, 0, arena_->offset_of(first)};
    for (const Part& part : parts) {
      const auto distance =
          static_cast<std::uint64_t>(static_cast<const char*>(part.input) - first);
      operation.bytes += part.bytes;
      operation.pattern = (operation.pattern ^ part.bytes) * 0x9e3779b97f4a7c15u + distance;
    }
    const bool large = operation.bytes * sources_.size() >= kLargeOutput;
    meetings_.arrive(operation);
    copy_parts(parts, first, rank(), large);
    for (int i = 1; i < size(); ++i) {
      const int peer = (rank() + i) % size();  // not all from one rank at a time
      copy_parts(parts, meetings_.await(peer, operation), peer, large);
    }
    meetings_.leave();
  }

  // From where rank `from` has the first part's input to its places in the outputs.
  static void copy_parts(const std::vector<Part>& parts, const char* source, int from, bool large) {
    const auto* first = static_cast<const char*>(parts.front().input);
    for (const Part& part : parts) {
      const char* input = source + (static_cast<const char*>(part.input) - first);
      char* output = static_cast<char*>(part.output) + static_cast<std::size_t>(from) * part.bytes;
      if (input != output) {
        copy(output, input, part.bytes, large);
      }
    }
  }

  static void copy(void* output, const void* input, std::size_t bytes, bool large) {
    if (large) {
      copy_past_caches(output, input, bytes);
    } else {
      std::memcpy(output, input, bytes);
    }
  }

  void gather_in_pieces(const std::vector<Part>& parts) {
    for (const Part& part : parts) {
      const bool large = part.bytes * sources_.size() >= kLargeOutput;
      for (std::size_t first = 0; first < part.bytes; first += kPieceBytes) {
        const std::size_t bytes = std::min(kPieceBytes, part.bytes - first);
        std::memcpy(staging_.get(), static_cast<const char*>(part.input) + first, bytes);
        const Operation operation{Kind::AllGather, DType::Bytes, 0, bytes, 1, staging_offset()};
        meetings_.arrive(operation);
        for (int i = 0; i < size(); ++i) {
          const int from = (rank() + i) % size();
          const char* source = meetings_.await(from, operation);
          copy(
              static_cast<char*>(part.output) + static_cast<std::size_t>(from) * part.bytes + first,
              source, bytes, large);
        }
        meetings_.leave();
      }
    }
  }

  void scatter(const void* input, void* output, std::size_t numel, DType dtype) {
    const auto ranks = sources_.size();
    const std::size_t segment = numel * itemsize(dtype);
    if (arena_->contains(input, segment * ranks)) {
      scatter_in_place(input, output, numel, dtype);
      return;
    }
    const std::size_t most = std::max<std::size_t>(1, kPieceBytes / (ranks * itemsize(dtype)));
    for (std::size_t first = 0; first < numel; first += most) {
      const std::size_t count = std::min(most, numel - first);
      const std::size_t bytes = count * itemsize(dtype);
      for (std::size_t r = 0; r < ranks; ++r) {
        std::memcpy(static_cast<char*>(staging_.get()) + r * bytes,
                    static_cast<const char*>(input) + r * segment + first * itemsize(dtype), bytes);
      }
      scatter_in_place(staging_.get(), static_cast<char*>(output) + first * itemsize(dtype), count,
                       dtype);
    }
  }

  void scatter_in_place(const void* input, void* output, std::size_t numel, DType dtype) {
    const std::size_t segment = numel * itemsize(dtype);
    const Operation operation{Kind::ReduceScatter,       dtype, 0,
                              segment * sources_.size(), 0,     arena_->offset_of(input)};
    meetings_.arrive(operation);
    for (int from = 0; from < size(); ++from) {
      sources_[static_cast<std::size_t>(from)] =
          meetings_.await(from, operation) + static_cast<std::size_t>(rank()) * segment;
    }
    sum_in_rank_order(sources_, output, numel, dtype);
    meetings_.leave();
  }

  void reduce(void* data, std::size_t numel, DType dtype) {
    if (arena_->contains(data, numel * itemsize(dtype))) {
      reduce_in_place(data, numel, dtype);
      return;
    }
    const std::size_t most = kPieceBytes / itemsize(dtype);
    for (std::size_t first = 0; first < numel; first += most) {
      const std::size_t count = std::min(most, numel - first);
      char* piece = static_cast<char*>(data) + first * itemsize(dtype);
      std::memcpy(staging_.get(), piece, count * itemsize(dtype));
      reduce_in_place(staging_.get(), count, dtype);
      std::memcpy(piece, staging_.get(), count * itemsize(dtype));
    }
  }

  // Two meetings: each rank sums one segment, in its own memory, where nobody else reads that one;
  // then each copies the others' sums, over what they have read before they came to this meeting.
  void reduce_in_place(void* data, std::size_t numel, DType dtype) {
    const Operation operation{Kind::AllReduce,         dtype, 0,
                              numel * itemsize(dtype), 0,     arena_->offset_of(data)};
    const std::size_t most = (numel + sources_.size() - 1) / sources_.size();
    const auto first_of = [&](int rank) {
      return std::min(numel, static_cast<std::size_t>(rank) * most);
    };
    const auto bytes_before = [&](int rank) { return first_of(rank) * itemsize(dtype); };
    const std::size_t mine = bytes_before(rank());
    meetings_.arrive(operation);
    for (int from = 0; from < size(); ++from) {
      sources_[static_cast<std::size_t>(from)] = meetings_.await(from, operation) + mine;
    }
    sum_in_rank_order(sources_, static_cast<char*>(data) + mine,
                      first_of(rank() + 1) - first_of(rank()), dtype);
    meetings_.arrive(operation);
    for (int i = 1; i < size(); ++i) {
      const int from = (rank() + i) % size();
      const std::size_t begin = bytes_before(from);
      std::memcpy(static_cast<char*>(data) + begin, meetings_.await(from, operation) + begin,
                  bytes_before(from + 1) - begin);
    }
    meetings_.leave();
  }

  void broadcast_now(void* data, std::size_t bytes, int root) {
    for (std::size_t first = 0; first < bytes; first += kPieceBytes) {
      const std::size_t count = std::min(kPieceBytes, bytes - first);
      char* piece = static_cast<char*>(data) + first;
      if (rank() == root) {
        std::memcpy(staging_.get(), piece, count);
      }
      const Operation operation{Kind::Broadcast, DType::Bytes, root, count, 0, staging_offset()};
      meetings_.arrive(operation);
      for (int from = 0; from < size(); ++from) {
        const char* source = meetings_.await(from, operation);
        if (from == root && rank() != root) {
          std::memcpy(piece, source, count);
        }
      }
      meetings_.leave();
    }
  }

  std::uint64_t staging_offset() const { return arena_->offset_of(staging_.get()); }

  std::shared_ptr<Arena> arena_;
  std::shared_ptr<void> staging_;
  const std::string unnamed_ = "a collective";
  const std::string* what_ = &unnamed_;

  // - Between group_start and group_end.
  bool in_group_ = false;
  std::vector<Part> group_;
  Stream* grouped_on_ = nullptr;

  // - The stream's thread's.
  std::vector<const void*> sources_;
  Meetings meetings_;
};

std::pair<std::unique_ptr<Communicator>, std::unique_ptr<Communicator>>
SharedMemoryEndpoint::connect(const std::vector<std::string>& addresses, int rank,
                              std::chrono::milliseconds timeout) const {
  std::vector<Peer> peers[2];
  for (const std::string& bytes : addresses) {
    Address address;
    FSDP_CHECK(bytes.size() == sizeof(address), "an address of a rank expects ", sizeof(address),
               " bytes but got ", bytes.size(), "; run one version of fsdp_ext on all ranks");
    std::memcpy(&address, bytes.data(), sizeof(address));
    const std::shared_ptr<const ArenaView> view = ArenaView::of(address.arena);
    for (int lane : {0, 1}) {
      peers[lane].push_back({address.arena, view,
                             reinterpret_cast<const Mailbox*>(view->at(address.mailboxes[lane])),
                             address.name});
    }
  }
  auto make = [&](int lane) {
    return std::make_unique<SharedMemoryCommunicator>(arena_, *mailboxes_[lane],
                                                      std::move(peers[lane]), rank, timeout);
  };
  std::unique_ptr<Communicator> gather = make(0);
  return {std::move(gather), make(1)};
}

}  // namespace fsdp
