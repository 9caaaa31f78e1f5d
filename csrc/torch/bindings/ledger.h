// What Python reads of a root's ledger.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include "torch/torch_root.h"

namespace fsdp {

pybind11::dict counters_of(TorchRoot& root);
// (operation, phase, units, bytes) of each collective since the last call.
pybind11::list take_log(TorchRoot& root);
// The iterations whose times were kept, and how many were not. Waits for the streams.
pybind11::tuple take_times(TorchRoot& root);

}  // namespace fsdp
