"""The faults that plant_faults.py plants, and the tests that cover the place of each."""

from __future__ import annotations

from dataclasses import dataclass

CORE, TORCH, COMM = "csrc/core", "csrc/torch", "csrc/comm"
SHARDING = "fsdp_ext/sharding"
# The C++ tests of what the faults are in: the schedule, collectives on the host, and packing.
CPP = (
    "-*Nccl*:*Deadlock*:*RanksApart*:*Flight*:*Forks*:*TwoLanes*:*Ledger*:*HostClock*:"
    "*HostStream*:*TwoRanks*:*DamagedPeer*:*Arena*"
)


@dataclass(frozen=True)
class Fault:
    """One fault.

    Args:
        name: what is wrong, in one phrase.
        file: the source file.
        old: the right text. In C++ it is a statement if it ends in a semicolon or a brace, and
            otherwise an expression, as in Python if there is faulty text.
        new: the faulty text. Without one the statement ``old`` is left out.
        python: the names of the Python test files, without ``test_`` and the suffix.
        cpp: a filter of GoogleTest, if the place needs no torch.
        within: text around ``old`` that the file has exactly once; by default that is ``old``.
    """

    name: str
    file: str
    old: str
    new: str = ""
    python: tuple[str, ...] = ()
    cpp: str = ""
    within: str = ""


FAULTS = (
    # - The schedule
    Fault(
        "a unit that stayed unsharded keeps parameters from before the step",
        f"{CORE}/gather/gatherer.cpp",
        "!is_current(*unit)",
        "false",
        cpp=CPP,
        python=("trained_parameters",),
    ),
    Fault(
        "a prefetched unit that did not run keeps its slot after forward",
        f"{CORE}/schedule/pipeline.cpp",
        "unit->gather.is_speculative()",
        "false",
        within="if (unit->gather.is_speculative()) {",
        cpp=CPP,
        python=("trained_parameters",),
    ),
    Fault(
        "a unit of the bucket that the pass left out keeps the bucket's slot",
        f"{CORE}/schedule/pipeline.cpp",
        "gatherer_.reshard_speculative(bucket);",
        cpp=CPP,
        python=("buckets", "unused_parameters"),
    ),
    Fault(
        "summoned units are prefetched",
        f"{CORE}/schedule/pipeline.cpp",
        "target.bucket == last || target.is_summoned",
        "target.bucket == last",
        cpp=CPP,
        python=("fsdp1_summon",),
    ),
    Fault(
        "a forward without gradients keeps group shards",
        f"{CORE}/schedule/pipeline.cpp",
        "forward_keeps_",
        "true",
        within="if (forward_keeps_) {",
        cpp=CPP,
        python=("reshard_groups",),
    ),
    Fault(
        "a rank without a gradient forgets that its unit awaits a reduction",
        f"{CORE}/reduce/unit_gradients.h",
        "awaits_reduction_ = awaits_reduction_ || (!syncs && count() > 0);",
        cpp=CPP,
        python=("unused_parameters",),
    ),
    Fault(
        "unshard() between steps reuses what a slot has of an earlier iteration",
        f"{CORE}/schedule/pipeline.cpp",
        "gatherer_.begin_iteration();",
        within="gatherer_.begin_iteration();  // the shards may have changed since",
        cpp=CPP,
        python=("prefetch_api", "trained_parameters"),
    ),
    Fault(
        "unshard() shows a unit that was put away as it is",
        f"{CORE}/schedule/pipeline.cpp",
        "unit.gather.is_put_away()",
        "false",
        within="unit.gather.is_put_away()) {\n    gatherer_.reshard(unit);",
        cpp=CPP,
        python=("prefetch_api", "trained_parameters"),
    ),
    Fault(
        "the second backward of a graph reshards what the third one reads",
        f"{CORE}/schedule/pipeline.cpp",
        "is_second_backward_ = !backward_may_reshard_;",
        cpp=CPP,
        python=("gradient_penalties", "freed_parameters", "parity"),
    ),
    Fault(
        "another prefetch depth leaves the ring as it was",
        f"{CORE}/units/bucket_set.h",
        "planned_depth_ == options_.prefetch_depth",
        "planned_depth_ != kNotPlanned",
        cpp=CPP,
        python=("buckets",),
    ),
    # - Gathers
    Fault(
        "a gather of this iteration is used after its shards have changed",
        f"{CORE}/gather/gatherer.cpp",
        "unit.gather.gathered_version_ != unit.shard_version()",
        "false",
        cpp=CPP,
        python=("prefetch_api",),
    ),
    Fault(
        "a bucket's own slot stays current when it is gathered elsewhere",
        f"{CORE}/gather/gatherer_messages.cpp",
        "bucket.gather.persistent_slot_->contents = Slot::kNobody;",
        within="bucket.gather.persistent_slot_->contents = Slot::kNobody;  // out of date",
        cpp=CPP,
        python=("buckets",),
    ),
    Fault(
        "a slot counts as current although the bucket was gathered elsewhere since",
        f"{CORE}/gather/gatherer.cpp",
        "bucket.gather.slot_ == &slot",
        "true",
        within="bucket.gather.slot_ == &slot;",
        cpp=CPP,
        python=("buckets",),
    ),
    Fault(
        "a slot is reclaimed although one of its units runs",
        f"{CORE}/gather/gatherer.cpp",
        "speculative == slot->users",
        "speculative > 0",
        cpp=CPP,
        python=("buckets", "prefetch_api"),
    ),
    Fault(
        "a user's reshard() leaves the cast shards of this iteration",
        f"{CORE}/gather/gatherer.cpp",
        "bucket.gather.cast_from_.valid = false;",
        cpp=CPP,
        python=("mixed_precision", "reshard_groups"),
    ),
    Fault(
        "a user's reshard() leaves the inputs of extensions of this iteration",
        f"{CORE}/gather/gatherer.cpp",
        "unit->gather.inputs_iteration_ = 0;",
        python=("extension_methods", "tensor_extensions"),
    ),
    Fault(
        "a group shard of an earlier step counts as the one of this step",
        f"{CORE}/gather/gatherer.cpp",
        "group->kept_from.matches(bucket.gather.gathered_from_)",
        "group->kept_from.valid",
        cpp=CPP,
        python=("reshard_groups",),
    ),
    # - Reductions
    Fault(
        "units of other divisors are reduced with the first one's",
        f"{CORE}/reduce/reducer.cpp",
        "a.scale_alike(b)",
        "true",
        cpp=CPP,
        python=("communication_methods",),
    ),
    Fault(
        "a unit forgets in a second backward without sync that it awaits a reduction",
        f"{CORE}/reduce/reducer.cpp",
        "unit->gradients.awaits_reduction_ || unit->gradients.any_arrived()",
        "unit->gradients.any_arrived()",
        cpp=CPP,
        python=("gradient_accumulation",),
    ),
    Fault(
        "gradients that a failed backward has accumulated stay",
        f"{CORE}/reduce/reducer_wait.cpp",
        "bucket.reduction.accumulated_.reset();",
        cpp=CPP,
        python=("recovery",),
    ),
    Fault(
        "some units of a bucket are reduced over the gradients of the others",
        f"{CORE}/reduce/reducer.cpp",
        "units.size() == bucket.units.size()",
        "true",
        cpp=CPP,
        python=("gradient_accumulation", "communication_methods"),
    ),
    Fault(
        "gradients of units that are not reduced now are finished again",
        f"{CORE}/reduce/reducer.cpp",
        "std::fill(modes.begin(), modes.end(), CastMode::Skip);",
        cpp=CPP,
        python=("gradient_accumulation", "communication_methods"),
    ),
    Fault(
        "a NaN of an earlier backward of the reduction is not named",
        f"{CORE}/reduce/reducer.cpp",
        "accumulated != 0",
        "false",
        within="reduced_since_[i] = accumulated != 0",
        cpp=CPP,
        python=("health",),
    ),
    Fault(
        "gradients of a second dtype overwrite those of the first",
        f"{CORE}/reduce/reducer.cpp",
        "accumulate || dtype != piece.gradient_dtypes.front()",
        "accumulate",
        cpp=CPP,
        python=("gradient_dtypes",),
    ),
    Fault(
        "a NaN in a later message counts as one of the first message's parameters",
        f"{CORE}/reduce/reducer.cpp",
        "bucket.units.front()->gradients.nonfinite_marks_ + piece.first_trainable",
        "bucket.units.front()->gradients.nonfinite_marks_",
        cpp=CPP,
        python=("health",),
    ),
    Fault(
        "a gradient that autograd did not bring is lost",
        f"{CORE}/reduce/reducer.cpp",
        "unit->gradients.arrive(i);",
        cpp=CPP,
        python=("hidden_outputs",),
    ),
    Fault(
        "zeros are not restored where one unit of a bucket was reduced",
        f"{CORE}/reduce/accumulated_gradients.cpp",
        "fill_with_zeros(device, stream, *unit);",
        cpp=CPP,
        python=("gradient_accumulation", "communication_methods"),
    ),
    Fault(
        "accumulated gradients count from the last backward, not from the first",
        f"{CORE}/reduce/accumulated_gradients.cpp",
        "since != 0 ? since : packing",
        "packing",
        cpp=CPP,
        python=("health", "recovery"),
    ),
    Fault(
        "marks of NaN are lost when memory is planned again",
        f"{CORE}/reduce/nonfinite_gradients.cpp",
        "device_.transfer(compute, std::chrono::nanoseconds(0), {move}, 0);",
        cpp=CPP,
        python=("health",),
    ),
    Fault(
        "a backward does not reduce what only earlier ones have accumulated",
        f"{CORE}/reduce/unit_gradients.h",
        "needs_reduction(syncs) || (syncs && awaits_reduction_)",
        "needs_reduction(syncs)",
        cpp=CPP,
        python=("gradient_accumulation", "fsdp1_no_sync"),
    ),
    # - Buckets and their memory
    Fault(
        "renewed gradients of all units of a bucket lie in one place",
        f"{CORE}/units/bucket.cpp",
        "next += kGradients.bytes(unit->layout);",
        cpp=CPP,
        python=("held_gradients",),
    ),
    Fault(
        "other buckets are formed although gradients are accumulated",
        f"{CORE}/units/bucket_set.cpp",
        "differs && !waits",
        "differs",
        within="if (differs && !waits) {",
        cpp=CPP,
        python=("gradient_accumulation", "communication_methods"),
    ),
    Fault(
        "a bucket follows the largest limit of its units",
        f"{CORE}/units/merging.cpp",
        "std::min(run.limit, more.limit)",
        "std::max(run.limit, more.limit)",
        cpp=CPP,
        python=("plan",),
    ),
    Fault(
        "the ring has no slots for what the user prefetches in backward",
        f"{CORE}/units/bucket_set.cpp",
        "std::max({depth, unit->forward_prefetch.size(), unit->backward_prefetch.size()})",
        "std::max({depth, unit->forward_prefetch.size()})",
        cpp=CPP,
        python=("prefetch_api",),
    ),
    Fault(
        "the newest slot is taken first",
        f"{CORE}/memory/buffer_ring.cpp",
        "released < best_released",
        "released > best_released",
        cpp=CPP,
        python=("prefetch_api",),
    ),
    Fault(
        "staging has no room for the messages of a smaller group",
        f"{CORE}/memory/memory_plan.cpp",
        "packed = std::max(packed, most_packed(of_group, parts, group.by));",
        cpp=CPP,
        python=("reshard_groups",),
    ),
    Fault(
        "chunks that are padded to a multiple overlap in the flat gradient",
        f"{CORE}/memory/layout.cpp",
        "padded_to(place.chunk_numel, param.chunk_multiple)",
        "place.chunk_numel",
        cpp=CPP,
        python=("fsdp1_flat_parameters",),
    ),
    # - Orders
    Fault(
        "backward has no step for a unit around the one that it reaches",
        f"{CORE}/schedule/backward_order.cpp",
        "calls[static_cast<std::size_t>(call->outer)].is_included = true;",
        cpp=CPP,
        python=("unused_parameters",),
    ),
    Fault(
        "a backward over a kept graph has no steps the second time",
        f"{CORE}/schedule/backward_order.cpp",
        "!(keeps || graph.is_kept)",
        "!keeps",
        cpp=CPP,
        python=("gradient_penalties", "model_lifetime"),
    ),
    Fault(
        "a parameter that no rank has used since gets a gradient of earlier steps",
        f"{CORE}/agree/backward_exchange.cpp",
        "std::fill(used_by_any_.begin(), used_by_any_.end(), 0);",
        cpp=CPP,
        python=("unused_parameters", "random_routing"),
    ),
    Fault(
        "ranks of the first shard group alone say what a smaller mesh has used",
        f"{CORE}/agree/backward_exchange.cpp",
        "first < size()",
        "first < group_size",
        cpp=CPP,
        python=("several_meshes",),
    ),
    Fault(
        "ranks that train other parameters are not told apart",
        f"{CORE}/agree/order_check.cpp",
        "hash = mix(hash, entry.trained);",
        cpp=CPP,
        python=("unused_parameters", "several_meshes"),
    ),
    Fault(
        "ranks that cut a bucket into other pieces are not told apart",
        f"{CORE}/agree/order_check.cpp",
        "mine.sizes = mix(mine.sizes, piece.bytes);",
        cpp=CPP,
        python=("errors",),
    ),
    # - Collectives and copies
    Fault(
        "a staged reduction writes each of its pieces over the first one",
        f"{COMM}/shared_memory/shared_memory.cpp",
        "static_cast<char*>(output) + first * itemsize(dtype)",
        "static_cast<char*>(output)",
        cpp=CPP,
        python=("shared_memory",),
    ),
    Fault(
        "a composed all-reduce leaves out what does not divide by the ranks",
        f"{COMM}/messages/composed.cpp",
        "in_segments < bytes",
        "false",
        cpp=CPP,
        python=("composed",),
    ),
    Fault(
        "the third rank's gradients are read from the first block again",
        f"{COMM}/shared_memory/rank_order_sum.cpp",
        "at(source, first)",
        "at(source, 0)",
        cpp=CPP,
    ),
    Fault(
        "padding behind a rank's short chunk is not cleared",
        "csrc/pack/pack_host.cpp",
        "written = entry.offset + numel;",
        "written = entry.offset + entry.chunk_numel;",
        cpp=CPP,
        python=("packer",),
    ),
    Fault(
        "a NaN in the last element of an odd bf16 gradient is not seen",
        "csrc/pack/pack_host.cpp",
        "*seen |= look(source[numel - 1]);",
        within="*seen |= look(source[numel - 1]);\n      destination[numel - 1] =",
        cpp=CPP,
        python=("health",),
    ),
    # - Tensors and autograd
    Fault(
        "attributes stay unsharded after a module's own __setattr__ has raised",
        f"{TORCH}/torch_unit.cpp",
        "changed->put(objects(!unsharded, changed->parameter()));",
        python=("trained_parameters",),
    ),
    Fault(
        "writes into a flat parameter do not count as changes of its shard",
        f"{TORCH}/torch_unit.cpp",
        "add(parameters_.flat());",
        python=("fsdp1_flat_parameters",),
    ),
    Fault(
        "hooks after accumulation run in each later backward again",
        f"{TORCH}/torch_unit.cpp",
        "got_gradient_[i] = 0;",
        python=("parameter_hooks", "fsdp1_optimizer_in_backward"),
    ),
    Fault(
        "a gradient that was put aside for a shown one is lost",
        f"{TORCH}/shown_gradients.cpp",
        "parameters_.gradient_owner(i).mutable_grad() = shown.put_aside;",
        python=("fsdp1_no_sync",),
    ),
    Fault(
        "accumulated gradients keep the divisor of their own time",
        f"{TORCH}/torch_root.cpp",
        "part.mul_(now / before);",
        python=("gradient_accumulation",),
    ),
    Fault(
        "hooks of a user on a unit's input vanish with the unit's node",
        f"{TORCH}/autograd_hooks.cpp",
        "input.before.function->add_tensor_pre_hook(\n"
        "          std::make_unique<MovedHook>(std::move(hook), input.before.input_nr));",
        python=("module_shapes", "inputs_changed_in_place"),
    ),
    Fault(
        "an output that is changed in place loses the unit's hook",
        f"{TORCH}/autograd_hooks.cpp",
        "copy_hooks(view.grad_fn().get());",
        python=("inputs_changed_in_place", "unused_parameters"),
    ),
    Fault(
        "a graph keeps its model after backward",
        f"{TORCH}/autograd_hooks.cpp",
        "kept.owner.reset();",
        within="kept.owner.reset();\n    }",
        python=("model_lifetime",),
    ),
    Fault(
        "padding of a renewed flat gradient is not cleared",
        f"{TORCH}/sharded_gradients.cpp",
        "clear_padding();",
        within="std::move(memory)), {});\n    clear_padding();",
        python=("fsdp1_flat_parameters",),
    ),
    # - Python
    Fault(
        "changes of pending gradients are lost when parameters are converted",
        f"{SHARDING}/root/root.py",
        "self._settle_pending()",
        within="self.impl.recover()\n        self._settle_pending()",
        python=("pending_gradients",),
    ),
    Fault(
        "units keep their sync settings of synchronize_gradients",
        f"{SHARDING}/root/root.py",
        "self.apply(self.units)",
        within="finally:\n            self.apply(self.units)",
        python=("pending_gradients",),
    ),
    Fault(
        "evaluations keep the slot of a root that was not asked to",
        f"{SHARDING}/root/root.py",
        "asked.reshard_after_forward is False",
        "True",
        python=("trained_parameters",),
    ),
    Fault(
        "units keep settings that the schedule has refused",
        f"{SHARDING}/api/setting_changes.py",
        "unit.settings = former",
        python=("communication_methods",),
    ),
    Fault(
        "optimizers go on with a parameter that loading has replaced",
        f"{SHARDING}/root/unit.py",
        "optimizer_hooks.check_again()",
        python=("fsdp1_optimizers",),
    ),
    Fault(
        "changes of a pending DTensor are not noticed",
        f"{SHARDING}/params/pending.py",
        "gradient._version + local._version",
        "local._version",
        python=("pending_gradients",),
    ),
    Fault(
        "gradients that move to another C++ side keep the old divisor",
        f"{SHARDING}/params/unreduced.py",
        "chunks.mul_(impl.pre_scale(number) / each.scale)",
        python=("trained_parameters",),
    ),
    Fault(
        "frozen parameters leave a reduction for which they have gradients",
        f"{SHARDING}/params/unreduced.py",
        "awaits and is_trained",
        "False",
        python=("gradient_accumulation", "fsdp1_no_sync"),
    ),
    Fault(
        "steps that change no version of a parameter are not noted",
        f"{SHARDING}/root/optimizer_hooks.py",
        "_C.note_optimizer_step()",
        python=("trained_parameters",),
    ),
    Fault(
        "the norm counts the shards of all replicas",
        f"{SHARDING}/root/gradient_health.py",
        "of_unit[: root.mesh_ranks.group_size]",
        "of_unit",
        python=("health",),
    ),
    Fault(
        "fp16 gradients are divided by too much before they are summed",
        f"{SHARDING}/params/param_group.py",
        "factor % before == 0 and factor / before > before",
        "factor % before == 0 and factor >= before",
        python=("mixed_precision",),
    ),
    Fault(
        "an optimizer goes on with a parameter that was replaced in turn",
        f"{SHARDING}/params/ownership.py",
        "sharded if later is None else later",
        "sharded",
        python=("fsdp1_optimizers",),
    ),
)
