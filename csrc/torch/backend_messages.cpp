#include "torch/backend_messages.h"

#include <ATen/ops/from_blob.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <regex>
#include <utility>
#include <vector>

#include "base/check.h"

namespace fsdp {
namespace {

class BackendMessage final : public Message {
 public:
  explicit BackendMessage(c10::intrusive_ptr<c10d::Work> work) : work_(std::move(work)) {}

  void wait() override {
    bool has_ended = false;
    try {
      has_ended = work_->wait();
    } catch (const std::exception& error) {
      throw Error(plain_text(error));
    }
    FSDP_CHECK(has_ended, "the message was given up");
  }
  void give_up() override { work_->abort(); }

 private:
  c10::intrusive_ptr<c10d::Work> work_;
};

class BackendMessages final : public Messages {
 public:
  explicit BackendMessages(c10::intrusive_ptr<c10d::Backend> backend)
      : backend_(std::move(backend)) {}

  int rank() const override { return backend_->getRank(); }
  int size() const override { return backend_->getSize(); }

  std::unique_ptr<Message> send(const void* data, std::size_t bytes, int to,
                                std::int32_t tag) override {
    std::vector<at::Tensor> tensors = {view_of(data, bytes)};
    return message_of([&] { return backend_->send(tensors, to, tag); });
  }

  std::unique_ptr<Message> receive(void* data, std::size_t bytes, int from,
                                   std::int32_t tag) override {
    std::vector<at::Tensor> tensors = {view_of(data, bytes)};
    return message_of([&] { return backend_->recv(tensors, from, tag); });
  }

 private:
  template <typename Post>
  static std::unique_ptr<Message> message_of(const Post& post) {
    try {
      return std::make_unique<BackendMessage>(post());
    } catch (const std::exception& error) {
      throw Error(plain_text(error));
    }
  }

  static at::Tensor view_of(const void* data, std::size_t bytes) {
    return at::from_blob(const_cast<void*>(data), {static_cast<std::int64_t>(bytes)}, at::kByte);
  }

  c10::intrusive_ptr<c10d::Backend> backend_;
};

}  // namespace

bool has_messages(c10d::Backend& backend) { return backend.getBackendName() == "gloo"; }

std::unique_ptr<Messages> messages_of(c10::intrusive_ptr<c10d::Backend> backend) {
  return std::make_unique<BackendMessages>(std::move(backend));
}

std::string plain_text(std::string message) {
  static const std::regex kPosition(R"(^(\[[^\]]*\.(cc|cpp|h|hpp):\d+\]\s*)+)");
  // The stack of torch, the traceback of Python, and gloo's advice.
  for (const char* ending :
       {"\nException raised from", "\n\nAt:\n", "This is typically caused by"}) {
    message.resize(std::min(message.size(), message.find(ending)));
  }
  message = std::regex_replace(message, kPosition, "");
  message.resize(message.find_last_not_of(". \n") + 1);
  return message;
}

std::string plain_text(const std::exception& error) {
  const auto* of_torch = dynamic_cast<const c10::Error*>(&error);
  return plain_text(
      std::string(of_torch != nullptr ? of_torch->what_without_backtrace() : error.what()));
}

}  // namespace fsdp
