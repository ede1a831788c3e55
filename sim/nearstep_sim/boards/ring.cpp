// Boards with COARSE devices in this process: a Verilated top each, with a clock of its own, the
// host's ends of their serial lines, and the cables between them.

#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "Vboard.h"
#include "boards/uart.hpp"
#include "models/random.hpp"
#include "verilate/context.hpp"

namespace nearstep {

struct RingOptions {
    std::uint64_t boards, clock_hz, baud, seed, reset_cycles;
    // Difference between the oscillators of neighbouring boards, in parts per million.
    std::uint64_t ppm;
    // Chance of 65536 that one pin of a transfer on a cable has the wrong level.
    std::uint32_t corrupt;
};

struct CableCounters {
    std::uint64_t transfers, hit;
};

// The pins of one direction between two boards. The lowest is the strobe.
class Cable {
  public:
    // The sender's pins after an edge of its clock.
    void drive(unsigned pins, std::uint32_t corrupt, Random& random) {
        if (hold_ && !--hold_) mask_ = 0;
        if ((pins ^ pins_) & 1) {
            ++counters_.transfers;
            const bool armed = times_ && !skip_;
            if (times_ && skip_) --skip_;
            if (armed) --times_;
            if (armed || random.chance(corrupt)) {
                ++counters_.hit;
                mask_ = 1u << random.next() % kPins;
                hold_ = kHalf;
            }
        }
        pins_ = pins;
    }

    // Levels at the receiver's pins: without a cable, those of the resistors.
    unsigned level() const { return plugged_ ? pins_ ^ mask_ : 0; }

    void plug(bool plugged) { plugged_ = plugged; }
    // Disturbs `times` transfers, after the next `skip`.
    void arm(std::uint64_t skip, std::uint64_t times) {
        skip_ = skip;
        times_ = times;
    }
    const CableCounters& counters() const { return counters_; }

  private:
    static constexpr unsigned kPins = 10, kHalf = 2;  // half a transfer: the data do not change
    unsigned pins_ = 0, mask_ = 0, hold_ = 0;
    bool plugged_ = true;
    std::uint64_t skip_ = 0, times_ = 0;
    CableCounters counters_{};
};

// A board, its clock, and the host's end of its line.
class Station {
  public:
    Station(const RingOptions& options, std::uint64_t number)
        : top_(&context_, "board"),
          uart_(options.clock_hz, options.baud),
          period_(kSecond / options.clock_hz * (kMillion + number * options.ppm) / kMillion),
          next_(number) {
        top_.rst = 1;
        for (std::uint64_t i = 0; i < options.reset_cycles; ++i) clock(0, 0);
        top_.rst = 0;
    }

    void clock(unsigned link0, unsigned link1) {
        top_.rx = uart_.drive();
        top_.i_link0 = link0;
        top_.i_link1 = link1;
        top_.clk = 1;
        top_.eval();
        top_.clk = 0;
        top_.eval();
        std::uint8_t byte;
        if (uart_.take(top_.tx, &byte)) come_.push_back(byte);
        next_ += period_;
        ++cycle_;
    }

    unsigned pins(unsigned port) const { return port ? top_.o_link1 : top_.o_link0; }
    std::uint64_t next() const { return next_; }
    std::uint64_t cycle() const { return cycle_; }
    Uart& uart() { return uart_; }
    std::deque<std::uint8_t>& come() { return come_; }

  private:
    static constexpr std::uint64_t kSecond = 1'000'000'000'000'000, kMillion = 1'000'000;  // fs
    Context context_;
    Vboard top_;
    Uart uart_;
    std::deque<std::uint8_t> come_;
    std::uint64_t period_, next_, cycle_ = 0;
};

// Cable 2i goes from port 1 of board i to port 0 of the next, cable 2i + 1 back.
class Ring {
  public:
    explicit Ring(const RingOptions& options) : o_(options), random_(options.seed) {
        for (std::uint64_t i = 0; i < o_.boards; ++i)
            stations_.push_back(std::make_unique<Station>(o_, i));
        cables_.resize(2 * o_.boards);
        if (o_.boards == 2) plug(1, false);  // two boards have one link
    }

    void send(std::uint64_t board, const std::uint8_t* data, std::uint64_t bytes) {
        stations_[board]->uart().send(data, bytes);
    }

    // Runs all boards until `board` has sent a byte, or for `cycles` of its cycles; copies the
    // bytes received from `board`, at most `room`.
    std::uint64_t run(std::uint64_t board, std::uint64_t cycles, std::uint8_t* out,
                      std::uint64_t room) {
        Station& asked = *stations_[board];
        const std::uint64_t end = asked.cycle() + cycles;
        std::uint64_t come = 0;
        const auto take = [&] {
            for (; come < room && !asked.come().empty(); asked.come().pop_front())
                out[come++] = asked.come().front();
        };
        for (take(); asked.cycle() < end && !come; take()) step();
        return come;
    }

    void plug(std::uint64_t link, bool plugged) {
        cables_[2 * link].plug(plugged);
        cables_[2 * link + 1].plug(plugged);
    }
    Cable& cable(std::uint64_t number) { return cables_[number]; }
    std::uint64_t cycle(std::uint64_t board) const { return stations_[board]->cycle(); }

  private:
    // The next edge of any clock.
    void step() {
        const std::size_t count = stations_.size();
        std::size_t first = 0;
        for (std::size_t i = 1; i < count; ++i)
            if (stations_[i]->next() < stations_[first]->next()) first = i;
        const std::size_t before = (first + count - 1) % count;
        Station& station = *stations_[first];
        station.clock(cables_[2 * before].level(), cables_[2 * first + 1].level());
        cables_[2 * first].drive(station.pins(1), o_.corrupt, random_);
        cables_[2 * before + 1].drive(station.pins(0), o_.corrupt, random_);
    }

    RingOptions o_;
    Random random_;
    std::vector<std::unique_ptr<Station>> stations_;
    std::vector<Cable> cables_;
};

}  // namespace nearstep

extern "C" {

using nearstep::Ring;

void* ring_open(const nearstep::RingOptions* options) { return new Ring(*options); }
void ring_close(Ring* ring) { delete ring; }

void ring_send(Ring* ring, std::uint64_t board, const std::uint8_t* data, std::uint64_t bytes) {
    ring->send(board, data, bytes);
}

std::uint64_t ring_run(Ring* ring, std::uint64_t board, std::uint64_t cycles, std::uint8_t* out,
                       std::uint64_t room) {
    return ring->run(board, cycles, out, room);
}

std::uint64_t ring_cycle(Ring* ring, std::uint64_t board) { return ring->cycle(board); }
void ring_plug(Ring* ring, std::uint64_t link, bool plugged) { ring->plug(link, plugged); }

void ring_arm(Ring* ring, std::uint64_t cable, std::uint64_t skip, std::uint64_t times) {
    ring->cable(cable).arm(skip, times);
}

void ring_counters(Ring* ring, std::uint64_t cable, nearstep::CableCounters* counters) {
    *counters = ring->cable(cable).counters();
}
}
