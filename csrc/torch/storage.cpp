#include "torch/storage.h"

#include <c10/core/TensorImpl.h>

#include <utility>

namespace fsdp {

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

at::DataPtr owned(std::shared_ptr<void> memory, at::Device device) {
  void* data = memory.get();
  auto* kept = new std::shared_ptr<void>(std::move(memory));
  return {data, kept, [](void* owner) { delete static_cast<std::shared_ptr<void>*>(owner); },
          device};
}

}  // namespace fsdp
