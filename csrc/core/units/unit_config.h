// The parts of a unit, and its settings.
#pragma once

#include <cstddef>
#include <string>
#include <utility>

#include "core/memory/layout.h"
#include "core/memory/memory_plan.h"
#include "core/units/unit_settings.h"

namespace fsdp {

struct UnitConfig : UnitSettings {
  UnitConfig(std::string unit_name, UnitLayout unit_layout, UnitSettings settings = {})
      : UnitSettings(std::move(settings)),
        name(std::move(unit_name)),
        layout(std::move(unit_layout)) {}

  std::string name;
  UnitLayout layout;
  int parent = -1;               // the unit that encloses it, added before it; -1 for the root
  MessageLimits message_limits;  // of its bucket
  int mesh = 0;                  // in Lanes::meshes, from 1; 0: the root's. Note [several meshes]
};

}  // namespace fsdp
