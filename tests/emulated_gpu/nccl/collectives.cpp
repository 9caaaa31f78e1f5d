// The collectives, each as exchanges of slots.
#include <cstdio>
#include <cstring>
#include <functional>

#include "groups.h"
#include "reductions.h"

namespace emulated_gpu {
namespace {

Collective describe(const char* name, std::size_t count, ncclDataType_t type, int op, int root) {
  Collective collective{{}, count, type, op, root, {}, {}};
  std::snprintf(collective.name, sizeof(collective.name), "%s", name);
  return collective;
}

Reduction reduction_of(const Communicator& communicator, ncclDataType_t type, ncclRedOp_t op) {
  if (op < ncclNumOps) {
    return {type, op, 1};
  }
  return {type, ncclSum, communicator.scales.at(static_cast<std::size_t>(op - ncclNumOps))};
}

const char* at(const void* begin, std::size_t offset) {
  return static_cast<const char*>(begin) + offset;
}
char* at(void* begin, std::size_t offset) { return static_cast<char*>(begin) + offset; }

// Reduces `bytes` bytes of every rank. A rank with `receives` gets the result.
void reduce_exchanged(Communicator& communicator, const Collective& collective, const void* from,
                      void* to, std::size_t bytes, const Reduction& reduction, bool receives) {
  communicator.exchange(
      collective, bytes, [&](std::size_t offset) { return at(from, offset); },
      [&](std::size_t offset, std::size_t part) {
        if (receives) {
          reduce(at(to, offset), communicator.slots(), part / bytes_of(reduction.type), reduction);
        }
      });
}

}  // namespace
}  // namespace emulated_gpu

using namespace emulated_gpu;

extern "C" {

ncclResult_t ncclAllGather(const void* from, void* to, std::size_t count, ncclDataType_t type,
                           ncclComm_t handle, cudaStream_t stream) {
  const std::size_t bytes = count * bytes_of(type);
  const Collective described = describe("all-gather", count, type, ncclSum, kNoRoot);
  return submit(described, from, to, bytes, handle, stream,
                [=](Communicator& communicator, const Collective& collective) {
                  reads(from, bytes);
                  writes(to, static_cast<std::size_t>(communicator.size) * bytes);
                  communicator.exchange(
                      collective, bytes, [&](std::size_t offset) { return at(from, offset); },
                      [&](std::size_t offset, std::size_t part) {
                        for (int rank = 0; rank < communicator.size; ++rank) {
                          const std::size_t place = static_cast<std::size_t>(rank) * bytes + offset;
                          std::memcpy(at(to, place), communicator.slot(rank), part);
                        }
                      });
                });
}

ncclResult_t ncclReduceScatter(const void* from, void* to, std::size_t count, ncclDataType_t type,
                               ncclRedOp_t op, ncclComm_t handle, cudaStream_t stream) {
  const std::size_t bytes = count * bytes_of(type);
  const Collective described = describe("reduce-scatter", count, type, op, kNoRoot);
  return submit(described, from, to, bytes, handle, stream,
                [=](Communicator& communicator, const Collective& collective) {
                  const Reduction reduction = reduction_of(communicator, type, op);
                  reads(from, static_cast<std::size_t>(communicator.size) * bytes);
                  writes(to, bytes);
                  for (int owner = 0; owner < communicator.size; ++owner) {
                    const void* segment = at(from, static_cast<std::size_t>(owner) * bytes);
                    reduce_exchanged(communicator, collective, segment, to, bytes, reduction,
                                     owner == communicator.rank);
                  }
                });
}

ncclResult_t ncclAllReduce(const void* from, void* to, std::size_t count, ncclDataType_t type,
                           ncclRedOp_t op, ncclComm_t handle, cudaStream_t stream) {
  const std::size_t bytes = count * bytes_of(type);
  const Collective described = describe("all-reduce", count, type, op, kNoRoot);
  return submit(described, from, to, bytes, handle, stream,
                [=](Communicator& communicator, const Collective& collective) {
                  reads(from, count * bytes_of(type));
                  writes(to, count * bytes_of(type));
                  reduce_exchanged(communicator, collective, from, to, count * bytes_of(type),
                                   reduction_of(communicator, type, op), true);
                });
}

ncclResult_t ncclReduce(const void* from, void* to, std::size_t count, ncclDataType_t type,
                        ncclRedOp_t op, int root, ncclComm_t handle, cudaStream_t stream) {
  const std::size_t bytes = count * bytes_of(type);
  const Collective described = describe("reduce", count, type, op, root);
  return submit(described, from, to, bytes, handle, stream,
                [=](Communicator& communicator, const Collective& collective) {
                  reads(from, count * bytes_of(type));
                  writes(to, root == communicator.rank ? count * bytes_of(type) : 0);
                  reduce_exchanged(communicator, collective, from, to, count * bytes_of(type),
                                   reduction_of(communicator, type, op), root == communicator.rank);
                });
}

ncclResult_t ncclBroadcast(const void* from, void* to, std::size_t count, ncclDataType_t type,
                           int root, ncclComm_t handle, cudaStream_t stream) {
  const std::size_t bytes = count * bytes_of(type);
  const Collective described = describe("broadcast", count, type, ncclSum, root);
  return submit(described, from, to, bytes, handle, stream,
                [=](Communicator& communicator, const Collective& collective) {
                  reads(from, communicator.rank == root ? count * bytes_of(type) : 0);
                  writes(to, count * bytes_of(type));
                  communicator.exchange(
                      collective, count * bytes_of(type),
                      [&](std::size_t offset) {
                        return communicator.rank == root ? at(from, offset) : nullptr;
                      },
                      [&](std::size_t offset, std::size_t part) {
                        std::memmove(at(to, offset), communicator.slot(root), part);
                      });
                });
}

ncclResult_t ncclBcast(void* data, std::size_t count, ncclDataType_t type, int root,
                       ncclComm_t handle, cudaStream_t stream) {
  return ncclBroadcast(data, data, count, type, root, handle, stream);
}
}
