// The memory for messages of composed collectives: Note [composed collectives].
#pragma once

#include <cstddef>
#include <cstdint>

#include "comm/transport_traits.h"

namespace fsdp {

// The memory that one lane's collectives keep for messages. It depends on the number of ranks
// alone.
struct MessageStaging {
  // The collectives that use the memory. Only reductions need room for pieces.
  enum class Use : std::uint8_t { Gathers, Reductions };
  static constexpr std::size_t kPiecesInFlight = 4;  // of each peer
  static constexpr std::size_t kHeaderBytes = 192;   // of a first message

  MessageStaging(int ranks, Use use);

  // The size of the pieces of a payload. It does not depend on the rank, so all ranks cut alike.
  std::size_t piece_bytes_of(std::size_t payload_bytes) const;

  std::size_t inline_bytes;  // the largest payload that travels in a first message
  std::size_t first_bytes;   // of a first message
  std::size_t piece_bytes;   // the largest piece
  std::size_t received;      // offsets of the parts: first messages of peers,
  std::size_t pieces;        // pieces of peers,
  std::size_t sum;           // and the sum of an all-reduce of at most inline_bytes
  std::size_t bytes;         // of everything; a single rank needs none
};

// The memory that both lanes of `ranks` ranks keep for messages.
std::size_t message_staging_bytes(const TransportTraits& transport, int ranks);

}  // namespace fsdp
