#include "comm/messages/message_staging.h"

#include <algorithm>

#include "base/align.h"
#include "base/copy.h"

namespace fsdp {
namespace {

// A payload this small is copied into the first message, which costs less than a second message.
constexpr std::size_t kMostInlineBytes = std::size_t{32} << 10;
constexpr std::size_t kLeastInlineBytes = std::size_t{4} << 10;
constexpr std::size_t kInlineBudget = std::size_t{1} << 20;  // for all peers together

constexpr std::size_t kLargestElement = 8;  // bytes
// A piece this small takes about as long on a fast wire as the calls that send it. The ring of
// pieces takes kPieceBudget bytes where this limit allows it.
constexpr std::size_t kMostPieceBytes = std::size_t{1} << 20;
constexpr std::size_t kLeastPieceBytes = std::size_t{64} << 10;
constexpr std::size_t kPieceBudget = std::size_t{4} << 20;
// A payload is cut into this many pieces, unless they would be too small, or too large for the
// ring.
constexpr std::size_t kPieces = 8;

// An all-reduce sends what is left after equal segments in first messages: less than an element for
// each rank.
std::size_t least_inline_bytes(int ranks) {
  return std::max(kLeastInlineBytes,
                  align_up(static_cast<std::size_t>(ranks) * kLargestElement, kCacheLine));
}

}  // namespace

MessageStaging::MessageStaging(int ranks, Use use)
    : inline_bytes(
          std::max(least_inline_bytes(ranks),
                   std::min(kInlineBudget / static_cast<std::size_t>(ranks), kMostInlineBytes) /
                       kCacheLine * kCacheLine)),
      first_bytes(kHeaderBytes + inline_bytes) {
  const auto peers = static_cast<std::size_t>(ranks - 1);
  piece_bytes = std::clamp(kPieceBudget / (kPiecesInFlight * std::max<std::size_t>(peers, 1)),
                           kLeastPieceBytes, kMostPieceBytes) /
                kCacheLine * kCacheLine;
  const bool reduces = use == Use::Reductions;
  // An all-gather sends the same first message to all peers.
  received = (reduces ? peers : 1) * first_bytes;
  pieces = received + peers * first_bytes;
  sum = pieces + (reduces ? peers * kPiecesInFlight * piece_bytes : 0);
  bytes = peers == 0 ? 0 : sum + (reduces ? inline_bytes : 0);
}

std::size_t MessageStaging::piece_bytes_of(std::size_t payload_bytes) const {
  const std::size_t wanted = align_up(payload_bytes / kPieces + 1, kCacheLine);
  return std::clamp(wanted, kLeastPieceBytes, piece_bytes);
}

std::size_t message_staging_bytes(const TransportTraits& transport, int ranks) {
  using Use = MessageStaging::Use;
  return transport.is_composed ? MessageStaging(ranks, Use::Gathers).bytes +
                                     MessageStaging(ranks, Use::Reductions).bytes
                               : 0;
}

}  // namespace fsdp
