#include "torch/inline_group.h"

#include <c10/core/InferenceMode.h>
#include <torch/csrc/utils/pybind.h>

#include <cstdio>
#include <cstring>
#include <utility>
#include <vector>

#include "base/check.h"
#include "base/text.h"
#include "device/host_stream.h"
#include "torch/backend_messages.h"
#include "torch/dtype.h"
#include "torch/with_python.h"

namespace py = pybind11;

namespace fsdp {
namespace {

enum class Kind : std::uint64_t { AllGather, ReduceScatter, AllReduce };

// A rank's announcement of its next collective.
struct Next {
  Kind kind;
  std::uint64_t bytes;
  std::uint64_t tag;
  char what[104];
};

class InlineCommunicator final : public Communicator {
 public:
  InlineCommunicator(TransportTraits traits, py::object collectives, const InlineRank& place)
      : Communicator(std::move(traits), place.rank, place.size),
        collectives_(std::move(collectives)),
        place_(place) {}

  void all_gather(Stream& stream, const void* input, void* output, std::size_t bytes) override {
    run(stream, Kind::AllGather, bytes,
        [this, input, output, bytes] { all_gather_now(input, output, bytes); });
  }

  void reduce_scatter(Stream& stream, const void* input, void* output, std::size_t numel,
                      DType dtype) override {
    run(stream, Kind::ReduceScatter, numel * itemsize(dtype), [this, input, output, numel, dtype] {
      collectives_.attr("reduce_scatter")(
          view_of(output, numel, dtype),
          view_of(input, numel * static_cast<std::size_t>(size()), dtype));
    });
  }

  void all_reduce(Stream& stream, void* data, std::size_t numel, DType dtype) override {
    run(stream, Kind::AllReduce, numel * itemsize(dtype), [this, data, numel, dtype] {
      collectives_.attr("all_reduce")(view_of(data, numel, dtype));
    });
  }

  void abort(const std::string& reason) override {
    if (error_.empty()) {
      error_ = reason;
    }
  }

  // Empty: the thread that issues a collective gets its error thrown. The check of all lanes before
  // an optimizer's step may be made by another rank, if ranks are threads of one process.
  std::string async_error() override { return {}; }

 private:
  template <typename Collective>
  void run(Stream& stream, Kind kind, std::size_t bytes, const Collective& collective) {
    static_cast<HostQueue&>(stream).enqueue([&] {
      FSDP_CHECK(error_.empty(), "communication was aborted: ", error_);
      const py::gil_scoped_acquire gil;
      // Another rank may be a thread of this process, and write these tensors.
      const c10::InferenceMode no_inference(false);
      try {
        meet(kind, bytes);
        collective();
      } catch (py::error_already_set& error) {
        if (!error.matches(PyExc_Exception)) {
          throw;  // a KeyboardInterrupt, say
        }
        abort(detail::concat("rank ", place_.global_rank, ": ", what(),
                             " failed over the process group: ", plain_text(error),
                             ". Look at the output of all ranks."));
        throw Error(error_);
      } catch (const std::exception& error) {
        abort(error.what());
        throw;
      }
    });
  }

  // See Note [inline groups].
  void meet(Kind kind, std::size_t bytes) {
    if (size() == 1) {
      return;
    }
    Next mine{kind, bytes, tag(), {}};
    std::snprintf(mine.what, sizeof(mine.what), "%s", what().c_str());
    std::vector<Next> all(static_cast<std::size_t>(size()));
    all_gather_now(&mine, all.data(), sizeof(mine));
    for (std::size_t other = 0; other < all.size(); ++other) {
      const Next& theirs = all[other];
      FSDP_CHECK(theirs.kind == kind && theirs.bytes == bytes && theirs.tag == tag(), "rank ",
                 place_.global_rank, ": ranks issued different collectives: this rank is in ",
                 mine.what, ", and rank ", other, " of its group is in ",
                 text_in(theirs.what, sizeof(theirs.what)),
                 ". Over a process group that runs collectives on the calling thread, all ranks "
                 "have to run the same units in the same order and use the same parameters");
    }
  }

  void all_gather_now(const void* input, void* output, std::size_t bytes) {
    collectives_.attr("all_gather")(
        view_of(output, bytes * static_cast<std::size_t>(size()), DType::Bytes),
        view_of(input, bytes, DType::Bytes));
  }

  HeldObject collectives_;
  InlineRank place_;
  std::string error_;
};

}  // namespace

std::unique_ptr<Communicator> make_inline_communicator(py::object collectives,
                                                       const InlineRank& place) {
  TransportTraits traits;
  traits.name = "process_group";
  traits.is_inline = true;
  traits.sums_in_rank_order = true;
  return std::make_unique<InlineCommunicator>(std::move(traits), std::move(collectives), place);
}

}  // namespace fsdp
