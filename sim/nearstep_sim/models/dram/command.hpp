// DDR4 commands, the pins that carry them, and the numbers of a part at a clock.
// Ref: JESD79-4, "Command Truth Table", "Timing Parameters by Speed Grade".
#pragma once

#include <cstdint>

namespace nearstep {

enum class Command : std::uint8_t {
    NOP, ACT, RD, RDA, WR, WRA, PRE, PREA, REF, MRS, ZQCS, ZQCL, OTHER
};
constexpr int kCommands = static_cast<int>(Command::OTHER);  // those that have a name

inline const char* name(Command command) {
    static const char* const names[] = {"NOP",  "ACT", "RD",  "RDA",  "WR",   "WRA",  "PRE",
                                        "PREA", "REF", "MRS", "ZQCS", "ZQCL", "OTHER"};
    return names[static_cast<int>(command)];
}

constexpr std::uint32_t kAllBanks = 1u << 10;
constexpr std::uint32_t kWeN = 1u << 14;
constexpr std::uint32_t kCasN = 1u << 15;
constexpr std::uint32_t kRasN = 1u << 16;
constexpr std::uint32_t kColumnMask = 0x3FF;
constexpr std::uint32_t kModeMask = 0x3FFF;  // A13 to A0: the bits of a mode register
constexpr int kBeatBytes = 64;
constexpr int kBurstLength = 8;
constexpr int kBurstClocks = kBurstLength / 2;

// Pins of one selected slot (chip select low).
struct Pins {
    bool act_n = true;
    std::uint32_t address = kRasN | kCasN | kWeN;
    std::uint8_t bg = 0;
    std::uint8_t ba = 0;
};

inline Command decode(const Pins& pins) {
    if (!pins.act_n) return Command::ACT;
    const bool a10 = pins.address & kAllBanks;
    switch ((pins.address >> 14) & 7u) {  // RAS_n CAS_n WE_n
        case 0b000: return Command::MRS;
        case 0b001: return Command::REF;
        case 0b010: return a10 ? Command::PREA : Command::PRE;
        case 0b100: return a10 ? Command::WRA : Command::WR;
        case 0b101: return a10 ? Command::RDA : Command::RD;
        case 0b110: return a10 ? Command::ZQCL : Command::ZQCS;
        case 0b111: return Command::NOP;
        default: return Command::OTHER;  // reserved
    }
}

inline Pins encode(Command command, unsigned bg, unsigned ba, std::uint32_t row,
                   std::uint32_t column) {
    Pins pins;
    pins.bg = static_cast<std::uint8_t>(bg);
    pins.ba = static_cast<std::uint8_t>(ba);
    switch (command) {
        case Command::ACT:
            pins.act_n = false;
            pins.address = row;
            break;
        case Command::RD: pins.address = kRasN | kWeN | column; break;
        case Command::RDA: pins.address = kRasN | kWeN | kAllBanks | column; break;
        case Command::WR: pins.address = kRasN | column; break;
        case Command::WRA: pins.address = kRasN | kAllBanks | column; break;
        case Command::PRE: pins.address = kCasN; break;
        case Command::PREA: pins.address = kCasN | kAllBanks; break;
        case Command::REF: pins.address = kWeN; break;
        case Command::NOP: break;
        case Command::MRS: pins.address = row & kModeMask; break;
        case Command::ZQCS: pins.address = kRasN | kCasN; break;
        case Command::ZQCL: pins.address = kRasN | kCasN | kAllBanks; break;
        case Command::OTHER: pins.address = kCasN | kWeN; break;
    }
    return pins;
}

// Clocks; filled from nearstep_spec.dram.timing, which holds the arithmetic. Order is the ABI.
struct Timing {
    std::int32_t cl, cwl;
    std::int32_t t_rcd, t_rp, t_ras, t_rc;
    std::int32_t t_ccd_s, t_ccd_l, t_rrd_s, t_rrd_l, t_faw;
    std::int32_t t_wr, t_wtr_s, t_wtr_l, t_rtp;
    std::int32_t t_rfc, t_refi;
    std::int32_t t_mrd, t_mod, t_zqcs, t_zqoper;

    int read_to_write() const { return cl + kBurstClocks + 2 - cwl; }
    int write_to_read_s() const { return cwl + kBurstClocks + t_wtr_s; }
    int write_to_read_l() const { return cwl + kBurstClocks + t_wtr_l; }
    int write_to_precharge() const { return cwl + kBurstClocks + t_wr; }
};

struct Geometry {
    std::int32_t bank_group_bits, bank_bits, row_bits, column_bits;

    int groups() const { return 1 << bank_group_bits; }
    int banks() const { return 1 << (bank_group_bits + bank_bits); }
    int row_beats() const { return 1 << (column_bits - 3); }
    std::uint64_t beats() const {
        return std::uint64_t{1} << (bank_group_bits + bank_bits + row_bits + column_bits - 3);
    }
};

// Shifts of the four words in the number of a beat of a rank; the widths are the geometry's. Which
// rank is one bit of the number of a beat of the channel, -1 if there is one rank.
struct Mapping {
    std::int32_t bank_group_shift, bank_shift, row_shift, column_shift, rank_shift;

    int ranks() const { return rank_shift < 0 ? 1 : 2; }
    unsigned rank_of(std::uint64_t beat) const {
        return rank_shift < 0 ? 0 : static_cast<unsigned>(beat >> rank_shift & 1);
    }
    // The number of a beat inside its rank, and the other way.
    std::uint64_t inside(std::uint64_t beat) const {
        return rank_shift < 0 ? beat : (beat >> 1 & ~low()) | (beat & low());
    }
    std::uint64_t outside(std::uint64_t beat, unsigned rank) const {
        return rank_shift < 0 ? beat
                              : (beat & ~low()) << 1 | std::uint64_t{rank} << rank_shift | (beat & low());
    }
    std::uint64_t low() const { return (std::uint64_t{1} << rank_shift) - 1; }
};

struct Place {
    std::uint8_t bg, ba;
    std::uint32_t row, column;  // first column of the burst
    std::uint32_t rank = 0;
};

inline Place place_of(std::uint64_t number, const Mapping& m, const Geometry& g) {
    const std::uint64_t beat = m.inside(number);
    const auto field = [beat](int shift, int width) {
        return static_cast<std::uint32_t>((beat >> shift) & ((std::uint64_t{1} << width) - 1));
    };
    return {static_cast<std::uint8_t>(field(m.bank_group_shift, g.bank_group_bits)),
            static_cast<std::uint8_t>(field(m.bank_shift, g.bank_bits)),
            field(m.row_shift, g.row_bits),
            field(m.column_shift, g.column_bits - 3) * kBurstLength,
            m.rank_of(number)};
}

// The number of a beat of the channel.
inline std::uint64_t beat_of(const Place& at, const Mapping& m) {
    return m.outside(std::uint64_t(at.bg) << m.bank_group_shift | std::uint64_t(at.ba) << m.bank_shift |
                         std::uint64_t(at.row) << m.row_shift |
                         std::uint64_t(at.column / kBurstLength) << m.column_shift,
                     at.rank);
}

}  // namespace nearstep
