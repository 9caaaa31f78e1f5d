// When buckets are reduced in backward, in an order that is the same on all ranks.
//
// Note [order of reductions]
// Ranks match reductions by their order, so all ranks need the same one. It is fixed when backward
// begins. Each bucket takes the place of its last step in Note [order of backward], in
// core/schedule/backward_order.h. A bucket is reduced after all buckets in front of it, when
// backward has passed its units. Parameters without a gradient then send zeros. The last gradient
// of a unit arrives earlier. But the full backward hooks of the unit's modules run after it, and
// they may read and change .grad.
//
// Gradients of units without steps, such as those whose outputs autograd's hooks cannot see, are
// reduced at the end of backward.
#pragma once

#include <memory>
#include <vector>

#include "core/reduce/reducer.h"
#include "core/schedule/backward_order.h"
#include "core/units/bucket.h"
#include "core/units/unit.h"

namespace fsdp {

class ReductionOrder {
 public:
  // The units, to which more may be added, and the reducer outlive this.
  ReductionOrder(const std::vector<std::unique_ptr<Unit>>& units, Reducer& reducer)
      : units_(units), reducer_(reducer) {}

  // `steps` are those of the whole backward.
  void begin_backward(const std::vector<BackwardStep>& steps);
  // Reduces the buckets that are complete.
  void advance();
  void end_backward();
  // Forgets a backward that failed.
  void reset() { awaited_.clear(); }

 private:
  const std::vector<std::unique_ptr<Unit>>& units_;
  Reducer& reducer_;
  std::vector<Bucket*> awaited_;  // the last one is next
};

}  // namespace fsdp
