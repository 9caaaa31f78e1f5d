#include "records.h"

#include <sys/mman.h>

#include <thread>
#include <utility>

#include "lasting.h"

namespace emulated_gpu {
namespace {

constexpr std::uint64_t kPage = 4096;
constexpr std::chrono::microseconds kBetweenLooks(20);

SharedRecords::Page* map_page(const SharedRange& range) {
  void* address = mmap(nullptr, kPage, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  return map_shared(range, address) ? static_cast<SharedRecords::Page*>(address) : nullptr;
}

SharedRange new_page() {
  static auto* file = new SharedFile("events of an emulated GPU");
  return file->take(kPage);
}

// All work of this process that it has told others of.
struct Told {
  std::mutex mutex;
  Clock clock;
};
Told& told() { return lasting<Told>(); }

// A record that another event has made, mostly in another process, so it looks at the page.
class RecordOfOther final : public Record {
 public:
  RecordOfOther(std::shared_ptr<SharedRecords> all, std::uint64_t number, Clock clock)
      : Record(std::move(clock)), all_(std::move(all)), number_(number) {}

  bool is_reached() override { return all_->page->reached >= number_; }
  void wait() override {
    while (!is_reached()) {
      std::this_thread::sleep_for(kBetweenLooks);
    }
  }

 private:
  const std::shared_ptr<SharedRecords> all_;
  const std::uint64_t number_;
};

}  // namespace

void Record::reach() {
  const std::lock_guard<std::mutex> lock(mutex_);
  is_reached_ = true;
  time_ = WallClock::now();
  changed_.notify_all();
}

bool Record::is_reached() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return is_reached_;
}

void Record::wait() {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [this] { return is_reached_; });
}

WallClock::time_point Record::time() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return time_;
}

SharedRecords::SharedRecords() : range(new_page()), page(map_page(range)) {
  if (page != nullptr) {
    page->last = 0;  // from now on the file has memory there
  }
}

SharedRecords::SharedRecords(const SharedRange& of_other)
    : range(of_other), page(map_page(range)) {}

SharedRecords::~SharedRecords() {
  if (page != nullptr) {
    munmap(page, kPage);
  }
}

SharedRecord::SharedRecord(std::shared_ptr<SharedRecords> all, std::uint64_t number, Clock clock)
    : Record(std::move(clock)), all_(std::move(all)), number_(number) {}

std::shared_ptr<SharedRecord> SharedRecord::next(std::shared_ptr<SharedRecords> all, Clock clock) {
  {
    const std::lock_guard<std::mutex> lock(told().mutex);
    told().clock.join(clock);
  }
  const std::uint64_t number = ++all->page->last;
  return std::make_shared<SharedRecord>(std::move(all), number, std::move(clock));
}

// What other processes have waited for is not known here. A record of another one counts as one
// that comes after all work that it was told of, so that no order is missed.
std::shared_ptr<Record> SharedRecord::newest(const std::shared_ptr<SharedRecords>& all,
                                             const std::shared_ptr<Record>& own) {
  const std::uint64_t last = all->page->last;
  const auto mine = std::dynamic_pointer_cast<SharedRecord>(own);
  if (last == 0 || (mine != nullptr && mine->number_ == last)) {
    return own;
  }
  const std::lock_guard<std::mutex> lock(told().mutex);
  return std::make_shared<RecordOfOther>(all, last, told().clock);
}

void SharedRecord::reach() {
  Record::reach();
  std::atomic<std::uint64_t>& reached = all_->page->reached;
  std::uint64_t before = reached;
  while (before < number_ && !reached.compare_exchange_weak(before, number_)) {
  }
}

}  // namespace emulated_gpu
