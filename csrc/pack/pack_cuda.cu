// The kernels of pack_kernels.h on a GPU: tables on the device, grids, launches.
//
// Note [launches]
// prepare uploads the tables. Addresses and modes change from step to step, so they are arguments
// of the kernels. A launch therefore allocates nothing, does not wait, and can be captured into a
// CUDA graph. Arguments may take 4 KiB (CUDA C++ Programming Guide, "kernel parameters"). A plan of
// more entries than fit takes several launches.
//
// Note [loaded kernels]
// By default CUDA loads a kernel at its first launch, and that may synchronise the device. A first
// pack in backward would stall it, and could deadlock with a collective of another communicator. So
// the packer loads all of its kernels when it is made.
#include <algorithm>
#include <cstring>
#include <memory>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/check.h"
#include "base/with_dtype.h"
#include "device/cuda_check.h"
#include "pack/pack.h"
#include "pack/pack_kernels.h"
#include "pack/pack_table.h"

namespace fsdp {
namespace {

using kernels::CastWork;
using kernels::PackWork;
using kernels::Place;
using kernels::TableView;
using kernels::UnpackWork;

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kernels::kLanes;
// At least this many blocks run on one processor. Each thread then has enough registers to spill
// none.
constexpr int kBlocks = 2;
// The most multiprocessors of a cast that crosses PCIe. Its blocks occupy their multiprocessors for
// the whole transfer, and keep compute, whose streams have a lower priority, off them. Eight have
// at least 256 KiB in flight, and PCIe 5.0 needs about 128 KiB (64 GB/s for 2 us). The eight are an
// estimate, and not measured.
constexpr int kPcieProcessors = 8;
constexpr int kAddresses = 480;
constexpr int kModes = 3968;

struct Addresses {
  std::int32_t first_entry;
  const void* of[kAddresses];
};

static_assert(sizeof(PackWork) + sizeof(Addresses) <= 4096, "more than arguments hold");

struct Modes {
  std::int32_t first_entry;
  CastMode of[kModes];
};

__device__ inline Place my_place() {
  const std::uint32_t warp_of_block = threadIdx.x / kernels::kLanes;
  return {blockIdx.x * kWarps + warp_of_block, gridDim.x * kWarps,
          static_cast<int>(threadIdx.x % kernels::kLanes)};
}

template <typename S, typename D>
__global__ void __launch_bounds__(kThreads, kBlocks)
    pack_kernel(const __grid_constant__ PackWork work,
                const __grid_constant__ Addresses addresses) {
  kernels::pack<S, D>(
      work,
      [&addresses](std::int32_t entry) { return addresses.of[entry - addresses.first_entry]; },
      my_place());
}

__global__ void __launch_bounds__(kThreads, kBlocks)
    unpack_kernel(const __grid_constant__ UnpackWork work) {
  kernels::unpack(work, my_place());
}

template <typename S, typename D>
__global__ void __launch_bounds__(kThreads, kBlocks)
    cast_kernel(const __grid_constant__ CastWork work, const __grid_constant__ Modes modes) {
  kernels::cast<S, D>(
      work, [&modes](std::int32_t entry) { return modes.of[entry - modes.first_entry]; },
      my_place());
}

// A table in one allocation of the device.
class DeviceTable {
 public:
  DeviceTable(Device& device, TileTable table) : host_(std::move(table)) {
    const std::size_t range_bytes = host_.ranges.size() * sizeof(CopyRange);
    const std::size_t tile_bytes = host_.range_of_tile.size() * sizeof(std::uint32_t);
    if (range_bytes == 0) {
      return;
    }
    memory_ = device.allocate(range_bytes + tile_bytes);
    auto* bytes = static_cast<char*>(memory_.get());
    // The compute stream may still use this memory, so the copies are ordered after its work. They
    // are done when this returns.
    Stream& stream = device.compute_stream();
    device.copy(stream, host_.ranges.data(), bytes, range_bytes);
    device.copy(stream, host_.range_of_tile.data(), bytes + range_bytes, tile_bytes);
    stream.synchronize();
    ranges_ = reinterpret_cast<const CopyRange*>(bytes);
    range_of_tile_ = reinterpret_cast<const std::uint32_t*>(bytes + range_bytes);
  }

  // The tiles of entries [first, last), including the padding before entry 0.
  TableView view(std::int32_t first, std::int32_t last) const {
    const std::uint32_t begin = first == 0 ? 0 : host_.first_tile_of_entry(first);
    return {ranges_, range_of_tile_, begin, host_.first_tile_of_entry(last) - begin};
  }

  TableView all() const {
    return {ranges_, range_of_tile_, 0, static_cast<std::uint32_t>(host_.range_of_tile.size())};
  }

 private:
  TileTable host_;
  std::shared_ptr<void> memory_;
  const CopyRange* ranges_ = nullptr;
  const std::uint32_t* range_of_tile_ = nullptr;
};

struct DeviceCastTable {
  DType source_dtype;
  DType destination_dtype;
  DeviceTable table;
};

class CudaPacker final : public Packer {
 public:
  CudaPacker(Device& device, int multiprocessors) : device_(device) {
    FSDP_CUDA_CHECK(
        cudaDeviceGetAttribute(&processors_, cudaDevAttrMultiProcessorCount, device_.index()));
    if (multiprocessors > 0) {
      processors_ = std::min(processors_, multiprocessors);
    }
    load_kernels();
  }

  void prepare(PackPlan& plan) override {
    plan.table = std::make_shared<const DeviceTable>(device_, make_table(plan));
  }

  void prepare(UnpackPlan& plan) override {
    plan.table = std::make_shared<const DeviceTable>(device_, make_table(plan));
  }

  void prepare(CastPlan& plan) override {
    auto tables = std::make_shared<std::vector<DeviceCastTable>>();
    for (CastTable& table : make_tables(plan)) {
      tables->push_back({table.source_dtype, table.destination_dtype,
                         DeviceTable(device_, std::move(table.tiles))});
    }
    plan.table = std::move(tables);
  }

  void pack(Stream& stream, const PackPlan& plan, const void* const* gradients,
            DType gradient_dtype, void* reduce_input, DType reduce_dtype, double scale,
            bool accumulate, const NonfiniteMarks& marks) override {
    check_pack(gradient_dtype, reduce_dtype);
    const PackWork work{prepared<DeviceTable>(plan.table).all(),
                        plan.segment_numel,
                        plan.world_size,
                        reduce_input,
                        scale,
                        accumulate,
                        marks};
    with_floats(gradient_dtype, reduce_dtype, [&](auto from, auto to) {
      pack_with(pack_kernel<decltype(from), decltype(to)>, stream, plan, gradients, work);
    });
  }

  void unpack(Stream& stream, const UnpackPlan& plan, const void* staging,
              void* unsharded) override {
    const UnpackWork work{prepared<DeviceTable>(plan.table).all(),
                          static_cast<std::int64_t>(plan.segment_bytes), plan.world_size, staging,
                          unsharded};
    launch(unpack_kernel, stream, work.table.tiles, processors_, work);
  }

  void cast(Stream& stream, const CastPlan& plan, const CastMode* modes, const void* source,
            void* destination, double scale) override {
    const auto entries = static_cast<std::int32_t>(plan.entries.size());
    const int processors = plan.crosses_pcie ? std::min(processors_, kPcieProcessors) : processors_;
    for (std::int32_t i = 0; i < entries; ++i) {
      check_cast(plan.entries[static_cast<std::size_t>(i)],
                 modes != nullptr ? modes[i] : CastMode::Write, scale);
    }
    for (const auto& [source_dtype, destination_dtype, table] :
         prepared<std::vector<DeviceCastTable>>(plan.table)) {
      std::int32_t first = 0;
      do {
        const std::int32_t last = std::min(entries, first + kModes);
        Modes travelling;
        travelling.first_entry = first;
        if (modes != nullptr) {
          std::copy(modes + first, modes + last, travelling.of);
        } else {
          std::fill_n(travelling.of, last - first, CastMode::Write);
        }
        const CastWork work{last == entries && first == 0 ? table.all() : table.view(first, last),
                            source, destination, scale};
        const auto launch_for = [&](auto from, auto to) {
          launch(cast_kernel<decltype(from), decltype(to)>, stream, work.table.tiles, processors,
                 work, travelling);
        };
        if (source_dtype == DType::Bytes) {
          launch_for(kernels::Byte{}, kernels::Byte{});
        } else {
          with_floats(source_dtype, destination_dtype, launch_for);
        }
        first = last;
      } while (first < entries);
    }
  }

 private:
  // See Note [loaded kernels].
  void load_kernels() {
    const CudaDeviceGuard guard(device_.index());
    constexpr DType kFloats[] = {DType::Float32, DType::BFloat16, DType::Float16, DType::Float64};
    for (const DType source : kFloats) {
      for (const DType destination : kFloats) {
        with_floats(source, destination, [this](auto from, auto to) {
          using S = decltype(from);
          using D = decltype(to);
          load(pack_kernel<S, D>);
          load(cast_kernel<S, D>);
        });
      }
    }
    load(cast_kernel<kernels::Byte, kernels::Byte>);
    load(unpack_kernel);
  }

  template <typename... Parameters>
  void load(void (*kernel)(Parameters...)) {
    cudaFuncAttributes attributes;
    FSDP_CUDA_CHECK(cudaFuncGetAttributes(&attributes, kernel));
    int of_processor = 0;
    FSDP_CUDA_CHECK(
        cudaOccupancyMaxActiveBlocksPerMultiprocessor(&of_processor, kernel, kThreads, 0));
    blocks_[reinterpret_cast<const void*>(kernel)] = std::max(of_processor, 1);
  }

  template <typename Table>
  static const Table& prepared(const std::shared_ptr<const void>& table) {
    FSDP_CHECK(table != nullptr, "this plan was not prepared. Call prepare() before using it.");
    return *static_cast<const Table*>(table.get());
  }

  // Launches the kernel until all entries are done.
  void pack_with(void (*kernel)(PackWork, Addresses), Stream& stream, const PackPlan& plan,
                 const void* const* gradients, PackWork work) {
    const auto& table = prepared<DeviceTable>(plan.table);
    const auto entries = static_cast<std::int32_t>(plan.entries.size());
    std::int32_t first = 0;
    do {
      const std::int32_t last = std::min(entries, first + kAddresses);
      Addresses addresses;
      addresses.first_entry = first;
      std::copy(gradients + first, gradients + last, addresses.of);
      if (last - first < entries) {
        work.table = table.view(first, last);
      }
      launch(kernel, stream,
             static_cast<std::uint64_t>(work.table.tiles) *
                 static_cast<std::uint64_t>(plan.world_size),
             processors_, work, addresses);
      first = last;
    } while (first < entries);
  }

  // The grid is persistent. It has as many blocks as can run at once on `processors`
  // multiprocessors, or fewer if there are fewer tiles.
  template <typename... Parameters, typename... Arguments>
  void launch(void (*kernel)(Parameters...), Stream& stream, std::uint64_t tiles, int processors,
              const Arguments&... arguments) {
    if (tiles == 0) {
      return;
    }
    const CudaDeviceGuard guard(device_.index());
    const int of_processor = blocks_.at(reinterpret_cast<const void*>(kernel));
    const auto most = static_cast<std::uint64_t>(of_processor * processors);
    const auto blocks = static_cast<unsigned>(std::min(most, (tiles + kWarps - 1) / kWarps));
    kernel<<<blocks, kThreads, 0, static_cast<cudaStream_t>(stream.native_handle())>>>(
        arguments...);
    FSDP_CUDA_CHECK(cudaGetLastError());
  }

  Device& device_;
  int processors_ = 1;                           // that packing may use
  std::unordered_map<const void*, int> blocks_;  // of a multiprocessor at once, by kernel
};

}  // namespace

std::unique_ptr<Packer> make_cuda_packer(Device& device, int multiprocessors) {
  return std::make_unique<CudaPacker>(device, multiprocessors);
}

}  // namespace fsdp
