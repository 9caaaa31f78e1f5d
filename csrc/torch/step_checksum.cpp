#include "torch/step_checksum.h"

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "base/hash_bytes.h"
#include "torch/torch_root.h"
#include "torch/torch_unit.h"

namespace fsdp {
namespace {

constexpr std::int64_t kOdd = 0x1e3779b97f4a7c15;  // half of the bits are set, and it is odd
// Words that are weighted at a time, so that the memory for that stays small.
constexpr std::int64_t kWordsAtOnce = std::int64_t{1} << 20;

at::Tensor number(std::int64_t value) {
  return at::scalar_tensor(value, at::TensorOptions().dtype(at::kLong));
}

// The tensor's bytes as integers of the largest size that fits.
at::Tensor words_of(const at::Tensor& any) {
  const at::Tensor tensor = any.contiguous();
  const std::int64_t first = tensor.storage_offset() * tensor.element_size();
  const auto bytes = static_cast<std::int64_t>(tensor.nbytes());
  const auto fits = [&](std::int64_t size) { return first % size == 0 && bytes % size == 0; };
  const at::Tensor flat = tensor.detach().reshape({-1});
  return flat.view(fits(8) ? at::kLong : fits(4) ? at::kInt : fits(2) ? at::kShort : at::kChar);
}

// As mix() in base/mix.h, twice, so that every bit of a word has an effect on about half of the
// bits of the result. There is no unsigned shift, so the sign is masked.
at::Tensor mix_words(const at::Tensor& words, const at::Tensor& places) {
  at::Tensor mixed = places.bitwise_xor(words);
  for (const int shift : {29, 32}) {
    const std::int64_t without_sign = (std::int64_t{1} << (64 - shift)) - 1;
    mixed.mul_(kOdd);
    mixed.bitwise_xor_(mixed.bitwise_right_shift(shift).bitwise_and_(without_sign));
  }
  return mixed.mul_(kOdd);
}

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

// A polynomial in kOdd of sums of words, each mixed with its place. Mixing maps different words to
// different ones, so a changed word changes its sum.
at::Tensor hash_by_operators(const at::Tensor& tensor) {
  const at::NoGradGuard no_grad;
  const at::Tensor words = words_of(tensor);
  const auto options = words.options().dtype(at::kLong);
  const at::Tensor places = at::arange(std::min(words.numel(), kWordsAtOnce), options).mul_(kOdd);
  at::Tensor hash = at::full({}, words.numel(), options);
  for (std::int64_t first = 0; first < words.numel(); first += kWordsAtOnce) {
    const std::int64_t count = std::min(kWordsAtOnce, words.numel() - first);
    const at::Tensor some = words.narrow(0, first, count);
    hash.mul_(kOdd).add_(mix_words(some, places.narrow(0, 0, count)).sum());
  }
  return hash;
}

at::Tensor hash_of(const at::Tensor& tensor) {
  if (!tensor.is_cpu()) {
    return hash_by_operators(tensor);
  }
  const at::Tensor whole = tensor.contiguous();
  const std::uint64_t hash = hash_bytes(whole.const_data_ptr(), whole.nbytes());
  return number(static_cast<std::int64_t>(hash));
}

at::Tensor hash_of(const std::vector<at::Tensor>& tensors) {
  const at::NoGradGuard no_grad;
  at::Tensor hash;
  for (const at::Tensor& tensor : tensors) {
    if (tensor.numel() > 0) {
      const at::Tensor next = hash_of(tensor);
      hash = hash.defined() ? hash.mul_(kOdd).add_(next) : next;
    }
  }
  return hash;
}

at::Tensor differs(const at::Tensor& gathered, const at::Tensor& shard) {
  const at::NoGradGuard no_grad;
  const at::Tensor cast = shard.to(gathered.device(), gathered.scalar_type());
  if (shard.scalar_type() == gathered.scalar_type()) {
    return hash_of(gathered).ne(hash_of(cast));
  }
  return gathered.ne(cast).logical_and_(cast.eq(cast)).any();
}

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

void StepChecks::compare(const std::vector<StepChecksum::Numbers>& units) const {
  with_python([&] {
    const pybind11::object compare = compare_();
    if (!compare.is_none()) {
      compare(step_, units);
    }
  });
}

}  // namespace fsdp
