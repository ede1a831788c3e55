// Drives a bank of Verilated floating-point units with vectors, one operation a cycle each.
//
// The model is the class Vbank. UNITS is a list of UNIT(k, operands, flags), one for each unit of the
// bank: its number, its number of operands (1 to 3), and whether it has o_flags (0 or 1).

#include <cstdint>
#include <memory>
#include <vector>

#include "Vbank.h"
#include "verilated.h"

namespace {

uint64_t next_random(uint64_t& state) {  // splitmix64
    uint64_t z = (state += 0x9E3779B97F4A7C15ull);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
}

struct Unit {
    const uint32_t *a, *b, *c;
    uint32_t* z;
    uint8_t* flags;
    int64_t count, latency;
    int64_t sent = 0, received = 0, slot = 0;
    std::vector<uint8_t> history;  // i_valid of the last `latency` cycles
};

void clock(Vbank& bank) {
    bank.clk = 1;
    bank.eval();
    bank.clk = 0;
    bank.eval();
}

#define DRIVE_1(k) bank.u##k##_i_a = x
#define DRIVE_2(k) DRIVE_1(k), bank.u##k##_i_b = y
#define DRIVE_3(k) DRIVE_2(k), bank.u##k##_i_c = w
#define FLAGS_0(k)
#define FLAGS_1(k) unit.flags[unit.received] = bank.u##k##_o_flags

void drive_all(Vbank& bank, bool valid, uint32_t x, uint32_t y, uint32_t w) {
#define UNIT(k, operands, flags) bank.u##k##_i_valid = valid, DRIVE_##operands(k);
    UNITS
#undef UNIT
}

}  // namespace

// Runs `count[k]` operations through unit k of a fresh bank, and writes its results, in order, to
// `z[k]` and `flags[k]`. With a seed other than 0, idle cycles with random operands are inserted.
// Returns the number of cycles; or -1 - cycle, and the unit in `*faulty`, for the first cycle in which
// an o_valid was not the i_valid of `latency[k]` cycles before.
extern "C" int64_t run_vectors(const int64_t* count, const uint32_t* const* a,
                               const uint32_t* const* b, const uint32_t* const* c,
                               uint32_t* const* z, uint8_t* const* flags, const int64_t* latency,
                               uint64_t seed, int64_t* faulty) {
    VerilatedContext context;
    auto model = std::make_unique<Vbank>(&context, "bank");
    Vbank& bank = *model;
    std::vector<Unit> units;
    int64_t left = 0, longest = 0;
#define UNIT(k, operands, with_flags)                                               \
    units.push_back({a[k], b[k], c[k], z[k], flags[k], count[k], latency[k]});       \
    units[k].history.resize(latency[k], 0);                                          \
    left += count[k];                                                                \
    longest = latency[k] > longest ? latency[k] : longest;
    UNITS
#undef UNIT

    bank.rst = 1;
    drive_all(bank, true, 0, 0, 0);
    for (int64_t k = 0; k <= longest; ++k) clock(bank);
    bank.rst = 0;

    uint64_t random = seed;
    int64_t cycle = 0;
    for (; left > 0; ++cycle) {
        uint64_t draw = 0;
        if (seed != 0) {
            draw = next_random(random);
            drive_all(bank, false, draw >> 2, draw >> 17, draw >> 32);
        }
#define UNIT(k, operands, with_flags)                                               \
    {                                                                                \
        Unit& unit = units[k];                                                       \
        const bool idle = seed != 0 && ((draw >> (2 * k % 60)) & 3) == 0;            \
        const bool valid = unit.sent < unit.count && !idle;                          \
        bank.u##k##_i_valid = valid;                                                 \
        unit.history[unit.slot] = valid;                                             \
        unit.slot = unit.slot + 1 == unit.latency ? 0 : unit.slot + 1;               \
        if (valid) {                                                                 \
            [[maybe_unused]] const uint32_t x = unit.a[unit.sent];                   \
            [[maybe_unused]] const uint32_t y = operands > 1 ? unit.b[unit.sent] : 0; \
            [[maybe_unused]] const uint32_t w = operands > 2 ? unit.c[unit.sent] : 0; \
            DRIVE_##operands(k);                                                     \
            ++unit.sent;                                                             \
        }                                                                            \
    }
        UNITS
#undef UNIT
        clock(bank);
#define UNIT(k, operands, with_flags)                                               \
    {                                                                                \
        Unit& unit = units[k];                                                       \
        if (bank.u##k##_o_valid != unit.history[unit.slot]) {                        \
            *faulty = k;                                                             \
            return -1 - cycle;                                                       \
        }                                                                            \
        if (bank.u##k##_o_valid) {                                                   \
            unit.z[unit.received] = bank.u##k##_o_z;                                 \
            FLAGS_##with_flags(k);                                                   \
            ++unit.received;                                                         \
            --left;                                                                  \
        }                                                                            \
    }
        UNITS
#undef UNIT
    }
    return cycle;
}
