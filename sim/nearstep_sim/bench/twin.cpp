// Two Verilated models of one block with the same random inputs; outputs must be equal at all times.
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "Vfirst.h"
#include "Vsecond.h"
#include "ports.hpp"
#include "verilated.h"

namespace {

constexpr unsigned kPhase = 64;  // cycles with the same likelihoods

struct Random {
    std::uint64_t state;
    std::uint64_t next() {
        state += 0x9E3779B97F4A7C15u;
        std::uint64_t z = state;
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
        z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
        return z ^ (z >> 31);
    }
};

// How an input behaves during a phase: a likelihood of 1 in eighths for every bit.
struct Habit {
    unsigned eighths = 4;
    void choose(Random& random) {
        constexpr unsigned kLikelihoods[] = {0, 1, 4, 4, 4, 7, 8, 8};
        eighths = kLikelihoods[random.next() & 7];
    }
    std::uint64_t bits(Random& random) const {
        const std::uint64_t a = random.next(), b = random.next(), c = random.next();
        switch (eighths) {
            case 0: return 0;
            case 1: return a & b & c;
            case 4: return a;
            case 7: return a | b | c;
            default: return ~std::uint64_t(0);
        }
    }
};

template <class Port>
void put(Port& port, unsigned width, const Habit& habit, Random& random) {
    if constexpr (std::is_integral_v<Port>) {
        const std::uint64_t mask = width == 64 ? ~std::uint64_t(0) : (std::uint64_t(1) << width) - 1;
        port = static_cast<Port>(habit.bits(random) & mask);
    } else {
        for (unsigned word = 0; word * 32 < width; ++word) {
            const unsigned rest = width - word * 32;
            const std::uint32_t mask = rest >= 32 ? ~0u : (1u << rest) - 1;
            port[word] = static_cast<std::uint32_t>(habit.bits(random)) & mask;
        }
    }
}

template <class Port>
bool equal(const Port& a, const Port& b, unsigned width) {
    if constexpr (std::is_integral_v<Port>) {
        return a == b;
    } else {
        for (unsigned word = 0; word * 32 < width; ++word)
            if (a[word] != b[word]) return false;
        return true;
    }
}

template <class Port>
void copy_out(const Port& port, unsigned width, std::uint32_t* words) {
    if constexpr (std::is_integral_v<Port>) {
        words[0] = static_cast<std::uint32_t>(port);
        if (width > 32) words[1] = static_cast<std::uint32_t>(std::uint64_t(port) >> 32);
    } else {
        for (unsigned word = 0; word * 32 < width; ++word) words[word] = port[word];
    }
}

}  // namespace

// Compares after both edges of `cycles` clocks. Returns the number of compared outputs. Writes to
// `report` the number of outputs that changed, and of the first difference: 1, cycle, output.
extern "C" std::uint64_t twin_run(
    std::uint64_t seed, std::uint64_t cycles, std::uint64_t* report, std::uint32_t* expected,
    std::uint32_t* actual) {
    VerilatedContext context;
    Vfirst first{&context, "first"};
    Vsecond second{&context, "second"};
    Random random{seed};
    Habit habits[INPUT_COUNT];
    bool changed[OUTPUT_COUNT] = {};
    Vfirst* const a = &first;
    Vsecond* const b = &second;
#define OUTPUT(name, number, width) auto before_##number = a->name;
    OUTPUTS
#undef OUTPUT
    std::uint64_t compared = 0;
    report[0] = report[1] = report[2] = report[3] = 0;
    for (std::uint64_t cycle = 0; cycle < cycles && !report[1]; ++cycle) {
        if (cycle % kPhase == 0)
            for (auto& habit : habits) habit.choose(random);
        const bool reset = cycle < 2 || (random.next() & 511) == 0;
        a->rst = b->rst = reset;
#define INPUT(name, number, width)                          \
    put(a->name, width, habits[number], random);            \
    b->name = a->name;
        INPUTS
#undef INPUT
        for (int clock = 0; clock < 2 && !report[1]; ++clock) {
            a->clk = b->clk = clock;
            a->eval();
            b->eval();
#define OUTPUT(name, number, width)                                         \
    ++compared;                                                             \
    if (!equal(a->name, before_##number, width)) changed[number] = true;    \
    before_##number = a->name;                                              \
    if (!report[1] && !equal(a->name, b->name, width)) {                    \
        report[1] = 1;                                                      \
        report[2] = cycle;                                                  \
        report[3] = number;                                                 \
        copy_out(a->name, width, expected);                                 \
        copy_out(b->name, width, actual);                                   \
    }
            OUTPUTS
#undef OUTPUT
        }
    }
    for (const bool each : changed) report[0] += each;
    first.final();
    second.final();
    return compared;
}
