// The point-to-point messages of a torch.distributed backend for CPU tensors.
#pragma once

#include <c10/util/intrusive_ptr.h>

#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "comm/messages/messages.h"

namespace fsdp {

// Whether collectives may be composed of the backend's messages. These have to travel as
// comm/messages/messages.h says, and gloo's do. Other backends may send a message before its
// receiver has asked for it, or have fewer tags.
bool has_messages(c10d::Backend& backend);

std::unique_ptr<Messages> messages_of(c10::intrusive_ptr<c10d::Backend> backend);

// The message of a backend's error, without the source position, stack or traceback that some
// messages contain. Empty if nothing is left.
std::string plain_text(std::string message);
std::string plain_text(const std::exception& error);

}  // namespace fsdp
