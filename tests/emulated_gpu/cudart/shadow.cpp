#include "shadow.h"

#include <algorithm>
#include <iterator>
#include <tuple>

namespace emulated_gpu {
namespace {

bool is_same(const User& one, const User& other) {
  return one.stream == other.stream && one.number == other.number;
}

}  // namespace

void merge(std::vector<Access>& accesses) {
  std::sort(accesses.begin(), accesses.end(), [](const Access& one, const Access& other) {
    return std::tie(one.is_write, one.begin) < std::tie(other.is_write, other.begin);
  });
  std::size_t count = 0;
  for (const Access& access : accesses) {
    Access& last = accesses[count > 0 ? count - 1 : 0];
    if (count > 0 && last.is_write == access.is_write && access.begin <= last.end) {
      last.end = std::max(last.end, access.end);
    } else {
      accesses[count++] = access;
    }
  }
  accesses.resize(count);
}

void Shadow::cut(std::uintptr_t address) {
  auto after = cells_.upper_bound(address);
  if (after == cells_.begin()) {
    return;
  }
  auto& [begin, cell] = *std::prev(after);
  if (begin < address && address < cell.end) {
    cells_.emplace_hint(after, address, cell);
    cell.end = address;
  }
}

void Shadow::fill(std::uintptr_t begin, std::uintptr_t end) {
  auto next = cells_.lower_bound(begin);
  while (begin < end) {
    const std::uintptr_t until = next != cells_.end() ? std::min(next->first, end) : end;
    if (begin < until) {
      cells_.emplace_hint(next, begin, Cell{until, {}, {}});
    }
    if (until == end) {
      return;
    }
    begin = next->second.end;
    ++next;
  }
}

std::optional<Conflict> Shadow::use(const Access& access, const User& user,
                                    const IsOrdered& is_ordered) {
  std::optional<Conflict> found;
  cut(access.begin);
  cut(access.end);
  fill(access.begin, access.end);
  const auto last = cells_.lower_bound(access.end);
  for (auto at = cells_.lower_bound(access.begin); at != last; ++at) {
    Cell& cell = at->second;
    const auto look_at = [&](const User& earlier, bool writes) {
      if (!found.has_value() && !is_same(earlier, user) && !is_ordered(earlier)) {
        found = {earlier, writes, {at->first, cell.end, access.is_write}};
      }
    };
    if (cell.writer.has_value()) {
      look_at(*cell.writer, true);
    }
    if (access.is_write) {
      for (const User& reader : cell.readers) {
        look_at(reader, false);
      }
      cell.writer = user;
      cell.readers.clear();
      continue;
    }
    const auto same = std::find_if(cell.readers.begin(), cell.readers.end(),
                                   [&](const User& one) { return one.stream == user.stream; });
    if (same != cell.readers.end()) {
      *same = user;
    } else {
      cell.readers.push_back(user);
    }
  }
  // What one write has covered is one cell again, so cells stay few.
  if (access.is_write) {
    cells_.erase(cells_.lower_bound(access.begin), last);
    cells_.emplace_hint(last, access.begin, Cell{access.end, user, {}});
  }
  return found;
}

bool Shadow::all_users(std::uintptr_t begin, std::uintptr_t end, const IsOrdered& predicate) const {
  auto at = cells_.upper_bound(begin);
  if (at != cells_.begin() && std::prev(at)->second.end > begin) {
    --at;
  }
  for (; at != cells_.end() && at->first < end; ++at) {
    const Cell& cell = at->second;
    if ((cell.writer.has_value() && !predicate(*cell.writer)) ||
        !std::all_of(cell.readers.begin(), cell.readers.end(), predicate)) {
      return false;
    }
  }
  return true;
}

void Shadow::forget(std::uintptr_t begin, std::uintptr_t end) {
  cut(begin);
  cut(end);
  cells_.erase(cells_.lower_bound(begin), cells_.lower_bound(end));
}

}  // namespace emulated_gpu
