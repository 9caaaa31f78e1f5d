// How reductions are waited for, and gradients dropped after a backward that failed.
#include "core/reduce/reducer.h"
#include "core/reduce/user_collective.h"

namespace fsdp {
namespace {

template <typename Function>
void for_each_hook(const Bucket& bucket, const Function& function) {
  for (const Unit* unit : bucket.units) {
    for (UserCollective* hook :
         {unit->reduce_hook.get(), unit->communication_hook.get(), unit->scatter_hook.get()}) {
      if (hook != nullptr) {
        function(*hook);
      }
    }
  }
}

}  // namespace

void Reducer::wait(const std::vector<std::unique_ptr<Bucket>>& buckets) {
  {
    const Timed timed(ledger_, device_.compute_stream(), Work::WaitForReduction, kAllUnits);
    for (const auto& bucket : buckets) {
      wait_for_reduction(*bucket);
    }
  }
  // Not a wait of its own: the compute stream has waited for the reductions.
  packed_gradients_.free(/*measures_wait=*/false);
  check_hooks(buckets);
}

void Reducer::wait_for_reduction(Bucket& bucket) {
  if (bucket.reduction.is_pending_) {
    bucket.reduction.is_pending_ = false;
    bucket.reduction.waited_on_ = device_.compute_stream().native_handle();
    wait_for_gradients(bucket);
  }
}

void Reducer::wait_before_change(const Bucket& bucket) {
  if (bucket.reduction.is_pending_) {
    wait_for_gradients(bucket);  // the end of backward still waits on its own stream
  }
}

// The compute stream waits for gradients on the device. The host waits for offloaded gradients.
void Reducer::wait_for_gradients(const Bucket& bucket) {
  if (bucket.layout.is_offloaded()) {
    bucket.reduction.reduced_->synchronize(device_.timeout(), bucket.reduction.label);
  } else {
    device_.compute_stream().wait(*bucket.reduction.reduced_, bucket.reduction.label);
  }
}

void Reducer::settle(Bucket& bucket) {
  if (bucket.reduction.is_pending_) {
    bucket.reduction.is_pending_ = false;
    bucket.reduction.reduced_->synchronize(device_.timeout(), bucket.reduction.label);
  }
  reset_hooks(bucket);
  updated_.clear();
  discard_updates(bucket);
  packed_gradients_.free(/*measures_wait=*/false);
}

void Reducer::discard(Bucket& bucket) {
  settle(bucket);
  bucket.reduction.accumulated_.reset();
  bucket.reduction.arrived_on_.clear();
  for (Unit* unit : bucket.units) {
    unit->gradients.reset_arrived();
    unit->gradients.awaits_reduction_ = false;
    unit->port.discard_gradients();
  }
}

// Throws the first error. Errors of other units belong to the same backward, and are forgotten with
// it.
void Reducer::check_hooks(const std::vector<std::unique_ptr<Bucket>>& buckets) {
  try {
    for (const auto& bucket : buckets) {
      for_each_hook(*bucket, [](UserCollective& hook) { hook.check(); });
    }
  } catch (...) {
    for (const auto& bucket : buckets) {
      reset_hooks(*bucket);
    }
    throw;
  }
}

void Reducer::reset_hooks(const Bucket& bucket) {
  for_each_hook(bucket, [](UserCollective& hook) { hook.reset(); });
}

}  // namespace fsdp
