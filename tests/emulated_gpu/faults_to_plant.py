"""What planted_faults.py plants by edits, the tests that it runs, and what they do not see."""

from __future__ import annotations

from dataclasses import dataclass

STREAMS = "tests/gpu/test_gpu_streams.py::"
SECOND_GPU = f"{STREAMS}test_a_model_may_be_on_another_gpu_than_the_current_one"
# They pass without a fault. Each wait is left out in those that meet it, in this order. In the
# first ones the host waits for nothing between steps, which would order streams, too.
TESTS = (
    "tests/gpu/test_gpu_buckets.py",
    "tests/gpu/test_gpu_ordering.py::test_a_late_stream_changes_nothing[2]",
    "tests/gpu/test_gpu_pieces.py::test_units_cut_into_messages_train_as_others[2]",
    f"{STREAMS}test_parts_of_a_unit_may_run_on_streams_of_the_user[1]",
    f"{STREAMS}test_a_slot_is_not_overwritten_while_a_stream_of_the_user_reads_it",
    f"{STREAMS}test_autograd_adds_to_sharded_gradients_behind_their_reduction[penalised]",
    "tests/gpu/test_gpu_graph.py::test_a_captured_step_trains_as_an_eager_one[2]",
    f"{STREAMS}test_replicas_and_groups_train_as_with_fsdp2[packed]",
    "tests/gpu/test_gpu_pieces.py::test_units_cut_into_messages_train_as_others[4]",
    "tests/gpu/test_gpu_pieces.py::test_parameters_that_extensions_make_train_as_under_fsdp2",
    "tests/gpu/test_gpu_pieces.py::"
    "test_inputs_of_extensions_are_not_overwritten_while_an_abandoned_gather_reads_them",
    f"{STREAMS}test_offloaded_states_are_stepped_as_others",
    f"{STREAMS}test_a_hook_may_run_on_a_stream_of_the_user",
    f"{STREAMS}test_a_collective_of_the_user_may_return_before_its_end",
    SECOND_GPU,
    "tests/gpu/test_gpu_offload.py::test_offloaded_units_train_as_others[2]",
    "tests/gpu/test_gpu_health.py",
    "tests/gpu/test_gpu_simulated.py::test_every_part_is_a_copy_of_this_ranks",
    "tests/gpu/test_gpu_parity.py::test_cases_train_as_unsharded_and_fsdp2[2-packed]",
    *(
        f"tests/gpu/test_gpu_more_cases.py::test_cases_train_as_unsharded_and_fsdp2[{file}]"
        for file in ("gradient_accumulation", "communication_methods", "prefetch_api")
    ),
    "tests/gpu/test_gpu_profile.py",
    "tests/gpu/test_gpu_nccl.py",
)


@dataclass(frozen=True)
class Edit:
    """A fault that is an edit of the sources."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...] = ()  # instead of all


EDITS = (
    Edit(
        "gradients are packed on a wrong stream",
        "csrc/core/reduce/reducer.cpp",
        "  Stream& stream = streams_.before(packs_apart(bucket));\n",
        "  Stream& stream = device_.compute_stream();\n",
    ),
    Edit(
        "parameters are unpacked on a wrong stream",
        "csrc/core/gather/gatherer.cpp",
        "packer_.unpack(after, ",
        "packer_.unpack(device_.compute_stream(), ",
    ),
    Edit(
        "parameters are gathered on a wrong stream",
        "csrc/core/gather/gatherer.cpp",
        "communicator.all_gather(stream, part.input, part.output, part.bytes);",
        "communicator.all_gather(device_.compute_stream(), part.input, part.output, part.bytes);",
    ),
    Edit(
        "reduced gradients are cast on a wrong stream",
        "csrc/core/reduce/reducer.cpp",
        "packer_.cast(reduction.after, ",
        "packer_.cast(device_.compute_stream(), ",
    ),
    Edit(
        "gradients are freed when they are packed, as without a record_stream",
        "csrc/core/reduce/packed_gradients.cpp",
        "keep_alive.push_back(unit->port.extract_gradients(addresses));",
        "const std::shared_ptr<void> freed_now = unit->port.extract_gradients(addresses);",
    ),
    Edit(
        "a slot is released without its readers",
        "csrc/core/memory/buffer_ring.cpp",
        "++releases_;\n  readers.record(*slot.released);\n",
        "++releases_;\n",
    ),
    Edit(
        "a slot is acquired that another bucket owns",
        "csrc/core/memory/buffer_ring.cpp",
        "slot.owner == Slot::kNobody ? slot.released_at : kTaken",
        "slot.released_at",
    ),
    Edit(
        "one rank reduces two buckets in another order",
        "csrc/core/reduce/reducer.cpp",
        "void Reducer::pack_and_reduce(Bucket& bucket) {\n",
        """void Reducer::pack_and_reduce(Bucket& bucket) {
  static Bucket* late = nullptr;
  static int calls = 0;
  if (++calls == 3 && lane_.communicator().rank() == 1) {
    late = &bucket;
    return;
  }
  if (Bucket* const next = std::exchange(late, nullptr)) {
    pack_and_reduce(bucket);
    pack_and_reduce(*next);
    return;
  }
""",
        tests=("tests/gpu/test_gpu_ordering.py::test_a_late_stream_changes_nothing[2]",),
    ),
    Edit(
        "threads do not select the device",
        "csrc/device/cuda_check.h",
        "if (before_ != device) {",
        "if (before_ != device && device < 0) {",
        tests=(SECOND_GPU,),
    ),
    *(
        Edit(
            f"{name} does not wait",
            "fsdp_ext/offloading/states.py",
            old,
            "pass",
            tests=(f"{STREAMS}test_offloaded_states_are_stepped_as_others",),
        )
        for name, old in (
            ("the copy of states to the GPU", "self._in.wait_stream(self._back)"),
            ("the step", "self._module.current_stream(self._device).wait_stream(self._in)"),
            (
                "the copy of states back",
                "self._back.wait_stream(self._module.current_stream(self._device))",
            ),
            (
                "a new staging tensor",
                "self._in.wait_stream(self._module.current_stream(self._device))",
            ),
            ("the host for copies of states to the GPU", "self._in.synchronize()"),
            ("the host for copies of states back", "self._back.synchronize()"),
        )
    ),
    *(
        Edit(
            f"{name} does not wait",
            "fsdp_ext/sharding/params/user_hooks.py",
            old,
            "pass",
            tests=(
                f"{STREAMS}test_a_hook_may_run_on_a_stream_of_the_user",
                f"{STREAMS}test_a_collective_of_the_user_may_return_before_its_end",
            ),
        )
        for name, old in (
            ("a hook's stream", "chosen.wait_stream(of_lane)"),
            ("the lane for a hook", "of_lane.wait_stream(chosen)"),
            ("the lane for a user's collective", "work.wait()"),
        )
    ),
)

NOT_PINNED = "the copy before it goes to memory that is not pinned, so it ends before it returns"
AFTER_USE = "the tests have no work in flight there that uses the memory"
BESIDE = "redundant: the wait beside it orders the same work"
ONLY_TIMES = "it orders no memory, and only times or timeouts depend on it"
NO_TEST = "no test of tests/gpu gets there"

# The faults that nothing sees, and why.
NOT_SEEN = {
    "comm/nccl/nccl.cpp exchange: stream.synchronize();": NOT_PINNED,
    "comm/nccl/nccl_buffers.cpp synchronize: device_.synchronizer()();": AFTER_USE,
    "comm/nccl/nccl_watchdog.cpp update_oldest_pending: "
    "if (candidate.pending && candidate.event->query()) {": ONLY_TIMES,
    "core/agree/rank_exchange.cpp ~RankExchange: lanes_.gather.drain();": AFTER_USE,
    "core/agree/rank_exchange.cpp ~RankExchange: replicas_->gather.drain();": AFTER_USE,
    "core/agree/rank_exchange.cpp all_gather: "
    "received_->synchronize(lanes_.device->timeout(), label);": NOT_PINNED,
    "core/agree/rank_exchange.cpp join: compute.wait(*received_, kExchange);": (
        "it orders collectives of ranks, not memory, and tests with replays have no replicas"
    ),
    "core/units/unit_set.cpp form: gatherer_.synchronize();": AFTER_USE,
    "core/units/unit_set.cpp form: reducer_.synchronize();": AFTER_USE,
    "core/gather/gather_slots.cpp abandon_gather: "
    "streams_.messages().wait(*source.last_piece().gathered, source.label);": NO_TEST,
    "core/gather/gather_slots.cpp acquire_persistent_slot: streams_.follow_compute();": NO_TEST,
    "core/gather/gather_slots.cpp acquire_persistent_slot: "
    "streams_.messages().wait(*bucket.gather.persistent_slot_->released,": (
        "a bucket is gathered into its own slot once an iteration, or after its shards have "
        "changed, and the stream follows the compute stream first"
    ),
    "core/gather/gather_slots.cpp acquire: streams_.follow_compute();": (
        "the tests' overflow slots get memory that no earlier work of the pass has used"
    ),
    "core/gather/gatherer.cpp invalidate: streams_.follow_compute();": (
        "the next iteration begins with the same wait; only a gather within the iteration needs it"
    ),
    "core/gather/gatherer.cpp join_capture: "
    "streams_.order_after(device_.compute_stream(), last, kGatherStream);": (
        "the compute stream waits for every gather that the captured step uses, so the streams "
        "have joined already; it is for gathers that nothing uses"
    ),
    "core/gather/gatherer.cpp join_capture: "
    "streams_.order_after(last, streams_.messages(), kGatherStream);": (
        "the same; the copies of the last pieces come after all messages"
    ),
    "core/gather/gatherer_memory.cpp plan_memory: streams_.follow_compute();": (
        "memory is planned right before an iteration begins, with the same wait"
    ),
    "core/gather/gatherer.cpp order_before_gather: "
    "before.wait(*bucket.gather.all_ranks_.last_piece().gathered, "
    "bucket.gather.all_ranks_.label);": (
        "the same; an iteration begins after what the compute stream has waited for"
    ),
    "core/reduce/reducer.cpp begin_reduction: "
    "streams_.messages().wait(*bucket.reduction.reduced_, bucket.reduction.label);": (
        "the compute stream has waited at the end of the backward before; only a bucket that is "
        "reduced twice within a backward needs it"
    ),
    "core/reduce/reducer.cpp end_reduction: streams_.order_after("
    "reduction.after, streams_.messages(), bucket.reduction.label);": (
        "redundant: the copies, the hook or the all-reduce before it have ordered the two streams"
    ),
    "core/reduce/reducer_wait.cpp settle: bucket.reduction.reduced_->synchronize("
    "device_.timeout(), bucket.reduction.label);": NO_TEST,
    "core/reduce/reducer_updates.cpp finish_updates: "
    "reduction.reduced_->synchronize(device_.timeout(), reduction.label);": (
        "only ranks without GPUs get there"
    ),
    "core/reduce/reducer_updates.cpp end_updates: "
    "stream->wait(*reduction.reduced_, reduction.label);": (
        "a later reduction has ordered the stream behind the compute stream, which has waited; "
        "only the last bucket of a backward needs it"
    ),
    "core/reduce/nonfinite_gradients.cpp find: compute.synchronize();": NOT_PINNED,
    "core/reduce/nonfinite_gradients.cpp find: compute.synchronize(); (2)": NO_TEST,
    "core/reduce/reducer.cpp begin_packing: "
    "input_.wait_for_both(before, bucket.reduction.label);": (
        "at its end a backward waits for all of its messages; only a bucket whose units differ "
        "packs there again within the same backward"
    ),
    "core/reduce/reducer_memory.cpp lend: "
    "compute.wait(*bucket.reduction.reduced_, bucket.reduction.label);": NO_TEST,
    "core/reduce/packed_gradients.cpp wait_for_packing: device_.stream_of(stream).wait("
    "*gradients.bucket->reduction.packed_,": (
        "the tests' streams wait for the compute stream, which has waited, before they reuse memory"
    ),
    "device/cuda_stream.cpp start_word: stream.wait(*reached, name_of_compute_);": (
        "no earlier work of the tests has used the eight bytes that it orders"
    ),
    "the host for copies of states to the GPU does not wait": (
        "redundant: each copy back comes after the copy to the GPU, and the host waits for it"
    ),
    "core/gather/gatherer.cpp ~Gatherer: lane_.drain();": AFTER_USE,
    "core/gather/gatherer.cpp synchronize: lane_.synchronize();": AFTER_USE,
    "core/gather/gather_slots.cpp note_read: stream.wait(*last.gathered, source.label);": (
        "the tests' streams wait for the stream that has waited for the gather; CudaReaders sees it"
    ),
    "core/gather/gather_slots.cpp wait_for_readers: "
    "read_->synchronize(device_.timeout(), kReaders);": (
        "no stream of the tests reads slots when they are freed; CudaPlan sees it"
    ),
    "core/gather/gather_slots.cpp wait_for_readers: "
    "slot.released->synchronize(device_.timeout(), kReaders);": (
        "no stream of the tests reads slots when they are freed; CudaPlan sees it"
    ),
    "comm/nccl/nccl.cpp grow_exchange_buffer: stream.synchronize();": (
        "the tests grow no message while one is in flight; "
        "CudaExchange.AnExchangeMayBeLargerThanOneInFlight sees it"
    ),
    "core/reduce/reducer_accumulated.cpp accumulated_parts: "
    "reduction.packed_->synchronize(device_.timeout(), reduction.label);": BESIDE,
    "core/reduce/reducer_accumulated.cpp accumulated_parts: lane_.synchronize();": BESIDE,
    "core/reduce/reducer_memory.cpp plan_memory: device_.compute_stream().synchronize();": (
        "the tests plan memory on one stream; CudaPlan.MarksOfNanAreFreedAfterTheyAreCopied sees it"
    ),
    "core/reduce/reducer_memory.cpp synchronize: lane_.synchronize();": AFTER_USE,
    "core/reduce/reducer_memory.cpp synchronize: replicas_->synchronize();": AFTER_USE,
    "core/reduce/reducer.cpp ~Reducer: lane_.drain();": AFTER_USE,
    "core/reduce/reducer.cpp ~Reducer: replicas_->drain();": AFTER_USE,
    "device/cuda_stream.cpp anchor: compute_.synchronize();": ONLY_TIMES,
    "device/cuda_stream.cpp wait_for: "
    "cudaError_t result = cudaEventQuery(events_[number]);": ONLY_TIMES,
    "device/cuda_stream.cpp query: const cudaError_t result = cudaEventQuery(event_);": (
        "the packer's tables are copied from memory that is not pinned; besides, only bindings for "
        "benchmarks and tests wait there"
    ),
    "torch/transports.cpp exchange_messages: "
    "buffers->done->synchronize(lanes.device->timeout(), what);": NOT_PINNED,
}
