// Pinned memory that work of streams uses, until the host has waited for that work.
//
// The host must not use this memory until then. Its own reads and writes are not noted, so they
// show by what they find. What work has written is there when the host has waited for it, and NaN
// until then. Memory that is not as the work has left it when the host has waited is an error. A
// copy is known to use its memory from its call on, other work from its end on.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "races.h"

namespace emulated_gpu {

struct PinnedUse;
using PinnedUses = std::vector<std::shared_ptr<PinnedUse>>;

// Before a copy is submitted. Returns what it uses of pinned memory: nothing if races are not
// looked for.
PinnedUses begin_copy(void* to, const void* from, std::size_t bytes);
// After it was submitted.
void set_ticket(const PinnedUses& uses, const TicketPtr& ticket);
// In place of a memmove, as work.
void run_copy(const PinnedUses& uses, void* to, const void* from, std::size_t bytes);

// Before work accesses memory, and after the work: what it has accessed.
void before_access(const Access& access);
void after_work(const TicketPtr& ticket, const std::vector<Access>& accesses);

// Ends the uses by work that the host has waited for.
void end_pinned_uses();

}  // namespace emulated_gpu
