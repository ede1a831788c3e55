// A board in this process: the Verilated top, the host's end of its line, and its SDRAM chip.

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "Vshell.h"
#include "boards/uart.hpp"
#include "models/random.hpp"
#include "models/sdram/sdram.hpp"
#include "verilate/context.hpp"

#if BOARD_HAS_NATIVE_UNITS
#include "design.hpp"
#endif

#ifdef NEARSTEP_TRACE
#include "verilated_vcd_c.h"
#endif

namespace nearstep {

struct BoardOptions {
    std::uint64_t clock_hz, baud, seed;
    std::uint64_t reset_cycles;
    // Of pads, in picoseconds: the memory's clock behind that of the design, and the delays of
    // outputs and inputs.
    std::uint64_t phase, out_delay, in_delay;
    SdramTiming timing;
    SdramShape shape;
    std::uint16_t* words;
    const char* trace;
};

struct BoardCounters {
    std::uint64_t cycles, reads, writes, refreshes, framing_errors;
};

#if BOARD_HAS_NATIVE_UNITS
// The C++ kernel in place of the functional units. The shell's registers stand between it and the
// kernel's ports, which are settled at the end of a cycle.
class OutsideUnits {
  public:
    explicit OutsideUnits(VerilatedContext* context) : units_(design::make_units(true, context)) {}

    // Just before an edge of the clock.
    void before(Vshell& shell) {
        if (shell.o_units_reset) {
            units_->reset(shell);
            feeding_ = false;
        } else {
            if (shell.fu___05Fi_valid && !feeding_) units_->configure(shell);
            feeding_ = shell.fu___05Fi_valid;
            units_->clock(shell);
        }
        design::clock_pairs(shell);
    }

    // Just after it: results of the next cycle.
    void after(Vshell& shell) {
        units_->show(shell);
        design::rest_pairs(shell);
    }

  private:
    std::unique_ptr<Units<Vshell>> units_;
    bool feeding_ = false;
};
#else
struct OutsideUnits {
    explicit OutsideUnits(VerilatedContext*) {}
    void before(Vshell&) {}
    void after(Vshell&) {}
};
#endif

class Board {
  public:
    explicit Board(const BoardOptions& options)
        : o_(options), top_(&context_, "board"), units_(&context_), uart_(options.clock_hz, options.baud),
          period_(kSecond / options.clock_hz), noise_(options.seed) {
        if (kDram) chip_.emplace(o_.timing, o_.shape, o_.words);
        reset();
    }

    // The reset button. The SDRAM is not refreshed until the host has initialised it again, so its
    // contents are invalid.
    void reset() {
        uart_.forget();
        if (chip_) chip_->forget();
        top_.rst = 1;
        for (std::uint64_t i = 0; i < o_.reset_cycles; ++i) step();
        top_.rst = 0;
    }

    void send(const std::uint8_t* data, std::uint64_t bytes) { uart_.send(data, bytes); }

    // Runs until `room` bytes have been received, `cycles` have passed, or the chip reports a
    // fault; with `any`, until one byte has been received.
    std::uint64_t run(std::uint64_t cycles, std::uint8_t* out, std::uint64_t room, bool any) {
        const std::uint64_t end = cycle_ + cycles;
        std::uint64_t come = 0;
        while (cycle_ < end && come < (any ? 1 : room) && !fault()) {
            step();
            if (uart_.take(top_.tx, out + come)) ++come;
        }
        return come;
    }

    const Fault* fault() const { return chip_ && chip_->fault ? &chip_->fault : nullptr; }
    Sdram* chip() { return chip_ ? &*chip_ : nullptr; }
    std::uint64_t cycle() const { return cycle_; }
    std::uint64_t waiting() const { return uart_.waiting(); }

    BoardCounters counters() const {
        BoardCounters found{cycle_, 0, 0, 0, uart_.framing_errors()};
        if (chip_) {
            found.reads = chip_->reads();
            found.writes = chip_->writes();
            found.refreshes = chip_->refreshes();
        }
        return found;
    }

  private:
    static constexpr std::uint64_t kSecond = 1'000'000'000'000;  // picoseconds

    void step() {
        const std::uint64_t now = cycle_ * period_ + kStart;
        top_.rx = uart_.drive();
#if BOARD_HAS_SDRAM
        std::uint16_t word;
        if (!chip_->shows(now - o_.in_delay, &word)) word = static_cast<std::uint16_t>(noise_.next());
        top_.sdram_dq = word;
#endif
        units_.before(top_);
        top_.clk = 1;
        top_.eval();
#if BOARD_HAS_SDRAM
        const SdramPins pins{
            .cke = top_.sdram_cke,
            .cs_n = top_.sdram_cs_n,
            .ras_n = top_.sdram_ras_n,
            .cas_n = top_.sdram_cas_n,
            .we_n = top_.sdram_we_n,
            .ba = top_.sdram_ba,
            .dm = top_.sdram_dm,
            .driven = top_.sdram_dq__en != 0,
            .a = top_.sdram_a,
            .dq = top_.sdram_dq__out,
        };
        chip_->edge(now + o_.phase + o_.out_delay, pins, o_.phase, period_ - o_.phase);
#endif
        units_.after(top_);
        top_.clk = 0;
        top_.eval();
        ++cycle_;
    }

    static constexpr bool kDram = BOARD_HAS_SDRAM;
    static constexpr std::uint64_t kStart = 1'000'000;  // keeps every time positive

    BoardOptions o_;
    Context context_;
    Vshell top_;
    OutsideUnits units_;
    Uart uart_;
    std::optional<Sdram> chip_;
    std::uint64_t period_, cycle_ = 0;
    Random noise_;
};

}  // namespace nearstep

extern "C" {

using nearstep::Board;

void* board_open(const nearstep::BoardOptions* options) { return new Board(*options); }
void board_close(Board* board) { delete board; }
void board_reset(Board* board) { board->reset(); }

void board_send(Board* board, const std::uint8_t* data, std::uint64_t bytes) {
    board->send(data, bytes);
}

std::uint64_t board_run(Board* board, std::uint64_t cycles, std::uint8_t* out, std::uint64_t room,
                        bool any) {
    return board->run(cycles, out, room, any);
}

std::uint64_t board_cycle(Board* board) { return board->cycle(); }
std::uint64_t board_waiting(Board* board) { return board->waiting(); }

void board_counters(Board* board, nearstep::BoardCounters* counters) {
    *counters = board->counters();
}

bool board_fault(Board* board, nearstep::Fault* fault) {
    if (!board->fault()) return false;
    *fault = *board->fault();
    return true;
}

void board_inject(Board* board, const nearstep::SdramInjection* injection) {
    if (board->chip()) board->chip()->inject(*injection);
}
}
