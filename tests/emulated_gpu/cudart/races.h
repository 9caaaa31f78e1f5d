// Finds work of streams that uses the same memory, writes it, and is not ordered.
//
// What a piece of work comes after is decided when the host submits it, however threads then run:
// earlier work of its stream, what that stream was told to wait for, and what the host has waited
// for until then, on whatever thread. So a wait that is missing is found although the work ran in
// the right order. What work uses is noted while it runs (`reads` and `writes` of emulated_gpu.h).
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "emulated_gpu.h"
#include "shadow.h"

namespace emulated_gpu {

// For each stream, by its id, the number of the last piece of work that has ended before.
class Clock {
 public:
  void join(const Clock& other);
  // Counts another piece of work of the stream, and returns its number.
  std::uint64_t advance(std::uint64_t stream);
  bool covers(const User& user) const;

 private:
  std::vector<std::uint64_t> numbers_;
};

// Where work came from, for messages.
struct Origin {
  std::string what;
  std::uint64_t stream;
  std::vector<std::string> python;  // the frames of the thread, if that ran Python
  std::vector<void*> native;        // otherwise the addresses that it returns to
};

// Of work that the calling thread submits. Null if races are not looked for. To read Python's
// frames it takes Python's lock for a moment, which a caller that holds another lock forbids.
enum class ReadsPython { kYes, kNo };
std::shared_ptr<const Origin> origin_of(const std::string& what, std::uint64_t stream,
                                        ReadsPython reads_python = ReadsPython::kYes);

// A piece of work, and what it comes after. Null if races are not looked for.
struct Ticket {
  User user;
  Clock before;
};
using TicketPtr = std::shared_ptr<const Ticket>;

// What the host has been told so far of the order of a stream's work.
class StreamOrder {
 public:
  explicit StreamOrder(std::uint64_t id) : id_(id) {}

  // The next piece of work of the stream, which begins after all that the host has waited for.
  TicketPtr next(const std::shared_ptr<const Origin>& origin);
  // The stream waits for what has ended then.
  void wait_for(const Clock& clock);
  // When everything that was submitted until now has ended.
  Clock now() const;

 private:
  const std::uint64_t id_;
  Clock clock_;
};

// The host knows that this has ended.
void host_waited_for(const Clock& clock);
bool has_host_waited_for(const User& user);
// The same of all work so far that has used the memory.
bool has_host_waited_for(const void* begin, std::size_t bytes);

// Fails the device, because the host wrote pinned memory before it had waited for the work that
// uses it.
void report_host_write(const void* begin, std::size_t bytes, const Origin& work);

// Runs the work, and fails the device if something unordered uses the same memory.
void run_checked(const TicketPtr& ticket, const Work& work);

// What a node of a graph uses. The work around it is noted to use the same.
struct GraphNode {
  std::shared_ptr<const Origin> origin;
  std::set<std::size_t> after;
  std::vector<Access> accesses;
};
std::vector<Access> run_noted(const Work& work);

// Fails the device if nodes use the same memory that no edges order. Nodes come after earlier ones.
void check_graph(const std::vector<GraphNode>& nodes);

// The memory is freed, and may become another allocation.
void forget_uses(const void* begin, std::size_t bytes);

}  // namespace emulated_gpu
