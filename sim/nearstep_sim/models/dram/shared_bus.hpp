// The buses that the ranks of a channel share: one command a clock, one burst of data at a time.
//
// Rules inside a rank are checked by its Ddr4Device.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <string>

#include "models/dram/ddr4.hpp"

namespace nearstep {

class SharedBus {
  public:
    // RTT_WR begins that many clocks before the data of a write: ODTLcnw = CWL - 2.
    static constexpr int kTerminationLead = 2;

    // `rank_switch`: tRTRS, clocks between the data of two ranks.
    SharedBus(const Timing& timing, int rank_switch) : timing_(timing), switch_(rank_switch) {}

    // The next command, in the order of time. The same command at one clock reaches several ranks.
    // False, with violation(), if it breaks a rule.
    bool check(unsigned rank, std::uint64_t clock, const Pins& pins) {
        Seen now;
        now.rank = rank;
        now.issued.ck = now.issued.from = static_cast<std::int64_t>(clock);
        now.issued.command = decode(pins);
        now.issued.pins = pins;
        if (now.issued.command == Command::NOP) return true;
        const Seen last = last_;
        last_ = now;
        if (last.issued.ck == now.issued.ck && last.rank != rank && !same(last.issued.pins, pins))
            return fail("command bus: two ranks", last, now, 0);
        return !is_column(now.issued.command) || data(now);
    }

    const Violation& violation() const { return violation_; }

  private:
    struct Seen {
        Issued issued;
        unsigned rank = 0;
        std::int64_t start = 0, end = 0;  // of the data
    };

    static bool is_column(Command command) {
        return command >= Command::RD && command <= Command::WRA;
    }
    static bool is_write(const Seen& seen) {
        return seen.issued.command == Command::WR || seen.issued.command == Command::WRA;
    }
    static bool same(const Pins& a, const Pins& b) {
        return a.act_n == b.act_n && a.address == b.address && a.bg == b.bg && a.ba == b.ba;
    }

    // Least clocks between data of another rank and the data of `after`.
    int apart(const Seen& after) const {
        return is_write(after) ? std::max(switch_, kTerminationLead) : switch_;
    }

    bool data(Seen now) {
        const std::int64_t ck = now.issued.ck;
        now.start = ck + (is_write(now) ? timing_.cwl : timing_.cl);
        now.end = now.start + kBurstClocks;
        // No later command has earlier data than this.
        const std::int64_t earliest = ck + std::min(timing_.cl, timing_.cwl);
        const int longest = std::max(switch_, kTerminationLead);
        while (!bursts_.empty() && bursts_.front().end + longest <= earliest) bursts_.pop_front();
        const Seen* worst = nullptr;
        std::int64_t minimum = 0;
        for (const Seen& other : bursts_) {
            if (other.rank == now.rank) continue;
            if (now.start >= other.end + apart(now) || other.start >= now.end + apart(other)) continue;
            const std::int64_t needed = other.end + apart(now) - now.start + ck - other.issued.ck;
            if (!worst || needed > minimum) {
                worst = &other;
                minimum = needed;
            }
        }
        bool ok = true;
        if (worst) {
            const bool overlap = now.start < worst->end + switch_ && worst->start < now.end + switch_;
            ok = fail(overlap ? "tRTRS" : "ODT", *worst, now, minimum);
        }
        bursts_.push_back(now);
        return ok;
    }

    bool fail(const char* rule, const Seen& previous, const Seen& next, std::int64_t minimum) {
        violation_ = {rule, previous.issued, next.issued, minimum, 0, static_cast<int>(previous.rank),
                      static_cast<int>(next.rank)};
        return false;
    }

    Timing timing_;
    int switch_;
    Seen last_;
    std::deque<Seen> bursts_;
    Violation violation_;
};

}  // namespace nearstep
