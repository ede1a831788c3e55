// A single data rate SDRAM chip, simulated at its pins, which checks its timing.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <deque>
#include <utility>

#include "verilate/fault.hpp"

namespace nearstep {

// Of a speed grade, in picoseconds, but for counts of clocks.
struct SdramTiming {
    std::uint64_t tck;          // clock
    std::uint64_t trcd, trp, tras, tras_most, trc, trfc, trrd, twr;
    std::uint64_t tmrd_clocks;
    std::uint64_t tac, toh;     // from a clock edge to data, and how long data is held after one
    std::uint64_t tlz, thz;     // from a clock edge until pins may be driven, and until they are not
    std::uint64_t tset, thold;  // inputs before and after a clock edge
    std::uint64_t refresh;      // mean time between refreshes
    std::uint64_t power_up;     // from power to the first command that opens a row
    std::uint64_t least_tck;    // with a CAS latency of two
};

struct SdramShape {
    std::uint64_t row_bits, column_bits, bank_bits;
};

// The pins at a rising edge of the chip's clock.
struct SdramPins {
    std::uint8_t cke, cs_n, ras_n, cas_n, we_n, ba, dm, driven;  // driven: by the controller
    std::uint16_t a, dq;
};

// Wrong read data, for tests of hosts. Reads are counted from the injection on.
struct SdramInjection {
    std::uint64_t reads;   // from this read on, counted from 0
    std::uint64_t times;   // so many
    std::uint32_t flip;    // bits of the word that are inverted
    std::uint32_t row;     // bits of the row that are inverted where it is read from
};

class Sdram {
  public:
    Fault fault;

    Sdram(const SdramTiming& timing, const SdramShape& shape, std::uint16_t* words)
        : t_(timing), shape_(shape), words_(words) {}

    // A rising edge of the clock at `now`; `since` and `until`: how long the inputs have been and
    // will be stable.
    void edge(std::uint64_t now, const SdramPins& pins, std::uint64_t since, std::uint64_t until) {
        now_ = now;
        ++clocks_;
        if (!started_) start();
        if (since < t_.tset) broken("setup time", "%llu ps, at least %llu", since, t_.tset);
        if (until < t_.thold) broken("hold time", "%llu ps, at least %llu", until, t_.thold);
        const std::uint8_t masked = std::exchange(mask_, pins.dm);
        put_out(masked);
        while (!drives_.empty() && drives_.front().off + t_.tck < now) drives_.pop_front();
        if (pins.driven) check_turnaround(now - since, now + until);
        if (!pins.cke || pins.cs_n) return check_refresh();
        const int command = pins.ras_n << 2 | pins.cas_n << 1 | pins.we_n;
        if (command != kNop && clocks_ < busy_until_clock_)
            broken("tMRD", "%llu clocks left", busy_until_clock_ - clocks_, 0ull);
        if (command != kNop && now < refreshing_until_)
            broken("tRFC", "%llu ps left", refreshing_until_ - now, 0ull);
        switch (command) {
            case kActive: activate(pins); break;
            case kRead: column(pins, false); break;
            case kWrite: column(pins, true); break;
            case kPrecharge: precharge(pins); break;
            case kRefresh: refresh(); break;
            case kMode: load_mode(pins); break;
            case kStop: broken("burst terminate", "no burst is under way", 0ull, 0ull); break;
            default: break;
        }
        check_refresh();
    }

    // The data on the chip's pins at a time; false if not valid.
    bool shows(std::uint64_t at, std::uint16_t* word) const {
        for (const Drive& drive : drives_)
            if (drive.from <= at && at <= drive.to) {
                *word = drive.word;
                return true;
            }
        return false;
    }

    // Makes the contents invalid: no refresh is needed until a row is opened.
    void forget() { holds_ = false; }

    void inject(const SdramInjection& injection) {
        injection_ = injection;
        seen_ = 0;
    }

    std::uint64_t reads() const { return reads_; }
    std::uint64_t writes() const { return writes_; }
    std::uint64_t refreshes() const { return refreshes_; }

  private:
    static constexpr int kMode = 0, kRefresh = 1, kPrecharge = 2, kActive = 3, kWrite = 4, kRead = 5,
                         kStop = 6, kNop = 7;
    static constexpr unsigned kBanks = 4, kAll = 1u << 10, kMostDebt = 8, kBoth = 3;

    struct Bank {
        bool open = false;
        std::uint64_t row = 0;
        std::uint64_t active_at = 0, column_from = 0, active_from = 0;
        std::uint64_t write_end = 0;  // of the last word, with its write recovery
    };
    struct Drive {
        std::uint64_t on, from, to, off;  // pins driven in [on, off], data valid in [from, to]
        std::uint16_t word;
    };
    struct Output {
        std::uint64_t clock;  // at which the word is valid
        std::uint16_t word;
    };

    template <class... Args>
    void broken(const char* rule, const char* format, Args... args) {
        fault.protocol("SDRAM", rule, now_, format, (unsigned long long)args...);
    }

    void start() {
        started_ = true;
        begun_ = now_;
    }

    void activate(const SdramPins& pins) {
        Bank& bank = banks_[pins.ba % kBanks];
        if (now_ - begun_ < t_.power_up)
            broken("power-up", "%llu ps since then, at least %llu", now_ - begun_, t_.power_up);
        if (!latency_) broken("mode register", "a row is opened before it is loaded", 0ull);
        if (latency_ && initial_refreshes_ < 2)
            broken("initial refreshes", "%llu, at least 2", initial_refreshes_);
        if (bank.open) broken("bank state", "bank %llu is open", pins.ba);
        if (now_ < bank.active_from) {
            const bool cycle = bank.active_at && now_ < bank.active_at + t_.trc;
            broken(cycle && now_ >= bank_free_[pins.ba % kBanks] ? "tRC" : "tRP", "%llu ps left",
                   bank.active_from - now_);
        }
        if (any_active_ && now_ < last_active_ + t_.trrd)
            broken("tRRD", "%llu ps left", last_active_ + t_.trrd - now_);
        if (!holds_) {  // the contents were invalid before
            holds_ = true;
            held_from_ = now_;
            counted_ = refreshes_;
        }
        bank.open = true;
        bank.row = pins.a & ((1u << shape_.row_bits) - 1);
        bank.active_at = last_active_ = now_;
        any_active_ = true;
        bank.column_from = now_ + t_.trcd;
        bank.write_end = 0;
    }

    void column(const SdramPins& pins, bool write) {
        Bank& bank = banks_[pins.ba % kBanks];
        if (!bank.open) return broken("bank state", "bank %llu is closed", pins.ba);
        if (now_ < bank.column_from) broken("tRCD", "%llu ps left", bank.column_from - now_);
        if (write && !pins.driven) broken("write data", "nobody drives the pins", 0ull);
        const std::uint64_t column = pins.a & ((1u << shape_.column_bits) - 1);
        if (write) {
            std::uint16_t& word = words_[place(pins.ba, bank.row, column)];
            const std::uint16_t lanes = (pins.dm & 1 ? 0 : 0x00FF) | (pins.dm & 2 ? 0 : 0xFF00);
            word = (word & ~lanes) | (pins.dq & lanes);
            bank.write_end = now_ + t_.twr;
            ++writes_;
        } else {
            outputs_.push_back({clocks_ + latency_, answer(pins.ba, bank.row, column)});
            ++reads_;
        }
        if (pins.a & kAll) close(bank, pins.ba, write ? bank.write_end : now_ + t_.tck, true);
    }

    std::uint16_t answer(unsigned bank, std::uint64_t row, std::uint64_t column) {
        const std::uint64_t number = seen_++;
        const bool wrong = number >= injection_.reads &&
                           number - injection_.reads < injection_.times;
        if (wrong) row ^= injection_.row & ((1u << shape_.row_bits) - 1);
        const std::uint16_t word = words_[place(bank, row, column)];
        return wrong ? word ^ injection_.flip : word;
    }

    void precharge(const SdramPins& pins) {
        for (unsigned i = 0; i < kBanks; ++i) {
            if (!(pins.a & kAll) && i != pins.ba) continue;
            if (banks_[i].open) close(banks_[i], i, now_, false);
            else bank_free_[i] = std::max(bank_free_[i], now_ + t_.trp);
        }
        precharged_ = true;
    }

    // Begins to close a bank at `at`; if the chip does so `itself`, no earlier than tRAS.
    void close(Bank& bank, unsigned number, std::uint64_t at, bool itself) {
        if (itself) at = std::max(at, bank.active_at + t_.tras);
        if (at < bank.active_at + t_.tras)
            broken("tRAS", "%llu ps left", bank.active_at + t_.tras - at);
        if (at > bank.active_at + t_.tras_most)
            broken("tRAS (most)", "%llu ps open, at most %llu", at - bank.active_at, t_.tras_most);
        if (at < bank.write_end) broken("tWR", "%llu ps left", bank.write_end - at);
        bank.open = false;
        bank_free_[number] = at + t_.trp;
        bank.active_from = std::max(at + t_.trp, bank.active_at + t_.trc);
    }

    bool all_closed(const char* what) {
        for (unsigned i = 0; i < kBanks; ++i) {
            if (banks_[i].open) {
                broken("bank state", what[0] == 'r' ? "refresh: bank %llu is open"
                                                    : "mode register: bank %llu is open", i);
                return false;
            }
            if (now_ < bank_free_[i]) {
                broken("tRP", "%llu ps left", bank_free_[i] - now_);
                return false;
            }
            if (now_ < banks_[i].active_from) {
                broken("tRC", "%llu ps left", banks_[i].active_from - now_);
                return false;
            }
        }
        return true;
    }

    void refresh() {
        if (!all_closed("refresh")) return;
        refreshing_until_ = now_ + t_.trfc;
        ++refreshes_;
        ++initial_refreshes_;
    }

    void load_mode(const SdramPins& pins) {
        if (!all_closed("mode register")) return;
        busy_until_clock_ = clocks_ + t_.tmrd_clocks;
        const unsigned length = pins.a & 7, latency = pins.a >> 4 & 7;
        if (pins.ba || pins.a & ~0x27Fu)
            return broken("mode register", "reserved bits are not 0: %#llx", pins.a);
        if (length) return broken("mode register", "this model has bursts of one word, not code %llu",
                                  length);
        if (latency != 2 && latency != 3)
            return broken("mode register", "CAS latency must be 2 or 3, not %llu", latency);
        if (latency == 2 && t_.tck < t_.least_tck)
            return broken("mode register", "a CAS latency of 2 needs a clock of %llu ps, not %llu",
                          t_.least_tck, t_.tck);
        if (!precharged_) return broken("initial precharge", "banks were never precharged", 0ull);
        latency_ = latency;
    }

    // Drives the words due from this edge on, unless masked.
    void put_out(std::uint8_t masked) {
        while (!outputs_.empty() && outputs_.front().clock <= clocks_ + 1) {
            const Output& out = outputs_.front();
            if (out.clock == clocks_ + 1 && masked != kBoth)
                drives_.push_back({now_ + t_.tlz, now_ + t_.tac, now_ + t_.tck + t_.toh,
                                   now_ + t_.tck + t_.thz, out.word});
            outputs_.pop_front();
        }
    }

    void check_turnaround(std::uint64_t from, std::uint64_t to) {
        for (const Drive& drive : drives_)
            if (from < drive.off && drive.on < to)
                return broken("turnaround", "both drive the pins for %llu ps",
                              std::min(to, drive.off) - std::max(from, drive.on));
    }

    void check_refresh() {
        if (!holds_) return;
        const std::uint64_t due = (now_ - held_from_) / t_.refresh, done = refreshes_ - counted_;
        if (due > done + kMostDebt)
            broken("refresh interval", "%llu refreshes are due, %llu were made", due, done);
    }

    std::uint64_t place(std::uint64_t bank, std::uint64_t row, std::uint64_t column) const {
        return (bank << shape_.row_bits | row) << shape_.column_bits | column;
    }

    SdramTiming t_;
    SdramShape shape_;
    std::uint16_t* words_;
    std::array<Bank, kBanks> banks_{};
    std::array<std::uint64_t, kBanks> bank_free_{};  // precharged, at this time
    std::deque<Drive> drives_;
    std::deque<Output> outputs_;
    SdramInjection injection_{};
    std::uint64_t now_ = 0, clocks_ = 0, begun_ = 0, last_active_ = 0, refreshing_until_ = 0;
    std::uint64_t busy_until_clock_ = 0, held_from_ = 0, counted_ = 0;
    std::uint64_t reads_ = 0, writes_ = 0, refreshes_ = 0, initial_refreshes_ = 0, seen_ = 0;
    unsigned latency_ = 0;
    std::uint8_t mask_ = 0;
    bool started_ = false, holds_ = false, precharged_ = false, any_active_ = false;
};

}  // namespace nearstep
