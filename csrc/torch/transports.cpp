#include "torch/transports.h"

#include <torch/csrc/utils/pybind.h>

#include <utility>

#include "core/check.h"
#include "torch/process_group.h"

namespace fsdp {
namespace {

// Their workers may be in a collective, and a process group written in Python needs the GIL there.
void delete_without_gil(Lanes* lanes) {
  if (Py_IsInitialized() == 0 || PyGILState_Check() == 0) {
    delete lanes;
    return;
  }
  const pybind11::gil_scoped_release no_gil;
  delete lanes;
}

}  // namespace

std::shared_ptr<Lanes> make_process_group_lanes(c10::intrusive_ptr<c10d::ProcessGroup> gather,
                                                c10::intrusive_ptr<c10d::ProcessGroup> reduce,
                                                std::chrono::milliseconds timeout,
                                                bool groups_one_by_one) {
  return {new Lanes(make_host_device(timeout), make_host_packer(),
                    make_process_group_communicator(std::move(gather), groups_one_by_one),
                    make_process_group_communicator(std::move(reduce), groups_one_by_one)),
          &delete_without_gil};
}

std::shared_ptr<Lanes> make_nccl_lanes(const nccl::Api& api, int device_index,
                                       const nccl::UniqueId& id, const NcclOptions& options,
                                       std::chrono::milliseconds timeout) {
  std::unique_ptr<Device> device = make_cuda_device(device_index, timeout, cuda_framework());
  FSDP_CHECK(!device->is_capturing(),
             "the first iteration sets up what a CUDA graph cannot capture; run a few whole steps "
             "before capturing one");
  std::unique_ptr<Packer> packer = make_cuda_packer(*device);
  auto [gather, reduce] = make_nccl_communicators(api, *device, id, options);
  return {new Lanes(std::move(device), std::move(packer), std::move(gather), std::move(reduce)),
          &delete_without_gil};
}

}  // namespace fsdp
