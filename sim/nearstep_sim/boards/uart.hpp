// The host's end of a serial line: eight bits, no parity, one stop bit.
#pragma once

#include <cstdint>
#include <deque>

namespace nearstep {

class Uart {
  public:
    // A bit takes `clock_hz / baud` cycles, which need not be whole.
    Uart(std::uint64_t clock_hz, std::uint64_t baud) : clock_(clock_hz), baud_(baud) {}

    void send(const std::uint8_t* data, std::uint64_t bytes) {
        sending_.insert(sending_.end(), data, data + bytes);
    }
    void forget() { sending_.clear(); }
    std::uint64_t waiting() const { return sending_.size() + (bits_ != 0); }

    // The level of the line to the board in this cycle.
    bool drive() {
        if (!bits_) {
            if (sending_.empty()) return true;
            frame_ = 0x200u | unsigned(sending_.front()) << 1;
            sending_.pop_front();
            bits_ = kBits;
            phase_ = 0;
        }
        const bool level = frame_ >> (kBits - bits_) & 1;
        phase_ += baud_;
        if (phase_ >= clock_) {
            phase_ -= clock_;
            --bits_;
        }
        return level;
    }

    // Samples the line from the board; true at the end of a byte.
    bool take(bool level, std::uint8_t* byte) {
        if (!listening_) {
            if (level) return false;
            listening_ = true;
            heard_ = 0;
            word_ = 0;
            wait_ = clock_ / 2;  // until the middle of the start bit
        }
        if (wait_ > baud_) {
            wait_ -= baud_;
            return false;
        }
        wait_ += clock_ - baud_;
        word_ |= unsigned(level) << heard_;
        if (++heard_ == 1 && level) {
            listening_ = false;
        } else if (heard_ == kBits) {
            listening_ = false;
            if (!level) {
                ++framing_errors_;
                return false;
            }
            *byte = word_ >> 1;
            return true;
        }
        return false;
    }

    std::uint64_t framing_errors() const { return framing_errors_; }

  private:
    static constexpr unsigned kBits = 10;
    std::uint64_t clock_, baud_, phase_ = 0, wait_ = 0, framing_errors_ = 0;
    std::deque<std::uint8_t> sending_;
    unsigned frame_ = 0, bits_ = 0, heard_ = 0, word_ = 0;
    bool listening_ = false;
};

}  // namespace nearstep
