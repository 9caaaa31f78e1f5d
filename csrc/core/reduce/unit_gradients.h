// The gradients of a unit: which ones have arrived in this backward, and which ones the last
// reduction included.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace fsdp {

// Larger than the number of any packing.
constexpr std::uint64_t kNoPacking = ~std::uint64_t{0};

class UnitGradients {
 public:
  explicit UnitGradients(std::size_t trainable_count)
      : arrived_(trainable_count, 0),
        is_frozen_(trainable_count, 0),
        used_(trainable_count, 0),
        reduced_since_(trainable_count, kNoPacking) {}

  std::size_t count() const { return arrived_.size(); }  // of trainable parameters

  void begin_backward() {
    is_reached_ = is_reduced_ = false;
    std::fill(used_.begin(), used_.end(), 0);
  }
  // Freezes or unfreezes parameter i for the following backwards, on all ranks alike.
  void set_frozen(std::size_t i, bool value) { is_frozen_.at(i) = value ? 1 : 0; }
  bool is_frozen(std::size_t i) const { return is_frozen_[i] != 0; }
  // Whether any parameter is not frozen.
  bool trains() const {
    return std::find(is_frozen_.begin(), is_frozen_.end(), 0) != is_frozen_.end();
  }
  // This backward has reached the unit, on all ranks.
  void reach(bool syncs) {
    is_reached_ = true;
    awaits_reduction_ = awaits_reduction_ || (!syncs && trains());
  }
  void arrive(std::size_t i) { arrived_.at(i) = 1; }

  // In this backward, and not packed yet.
  bool has_arrived(std::size_t i) const { return arrived_[i] != 0; }
  bool any_arrived() const {
    return std::find(arrived_.begin(), arrived_.end(), 1) != arrived_.end();
  }
  // For each parameter, whether this backward has reduced a gradient of this rank.
  const std::vector<char>& used() const { return used_; }
  bool any_used() const { return std::find(used_.begin(), used_.end(), 1) != used_.end(); }
  bool is_reduced() const { return is_reduced_; }  // in this backward
  // Whether this backward has reduced the unit, but this rank has not used all trained parameters.
  bool misses_gradients() const {
    for (std::size_t i = 0; is_reduced_ && i < count(); ++i) {
      if (used_[i] == 0 && !is_frozen(i)) {
        return true;
      }
    }
    return false;
  }
  // Whether backwards without gradient sync have reached the unit since its last reduction. It is
  // the same on all ranks.
  bool awaits_reduction() const { return awaits_reduction_; }
  bool needs_reduction(bool syncs) const {
    return any_arrived() || (is_reached_ && syncs && !is_reduced_ && trains());
  }
  // At the end of backward: as needs_reduction, or backwards without gradient sync have left
  // gradients.
  bool has_left_over(bool syncs) const {
    return needs_reduction(syncs) || (syncs && awaits_reduction_);
  }

 private:
  friend class Reducer;
  friend class NonfiniteGradients;

  void reset_arrived() { std::fill(arrived_.begin(), arrived_.end(), 0); }

  std::vector<char> arrived_;
  std::vector<char> is_frozen_;
  std::vector<char> used_;
  bool is_reached_ = false;
  bool is_reduced_ = false;
  bool awaits_reduction_ = false;
  // For Note [NaN and Inf] in core/reduce/nonfinite_gradients.h:
  std::uint64_t* nonfinite_marks_ = nullptr;  // on the device
  std::vector<std::uint64_t> reduced_since_;  // the first packing in the last reduction
};

}  // namespace fsdp
