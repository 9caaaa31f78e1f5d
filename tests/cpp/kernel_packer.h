// A packer that runs the bodies of the CUDA kernels on the host, lane by lane, over grids of any
// size. So tests find errors in their index arithmetic without a GPU.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

#include "base/with_dtype.h"
#include "device/host_stream.h"
#include "pack/pack.h"
#include "pack/pack_kernels.h"
#include "pack/pack_table.h"

namespace fsdp::test {

class KernelPacker final : public Packer {
 public:
  using Enqueue = std::function<void(Stream& stream, std::function<void()> work)>;

  explicit KernelPacker(std::uint32_t warps, Enqueue enqueue = enqueue_on_host)
      : warps_(warps), enqueue_(std::move(enqueue)) {}

  void prepare(PackPlan& plan) override {
    plan.table = std::make_shared<const TileTable>(make_table(plan));
  }
  void prepare(UnpackPlan& plan) override {
    plan.table = std::make_shared<const TileTable>(make_table(plan));
  }
  void prepare(CastPlan& plan) override {
    plan.table = std::make_shared<const std::vector<CastTable>>(make_tables(plan));
  }

  void pack(Stream& stream, const PackPlan& plan, const void* const* gradients,
            DType gradient_dtype, void* reduce_input, DType reduce_dtype, double scale,
            bool accumulate, const NonfiniteMarks& marks) override {
    check_pack(gradient_dtype, reduce_dtype);
    const auto& table = *static_cast<const TileTable*>(plan.table.get());
    const std::vector<const void*> addresses(gradients, gradients + plan.entries.size());
    // Two launches, as for a plan of very many entries.
    const auto entries = static_cast<std::int32_t>(plan.entries.size());
    const std::uint32_t middle = table.first_tile_of_entry(entries / 2);
    const auto end = static_cast<std::uint32_t>(table.range_of_tile.size());
    for (const auto& [first, last] : {std::pair(0u, middle), std::pair(middle, end)}) {
      const kernels::PackWork work{view(table, first, last),
                                   plan.segment_numel,
                                   plan.world_size,
                                   reduce_input,
                                   scale,
                                   accumulate,
                                   marks};
      enqueue_(stream, [=] {
        with_floats(gradient_dtype, reduce_dtype, [&](auto from, auto to) {
          for_each_lane([&](kernels::Place place) {
            kernels::pack<decltype(from), decltype(to)>(
                work,
                [&](std::int32_t entry) { return addresses[static_cast<std::size_t>(entry)]; },
                place);
          });
        });
      });
    }
  }

  void unpack(Stream& stream, const UnpackPlan& plan, const void* staging,
              void* unsharded) override {
    const auto& table = *static_cast<const TileTable*>(plan.table.get());
    const kernels::UnpackWork work{
        view(table, 0, static_cast<std::uint32_t>(table.range_of_tile.size())),
        static_cast<std::int64_t>(plan.segment_bytes), plan.world_size, staging, unsharded};
    enqueue_(stream,
             [=] { for_each_lane([&](kernels::Place place) { kernels::unpack(work, place); }); });
  }

  void cast(Stream& stream, const CastPlan& plan, const CastMode* modes, const void* source,
            void* destination, double scale) override {
    casts_in_device += plan.crosses_pcie ? 0 : 1;
    std::vector<CastMode> kept(plan.entries.size(), CastMode::Write);
    for (std::size_t i = 0; i < kept.size(); ++i) {
      kept[i] = modes != nullptr ? modes[i] : CastMode::Write;
      check_cast(plan.entries[i], kept[i], scale);
    }
    for (const CastTable& table : *static_cast<const std::vector<CastTable>*>(plan.table.get())) {
      const kernels::CastWork work{
          view(table.tiles, 0, static_cast<std::uint32_t>(table.tiles.range_of_tile.size())),
          source, destination, scale};
      enqueue_(stream, [=, &table] {
        with_types(table.source_dtype, table.destination_dtype, [&](auto from, auto to) {
          for_each_lane([&](kernels::Place place) {
            kernels::cast<decltype(from), decltype(to)>(
                work, [&](std::int32_t entry) { return kept[static_cast<std::size_t>(entry)]; },
                place);
          });
        });
      });
    }
  }

  int casts_in_device = 0;  // whose plans do not cross PCIe

 private:
  static kernels::TableView view(const TileTable& table, std::uint32_t first, std::uint32_t last) {
    return {table.ranges.data(), table.range_of_tile.data(), first, last - first};
  }

  // In reverse order, since no lane may rely on an earlier one.
  template <typename Body>
  void for_each_lane(const Body& body) const {
    for (std::uint32_t warp = warps_; warp-- > 0;) {
      for (int lane = kernels::kLanes; lane-- > 0;) {
        body(kernels::Place{warp, warps_, lane});
      }
    }
  }

  template <typename Function>
  static void with_types(DType from, DType to, const Function& function) {
    if (from == DType::Bytes) {
      function(kernels::Byte{}, kernels::Byte{});
    } else {
      with_floats(from, to, function);
    }
  }

  static void enqueue_on_host(Stream& stream, std::function<void()> work) {
    static_cast<HostQueue&>(stream).enqueue(std::move(work));
  }

  std::uint32_t warps_;
  Enqueue enqueue_;
};

}  // namespace fsdp::test
