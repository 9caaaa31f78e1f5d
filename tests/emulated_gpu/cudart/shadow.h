// Remembers, for all memory, which work has last read it and which has last written it.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <vector>

namespace emulated_gpu {

struct Access {
  std::uintptr_t begin;
  std::uintptr_t end;
  bool is_write;
};

// Sorts the accesses, and makes one of those of a kind that touch each other.
void merge(std::vector<Access>& accesses);

struct Origin;

// A piece of work: the number `number` of its stream. In a graph, each node is a stream of its own.
struct User {
  std::uint64_t stream;
  std::uint64_t number;
  std::shared_ptr<const Origin> origin;
};

struct Conflict {
  User earlier;
  bool earlier_writes;
  Access access;  // the part of the later one that overlaps
};

class Shadow {
 public:
  using IsOrdered = std::function<bool(const User& earlier)>;

  // Takes note of an access. Returns an earlier one of the same memory that is not ordered before
  // it, if one of the two writes.
  std::optional<Conflict> use(const Access& access, const User& user, const IsOrdered& is_ordered);

  // Whether the predicate holds for all that has used the memory last.
  bool all_users(std::uintptr_t begin, std::uintptr_t end, const IsOrdered& predicate) const;

  // The memory is freed.
  void forget(std::uintptr_t begin, std::uintptr_t end);

 private:
  struct Cell {
    std::uintptr_t end;
    std::optional<User> writer;
    std::vector<User> readers;  // since it was written, the last one of each stream
  };
  using Cells = std::map<std::uintptr_t, Cell>;

  // Cuts the cell that contains the address in two there.
  void cut(std::uintptr_t address);
  // Makes cells of the memory between `begin` and `end` that has none.
  void fill(std::uintptr_t begin, std::uintptr_t end);

  Cells cells_;  // by where they begin
};

}  // namespace emulated_gpu
