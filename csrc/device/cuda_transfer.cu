#include <algorithm>

#include "base/check.h"
#include "device/cuda_check.h"
#include "device/cuda_transfer.h"

namespace fsdp {
namespace {

constexpr int kThreads = 512;
constexpr int kWordsInFlight = 8;
constexpr std::size_t kSliceBytes = std::size_t{64} << 10;
constexpr int kMovesALaunch = 48;  // fit into a kernel's arguments on every driver

struct TableEntry {
  Move move;
  std::uint64_t first;  // its first slice in the table; its pieces follow one after another
  std::uint64_t slices_a_piece;
};

struct Table {
  TableEntry entries[kMovesALaunch];
  int count;
  std::uint64_t slices;
};
static_assert(sizeof(Table) + 8 <= 4096, "the table must fit into a kernel's arguments");

__device__ std::uint64_t nanoseconds() {
  std::uint64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

__device__ void wait_until(std::uint64_t start, std::uint64_t duration) {
  while (nanoseconds() - start < duration) {
    __nanosleep(200);
  }
}

// Reads memory in a way that the compiler does not remove.
__device__ void keep(const uint4& word) {
  asm volatile("" ::"r"(word.x), "r"(word.y), "r"(word.z), "r"(word.w));
}
__device__ void keep(char byte) { asm volatile("" ::"r"(static_cast<int>(byte))); }

// A thread has kWordsInFlight loads in flight before its first store, since one alone would be
// slower than a fast link: a multiprocessor then has all 64 KiB of a slice in flight.
template <typename Word>
__device__ void move_words(const char* source, char* destination, std::size_t bytes, bool write) {
  const auto* from = reinterpret_cast<const Word*>(source);
  auto* to = reinterpret_cast<Word*>(destination);
  const std::size_t words = bytes / sizeof(Word);
  for (std::size_t first = threadIdx.x; first < words; first += kThreads * kWordsInFlight) {
    Word loaded[kWordsInFlight];
#pragma unroll
    for (int i = 0; i < kWordsInFlight; ++i) {
      // Loads past the end repeat the last word, so that no load is behind a branch.
      const std::size_t at = first + static_cast<std::size_t>(i) * kThreads;
      loaded[i] = from[at < words ? at : words - 1];
    }
#pragma unroll
    for (int i = 0; i < kWordsInFlight; ++i) {
      const std::size_t at = first + static_cast<std::size_t>(i) * kThreads;
      if (!write) {
        keep(loaded[i]);
      } else if (at < words) {
        to[at] = loaded[i];
      }
    }
  }
}

__device__ void move_slice(const TableEntry& entry, std::uint64_t slice) {
  const Move& move = entry.move;
  const auto piece = static_cast<std::size_t>(slice / entry.slices_a_piece);
  const std::size_t begin = static_cast<std::size_t>(slice % entry.slices_a_piece) * kSliceBytes;
  const std::size_t left = move.bytes - begin;
  const std::size_t bytes = left < kSliceBytes ? left : kSliceBytes;
  const char* source = static_cast<const char*>(move.source) + piece * move.source_step + begin;
  char* destination = static_cast<char*>(move.destination) + piece * move.destination_step + begin;
  const bool write = move.writes(static_cast<int>(piece));
  const auto addresses =
      reinterpret_cast<std::uintptr_t>(source) | reinterpret_cast<std::uintptr_t>(destination);
  if ((addresses | bytes) % 16 == 0) {
    move_words<uint4>(source, destination, bytes, write);
  } else {
    move_words<char>(source, destination, bytes, write);
  }
}

__global__ void __launch_bounds__(kThreads)
    transfer_kernel(const __grid_constant__ Table table, std::uint64_t duration) {
  const std::uint64_t start = nanoseconds();
  int entry = 0;
  for (std::uint64_t slice = blockIdx.x; slice < table.slices; slice += gridDim.x) {
    while (entry + 1 < table.count && table.entries[entry + 1].first <= slice) {
      ++entry;
    }
    wait_until(start, static_cast<std::uint64_t>(static_cast<double>(duration) *
                                                 static_cast<double>(slice) /
                                                 static_cast<double>(table.slices)));
    move_slice(table.entries[entry], slice - table.entries[entry].first);
  }
  wait_until(start, duration);
}

__global__ void stamp_kernel(std::uint64_t* start) { *start = nanoseconds(); }

__global__ void wait_kernel(const std::uint64_t* start, std::uint64_t duration) {
  wait_until(start != nullptr ? *start : nanoseconds(), duration);
}

// Returns all of a multiprocessor's shared memory, and lets the kernel use it, so that no other
// block fits beside it.
int reserve_shared_memory() {
  int device = 0;
  int bytes = 0;
  FSDP_CUDA_CHECK(cudaGetDevice(&device));
  FSDP_CUDA_CHECK(cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
  FSDP_CUDA_CHECK(
      cudaFuncSetAttribute(transfer_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  return bytes;
}

int multiprocessors_of_device() {
  int device = 0;
  int count = 0;
  FSDP_CUDA_CHECK(cudaGetDevice(&device));
  FSDP_CUDA_CHECK(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device));
  return count;
}

std::uint64_t bytes_of(const Move& move) {
  return static_cast<std::uint64_t>(move.bytes) * static_cast<std::uint64_t>(move.count);
}

}  // namespace

void load_transfer_kernels() {
  cudaFuncAttributes attributes;
  FSDP_CUDA_CHECK(cudaFuncGetAttributes(&attributes, transfer_kernel));
  FSDP_CUDA_CHECK(cudaFuncGetAttributes(&attributes, stamp_kernel));
  FSDP_CUDA_CHECK(cudaFuncGetAttributes(&attributes, wait_kernel));
}

void launch_transfer(cudaStream_t stream, std::chrono::nanoseconds duration,
                     const std::vector<Move>& moves, int multiprocessors) {
  const auto total_nanoseconds = static_cast<double>(duration.count());
  std::uint64_t total_bytes = 0;
  for (const Move& move : moves) {
    total_bytes += bytes_of(move);
  }
  const int available = multiprocessors_of_device();
  FSDP_CHECK(multiprocessors <= available, "A simulated collective got ", multiprocessors,
             " multiprocessors, but this GPU has ", available, ". Pass at most that many.");
  const int shared = reserve_shared_memory();
  for (std::size_t begin = 0; begin < std::max<std::size_t>(1, moves.size());
       begin += kMovesALaunch) {
    Table table{};
    std::uint64_t bytes = 0;
    for (std::size_t i = begin; i < std::min(moves.size(), begin + kMovesALaunch); ++i) {
      TableEntry& entry = table.entries[table.count++];
      entry.move = moves[i];
      entry.first = table.slices;
      entry.slices_a_piece = (moves[i].bytes + kSliceBytes - 1) / kSliceBytes;
      table.slices += entry.slices_a_piece * static_cast<std::uint64_t>(moves[i].count);
      bytes += bytes_of(moves[i]);
    }
    const double share =
        total_bytes == 0 ? 1.0 : static_cast<double>(bytes) / static_cast<double>(total_bytes);
    transfer_kernel<<<multiprocessors, kThreads, shared, stream>>>(
        table, static_cast<std::uint64_t>(total_nanoseconds * share));
    FSDP_CUDA_CHECK(cudaGetLastError());
  }
}

void launch_transfer_by_engines(cudaStream_t stream, std::chrono::nanoseconds duration,
                                const std::vector<Move>& moves, std::uint64_t* start) {
  if (start != nullptr) {
    stamp_kernel<<<1, 1, 0, stream>>>(start);
    FSDP_CUDA_CHECK(cudaGetLastError());
  }
  const auto copy = [&](const void* source, void* destination, std::size_t bytes) {
    FSDP_CUDA_CHECK(cudaMemcpyAsync(destination, source, bytes, cudaMemcpyDeviceToDevice, stream));
  };
  for (const Move& move : moves) {
    const auto* source = static_cast<const char*>(move.source);
    auto* destination = static_cast<char*>(move.destination);
    if (move.written_piece != Move::kAllPieces) {
      const auto piece = static_cast<std::size_t>(move.written_piece);
      copy(source + piece * move.source_step, destination + piece * move.destination_step,
           move.bytes);
      continue;
    }
    // If all pieces are copies of one, each copy doubles what is already there.
    const bool doubles = move.source_step == 0 && move.destination_step == move.bytes;
    copy(source, destination, move.bytes);
    const auto count = static_cast<std::size_t>(move.count);
    for (std::size_t done = 1; done < count;) {
      const std::size_t pieces = doubles ? std::min(done, count - done) : 1;
      copy(doubles ? destination : source + done * move.source_step,
           destination + done * move.destination_step, pieces * move.bytes);
      done += pieces;
    }
  }
  wait_kernel<<<1, 1, 0, stream>>>(start, static_cast<std::uint64_t>(duration.count()));
  FSDP_CUDA_CHECK(cudaGetLastError());
}

}  // namespace fsdp
