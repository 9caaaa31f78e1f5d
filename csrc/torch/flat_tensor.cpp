#include "torch/flat_tensor.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

namespace fsdp {
namespace {

void release(void* kept_owner) { delete static_cast<std::shared_ptr<void>*>(kept_owner); }

at::DataPtr data_ptr_of(void* data, std::shared_ptr<void> owner, at::Device device) {
  if (owner == nullptr) {
    return {data, device};
  }
  return {data, new std::shared_ptr<void>(std::move(owner)), &release, device};
}

void* data_of(const c10::Storage& storage) {
  return storage.unsafeGetStorageImpl()->mutable_data();
}

void set_data(const c10::Storage& storage, void* data, std::shared_ptr<void> owner) {
  storage.unsafeGetStorageImpl()->set_data_ptr_noswap(
      data_ptr_of(data, std::move(owner), storage.device()));
}

// Returns an owner of the tensor's memory. On the host it owns the memory and not the storage,
// because share_memory_() gives a storage other memory and frees the old one.
std::shared_ptr<void> owner_of(const at::Tensor& tensor) {
  const c10::Storage& storage = tensor.storage();
  if (!tensor.is_cpu()) {
    return std::make_shared<c10::Storage>(storage);
  }
  data_of(storage);  // ends lazy copies
  c10::StorageImpl* impl = storage.unsafeGetStorageImpl();
  if (impl->data_ptr().get_deleter() != &release) {
    auto memory = std::make_shared<at::DataPtr>(impl->set_data_ptr(at::DataPtr()));
    set_data(storage, memory->get(), memory);
  }
  return *static_cast<std::shared_ptr<void>*>(impl->data_ptr().get_context());
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
    : flat_(std::move(flat)), data_(data_of(flat_.storage())), owner_(owner_of(flat_)) {
  const char* begin = at_byte(data_, 0);
  for (const at::Tensor& part : parts) {
    if (part.storage().nbytes() == 0) {
      continue;  // it has no memory
    }
    const char* place = at_byte(data_of(part.storage()), 0);
    parts_.push_back({part.storage(), static_cast<std::size_t>(place - begin)});
  }
}

at::Tensor FlatTensor::part_of(const at::Tensor& flat, std::size_t offset,
                               const std::vector<std::int64_t>& shape, at::ScalarType dtype) {
  std::size_t bytes = c10::elementSize(dtype);
  for (const std::int64_t size : shape) {
    bytes *= static_cast<std::size_t>(size);
  }
  // An empty part gets a null address. At the address of the next part, torch.save would take both
  // for one storage, and would raise if their dtypes differ.
  c10::DataPtr memory = bytes == 0 ? c10::DataPtr(nullptr, flat.device())
                                   : data_ptr_of(at_byte(data_of(flat.storage()), offset),
                                                 owner_of(flat), flat.device());
  const auto storage = c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), bytes, std::move(memory),
      /*allocator=*/nullptr, /*resizable=*/false);
  return view_of_storage(storage, 0, shape, dtype, flat.device());
}

bool FlatTensor::has_storage_of(const at::Tensor& tensor) {
  return tensor.has_storage() && tensor.storage().data_ptr().get_deleter() == &release;
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
  at::from_blob(memory.get(), flat_.sizes(), flat_.options()).copy_(flat_);
  if (flat_.is_cuda()) {
    // If the old memory was allocated for another stream, its allocator must not reuse it before
    // the current stream has copied it. For PyTorch's own memory, record_stream ensures this. For
    // memory that fsdp_ext has allocated, Reducer::renew_gradients makes the other stream wait.
    flat_.record_stream(c10::impl::VirtualGuardImpl(at::kCUDA).getStream(flat_.device()));
  }
  set_memory(std::move(memory));
}

void FlatTensor::set_memory(std::shared_ptr<void> memory) {
  data_ = memory.get();
  owner_ = std::move(memory);
  set_data(flat_.storage(), data_, owner_);
  for (const Part& part : parts_) {
    set_data(part.storage, data_ != nullptr ? at_byte(data_, part.offset) : nullptr, owner_);
  }
}

void FlatTensor::reclaim(bool parts_are_newer) {
  if (!flat_.defined() || !flat_.is_cpu()) {
    return;
  }
  reclaim(flat_.storage(), data_, /*with_content=*/true);
  for (const Part& part : parts_) {
    reclaim(part.storage, at_byte(data_, part.offset), parts_are_newer);
  }
}

void FlatTensor::reclaim(const c10::Storage& storage, void* own, bool with_content) const {
  const void* const now = data_of(storage);
  if (own == now) {
    return;
  }
  if (with_content) {
    std::memcpy(own, now, std::min(storage.nbytes(), flat_.nbytes()));
  }
  set_data(storage, own, owner_);
}

void clear_elements(const std::vector<at::Tensor>& tensors,
                    const std::vector<at::Tensor>& elements) {
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const at::Tensor& tensor = tensors[i];
    if (!tensor.is_cpu()) {
      tensor.index_fill_(0, elements[i], 0);
      continue;
    }
    auto* const bytes = static_cast<std::byte*>(tensor.mutable_data_ptr());
    const auto* const first = elements[i].const_data_ptr<std::int64_t>();
    for (std::int64_t j = 0; j < elements[i].numel(); ++j) {
      std::memset(bytes + first[j] * tensor.element_size(), 0, tensor.element_size());
    }
  }
}

}  // namespace fsdp
