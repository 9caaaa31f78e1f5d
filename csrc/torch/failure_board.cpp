#include "torch/failure_board.h"

#include <algorithm>
#include <cstdint>
#include <exception>
#include <future>
#include <map>
#include <thread>

#include "base/check.h"
#include "base/text.h"

namespace fsdp {
namespace {

// How long FailureBoard waits for ranks that fail later, and for the store in all.
constexpr std::chrono::milliseconds kLongestWaitForOthers{1000};
constexpr std::chrono::milliseconds kLongestExchange{2000};

// The entry that a rank writes on the FailureBoard, and its key.
std::string failure_of(const GroupMembers& members, const std::string& what) {
  return detail::concat("rank ", members.global_rank, " was in ", what);
}
std::string key_of(int global_rank) { return detail::concat("failed_in/", global_rank); }

// Runs `call` on a new thread, which may outlive the caller, and waits for it for a moment. The
// future has the call's exception, too.
template <typename Call>
auto call_and_wait(Call call) {
  std::packaged_task<decltype(call())()> task(std::move(call));
  auto answer = task.get_future();
  std::thread(std::move(task)).detach();
  answer.wait_for(kLongestExchange);
  return answer;
}

class StoreBoard final : public Board {
 public:
  explicit StoreBoard(c10::intrusive_ptr<c10d::Store> store) : store_(std::move(store)) {}

  void write(const std::string& key, const std::string& text) override {
    store_->set(store_key(key), std::vector<std::uint8_t>(text.begin(), text.end()));
  }
  std::string read(const std::string& key) override {
    if (!store_->check({store_key(key)})) {
      return "";
    }
    const std::vector<std::uint8_t> text = store_->get(store_key(key));
    return {text.begin(), text.end()};
  }

 private:
  static std::string store_key(const std::string& key) { return "fsdp_ext/lanes/" + key; }

  c10::intrusive_ptr<c10d::Store> store_;
};

}  // namespace

std::string GroupMembers::name_of(int rank) const {
  for (const auto& [other, process] : processes) {
    if (other == rank) {
      return detail::concat("rank ", rank, " (", fsdp::name_of(process), ")");
    }
  }
  return detail::concat("rank ", rank);
}

std::string FailureBoard::exchange(const std::string& what, const GroupMembers& members) const {
  const std::string unknown = "A rank may hang, have failed, or run other collectives. ";
  if (board_ == nullptr) {
    return unknown;
  }
  try {
    auto answer =
        call_and_wait([board = *this, what, members] { return board.ask(what, members); });
    if (answer.wait_for(std::chrono::seconds(0)) == std::future_status::ready) {
      const std::string heard = answer.get();
      return heard.empty() ? unknown : heard;
    }
    return detail::concat("The process group's store does not answer either. In most jobs ",
                          members.name_of(0),
                          " serves it. That process, or the network to it, may be down. ");
  } catch (const std::exception&) {
    return detail::concat("The process group's store cannot be reached either. In most jobs ",
                          members.name_of(0), " serves it, and may have ended. ");
  }
}

// The ranks next to this one, since many collectives go round a ring.
std::vector<int> GroupMembers::neighbours(std::size_t most) const {
  std::vector<int> ranks;
  for (const auto& [rank, process] : processes) {
    ranks.push_back(rank);
  }
  const auto next = std::lower_bound(ranks.begin(), ranks.end(), global_rank);
  std::rotate(ranks.begin(), next, ranks.end());
  if (ranks.size() > most) {
    ranks.erase(ranks.begin() + static_cast<std::ptrdiff_t>(most / 2),
                ranks.end() - static_cast<std::ptrdiff_t>(most - most / 2));
  }
  std::sort(ranks.begin(), ranks.end());
  return ranks;
}

void FailureBoard::tell(const std::string& what, const GroupMembers& members) const {
  if (board_ == nullptr) {
    return;
  }
  try {
    call_and_wait([board = board_, key = key_of(members.global_rank),
                   mine = failure_of(members, what)] { board->write(key, mine); });
  } catch (const std::exception&) {
    // No thread could be started. The caller reports an error of its own.
  }
}

std::string FailureBoard::ask(const std::string& what, const GroupMembers& members) const {
  constexpr std::size_t kMost = 8;  // ranks in the message
  const auto end = std::chrono::steady_clock::now() + kLongestWaitForOthers;
  std::map<int, std::string> answers = {{members.global_rank, failure_of(members, what)}};
  board_->write(key_of(members.global_rank), answers.begin()->second);
  std::string silent;
  const std::vector<int> asked = members.neighbours(kMost);
  for (const int rank : asked) {
    const std::string text = read_until(key_of(rank), end);
    if (!text.empty()) {
      answers[rank] = text;
    } else {
      silent += (silent.empty() ? "" : ", ") + members.name_of(rank);
    }
  }
  std::string heard;
  for (const auto& [rank, text] : answers) {
    heard += (heard.empty() ? "" : ", ") + text;
  }
  const bool are_more = asked.size() < members.processes.size();
  heard =
      answers.size() < 2 ? "" : "When they failed, " + heard + (are_more ? ", and so on. " : ". ");
  if (silent.empty()) {
    return heard.empty() ? "" : heard + "A rank may hang, have failed, or run other collectives. ";
  }
  return detail::concat(heard, "No answer came from ", silent,
                        ". A rank that does not answer may be busy or hang, it may have ended, or "
                        "the network to it may be down. ");
}

std::string FailureBoard::read_until(const std::string& key,
                                     std::chrono::steady_clock::time_point end) const {
  constexpr std::chrono::milliseconds kInterval{20};
  std::string text = board_->read(key);
  while (text.empty() && std::chrono::steady_clock::now() < end) {
    std::this_thread::sleep_for(kInterval);
    text = board_->read(key);
  }
  return text_in(text.data(), text.size());
}

std::unique_ptr<Board> make_store_board(c10::intrusive_ptr<c10d::Store> store) {
  return store != nullptr ? std::make_unique<StoreBoard>(std::move(store)) : nullptr;
}

}  // namespace fsdp
