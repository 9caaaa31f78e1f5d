// A flat shard or flat gradient, and one tensor for each parameter's part of it.
//
// Note [own storages]
// Each part has a storage of its own over the flat tensor's memory, instead of being a view. A
// checkpoint writes the whole storage of a tensor, which for a view would be the whole flat shard
// once for each parameter. A DTensor can only be pickled if its local tensor begins where its
// storage begins. Since the storages know nothing of each other, whatever gives the flat tensor
// other memory (Note [moving shards] in core/units/bucket.h) also sets the pointers of all parts.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace fsdp {

// A contiguous tensor of `shape` at byte `offset` of a storage that may have no memory yet.
at::Tensor view_of_storage(const c10::intrusive_ptr<c10::StorageImpl>& storage, std::size_t offset,
                           const std::vector<std::int64_t>& shape, at::ScalarType dtype,
                           at::Device device);

class FlatTensor {
 public:
  FlatTensor() = default;
  // `parts` are results of part_of(flat).
  FlatTensor(at::Tensor flat, const std::vector<at::Tensor>& parts);

  // A tensor with a storage of its own at byte `offset` of `flat`. It keeps the memory alive.
  static at::Tensor part_of(const at::Tensor& flat, std::size_t offset,
                            const std::vector<std::int64_t>& shape, at::ScalarType dtype);

  // Whether a tensor shares the storage of a result of part_of.
  static bool has_storage_of(const at::Tensor& tensor);

  // A tensor like `flat` over other memory.
  static at::Tensor like(const at::Tensor& flat, std::shared_ptr<void> memory);

  const at::Tensor& flat() const { return flat_; }
  void* data() const { return flat_.data_ptr(); }

  // Copies the content into `memory`, where it stays from now on.
  void move(std::shared_ptr<void> memory);
  // Points the tensor and its parts to `memory`, and copies nothing. Null leaves them without any.
  void set_memory(std::shared_ptr<void> memory);
  // Takes the tensor and its parts back to their own memory, with their content, if share_memory_()
  // gave them other memory. It compares one pointer for each part, so every forward can call it.
  // If the whole tensor is written, as a flat parameter is, parts may be out of date.
  void reclaim(bool parts_are_newer = true);

 private:
  struct Part {
    c10::Storage storage;
    std::size_t offset;  // bytes
  };

  void reclaim(const c10::Storage& storage, void* own, bool with_content) const;

  at::Tensor flat_;
  void* data_ = nullptr;
  std::shared_ptr<void> owner_;  // of the memory at `data_`, whatever memory the storages have now
  std::vector<Part> parts_;
};

// Sets elements of contiguous 1-D tensors to zero: those of `tensors[i]` at the int64 indices in
// `elements[i]`, a tensor on the same device. On the host this is faster than index_fill_. It needs
// no GIL.
void clear_elements(const std::vector<at::Tensor>& tensors,
                    const std::vector<at::Tensor>& elements);

}  // namespace fsdp
