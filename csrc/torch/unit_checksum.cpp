#include "torch/unit_checksum.h"

#include <utility>
#include <vector>

#include "torch/torch_root.h"
#include "torch/torch_unit.h"

namespace fsdp {

void UnitChecksum::begin() {
  sum_ = std::make_unique<StepChecksum>();
  sum_->shard_version = shard_version();
  sum_->shard = hash_of_shard();
}

std::uint64_t UnitChecksum::shard_version() const {
  const auto root = unit_.root();
  return root->pipeline().unit(unit_.number()).shard_version();
}

// To read the numbers, the host waits for the compute stream, which has waited for all lanes
// before.
StepChecksum::Numbers UnitChecksum::end() {
  hash_parameters();  // of a unit that stays unsharded
  const std::unique_ptr<StepChecksum> look = std::move(sum_);
  const auto value_of = [](const at::Tensor& tensor) {
    return tensor.defined() ? tensor.item<std::int64_t>() : 0;
  };
  const bool is_written = look->shard_version != shard_version();
  const std::int64_t shard = value_of(look->shard);
  return {value_of(look->forward), value_of(look->backward), shard,
          !is_written && shard != value_of(hash_of_shard()) ? 1 : 0};
}

void UnitChecksum::hash_parameters() {
  if (sum_ == nullptr) {
    return;
  }
  const auto root = unit_.root();
  if (root == nullptr || !root->pipeline().unit(unit_.number()).gather.is_unsharded()) {
    return;
  }
  at::Tensor& hash = root->pipeline().passes()->in_forward() ? sum_->forward : sum_->backward;
  if (!hash.defined()) {
    hash = hash_of(unit_.unsharded_views());
  }
}

// Padding between the parameters may have any values. Parameters of extensions have no plain
// memory.
at::Tensor UnitChecksum::hash_of_shard() const {
  const UnitParameters& parameters = unit_.parameters();
  std::vector<at::Tensor> rows;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    if (!parameters[i].sharded.is_none()) {
      at::Tensor local = local_tensor_of(parameters.sharded(i));
      if (!local.key_set().has(c10::DispatchKey::Python)) {
        rows.push_back(std::move(local));
      }
    }
  }
  return hash_of(rows);
}

}  // namespace fsdp
