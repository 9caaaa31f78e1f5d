// Changes single settings of a unit.
#pragma once

#include <utility>

#include "core/schedule/pipeline.h"

namespace fsdp {

template <typename Change>
void change_settings(Pipeline& pipeline, int unit, const Change& change) {
  UnitSettings settings = pipeline.unit(unit);
  change(settings);
  pipeline.units().apply(unit, std::move(settings));
}

inline void set_requires_gradient_sync(Pipeline& pipeline, int unit, bool value) {
  change_settings(pipeline, unit,
                  [&](UnitSettings& settings) { settings.requires_gradient_sync = value; });
}

// `group`: 0 for all ranks.
inline void set_reshard_after_forward(Pipeline& pipeline, int unit, bool value, int group = 0) {
  change_settings(pipeline, unit, [&](UnitSettings& settings) {
    settings.reshard_after_forward = value;
    settings.reshard_group = group;
  });
}

}  // namespace fsdp
