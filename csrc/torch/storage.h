// Storages over memory that torch has not allocated.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace fsdp {

// A contiguous tensor of `shape` at byte `offset` of a storage that may have no memory yet.
at::Tensor view_of_storage(const c10::intrusive_ptr<c10::StorageImpl>& storage, std::size_t offset,
                           const std::vector<std::int64_t>& shape, at::ScalarType dtype,
                           at::Device device);

// The contents of a storage that keeps `memory` alive.
at::DataPtr owned(std::shared_ptr<void> memory, at::Device device);

}  // namespace fsdp
