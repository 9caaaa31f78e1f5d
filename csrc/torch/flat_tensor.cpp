#include "torch/flat_tensor.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/from_blob.h>

#include <cstring>
#include <utility>

namespace fsdp {
namespace {

at::DataPtr data_ptr_of(void* data, std::shared_ptr<void> owner, at::Device device) {
  auto* kept = new std::shared_ptr<void>(std::move(owner));
  return {data, kept,
          [](void* kept_owner) { delete static_cast<std::shared_ptr<void>*>(kept_owner); }, device};
}

void* data_of(const c10::Storage& storage) {
  return storage.unsafeGetStorageImpl()->mutable_data();
}

void set_data(const c10::Storage& storage, void* data, std::shared_ptr<void> owner) {
  storage.unsafeGetStorageImpl()->set_data_ptr_noswap(
      data_ptr_of(data, std::move(owner), storage.device()));
}

// Keeps the memory of a tensor alive. The memory is that of its storage as it is now.
std::shared_ptr<void> owner_of(const at::Tensor& tensor) {
  return std::make_shared<c10::Storage>(tensor.storage());
}

char* at_byte(void* data, std::size_t offset) { return static_cast<char*>(data) + offset; }

}  // namespace

at::Tensor view_of_storage(const c10::intrusive_ptr<c10::StorageImpl>& storage, std::size_t offset,
                           const std::vector<std::int64_t>& shape, at::ScalarType dtype,
                           at::Device device) {
  const auto keys =
      c10::DispatchKeySet(device.is_cuda() ? c10::DispatchKey::CUDA : c10::DispatchKey::CPU);
  at::Tensor view = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(storage), keys,
                                                             c10::scalarTypeToTypeMeta(dtype));
  view.unsafeGetTensorImpl()->set_storage_offset(
      static_cast<std::int64_t>(offset / c10::elementSize(dtype)));
  view.unsafeGetTensorImpl()->set_sizes_contiguous(shape);
  return view;
}

FlatTensor::FlatTensor(at::Tensor flat, const std::vector<at::Tensor>& parts)
    : flat_(std::move(flat)) {
  const char* begin = at_byte(data_of(flat_.storage()), 0);
  for (const at::Tensor& part : parts) {
    const char* place = at_byte(data_of(part.storage()), 0);
    parts_.push_back({part.storage(), static_cast<std::size_t>(place - begin)});
  }
}

at::Tensor FlatTensor::part_of(const at::Tensor& flat, std::int64_t offset,
                               const std::vector<std::int64_t>& shape, at::ScalarType dtype) {
  std::size_t bytes = c10::elementSize(dtype);
  for (const std::int64_t size : shape) {
    bytes *= static_cast<std::size_t>(size);
  }
  const auto storage = c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), bytes,
      data_ptr_of(at_byte(data_of(flat.storage()), static_cast<std::size_t>(offset)),
                  owner_of(flat), flat.device()),
      /*allocator=*/nullptr, /*resizable=*/false);
  return view_of_storage(storage, 0, shape, dtype, flat.device());
}

at::Tensor FlatTensor::like(const at::Tensor& flat, std::shared_ptr<void> memory) {
  void* const data = memory.get();
  const auto storage = c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), flat.nbytes(),
      data_ptr_of(data, std::move(memory), flat.device()), /*allocator=*/nullptr,
      /*resizable=*/false);
  return view_of_storage(storage, 0, {flat.numel()}, flat.scalar_type(), flat.device());
}

// `flat_` is all of its storage.
void FlatTensor::move(std::shared_ptr<void> memory) {
  reclaim();
  const at::NoGradGuard no_grad;
  void* data = memory.get();
  at::from_blob(data, flat_.sizes(), flat_.options()).copy_(flat_);
  set_data(flat_.storage(), data, memory);
  for (const Part& part : parts_) {
    set_data(part.storage, at_byte(data, part.offset), memory);
  }
}

void FlatTensor::reclaim() {
  void* const data = data_of(flat_.storage());
  for (const Part& part : parts_) {
    void* const own = at_byte(data, part.offset);
    void* const now = data_of(part.storage);
    if (own != now && flat_.is_cpu()) {
      std::memcpy(own, now, part.storage.nbytes());
      set_data(part.storage, own, owner_of(flat_));
    }
  }
}

}  // namespace fsdp
