// DDR4 rank: every command is checked against a table of JEDEC minima and the state of the rows.
//
// The first violation is kept, with both commands, and has no effect on the contents; the rank
// refuses every command after it. A mode register may be set to anything; but a column command in a
// mode that would move, chop or change its data, or a REF in one that changes its number, is a
// violation. CKE is always high: self refresh and power down do not exist.
// Ref: JESD79-4, "Timing Parameters by Speed Grade", "Refresh Command", "Precharge Command",
// "Programming the Mode Registers", "ZQ Calibration Commands".
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "models/dram/command.hpp"
#include "models/dram/storage.hpp"
#include "models/dram/trace.hpp"

namespace nearstep {

// A command that was issued. `from`: clock at which its effect begins; an automatic precharge
// begins later than its column command.
struct Issued {
    static constexpr std::int64_t kNever = INT64_MIN / 4;

    std::int64_t from = kNever;
    std::int64_t ck = kNever;
    Command command = Command::NOP;
    Pins pins;

    // Of a rank, if there are several.
    std::string text(int rank = -1) const {
        if (ck == kNever) return "the start at 0";
        if (rank >= 0)
            return std::string(name(command)) + " of rank " + std::to_string(rank) + " at " +
                   std::to_string(ck);
        std::string where;
        if (command >= Command::ACT && command <= Command::PRE)
            where = " bg" + std::to_string(pins.bg) + " ba" + std::to_string(pins.ba);
        if (command == Command::MRS)
            where = " MR" + std::to_string(pins.bg * 4 + pins.ba) + " " +
                    std::to_string(pins.address & kModeMask);
        if (command == Command::ACT) where += " row " + std::to_string(pins.address);
        if (command >= Command::RD && command <= Command::WRA)
            where += " column " + std::to_string(pins.address & kColumnMask);
        return name(command) + where + " at " + std::to_string(ck);
    }
};

struct Violation {
    const char* rule = nullptr;  // JEDEC name, or the state that does not allow the command
    Issued previous, next;
    std::int64_t minimum = 0;  // clocks; 0 for a rule of state
    std::int64_t owed = 0;     // refreshes, where they are too many
    int previous_rank = -1, next_rank = -1;  // of a rule between ranks

    std::string text() const {
        std::string out = std::string(rule) + ": " + next.text(next_rank) + " after " +
                          previous.text(previous_rank);
        if (owed) out += ", " + std::to_string(owed) + " owed, limit " + std::to_string(minimum);
        else if (minimum)
            out += ", " + std::to_string(next.ck - std::max<std::int64_t>(previous.from, 0)) +
                   " clocks, limit " + std::to_string(minimum);
        return out;
    }
};

// Use of the data bus, in clocks, from one column command to the next. The cause of a gap is the
// first of: no column command before; a refresh in the gap; another direction; a row opened in the
// gap; the same bank group; else no request. Order is the ABI.
struct BusClocks {
    std::uint64_t data = 0, start = 0, refresh = 0, turnaround = 0, row = 0, bank_group = 0,
                  other = 0;
};

// Extremes of a rank's refreshes, to compare with their limits. Order is the ABI.
struct RefreshExtremes {
    std::int64_t longest_gap = 0;                   // clocks between two REF, or to the first
    std::int64_t shortest_seventeen = INT64_MAX;    // clocks from a REF to the sixteenth after it
    std::int64_t lowest_debt = 0, highest_debt = 0;  // before a REF
};

class Ddr4Device {
  public:
    static constexpr int kMaxPostponed = 8;

    // A kind of command for the rule table; those with automatic precharge are a column command
    // and a later PRE.
    enum Kind : std::uint8_t {
        kAct, kRead, kWrite, kPre, kRef, kKinds,
        kQuiet = kKinds,  // MRS and ZQ calibration, which nothing may follow for a while
        kNextKinds
    };
    enum class Scope : std::uint8_t { kBank, kGroup, kRank };
    struct Rule {
        const char* name;
        Kind previous, next;
        Scope scope;
        int minimum;
    };

    Ddr4Device(const Timing& timing, const Geometry& geometry, unsigned rank = 0)
        : timing_(timing),
          geometry_(geometry),
          rank_number_(rank),
          storage_(geometry),
          banks_(geometry.banks()),
          groups_(geometry.groups()) {
        for (const Rule& rule : rule_table(timing)) rules_[rule.next].push_back(rule);
        update_refresh_deadline();
    }

    // (previous, next, scope, minimum). A rank rule also binds within a group, where the longer
    // group rule hides it.
    static std::vector<Rule> rule_table(const Timing& t) {
        using enum Scope;
        return {
            {"tRC", kAct, kAct, kBank, t.t_rc},
            {"tRP", kPre, kAct, kBank, t.t_rp},
            {"tRRD_L", kAct, kAct, kGroup, t.t_rrd_l},
            {"tRRD_S", kAct, kAct, kRank, t.t_rrd_s},
            {"tRFC", kRef, kAct, kRank, t.t_rfc},
            {"tRCD", kAct, kRead, kBank, t.t_rcd},
            {"tCCD_L", kRead, kRead, kGroup, t.t_ccd_l},
            {"tCCD_S", kRead, kRead, kRank, t.t_ccd_s},
            {"tWTR_L", kWrite, kRead, kGroup, t.write_to_read_l()},
            {"tWTR_S", kWrite, kRead, kRank, t.write_to_read_s()},
            {"tRCD", kAct, kWrite, kBank, t.t_rcd},
            {"tCCD_L", kWrite, kWrite, kGroup, t.t_ccd_l},
            {"tCCD_S", kWrite, kWrite, kRank, t.t_ccd_s},
            {"tRTW", kRead, kWrite, kRank, t.read_to_write()},
            {"tRAS", kAct, kPre, kBank, t.t_ras},
            {"tRTP", kRead, kPre, kBank, t.t_rtp},
            {"tWR", kWrite, kPre, kBank, t.write_to_precharge()},
            {"tRFC", kRef, kPre, kRank, t.t_rfc},
            {"tRP", kPre, kRef, kRank, t.t_rp},
            {"tRFC", kRef, kRef, kRank, t.t_rfc},
            {"tRP", kPre, kQuiet, kRank, t.t_rp},
            {"tRFC", kRef, kQuiet, kRank, t.t_rfc},
        };
    }

    // One selected slot. Clocks increase from call to call. False once a rule was violated.
    bool command(std::uint64_t clock, const Pins& pins) {
        if (failed_) return false;
        const Command decoded = decode(pins);
        if (decoded == Command::NOP) return true;
        Issued now;
        now.ck = now.from = static_cast<std::int64_t>(clock);
        now.command = decoded;
        now.pins = pins;
        if (trace_) trace_line(now);
        if (now.ck <= last_.ck) return fail("one command a slot", last_, now);
        if (now.ck > refresh_deadline_) return fail_refresh(now);
        if (now.ck < quiet_until_ && !quiet(now)) return false;
        const bool ok = apply(now);
        if (ok) {
            ++counts_[static_cast<int>(decoded)];
            last_ = now;
        }
        return ok;
    }

    // Checks for a missing refresh at `clock`. False once a rule was violated.
    bool advance(std::uint64_t clock) {
        if (!failed_ && static_cast<std::int64_t>(clock) > refresh_deadline_) {
            Issued now;
            now.ck = now.from = static_cast<std::int64_t>(clock);
            return fail_refresh(now);
        }
        return !failed_;
    }

    // Records a violation found by the model of the data path.
    bool fail_data(const char* rule, std::uint64_t clock) {
        Issued now;
        now.ck = now.from = static_cast<std::int64_t>(clock);
        return failed_ ? false : fail(rule, last_, now);
    }

    // Records a violation of a rule between ranks.
    bool fail_shared(const Violation& violation) {
        if (!failed_) violation_ = violation;
        failed_ = true;
        return false;
    }

    bool failed() const { return failed_; }
    const Violation& violation() const { return violation_; }

    // Address of the column command just accepted.
    Place place(const Pins& pins) const {
        return {pins.bg, pins.ba, static_cast<std::uint32_t>(banks_[bank_of(pins)].row),
                pins.address & kColumnMask};
    }
    bool has_bank(unsigned bg, unsigned ba) const {
        return bg >> geometry_.bank_group_bits == 0 && ba >> geometry_.bank_bits == 0;
    }
    // The open row, or -1.
    std::int64_t open_row(unsigned bg, unsigned ba) const {
        if (!has_bank(bg, ba)) return -1;
        const Bank& bank = banks_[(bg << geometry_.bank_bits) | ba];
        return bank.open ? bank.row : -1;
    }
    // Refreshes owed (positive) or pulled in (negative).
    std::int64_t refresh_debt(std::uint64_t clock) const {
        return intervals(static_cast<std::int64_t>(clock)) - refreshes_;
    }

    const RefreshExtremes& refresh_extremes() const { return extremes_; }
    // Clocks by which the controller's refresh intervals begin early, negative if late. Call before
    // the first command.
    void refresh_offset(std::int64_t clocks) {
        refresh_offset_ = clocks;
        update_refresh_deadline();
    }

    // Since the last restart_account(), up to the end of the last burst.
    const BusClocks& account() const { return account_; }
    void restart_account(std::uint64_t clock) {
        account_ = {};
        bus_free_ = static_cast<std::int64_t>(clock);
    }

    SparseStorage& storage() { return storage_; }
    const SparseStorage& storage() const { return storage_; }
    const Timing& timing() const { return timing_; }
    const Geometry& geometry() const { return geometry_; }
    std::uint64_t count(Command command) const { return counts_[static_cast<int>(command)]; }
    // Ranks of a channel write to one file.
    void trace_to(std::shared_ptr<TraceWriter> writer) { trace_ = std::move(writer); }
    void flush_trace() {
        if (trace_) trace_->flush();
    }

  private:
    struct Bank {
        bool open = false;
        std::int64_t row = -1;
        Issued last[kKinds];
    };
    struct Scoped {
        Issued last[kKinds];
    };

    unsigned bank_of(const Pins& pins) const {
        return (unsigned(pins.bg) << geometry_.bank_bits) | pins.ba;
    }
    // Whole tREFI before `ck`.
    std::int64_t intervals(std::int64_t ck) const {
        const std::int64_t passed = ck - 1 + refresh_offset_;
        return passed > 0 ? passed / timing_.t_refi : 0;
    }

    bool fail(const char* rule, const Issued& previous, const Issued& next,
              std::int64_t minimum = 0) {
        failed_ = true;
        violation_.rule = rule;
        violation_.previous = previous;
        violation_.next = next;
        violation_.minimum = minimum;
        return false;
    }
    bool fail_refresh(const Issued& now) {
        const std::int64_t longest = std::int64_t{kMaxPostponed + 1} * timing_.t_refi;
        const Issued& last = rank_.last[kRef];
        if (now.ck - std::max<std::int64_t>(last.ck, 0) > longest)
            return fail("tREFI", last, now, longest);
        violation_.owed = intervals(now.ck) - refreshes_;
        return fail("postponed REF", last, now, kMaxPostponed);
    }
    // The last command was MRS or a calibration, which has not ended.
    bool quiet(const Issued& now) {
        const bool mode = last_.command == Command::MRS;
        if (mode && now.command == Command::MRS)
            return now.ck - last_.ck >= timing_.t_mrd || fail("tMRD", last_, now, timing_.t_mrd);
        return fail(mode ? "tMOD" : last_.command == Command::ZQCS ? "tZQCS" : "tZQoper", last_, now,
                    quiet_until_ - last_.ck);
    }

    // The broken rule with the longest remaining wait, if any.
    void check(const Issued& now, Kind next, const Bank& bank, const Scoped& group,
               const Rule*& worst, const Issued*& previous, std::int64_t& wait) const {
        for (const Rule& rule : rules_[next]) {
            const Issued* before = rule.scope == Scope::kBank    ? &bank.last[rule.previous]
                                   : rule.scope == Scope::kGroup ? &group.last[rule.previous]
                                                                 : &rank_.last[rule.previous];
            const std::int64_t missing = before->from + rule.minimum - now.ck;
            if (missing > wait) {
                worst = &rule;
                previous = before;
                wait = missing;
            }
        }
    }
    bool check(const Issued& now, Kind next, const Bank& bank, const Scoped& group) {
        const Rule* worst = nullptr;
        const Issued* previous = nullptr;
        std::int64_t wait = 0;
        check(now, next, bank, group, worst, previous, wait);
        return worst ? fail(worst->name, *previous, now, worst->minimum) : true;
    }

    void record(const Issued& now, Kind kind, Bank& bank, Scoped& group) {
        bank.last[kind] = group.last[kind] = rank_.last[kind] = now;
    }

    bool apply(const Issued& now) {
        switch (now.command) {
            case Command::OTHER: return fail("unknown command", last_, now);
            case Command::REF: return refresh(now);
            case Command::PREA: return precharge_all(now);
            case Command::MRS: return set_mode(now);
            case Command::ZQCS: return be_quiet(now, timing_.t_zqcs);
            case Command::ZQCL: return be_quiet(now, timing_.t_zqoper);
            default: break;
        }
        if (!has_bank(now.pins.bg, now.pins.ba))
            return fail("bank out of range", last_, now);
        Bank& bank = banks_[bank_of(now.pins)];
        Scoped& group = groups_[now.pins.bg];
        switch (now.command) {
            case Command::ACT: return activate(now, bank, group);
            case Command::PRE: return precharge(now, bank, group);
            default: return column(now, bank, group);
        }
    }

    bool activate(const Issued& now, Bank& bank, Scoped& group) {
        if (now.pins.address >> geometry_.row_bits) return fail("row out of range", last_, now);
        if (bank.open) return fail("bank open", bank.last[kAct], now);
        const Issued& fourth = four_activates_[activates_ & 3];
        const std::int64_t wait = fourth.from + timing_.t_faw - now.ck;
        const Rule* worst = nullptr;
        const Issued* previous = nullptr;
        std::int64_t longest = 0;
        check(now, kAct, bank, group, worst, previous, longest);
        if (wait > longest) return fail("tFAW", fourth, now, timing_.t_faw);
        if (worst) return fail(worst->name, *previous, now, worst->minimum);
        four_activates_[activates_++ & 3] = now;
        bank.open = true;
        bank.row = now.pins.address;
        ++open_;
        record(now, kAct, bank, group);
        return true;
    }

    bool column(const Issued& now, Bank& bank, Scoped& group) {
        const bool write = now.command == Command::WR || now.command == Command::WRA;
        const Kind kind = write ? kWrite : kRead;
        if (!bank.open) return fail("bank closed", bank.last[kPre], now);
        if (now.pins.address & (kBurstLength - 1)) return fail("column inside a burst", last_, now);
        if (data_modes_) [[unlikely]]
            return fail("mode not modelled", modes_[std::countr_zero(data_modes_)], now);
        if (!check(now, kind, bank, group)) return false;
        account(now, kind, bank, group);
        record(now, kind, bank, group);
        if (now.command == Command::RDA || now.command == Command::WRA) {
            Issued closing = now;
            closing.from = std::max(
                bank.last[kAct].from + timing_.t_ras,
                now.ck + (write ? timing_.write_to_precharge() : timing_.t_rtp));
            close(closing, bank, group);
        }
        return true;
    }

    void account(const Issued& now, Kind kind, const Bank& bank, const Scoped& group) {
        const Kind other = kind == kRead ? kWrite : kRead;
        const std::int64_t gap = now.ck - bus_free_, since = bus_free_ - kBurstClocks;
        const bool first = account_.data == 0;
        account_.data += kBurstClocks;
        if (gap > 0)
            (first                                                    ? account_.start
             : rank_.last[kRef].ck > since                            ? account_.refresh
             : rank_.last[other].ck > rank_.last[kind].ck             ? account_.turnaround
             : bank.last[kAct].ck > since                             ? account_.row
             : group.last[kind].ck == rank_.last[kind].ck &&
                     gap <= timing_.t_ccd_l - kBurstClocks + 3        ? account_.bank_group
                                                                      : account_.other) += gap;
        bus_free_ = now.ck + kBurstClocks;
    }

    void close(const Issued& closing, Bank& bank, Scoped& group) {
        open_ -= bank.open;
        bank.open = false;
        if (closing.from >= bank.last[kPre].from) bank.last[kPre] = closing;
        if (closing.from >= group.last[kPre].from) group.last[kPre] = closing;
        if (closing.from >= rank_.last[kPre].from) rank_.last[kPre] = closing;
    }

    // Also for a closed bank, whose precharge then begins with the last command.
    bool precharge(const Issued& now, Bank& bank, Scoped& group) {
        if (!check(now, kPre, bank, group)) return false;
        close(now, bank, group);
        return true;
    }

    bool precharge_all(const Issued& now) {
        const Rule* worst = nullptr;
        const Issued* previous = nullptr;
        std::int64_t wait = 0;
        for (std::size_t i = 0; i < banks_.size(); ++i)
            check(now, kPre, banks_[i], groups_[i >> geometry_.bank_bits], worst, previous, wait);
        if (worst) return fail(worst->name, *previous, now, worst->minimum);
        for (std::size_t i = 0; i < banks_.size(); ++i)
            close(now, banks_[i], groups_[i >> geometry_.bank_bits]);
        return true;
    }

    bool all_closed(const Issued& now) {
        if (open_)
            for (const Bank& bank : banks_)
                if (bank.open) return fail("bank open", bank.last[kAct], now);
        return true;
    }

    // Allows no other command for `clocks`.
    bool be_quiet(const Issued& now, int clocks) {
        if (!all_closed(now) || !check(now, kQuiet, banks_[0], groups_[0])) return false;
        quiet_until_ = now.ck + clocks;
        return true;
    }

    bool set_mode(const Issued& now) {
        const unsigned number = now.pins.bg * 4u + now.pins.ba;
        if (number > kRegisteringClockDriver) return fail("no such mode register", last_, now);
        if (!be_quiet(now, timing_.t_mod)) return false;
        if (number == kRegisteringClockDriver) return true;  // not for the DRAM
        const std::uint32_t bits = now.pins.address & kModeMask;
        const unsigned mask = 1u << number;
        modes_[number] = now;
        data_modes_ = changes_data(number, bits, timing_) ? data_modes_ | mask : data_modes_ & ~mask;
        const bool other = (number == 3 && bits >> 6 & 7) || (number == 4 && bits >> 2 & 3);
        refresh_modes_ = other ? refresh_modes_ | mask : refresh_modes_ & ~mask;
        return true;
    }

    // Whether reads and writes differ from bursts of eight at CL and CWL, whose bytes can be masked.
    static bool changes_data(unsigned number, std::uint32_t bits, const Timing& t) {
        const auto field = [bits](int high, int low) {
            return bits >> low & ((2u << (high - low)) - 1);
        };
        const auto on = [bits](int bit) { return (bits >> bit & 1) != 0; };
        switch (number) {
            case 0: {
                static constexpr int kLatency[] = {9,  10, 11, 12, 13, 14, 15, 16, 18, 20, 22,
                                                   24, 23, 17, 19, 21, 25, 26, 27, 28, 29, 30,
                                                   31, 32, 0,  0,  0,  0,  0,  0,  0,  0};
                const unsigned code = field(12, 12) << 4 | field(6, 4) << 1 | field(2, 2);
                return field(1, 0) != 0 || on(7) || kLatency[code] != t.cl;
            }
            // DLL off, additive latency, write levelling, TDQS in place of DM, outputs off
            case 1: return !on(0) || field(4, 3) != 0 || on(7) || on(11) || on(12);
            case 2: {
                static constexpr int kLatency[] = {9, 10, 11, 12, 14, 16, 18, 20};
                return on(12) || kLatency[field(5, 3)] != t.cwl;  // write CRC
            }
            case 3: return on(2) || on(3) || on(4);  // MPR, gear down, addressing of single DRAMs
            // maximum power down, Vref monitor, repair, command latency, training, long preambles
            case 4:
                return on(1) || on(4) || on(5) || on(13) || field(8, 6) != 0 || field(12, 10) != 0;
            case 5: return field(2, 0) != 0 || !on(10) || on(11) || on(12);  // parity, no DM, DBI
            case 6: return on(7);  // training of VrefDQ
            default: return false;
        }
    }

    bool refresh(const Issued& now) {
        if (!all_closed(now)) return false;
        if (refresh_modes_) [[unlikely]]
            return fail("mode not modelled", modes_[std::countr_zero(refresh_modes_)], now);
        if (!check(now, kRef, banks_[0], groups_[0])) return false;
        const Issued& sixteenth = sixteen_refreshes_[refresh_commands_ & 15];
        if (now.ck - sixteenth.from < 2 * std::int64_t{timing_.t_refi})
            return fail("16 REF in 2 tREFI", sixteenth, now, 2 * std::int64_t{timing_.t_refi});
        note_extremes(now, sixteenth);
        sixteen_refreshes_[refresh_commands_++ & 15] = now;
        rank_.last[kRef] = now;
        // At most eight refreshes are pulled in.
        refreshes_ = std::min(refreshes_ + 1, intervals(now.ck) + kMaxPostponed);
        update_refresh_deadline();
        return true;
    }

    void note_extremes(const Issued& now, const Issued& sixteenth) {
        const std::int64_t last = std::max<std::int64_t>(rank_.last[kRef].ck, 0);
        const std::int64_t debt = intervals(now.ck) - refreshes_;
        extremes_.longest_gap = std::max(extremes_.longest_gap, now.ck - last);
        if (sixteenth.ck >= 0)
            extremes_.shortest_seventeen =
                std::min(extremes_.shortest_seventeen, now.ck - sixteenth.ck);
        extremes_.lowest_debt = std::min(extremes_.lowest_debt, debt);
        extremes_.highest_debt = std::max(extremes_.highest_debt, debt);
    }

    // Eight may be owed, and no two REF are more than nine intervals apart.
    void update_refresh_deadline() {
        const std::int64_t interval = std::int64_t{kMaxPostponed + 1} * timing_.t_refi;
        refresh_deadline_ = std::min(refreshes_ * timing_.t_refi + interval - refresh_offset_,
                                     std::max<std::int64_t>(rank_.last[kRef].ck, 0) + interval);
    }

    void trace_line(const Issued& now) {
        std::int64_t row = -1;
        const unsigned bank = bank_of(now.pins);
        if (bank < banks_.size() && banks_[bank].open) row = banks_[bank].row;
        trace_->line(static_cast<std::uint64_t>(now.ck), now.command, rank_number_, now.pins, row);
    }

    Timing timing_;
    Geometry geometry_;
    unsigned rank_number_;
    SparseStorage storage_;
    std::vector<Bank> banks_;
    std::vector<Scoped> groups_;
    Scoped rank_;
    std::array<std::vector<Rule>, kNextKinds> rules_;
    std::array<Issued, 4> four_activates_;
    std::array<Issued, 16> sixteen_refreshes_;
    std::uint64_t activates_ = 0, refresh_commands_ = 0;
    std::int64_t refreshes_ = 0, refresh_deadline_ = 0, refresh_offset_ = 0;
    RefreshExtremes extremes_;
    int open_ = 0;
    BusClocks account_;
    std::int64_t bus_free_ = 0;
    Issued last_;
    std::array<std::uint64_t, kCommands + 1> counts_{};
    static constexpr unsigned kRegisteringClockDriver = 7;
    std::array<Issued, kRegisteringClockDriver> modes_;
    unsigned data_modes_ = 0, refresh_modes_ = 0;  // mode registers with modes not modelled
    std::int64_t quiet_until_ = Issued::kNever;
    bool failed_ = false;
    Violation violation_;
    std::shared_ptr<TraceWriter> trace_;
};

}  // namespace nearstep
