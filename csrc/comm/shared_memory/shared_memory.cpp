// Note [in place]
// Peers read an input in the arena where it is: an all-gather reads each byte once and writes it
// once, a reduce-scatter reads each byte once and writes the sum. An input outside the arena (a
// tensor of the user's) goes piece by piece through a staging buffer in the arena, which costs one
// more read and write. All ranks must choose the same path, which they do if they run the same
// program. If they differ, the collective fails with an error.

#include "comm/shared_memory/shared_memory.h"

#include <algorithm>
#include <cstring>
#include <mutex>
#include <new>

#include "base/check.h"
#include "base/copy.h"
#include "comm/shared_memory/rank_barrier.h"
#include "comm/shared_memory/rank_order_sum.h"
#include "device/host_stream.h"

namespace fsdp {
namespace {

using Kind = Operation::Kind;

// Size of the staging buffer, which should stay in the cache of one core.
constexpr std::size_t kPieceBytes = std::size_t{1} << 20;

// Operation::pattern of an all-gather through the staging buffer.
constexpr std::uint64_t kStagedPattern = 1;

Operation operation_of(Kind kind, std::size_t bytes, std::uint64_t offset,
                       DType dtype = DType::Bytes) {
  Operation operation;
  operation.kind = kind;
  operation.dtype = dtype;
  operation.bytes = bytes;
  operation.offset = offset;
  operation.after = bytes;
  return operation;
}

}  // namespace

TransportTraits shared_memory_traits() {
  TransportTraits traits;
  traits.name = "shared_memory";
  traits.gather_by = GatherBy::Parameter;
  traits.sums_in_rank_order = true;
  return traits;
}

SharedMemoryEndpoint::SharedMemoryEndpoint(int global_rank)
    : global_rank_(global_rank), arena_(Arena::of_this_process()) {
  static std::mutex mutex;
  static auto& all_mailboxes = *new std::vector<std::shared_ptr<void>>;  // never destroyed
  const std::lock_guard<std::mutex> lock(mutex);
  for (Mailbox*& mailbox : mailboxes_) {
    all_mailboxes.push_back(Arena::allocate(arena_, sizeof(Mailbox)));
    mailbox = new (all_mailboxes.back().get()) Mailbox;
  }
}

std::string SharedMemoryEndpoint::address() const {
  PeerAddress address;
  address.arena = arena_->address();
  address.mailboxes[0] = arena_->offset_of(mailboxes_[0]);
  address.mailboxes[1] = arena_->offset_of(mailboxes_[1]);
  address.global_rank = global_rank_;
  return to_bytes(address);
}

class SharedMemoryCommunicator final : public Communicator {
 public:
  SharedMemoryCommunicator(std::shared_ptr<Arena> arena, Mailbox& mine, std::vector<Peer> peers,
                           int rank, std::chrono::milliseconds timeout)
      : Communicator(shared_memory_traits(), rank, static_cast<int>(peers.size())),
        arena_(std::move(arena)),
        staging_(Arena::allocate(arena_, kPieceBytes)),
        sources_(peers.size()),
        barrier_(mine, std::move(peers), rank, timeout) {}

  void set_stream(Stream& stream) override {
    static_cast<HostQueue&>(stream).publish_waits(barrier_.blocked());
  }

  std::shared_ptr<void> allocate_alone(Device& device, std::size_t bytes, BufferUse use) override {
    const bool is_read = use == BufferUse::Input || use == BufferUse::Shard;
    return is_read ? Arena::allocate(arena_, bytes) : device.allocate(bytes);
  }

  void all_gather(Stream& stream, const void* input, void* output, std::size_t bytes) override {
    enqueue(stream, [this, part = GatherPart{input, output, bytes}] { run_all_gathers({part}); });
  }

  void all_gather_parts(Stream& stream, const std::vector<GatherPart>& parts) override {
    enqueue(stream, [this, parts] { run_all_gathers(parts); });
  }

  void reduce_scatter(Stream& stream, const void* input, void* output, std::size_t numel,
                      DType dtype) override {
    enqueue(stream, [=] { run_reduce_scatter(input, output, numel, dtype); });
  }

  void all_reduce(Stream& stream, void* data, std::size_t numel, DType dtype) override {
    enqueue(stream, [=] { run_all_reduce(data, numel, dtype); });
  }

  void abort(const std::string& reason) override { barrier_.abort(reason); }
  std::string async_error() override { return barrier_.async_error(); }

 private:
  template <typename Work>
  void enqueue(Stream& stream, Work work) {
    barrier_.issue_collective();
    static_cast<HostQueue&>(stream).enqueue(
        [this, what = &what(), tag = tag(), work = std::move(work)] {
          try {
            barrier_.begin_collective(*what, tag);
            work();
            barrier_.end_collective();
          } catch (const std::exception& error) {
            barrier_.abort(error.what());
            throw;
          }
        });
  }

  // - Collectives, run by the stream's thread

  void run_all_gathers(const std::vector<GatherPart>& parts) {
    for (const GatherPart& part : parts) {
      if (!arena_->contains(part.input, part.bytes)) {
        gather_through_staging(parts);
        return;
      }
    }
    gather_in_place(parts);
  }

  void gather_in_place(const std::vector<GatherPart>& parts) {
    const auto* first = static_cast<const char*>(parts.front().input);
    Operation operation = operation_of(Kind::AllGather, 0, arena_->offset_of(first));
    for (const GatherPart& part : parts) {
      const std::ptrdiff_t distance = static_cast<const char*>(part.input) - first;
      operation.bytes += part.bytes;
      operation.pattern = (operation.pattern ^ part.bytes) * 0x9e3779b97f4a7c15u +
                          static_cast<std::uint64_t>(distance);
      const auto end = distance + static_cast<std::ptrdiff_t>(part.bytes);
      operation.before = std::max(operation.before, behind(-distance));
      operation.after = std::max(operation.after, behind(end));
    }
    const bool large = operation.bytes * sources_.size() >= kLargeOutput;
    barrier_.post(operation);
    copy_parts(parts, first, rank(), large);
    for (int i = 1; i < size(); ++i) {
      const int peer = (rank() + i) % size();  // spreads the reads over the ranks
      copy_parts(parts, barrier_.wait_for_input(peer, operation), peer, large);
    }
    barrier_.finish();
  }

  static std::uint64_t behind(std::ptrdiff_t distance) {
    return static_cast<std::uint64_t>(std::max<std::ptrdiff_t>(distance, 0));
  }

  // Copies the inputs of rank `from` to their places in the outputs. `source` is where that rank
  // has the first part's input.
  static void copy_parts(const std::vector<GatherPart>& parts, const char* source, int from,
                         bool large) {
    const auto* first = static_cast<const char*>(parts.front().input);
    for (const GatherPart& part : parts) {
      const char* input = source + (static_cast<const char*>(part.input) - first);
      char* output = static_cast<char*>(part.output) + static_cast<std::size_t>(from) * part.bytes;
      if (input != output) {
        copy(output, input, part.bytes, large);
      }
    }
  }

  void gather_through_staging(const std::vector<GatherPart>& parts) {
    for (const GatherPart& part : parts) {
      const bool large = part.bytes * sources_.size() >= kLargeOutput;
      for (std::size_t first = 0; first < part.bytes; first += kPieceBytes) {
        const std::size_t bytes = std::min(kPieceBytes, part.bytes - first);
        std::memcpy(staging_.get(), static_cast<const char*>(part.input) + first, bytes);
        Operation operation =
            operation_of(Kind::AllGather, bytes, arena_->offset_of(staging_.get()));
        operation.pattern = kStagedPattern;
        barrier_.post(operation);
        for (int i = 0; i < size(); ++i) {
          const int from = (rank() + i) % size();
          const char* source = barrier_.wait_for_input(from, operation);
          char* output =
              static_cast<char*>(part.output) + static_cast<std::size_t>(from) * part.bytes + first;
          copy(output, source, bytes, large);
        }
        barrier_.finish();
      }
    }
  }

  void run_reduce_scatter(const void* input, void* output, std::size_t numel, DType dtype) {
    const auto ranks = sources_.size();
    const std::size_t segment = numel * itemsize(dtype);
    if (arena_->contains(input, segment * ranks)) {
      reduce_scatter_in_place(input, output, numel, dtype);
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
      reduce_scatter_in_place(staging_.get(), static_cast<char*>(output) + first * itemsize(dtype),
                              count, dtype);
    }
  }

  void reduce_scatter_in_place(const void* input, void* output, std::size_t numel, DType dtype) {
    const std::size_t segment = numel * itemsize(dtype);
    const Operation operation = operation_of(Kind::ReduceScatter, segment * sources_.size(),
                                             arena_->offset_of(input), dtype);
    barrier_.post(operation);
    for (int from = 0; from < size(); ++from) {
      sources_[static_cast<std::size_t>(from)] =
          barrier_.wait_for_input(from, operation) + static_cast<std::size_t>(rank()) * segment;
    }
    sum_in_rank_order(sources_, output, numel, dtype);
    barrier_.finish();
  }

  void run_all_reduce(void* data, std::size_t numel, DType dtype) {
    if (arena_->contains(data, numel * itemsize(dtype))) {
      all_reduce_in_place(data, numel, dtype);
      return;
    }
    const std::size_t most = kPieceBytes / itemsize(dtype);
    for (std::size_t first = 0; first < numel; first += most) {
      const std::size_t count = std::min(most, numel - first);
      char* piece = static_cast<char*>(data) + first * itemsize(dtype);
      std::memcpy(staging_.get(), piece, count * itemsize(dtype));
      all_reduce_in_place(staging_.get(), count, dtype);
      std::memcpy(piece, staging_.get(), count * itemsize(dtype));
    }
  }

  // Two rounds. In the first, each rank sums one segment into its own memory; no other rank reads
  // that segment there. In the second, each rank copies the other ranks' sums over segments that
  // those ranks have read before they posted the second round.
  void all_reduce_in_place(void* data, std::size_t numel, DType dtype) {
    const Operation operation =
        operation_of(Kind::AllReduce, numel * itemsize(dtype), arena_->offset_of(data), dtype);
    const std::size_t most = (numel + sources_.size() - 1) / sources_.size();
    const auto first_of = [&](int rank) {
      return std::min(numel, static_cast<std::size_t>(rank) * most);
    };
    const auto bytes_before = [&](int rank) { return first_of(rank) * itemsize(dtype); };
    const std::size_t mine = bytes_before(rank());
    barrier_.post(operation);
    for (int from = 0; from < size(); ++from) {
      sources_[static_cast<std::size_t>(from)] = barrier_.wait_for_input(from, operation) + mine;
    }
    sum_in_rank_order(sources_, static_cast<char*>(data) + mine,
                      first_of(rank() + 1) - first_of(rank()), dtype);
    barrier_.post(operation);
    for (int i = 1; i < size(); ++i) {
      const int from = (rank() + i) % size();
      const std::size_t begin = bytes_before(from);
      std::memcpy(static_cast<char*>(data) + begin,
                  barrier_.wait_for_input(from, operation) + begin, bytes_before(from + 1) - begin);
    }
    barrier_.finish();
  }

  std::shared_ptr<Arena> arena_;
  std::shared_ptr<void> staging_;

  // - Used by the stream's thread
  std::vector<const void*> sources_;
  RankBarrier barrier_;
};

struct SharedMemoryEndpoint::LanePeers {
  std::vector<Peer> of[2];  // of the gather lane and the reduce lane
};

// `rank` is the place of this rank among the addresses.
SharedMemoryEndpoint::LanePeers SharedMemoryEndpoint::peers_at(
    const std::vector<std::string>& addresses, int rank) const {
  const bool has_own = rank >= 0 && static_cast<std::size_t>(rank) < addresses.size() &&
                       addresses[static_cast<std::size_t>(rank)] == address();
  LanePeers peers;
  for (const std::string& bytes : addresses) {
    const PeerAddress address = parse_address(bytes);
    const std::shared_ptr<const ArenaView> view = ArenaView::of(address.arena);
    const PeerMemory memory{
        view, view->base(), view->bytes(),
        detail::concat("rank ", address.global_rank, " (process ", address.arena.process.pid, ")")};
    for (int lane : {0, 1}) {
      peers.of[lane].emplace_back(address, memory, lane);
    }
  }
  FSDP_CHECK(has_own, "Rank ", global_rank_, " is not at place ", rank, " of the ",
             addresses.size(),
             " addresses of its group. The process group's store has other data in it. Restart all "
             "ranks.");
  return peers;
}

std::pair<std::unique_ptr<Communicator>, std::unique_ptr<Communicator>>
SharedMemoryEndpoint::connect(const std::vector<std::string>& addresses, int rank,
                              std::chrono::milliseconds timeout) const {
  LanePeers peers = peers_at(addresses, rank);
  auto make = [&](int lane) {
    return std::make_unique<SharedMemoryCommunicator>(arena_, *mailboxes_[lane],
                                                      std::move(peers.of[lane]), rank, timeout);
  };
  std::unique_ptr<Communicator> gather = make(0);
  return {std::move(gather), make(1)};
}

HostLanes SharedMemoryEndpoint::connect_on_host(const std::vector<std::string>& addresses,
                                                const HostMap& map, int rank,
                                                std::chrono::milliseconds timeout) const {
  std::vector<std::string> here;
  int index = -1;
  for (const int beside : map.ranks_beside(rank)) {
    index = beside == rank ? static_cast<int>(here.size()) : index;
    here.push_back(addresses[static_cast<std::size_t>(beside)]);
  }
  LanePeers peers = peers_at(here, index);
  auto make = [&](int lane) {
    return std::make_unique<HostRanks>(arena_, *mailboxes_[lane], std::move(peers.of[lane]), map,
                                       rank, timeout);
  };
  std::unique_ptr<HostRanks> gather = make(0);
  return {std::move(gather), make(1)};
}

}  // namespace fsdp
