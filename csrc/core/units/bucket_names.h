// The names of a bucket and its collectives, in error messages and in profilers' timelines.
#pragma once

#include <string>
#include <vector>

#include "base/check.h"
#include "core/units/unit.h"

namespace fsdp {

inline std::string name_of(const std::vector<Unit*>& units) {
  return units.size() == 1 ? units.front()->name
                           : units.front()->name + " to " + units.back()->name;
}

inline std::string label_of(const std::string& what, const std::vector<Unit*>& units) {
  return detail::concat(what, units.size() == 1 ? " of unit '" : " of units '", name_of(units),
                        "'");
}

// Ranges that FSDP2 also has get FSDP2's names.
struct BucketRanges {
  explicit BucketRanges(const std::string& bucket)
      : all_gather(range_name("all_gather", bucket)),
        accumulate(range_name("post_backward_accumulate", bucket)),
        reduce(range_name("post_backward_reduce", bucket)),
        reduce_scatter(range_name("reduce_scatter", bucket)),
        all_reduce(range_name("all_reduce", bucket)) {}

  const std::string all_gather;
  const std::string accumulate;
  const std::string reduce;  // with the packing
  const std::string reduce_scatter;
  const std::string all_reduce;
};

}  // namespace fsdp
