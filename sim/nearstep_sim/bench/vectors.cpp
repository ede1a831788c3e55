// Drives a Verilated floating-point unit with vectors, one operation a cycle.
//
// Compiled once a unit: the model is the class Vunit, OPERANDS is 1, 2 or 3, FLAGS tells whether it
// has o_flags.

#include <cstdint>
#include <memory>
#include <vector>

#include "Vunit.h"
#include "verilated.h"

namespace {

uint64_t next_random(uint64_t& state) {  // splitmix64
    uint64_t z = (state += 0x9E3779B97F4A7C15ull);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
}

void drive(Vunit& unit, bool valid, uint32_t a, uint32_t b, uint32_t c) {
    unit.i_valid = valid;
    unit.i_a = a;
#if OPERANDS > 1
    unit.i_b = b;
#endif
#if OPERANDS > 2
    unit.i_c = c;
#endif
}

void clock(Vunit& unit) {
    unit.clk = 1;
    unit.eval();
    unit.clk = 0;
    unit.eval();
}

}  // namespace

// Runs `count` operations through a fresh unit and writes its results, in order, to `z` and `flags`.
// With a seed other than 0, idle cycles with random operands come between them. Returns the number
// of cycles, or -1 - cycle for the first cycle in which o_valid was not i_valid `latency` cycles
// before.
extern "C" int64_t run_vectors(int64_t count, const uint32_t* a, const uint32_t* b,
                               const uint32_t* c, uint32_t* z, uint8_t* flags, int64_t latency,
                               uint64_t seed) {
    VerilatedContext context;
    auto unit = std::make_unique<Vunit>(&context, "unit");
    unit->rst = 1;
    drive(*unit, true, 0, 0, 0);
    for (int64_t k = 0; k <= latency; ++k) clock(*unit);
    unit->rst = 0;

    std::vector<uint8_t> history(latency, 0);
    uint64_t random = seed;
    int64_t sent = 0, received = 0, cycle = 0, slot = 0;
    while (received < count) {
        bool valid = sent < count;
        if (seed != 0) {
            const uint64_t draw = next_random(random);
            valid = valid && (draw & 3) != 0;
            if (!valid) drive(*unit, false, draw >> 2, draw >> 17, draw >> 32);
        } else if (!valid) {
            drive(*unit, false, 0, 0, 0);
        }
        if (valid) {
            drive(*unit, true, a[sent], OPERANDS > 1 ? b[sent] : 0, OPERANDS > 2 ? c[sent] : 0);
            ++sent;
        }
        history[slot] = valid;
        slot = slot + 1 == latency ? 0 : slot + 1;
        clock(*unit);
        if (unit->o_valid != history[slot]) return -1 - cycle;
        if (unit->o_valid) {
            z[received] = unit->o_z;
#if FLAGS
            flags[received] = unit->o_flags;
#endif
            ++received;
        }
        ++cycle;
    }
    return cycle;
}
