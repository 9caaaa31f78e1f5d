#include "core/ledger.h"

#include <algorithm>

namespace fsdp {

void Ledger::reset() {
  Counters fresh;
  fresh.unsharded_bytes = fresh.peak_unsharded_bytes = counters_.unsharded_bytes;
  fresh.unsharded_units = fresh.peak_unsharded_units = counters_.unsharded_units;
  counters_ = fresh;
}

void Ledger::collective(Collective op, Phase phase, int first_unit, int last_unit,
                        std::size_t bytes) {
  (op == Collective::AllGather ? counters_.all_gathers : counters_.reduce_scatters) += 1;
  counters_.wire_bytes += bytes;
  if (logging_) {
    log_.push_back({op, phase, first_unit, last_unit, bytes});
  }
}

void Ledger::unsharded(int units, std::size_t bytes) {
  counters_.unsharded_bytes += bytes;
  counters_.unsharded_units += units;
  counters_.peak_unsharded_bytes =
      std::max(counters_.peak_unsharded_bytes, counters_.unsharded_bytes);
  counters_.peak_unsharded_units =
      std::max(counters_.peak_unsharded_units, counters_.unsharded_units);
}

void Ledger::resharded(int units, std::size_t bytes) {
  counters_.unsharded_bytes -= bytes;
  counters_.unsharded_units -= units;
}

}  // namespace fsdp
