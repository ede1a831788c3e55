// State of each line of a large memory: what the kernel may access. Pieces are allocated on use.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

namespace nearstep {

enum class LineState : std::uint8_t { guard = 0, unwritten, written };

class LineStates {
  public:
    explicit LineStates(std::uint64_t lines) : pieces_((lines + kPiece - 1) / kPiece) {}

    LineState of(std::uint64_t line) const {
        const auto& piece = pieces_[line / kPiece];
        return piece ? piece[line % kPiece] : LineState::guard;
    }

    // Lines [first, limit).
    void mark(std::uint64_t first, std::uint64_t limit, LineState state) {
        while (first < limit) {
            const std::uint64_t end = std::min(limit, (first / kPiece + 1) * kPiece);
            auto& piece = pieces_[first / kPiece];
            if (!piece && state != LineState::guard)
                piece = std::make_unique<LineState[]>(kPiece);
            if (piece)
                std::fill(piece.get() + first % kPiece, piece.get() + first % kPiece + end - first,
                          state);
            first = end;
        }
    }

  private:
    static constexpr std::uint64_t kPiece = 1 << 16;
    std::vector<std::unique_ptr<LineState[]>> pieces_;
};

}  // namespace nearstep
