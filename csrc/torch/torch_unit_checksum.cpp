// What a unit contributes to a checked step: Note [checked steps] in torch/step_checksum.h.
#include <utility>
#include <vector>

#include "torch/torch_root.h"
#include "torch/torch_unit.h"

namespace fsdp {

void TorchUnit::begin_checksum() {
  checksum_ = std::make_unique<StepChecksum>();
  checksum_->shard_version = shard_version_of_schedule();
  checksum_->shard = hash_of_shard();
}

std::uint64_t TorchUnit::shard_version_of_schedule() const {
  const auto root = root_.lock();
  return root->pipeline().unit(number_).shard_version();
}

// Reading the numbers makes the host wait for the compute stream, which has waited for all lanes.
StepChecksum::Numbers TorchUnit::end_checksum() {
  hash_parameters();  // of a unit that stays unsharded
  const std::unique_ptr<StepChecksum> look = std::move(checksum_);
  const auto value_of = [](const at::Tensor& tensor) {
    return tensor.defined() ? tensor.item<std::int64_t>() : 0;
  };
  const bool is_written = look->shard_version != shard_version_of_schedule();
  const std::int64_t shard = value_of(look->shard);
  return {value_of(look->forward), value_of(look->backward), shard,
          !is_written && shard != value_of(hash_of_shard()) ? 1 : 0};
}

// Hashes the parameters only the first time in each pass, because ranks may differ in how often
// they gather a unit.
void TorchUnit::hash_parameters() {
  const auto root = root_.lock();
  if (checksum_ == nullptr || root == nullptr ||
      !root->pipeline().unit(number_).gather.is_unsharded()) {
    return;
  }
  at::Tensor& hash =
      root->pipeline().passes()->in_forward() ? checksum_->forward : checksum_->backward;
  if (!hash.defined()) {
    hash = hash_of(unsharded_views());
  }
}

// Padding between the parameters may have any values. Parameters of extensions have no plain
// memory.
at::Tensor TorchUnit::hash_of_shard() const {
  std::vector<at::Tensor> rows;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    if (!parameters_[i].sharded.is_none()) {
      at::Tensor local = local_tensor_of(parameters_.sharded(i));
      if (!local.key_set().has(c10::DispatchKey::Python)) {
        rows.push_back(std::move(local));
      }
    }
  }
  return hash_of(rows);
}

}  // namespace fsdp
