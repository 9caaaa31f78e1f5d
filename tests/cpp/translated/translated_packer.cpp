// The packer for GPUs, csrc/pack/pack_cuda.cu, over translated kernels.
#include "device/stream.h"
#include "kernels_under_test.h"
#include "launches.h"

namespace fsdp::test {
namespace {

class TranslatedPacker final : public Packer {
 public:
  void prepare(PackPlan& plan) override { packer_->prepare(plan); }
  void prepare(UnpackPlan& plan) override { packer_->prepare(plan); }
  void prepare(CastPlan& plan) override { packer_->prepare(plan); }

  void pack(Stream& stream, const PackPlan& plan, const void* const* gradients,
            DType gradient_dtype, void* reduce_input, DType reduce_dtype, double scale,
            bool accumulate, const NonfiniteMarks& marks) override {
    const LaunchesOn here(stream);
    packer_->pack(stream, plan, gradients, gradient_dtype, reduce_input, reduce_dtype, scale,
                  accumulate, marks);
  }
  void unpack(Stream& stream, const UnpackPlan& plan, const void* staging,
              void* unsharded) override {
    const LaunchesOn here(stream);
    packer_->unpack(stream, plan, staging, unsharded);
  }
  void cast(Stream& stream, const CastPlan& plan, const CastMode* modes, const void* source,
            void* destination, double scale) override {
    const LaunchesOn here(stream);
    packer_->cast(stream, plan, modes, source, destination, scale);
  }

 private:
  std::unique_ptr<Device> device_ = make_host_device(std::chrono::milliseconds(60000));
  std::unique_ptr<Packer> packer_ = make_cuda_packer(*device_);
};

}  // namespace

std::unique_ptr<Packer> make_kernels_under_test() { return std::make_unique<TranslatedPacker>(); }

bool kernels_have_one_nan() { return true; }

}  // namespace fsdp::test
