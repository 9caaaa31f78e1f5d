#include "torch/process_group.h"

#include <ATen/ops/from_blob.h>
#include <c10/util/Exception.h>
#include <torch/headeronly/version.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <future>
#include <mutex>
#include <regex>
#include <thread>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <utility>
#include <vector>

#include "base/check.h"
#include "comm/mailbox.h"
#include "device/host_stream.h"
#include "torch/dtype.h"

namespace fsdp {
namespace {

// How long FailureBoard waits for ranks that fail later, and for the store in all.
constexpr std::chrono::milliseconds kLongestWaitForOthers{1000};
constexpr std::chrono::milliseconds kLongestExchange{2000};

at::Tensor view_of(const void* data, std::size_t numel, DType dtype) {
  return at::from_blob(const_cast<void*>(data), {static_cast<std::int64_t>(numel)},
                       at::TensorOptions().dtype(to_scalar_type(dtype)));
}

// What host_all_gather sends first: Note [exchange group].
struct FirstBlock {
  std::uint64_t bytes;  // of the whole message
  char what[120];
  char content[128];
};

class ProcessGroupCommunicator final : public Communicator {
 public:
  ProcessGroupCommunicator(c10::intrusive_ptr<c10d::ProcessGroup> group,
                           c10::intrusive_ptr<c10d::ProcessGroup> exchange_group,
                           GroupMembers members, std::shared_ptr<const FailureBoard> board,
                           bool groups_one_by_one)
      : group_(std::move(group)),
        exchange_group_(exchange_group != nullptr ? std::move(exchange_group) : group_),
        members_(std::move(members)),
        board_(std::move(board)),
        backend_(group_->getBackend(c10::DeviceType::CPU)),
        exchange_backend_(exchange_group_->getBackend(c10::DeviceType::CPU)),
        groups_one_by_one_(groups_one_by_one) {}

  const char* transport() const override { return "process_group"; }
  int rank() const override { return group_->getRank(); }
  int size() const override { return group_->getSize(); }
  GatherBy gather_by() const override {
    return groups_one_by_one_ ? GatherBy::Size : gather_by_of(transport(), /*on_gpu=*/false);
  }
  void announce(const std::string& what, std::uint64_t /*tag*/) override { what_ = &what; }

  void all_gather(Stream& stream, const void* input, void* output, std::size_t bytes) override {
    enqueue(stream,
            [this, input, output, bytes] { all_gather_now(*backend_, input, output, bytes); });
  }

  void reduce_scatter(Stream& stream, const void* input, void* output, std::size_t numel,
                      DType dtype) override {
    enqueue(stream, [this, input, output, numel, dtype] {
      at::Tensor in = view_of(input, numel * static_cast<std::size_t>(backend_->getSize()), dtype);
      at::Tensor out = view_of(output, numel, dtype);
      reduce_scatter_single(out, in)->wait();
    });
  }

  void all_reduce(Stream& stream, void* data, std::size_t numel, DType dtype) override {
    enqueue(stream, [this, data, numel, dtype] {
      std::vector<at::Tensor> tensors = {view_of(data, numel, dtype)};
      backend_->allreduce(tensors)->wait();
    });
  }

  void broadcast(Stream& stream, void* data, std::size_t bytes, int root) override {
    enqueue(stream, [this, data, bytes, root] {
      std::vector<at::Tensor> tensors = {view_of(data, bytes, DType::Bytes)};
      c10d::BroadcastOptions options;
      options.rootRank = root;
      backend_->broadcast(tensors, options)->wait();
    });
  }

  void barrier(Stream& stream) override {
    enqueue(stream, [this] { backend_->barrier()->wait(); });
  }

  void host_all_gather(Stream& stream, const void* input, void* output,
                       std::size_t bytes) override {
    enqueue(stream, [this, what = what_, input, output, bytes] {
      exchange(*what, static_cast<const char*>(input), static_cast<char*>(output), bytes);
    });
  }

  void abort(const std::string& reason) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    error_ = reason;
    aborted_ = true;
  }

  std::string async_error() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    return error_;
  }

 private:
  template <typename Work>
  void enqueue(Stream& stream, Work work) {
    static_cast<HostQueue&>(stream).enqueue([this, what = what_, work] {
      FSDP_CHECK(!aborted_, "communication was aborted: ", async_error());
      try {
        work();
      } catch (const std::exception& error) {
        const std::string message = message_of(error, *what);
        abort(message);
        throw Error(message);
      }
    });
  }

  std::string message_of(const std::exception& error, const std::string& what) const {
    const auto* of_torch = dynamic_cast<const c10::Error*>(&error);
    const std::string reason =
        plain_text(of_torch != nullptr ? of_torch->what_without_backtrace() : error.what());
    return detail::concat(
        "rank ", members_.global_rank, ": ", what,
        " failed over the process group: ", reason.empty() ? "the backend gave no reason" : reason,
        ". ", why_it_failed(what));
  }

  // Names a rank that has ended, or else says what the ranks did. The kernel closes its sockets,
  // which is the error of the others, a moment before the process is gone.
  std::string why_it_failed(const std::string& what) const {
    constexpr std::chrono::milliseconds kInterval{10};
    constexpr int kAttempts = 100;
    for (int i = 0; i < kAttempts && !members_.processes.empty(); ++i) {
      for (const auto& [rank, process] : members_.processes) {
        if (state_of(process) == ProcessState::Ended) {
          return detail::concat("Rank ", rank, " (process ", process.pid,
                                ") has ended. Its last output may say why.");
        }
      }
      std::this_thread::sleep_for(kInterval);
    }
    return board_->exchange(what) +
           "A rank may hang, have failed, or run other collectives. Look at the output of all "
           "ranks.";
  }

  // See Note [exchange group].
  void exchange(const std::string& what, const char* input, char* output, std::size_t bytes) {
    const auto ranks = static_cast<std::size_t>(exchange_backend_->getSize());
    FirstBlock mine{};
    mine.bytes = bytes;
    std::snprintf(mine.what, sizeof(mine.what), "%s", what.c_str());
    const std::size_t first = std::min(bytes, sizeof(mine.content));
    const std::size_t rest = bytes - first;
    std::memcpy(mine.content, input, first);
    std::vector<FirstBlock> blocks(ranks);
    all_gather_now(*exchange_backend_, &mine, blocks.data(), sizeof(mine));
    for (std::size_t rank = 0; rank < ranks; ++rank) {
      const FirstBlock& theirs = blocks[rank];
      FSDP_CHECK(theirs.bytes == bytes, "this rank is in ", what, ", and rank ", rank, " is in ",
                 text_in(theirs.what, sizeof(theirs.what)),
                 ". Run the same units in the same order on every rank");
      std::memcpy(output + rank * bytes, theirs.content, first);
    }
    if (rest > 0) {
      std::vector<char> tails(ranks * rest);
      all_gather_now(*exchange_backend_, input + first, tails.data(), rest);
      for (std::size_t rank = 0; rank < ranks; ++rank) {
        std::memcpy(output + rank * bytes + first, tails.data() + rank * rest, rest);
      }
    }
  }

  // torch 2.15 renamed these methods.
  static void all_gather_now(c10d::Backend& backend, const void* input, void* output,
                             std::size_t bytes) {
    at::Tensor in = view_of(input, bytes, DType::Bytes);
    at::Tensor out =
        view_of(output, bytes * static_cast<std::size_t>(backend.getSize()), DType::Bytes);
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 15
    backend.all_gather_single(out, in)->wait();
#else
    backend._allgather_base(out, in)->wait();
#endif
  }

  c10::intrusive_ptr<c10d::Work> reduce_scatter_single(at::Tensor& output, at::Tensor& input) {
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 15
    return backend_->reduce_scatter_single(output, input);
#else
    return backend_->_reduce_scatter_base(output, input);
#endif
  }

  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  c10::intrusive_ptr<c10d::ProcessGroup> exchange_group_;
  GroupMembers members_;
  std::shared_ptr<const FailureBoard> board_;
  c10::intrusive_ptr<c10d::Backend> backend_;
  c10::intrusive_ptr<c10d::Backend> exchange_backend_;
  bool groups_one_by_one_;
  const std::string unnamed_ = "a collective";
  const std::string* what_ = &unnamed_;
  std::atomic<bool> aborted_{false};
  std::mutex mutex_;
  std::string error_;
};

}  // namespace

std::string FailureBoard::exchange(const std::string& what) const {
  if (store_ == nullptr) {
    return "";
  }
  // The thread may outlive this object.
  std::packaged_task<std::string()> task([board = *this, what] { return board.ask(what); });
  std::future<std::string> answer = task.get_future();
  std::thread(std::move(task)).detach();
  try {
    const bool is_ready = answer.wait_for(kLongestExchange) == std::future_status::ready;
    return is_ready ? answer.get() : "";
  } catch (const std::exception&) {  // the store is gone, or has something else in it
    return "";
  }
}

std::string FailureBoard::ask(const std::string& what) const {
  constexpr int kMost = 8;  // ranks in the message
  constexpr std::chrono::milliseconds kInterval{20};
  const auto key_of = [](int rank) { return detail::concat("fsdp_ext/failed_in/", rank); };
  const auto end = std::chrono::steady_clock::now() + kLongestWaitForOthers;
  const std::string mine = detail::concat("rank ", global_rank_, " was in ", what);
  store_->set(key_of(rank_), std::vector<std::uint8_t>(mine.begin(), mine.end()));
  std::string all;
  int others = 0;
  for (int rank = 0; rank < std::min(size_, kMost); ++rank) {
    bool is_there = store_->check({key_of(rank)});
    while (!is_there && std::chrono::steady_clock::now() < end) {
      std::this_thread::sleep_for(kInterval);
      is_there = store_->check({key_of(rank)});
    }
    if (is_there) {
      const std::vector<std::uint8_t> text = store_->get(key_of(rank));
      all += (all.empty() ? "" : ", ") +
             text_in(reinterpret_cast<const char*>(text.data()), text.size());
      others += rank == rank_ ? 0 : 1;
    }
  }
  return others == 0 ? "" : "When they failed, " + all + (size_ > kMost ? ", and so on. " : ". ");
}

std::string plain_text(std::string message) {
  static const std::regex kPosition(R"(^(\[[^\]]*\.(cc|cpp|h|hpp):\d+\]\s*)+)");
  // A stack of torch's, a traceback of Python's, and what gloo advises.
  for (const char* ending :
       {"\nException raised from", "\n\nAt:\n", "This is typically caused by"}) {
    message.resize(std::min(message.size(), message.find(ending)));
  }
  message = std::regex_replace(message, kPosition, "");
  message.resize(message.find_last_not_of(". \n") + 1);
  return message;
}

std::unique_ptr<Communicator> make_process_group_communicator(
    c10::intrusive_ptr<c10d::ProcessGroup> group,
    c10::intrusive_ptr<c10d::ProcessGroup> exchange_group, GroupMembers members,
    std::shared_ptr<const FailureBoard> board, bool groups_one_by_one) {
  return std::make_unique<ProcessGroupCommunicator>(std::move(group), std::move(exchange_group),
                                                    std::move(members), std::move(board),
                                                    groups_one_by_one);
}

}  // namespace fsdp
