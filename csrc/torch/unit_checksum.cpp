#include "torch/unit_checksum.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "torch/torch_root.h"
#include "torch/torch_unit.h"

namespace fsdp {
namespace {

// The part of `whole` that is the shard of rank `rank` of `ranks`.
at::Tensor part_of(const at::Tensor& whole, const at::Tensor& shard, int rank, int ranks) {
  for (std::int64_t dim = 0; dim < whole.dim(); ++dim) {
    const std::int64_t size = whole.size(dim);
    if (size != shard.size(dim)) {
      const std::int64_t chunk = (size + ranks - 1) / ranks;
      return whole.narrow(dim, std::min(rank * chunk, size), shard.size(dim));
    }
  }
  return whole;
}

}  // namespace

void UnitChecksum::begin() {
  sum_ = std::make_unique<StepChecksum>();
  sum_->shard_version = shard_version();
  sum_->shard = hash_of_shard();
  const auto root = unit_.root();
  sum_->is_gathered_ahead =
      root->pipeline().unit(unit_.number()).gather.state() == UnitState::Gathering;
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
  using GatherAhead = StepChecksum::GatherAhead;
  const bool is_written = look->shard_version != shard_version();
  const std::int64_t shard = value_of(look->shard);
  const bool is_outdated = value_of(look->is_outdated) != 0;
  const GatherAhead ahead = !look->is_gathered_ahead ? GatherAhead::No
                            : is_outdated            ? GatherAhead::Outdated
                                                     : GatherAhead::Equal;
  return {value_of(look->forward), value_of(look->backward), shard,
          !is_written && shard != value_of(hash_of_shard()) ? 1 : 0,
          static_cast<std::int64_t>(ahead)};
}

void UnitChecksum::compare_with_shard() {
  if (sum_ == nullptr || !sum_->is_gathered_ahead || sum_->is_outdated.defined() ||
      sum_->shard_version != shard_version()) {
    return;
  }
  const auto root = unit_.root();
  const Unit& unit = root->pipeline().unit(unit_.number());
  const int rank = unit.bucket->gather.all_ranks().communicator.rank();
  const std::vector<at::Tensor> whole = unit_.unsharded_views();
  for_each_shard([&](std::size_t i, const at::Tensor& shard) {
    if (shard.numel() > 0 && unit.layout.params()[i].gathered) {
      const at::Tensor next =
          differs(part_of(whole[i], shard, rank, unit.layout.world_size()), shard);
      at::Tensor& all = sum_->is_outdated;
      all = all.defined() ? all.logical_or_(next) : next;
    }
  });
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

// Parameters of extensions have no plain memory.
template <typename Visit>
void UnitChecksum::for_each_shard(const Visit& visit) const {
  const UnitParameters& parameters = unit_.parameters();
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    if (!parameters[i].sharded.is_none()) {
      const at::Tensor local = local_tensor_of(parameters.sharded(i));
      if (!local.key_set().has(c10::DispatchKey::Python)) {
        visit(i, local);
      }
    }
  }
}

// Padding between the parameters may have any values.
at::Tensor UnitChecksum::hash_of_shard() const {
  std::vector<at::Tensor> rows;
  for_each_shard([&rows](std::size_t, const at::Tensor& shard) { rows.push_back(shard); });
  return hash_of(rows);
}

}  // namespace fsdp
