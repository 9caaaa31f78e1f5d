// Copies to and from pinned memory that the host has not waited for.
//
// The host must not use this memory until it has waited. Its own reads and writes are not noted, so
// they show by what they find: a copy to pinned memory leaves NaN there until the host has waited
// for it, and memory that is not as the copy left it when the host has waited is an error.
#pragma once

#include <cstddef>
#include <memory>

#include "races.h"

namespace emulated_gpu {

class PinnedCopy;

// Before the copy is submitted. Returns null if neither address is pinned, or if races are not
// looked for.
std::shared_ptr<PinnedCopy> begin_pinned_copy(void* to, const void* from, std::size_t bytes);

// After it was submitted.
void set_ticket(PinnedCopy& copy, const TicketPtr& ticket);

// On the thread of its stream, in place of a memmove.
void run(PinnedCopy& copy);

// Ends the copies that the host has waited for. They have run.
void end_pinned_copies();

}  // namespace emulated_gpu
