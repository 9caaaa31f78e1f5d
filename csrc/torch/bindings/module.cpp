#include "torch/bindings/registrations.h"

PYBIND11_MODULE(_C, m) {
  fsdp::register_layout(m);
  fsdp::register_unit(m);
  fsdp::register_lanes(m);
  fsdp::register_root(m);
  fsdp::register_testing(m);
}
