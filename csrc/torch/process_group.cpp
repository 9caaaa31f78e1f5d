#include "torch/process_group.h"

#include <torch/headeronly/version.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <thread>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <utility>
#include <vector>

#include "base/check.h"
#include "comm/messages/composed.h"
#include "device/host_stream.h"
#include "torch/backend_messages.h"
#include "torch/dtype.h"

namespace fsdp {
namespace {

class ProcessGroupCommunicator final : public Communicator {
 public:
  ProcessGroupCommunicator(TransportTraits traits, c10::intrusive_ptr<c10d::ProcessGroup> group,
                           LaneGroup lanes, MessageStaging::Use use,
                           std::unique_ptr<HostRanks> host)
      : Communicator(std::move(traits), group->getRank(), group->getSize()),
        group_(std::move(group)),
        lanes_(std::move(lanes)),
        backend_(group_->getBackend(c10::DeviceType::CPU)),
        peers_read_(use == MessageStaging::Use::Gathers ? BufferUse::Output : BufferUse::Input) {
    if (this->traits().is_composed) {
      composed_ = std::make_unique<ComposedCollectives>(
          messages_of(backend_), lanes_.members.global_ranks, use, std::move(host));
    }
    if (lanes_.deadlocks != nullptr) {
      published_ = &lanes_.published->lane(use == MessageStaging::Use::Gathers ? 0 : 1);
    }
  }
  ~ProcessGroupCommunicator() override {
    if (lanes_.deadlocks != nullptr) {
      lanes_.deadlocks->stop();  // it reports to this object
    }
  }

  void set_stream(Stream& stream) override {
    if (published_ != nullptr) {
      static_cast<HostQueue&>(stream).publish_waits(published_->issuer.blocked);
    }
  }

  std::shared_ptr<void> allocate_alone(Device& device, std::size_t bytes, BufferUse use) override {
    const HostRanks* host = composed_ != nullptr ? composed_->host() : nullptr;
    return host != nullptr && use == peers_read_ ? host->allocate(bytes) : device.allocate(bytes);
  }

  void all_gather(Stream& stream, const void* input, void* output, std::size_t bytes) override {
    enqueue(stream, [this, input, output, bytes](const Name& name) {
      if (composed_ != nullptr) {
        composed_->all_gather(name, input, output, bytes);
      } else {
        all_gather_now(*backend_, input, output, bytes);
      }
    });
  }

  void reduce_scatter(Stream& stream, const void* input, void* output, std::size_t numel,
                      DType dtype) override {
    enqueue(stream, [this, input, output, numel, dtype](const Name& name) {
      if (composed_ != nullptr) {
        composed_->reduce_scatter(name, input, output, numel, dtype);
      } else {
        reduce_scatter_now(input, output, numel, dtype);
      }
    });
  }

  void all_reduce(Stream& stream, void* data, std::size_t numel, DType dtype) override {
    enqueue(stream, [this, data, numel, dtype](const Name& name) {
      if (composed_ != nullptr) {
        composed_->all_reduce(name, data, numel, dtype);
      } else {
        std::vector<at::Tensor> tensors = {view_of(data, numel, dtype)};
        backend_->allreduce(tensors)->wait();
      }
    });
  }

  // The other ranks do not know the reason, unlike that of a collective which failed.
  void abort(const std::string& reason) override { end(reason, /*tells_others=*/true); }

  std::string async_error() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    return error_;
  }

 private:
  using Name = ComposedCollectives::Name;

  // A collective of the backend's own goes on until its timeout.
  void end(const std::string& reason, bool tells_others) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (aborted_) {
        return;
      }
      error_ = reason;
      aborted_ = true;
    }
    if (composed_ != nullptr) {
      composed_->give_up(reason);
    }
    if (lanes_.deadlocks != nullptr) {
      lanes_.deadlocks->fail(reason, tells_others);
    }
  }

  // Calls work(name), with the announced name of the collective.
  template <typename Work>
  void enqueue(Stream& stream, Work work) {
    if (published_ != nullptr) {
      published_->issuer.issue();
    }
    static_cast<HostQueue&>(stream).enqueue([this, what = &what(), tag = tag(), work] {
      FSDP_CHECK(!aborted_, "communication was aborted: ", async_error());
      const Published published(published_, *what);
      try {
        work(Name{*what, tag});
      } catch (const std::exception& error) {
        if (!aborted_) {
          end(message_of(error, *what), /*tells_others=*/false);
        }
        throw Error(async_error());
      }
    });
  }

  // Publishes that the lane is in a collective: Note [ranks that share no memory].
  class Published {
   public:
    Published(Mailbox* mailbox, const std::string& what) : mailbox_(mailbox) {
      if (mailbox_ != nullptr) {
        mailbox_->activity.begin(what);
        mailbox_->posted += 1;
      }
    }
    ~Published() {
      if (mailbox_ != nullptr) {
        mailbox_->activity.end();
      }
    }
    Published(const Published&) = delete;
    Published& operator=(const Published&) = delete;

   private:
    Mailbox* mailbox_;
  };

  std::string message_of(const std::exception& error, const std::string& what) const {
    const std::string reason = plain_text(error);
    if (dynamic_cast<const DifferentCollectives*>(&error) != nullptr) {
      return detail::concat("rank ", lanes_.members.global_rank,
                            ": ranks issued different collectives: ", reason);
    }
    if (dynamic_cast<const HostFailure*>(&error) != nullptr) {
      if (find_ended_rank(what) == nullptr) {
        lanes_.failures->tell(what, lanes_.members);
      }
      return reason;
    }
    return detail::concat(
        "rank ", lanes_.members.global_rank, ": ", what,
        " failed over the process group: ", reason.empty() ? "the backend gave no reason" : reason,
        ". ", why_it_failed(what));
  }

  // Names a rank that has ended, or else describes the ranks' collectives. The kernel closes its
  // sockets, and so the other ranks fail, a moment before the process is gone.
  std::string why_it_failed(const std::string& what) const {
    constexpr std::chrono::milliseconds kInterval{10};
    constexpr int kAttempts = 100;
    const auto& processes = lanes_.members.processes;
    const bool can_look = std::any_of(processes.begin(), processes.end(), [](const auto& member) {
      return can_look_up(member.second);
    });
    for (int i = 0; i < kAttempts && can_look; ++i) {
      if (const auto* ended = find_ended_rank(what); ended != nullptr) {
        return detail::concat("Rank ", ended->first, " (process ", ended->second.pid,
                              ") has ended. Its last output may say why.");
      }
      std::this_thread::sleep_for(kInterval);
    }
    return lanes_.failures->exchange(what, lanes_.members) + "Look at the output of all ranks.";
  }

  // A rank that has ended, among those that this process can look up; nothing if there is none.
  // Ranks on other hosts cannot look it up, so this tells them.
  const std::pair<int, ProcessIdentity>* find_ended_rank(const std::string& what) const {
    const auto& processes = lanes_.members.processes;
    const auto found = std::find_if(processes.begin(), processes.end(), [](const auto& member) {
      return can_look_up(member.second) && state_of(member.second) == ProcessState::Ended;
    });
    if (found == processes.end()) {
      return nullptr;
    }
    lanes_.failures->tell(detail::concat(what, " and found that ",
                                         lanes_.members.name_of(found->first), " has ended"),
                          lanes_.members);
    return &*found;
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

  void reduce_scatter_now(const void* input, void* output, std::size_t numel, DType dtype) {
    const auto ranks = static_cast<std::size_t>(backend_->getSize());
    at::Tensor in = view_of(input, numel * ranks, dtype);
    at::Tensor out = view_of(output, numel, dtype);
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 15
    backend_->reduce_scatter_single(out, in)->wait();
#else
    backend_->_reduce_scatter_base(out, in)->wait();
#endif
  }

  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  LaneGroup lanes_;
  Mailbox* published_ = nullptr;  // this lane in lanes_.published
  c10::intrusive_ptr<c10d::Backend> backend_;
  BufferUse peers_read_;  // what the collectives of this lane let the ranks of this host read
  std::unique_ptr<ComposedCollectives> composed_;  // null if the backend has no messages
  std::atomic<bool> aborted_{false};
  std::mutex mutex_;
  std::string error_;
};

}  // namespace

TransportTraits process_group_traits(bool has_messages) {
  TransportTraits traits;
  traits.name = "process_group";
  traits.is_composed = has_messages;
  traits.sums_in_rank_order = has_messages;
  return traits;
}

std::unique_ptr<Communicator> make_process_group_communicator(
    c10::intrusive_ptr<c10d::ProcessGroup> group, LaneGroup lanes, MessageStaging::Use use,
    bool groups_one_by_one, std::unique_ptr<HostRanks> host) {
  TransportTraits traits = process_group_traits(
      group->getSize() > 1 && has_messages(*group->getBackend(c10::DeviceType::CPU)));
  traits.gather_by = groups_one_by_one ? GatherBy::Size : traits.gather_by;
  if (traits.is_composed && host != nullptr) {
    traits.hosts = host->map().hosts();
  }
  return std::make_unique<ProcessGroupCommunicator>(std::move(traits), std::move(group),
                                                    std::move(lanes), use, std::move(host));
}

}  // namespace fsdp
