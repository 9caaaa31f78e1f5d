// Pinned memory that work of streams uses, until the host has waited for that work.
//
// The host must not use this memory until then. The checker cannot see accesses by the host. So it
// puts NaN where the host reads too early, and compares the bytes where it writes too early. What
// work has written is there when the host has waited for the work. A copy is known to use its
// memory from its call on, other work from its end on.
//
// The bytes are NaN in formats of 16 bits and more, and hardly ever the same in two places or
// processes.
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
// After it was submitted. Without a ticket the copy was refused, and uses nothing.
void set_ticket(const PinnedUses& uses, const TicketPtr& ticket);
// In place of a memmove, as work.
void run_copy(const PinnedUses& uses, void* to, const void* from, std::size_t bytes);

// Before work accesses memory, and after the work: what it has accessed.
void before_access(const Access& access);
void after_work(const TicketPtr& ticket, const std::vector<Access>& accesses);

// Functions of the host on streams may use pinned memory in order of their streams. Until all of
// them have run, a copy does not change its memory at its call, and does not compare what it reads.
// A function holds what this returns until then.
std::shared_ptr<const void> begin_host_function();

// Ends the uses by work that the host has waited for.
void end_pinned_uses();

}  // namespace emulated_gpu
