// When buckets are reduced in backward, in an order that is the same on all ranks.
//
// Note [order of reductions]
// Ranks match reductions by their order. A bucket is reduced when its last gradient arrives. If a
// rank leaves one of the bucket's parameters unused, its last gradient never arrives. This rank
// reduces the bucket when backward has passed the unit's inputs. If the inputs have no gradient, no
// hook runs then. So before any bucket is reduced, all buckets that forward entered after it are
// reduced, with zeros for parameters without a gradient. They get no more gradients, because
// autograd runs the operators of later forward calls first. A unit that encloses others waits for
// them, since its own gradients may all arrive before backward reaches the units inside it.
//
// A unit that backward does not reach at all on this rank is reduced only if the user asked for it,
// by `reduces_unused`, or by skip() in forward. Otherwise ranks that differ in this get an error
// (Note [collective tags]).
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "core/bucket.h"
#include "core/reducer.h"
#include "core/unit.h"

namespace fsdp {

class ReductionOrder {
 public:
  // The units, to which more may be added, and the reducer outlive this.
  ReductionOrder(const std::vector<std::unique_ptr<Unit>>& units, Reducer& reducer)
      : units_(units), reducer_(reducer) {}

  // From now on units may be reduced even if no gradient arrives: Unit::reduces_unused and
  // Unit::is_skipped.
  void expect_unused() { may_reduce_unused_ = true; }

  void gradient_arrived(Unit& unit, std::size_t trainable);
  // Backward has passed the unit's inputs.
  void leave(Unit& unit);
  void end_backward();
  // Forgets the gradients of a backward that failed.
  void reset() { arrived_units_ = 0; }

 private:
  void complete(Unit& unit);
  void reduce(Bucket& bucket);
  void reduce_units_entered_after(const Unit& unit);
  template <typename IsChosen>
  void reduce_latest_first(const IsChosen& is_chosen);
  bool awaits_inner_units(const Unit& unit) const;
  bool encloses(const Unit& unit, const Unit& other) const;

  const std::vector<std::unique_ptr<Unit>>& units_;
  Reducer& reducer_;
  std::size_t arrived_units_ = 0;   // with gradients that are not reduced yet
  bool may_reduce_unused_ = false;  // since expect_unused
  std::vector<Unit*> chosen_;       // used within reduce_latest_first
};

}  // namespace fsdp
