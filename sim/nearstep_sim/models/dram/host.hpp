// Host memory controller: 64-byte loads and stores become DDR4 commands, two slots a fabric cycle.
//
// Open page; in order (rows are prepared ahead, columns stay in order) or FR-FCFS (row hits first,
// one direction at a time, with a limit on overtaking). Accesses to one beat always stay in order.
// Refreshes of a rank are regular, postponed, or at any time that JEDEC allows. Timing is in
// "earliest next" clocks, independent of the device model's rule table, which checks the commands.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <deque>
#include <stdexcept>
#include <string>
#include <vector>

#include "models/dram/command.hpp"

namespace nearstep {

// Order is the ABI.
struct HostConfig {
    Timing timing;       // at the host's clock
    Geometry geometry;   // of a rank
    Mapping mapping;     // inside a channel; the channel is the top of the address
    std::int32_t ranks;  // on the bus: those of the first channel, then those of the next
    std::int32_t read_latency;   // fabric cycles from a read command to its first data
    std::int32_t write_latency;  // fabric cycles from a write command to its first data
    std::int32_t write_to_read;  // clocks, at least, between those of two ranks of a channel
    std::int32_t fr_fcfs;        // 0: columns in order
    std::int32_t window;         // requests that the scheduler sees
    std::int32_t overtake;       // column commands that may overtake the oldest request
    std::int32_t postpone;       // refreshes gathered before they are forced, 1 to 8
    std::int32_t late_rank;      // refreshed only when eight are due to it; -1: none
    std::int32_t column_slot;    // the only slot of column commands; -1: any
    std::int32_t stall;          // of 65536: chance of a cycle that issues no access
    std::int32_t refresh_offset;  // clocks by which its refresh intervals begin early
    std::int32_t whim;     // not 0: refreshes begin and end at random, up to the last moment
    std::int32_t pull_in;  // refreshes given in advance at most, at whim
    std::int32_t auto_precharge;  // of 65536: chance of a column command that closes its bank
    std::uint64_t seed;          // of the stalls
};

struct HostSlot {
    std::int32_t rank = -1;  // -1: deselected
    Pins pins;
};

// What the host drives in one fabric cycle.
struct HostCycle {
    static constexpr int kSlots = 2;
    static constexpr int kDataBytes = kBeatBytes / kSlots;

    std::array<HostSlot, kSlots> slots;
    bool wrdata_en = false;
    std::uint32_t wrdata_mask = 0;
    std::uint8_t wrdata[kDataBytes] = {};
};

struct HostCompletion {
    std::uint64_t tag;
    std::uint64_t submitted, completed;  // fabric cycles
    std::uint8_t data[kBeatBytes];
};

// Order is the ABI.
struct HostStatistics {
    std::uint64_t cycles, loads, stores, row_hits, row_misses, row_conflicts, refreshes;
    std::uint64_t busy_cycles;  // with a request somewhere
    std::uint64_t load_latency_sum, load_latency_max;  // fabric cycles, submission to data
};

class HostController {
  public:
    explicit HostController(const HostConfig& config)
        : c_(config),
          t_(config.timing),
          banks_per_rank_(config.geometry.banks()),
          random_(mix_seed(config.seed)),
          ranks_(config.ranks) {
        if (c_.ranks < 1 || c_.ranks % c_.mapping.ranks())
            throw std::invalid_argument("ranks must be those of one channel or more");
        if (c_.window < 1 || c_.read_latency < 1 || c_.write_latency < 0)
            throw std::invalid_argument("window and read_latency must be at least 1");
        if (c_.postpone < 1 || c_.postpone > 8)
            throw std::invalid_argument("postpone must be 1 to 8");
        if (c_.pull_in < 0 || c_.pull_in > kMostInAdvance)
            throw std::invalid_argument("pull_in must be 0 to 8");
        for (Rank& rank : ranks_) {
            rank.banks.resize(banks_per_rank_);
            rank.groups.resize(config.geometry.groups());
        }
        reads_.resize(c_.read_latency + 3);
        writes_.resize(c_.write_latency + 3);
    }

    void load(std::uint64_t beat, std::uint64_t tag) { submit(beat, tag, false, nullptr, 0); }
    // A set bit of mask keeps the byte in memory. A tag that is not 0 is added to `stored` with the
    // last data of the store.
    void store(std::uint64_t beat, const std::uint8_t* data, std::uint64_t mask,
               std::uint64_t tag = 0) {
        submit(beat, tag, true, data, mask);
    }
    // A command for which all banks of a rank must be closed: MRS, ZQ calibration, or the reserved
    // code. Issued before other commands of the rank, which then waits for JEDEC's minimum.
    void give(int rank, const Pins& pins) { given_.push_back({rank, pins}); }
    // Later requests wait until the data of every earlier one has moved.
    void fence() { fence_next_ = true; }

    bool idle() const {
        return queue_.empty() && window_.empty() && in_flight_ == 0 && given_.empty();
    }
    std::uint64_t cycle() const { return cycle_; }
    int ranks() const { return c_.ranks; }
    const HostStatistics& statistics() const { return statistics_; }
    const std::string& error() const { return error_; }  // the memory's first error, or empty
    std::deque<HostCompletion>& completions() { return completions_; }
    std::deque<std::uint64_t>& stored() { return stored_; }
    std::size_t waiting() const { return queue_.size() + window_.size(); }

    // One fabric cycle: takes rddata (null while rddata_valid is low) and drives all other pins.
    // The memory's rddata is registered, so independent of the pins driven in the same cycle.
    void tick(const std::uint8_t* rddata, HostCycle& out) {
        take_read_data(rddata);
        fill_window();
        for (int slot = 0; slot < HostCycle::kSlots; ++slot) out.slots[slot].rank = -1;
        if (c_.stall) stalled_ = (next_random() & 0xFFFF) < static_cast<unsigned>(c_.stall);
        for (int slot = 0; slot < HostCycle::kSlots; ++slot) choose(slot, out.slots[slot]);
        drive_write_data(out);
        statistics_.busy_cycles += !idle();
        statistics_.cycles = ++cycle_;
    }

  private:
    struct Request {
        std::uint64_t beat, tag, submitted;
        bool write, fence;
        std::uint64_t mask;
        std::array<std::uint8_t, kBeatBytes> data;
    };
    struct Entry {
        Request request;
        int rank;
        int bank;  // in the rank
        Place place;
        bool closed = false, conflict = false;  // met a closed bank, another row
    };
    struct Bank {
        std::int64_t row = -1;
        std::int64_t act = 0, pre = 0, column = 0;  // earliest next
    };
    struct Group {
        std::int64_t act = 0, read = 0, write = 0;
    };
    static constexpr int kInWindow = 16, kWindow = 2;  // at most so many REF in so many tREFI
    struct Rank {
        std::vector<Bank> banks;
        std::vector<Group> groups;
        std::int64_t act = 0, read = 0, write = 0, ref = 0;
        std::array<std::int64_t, 4> activates{-1'000'000, -1'000'000, -1'000'000, -1'000'000};
        unsigned next_activate = 0;
        std::int64_t refreshes = 0;
        bool refreshing = false;
        // With `whim`: refreshes owed at begin and end, the earliest begin; clocks of the last REF.
        std::int64_t begin = 1, end = 0, not_before = 0;
        std::array<std::int64_t, kInWindow> refreshed{};
        unsigned next_refresh = 0;
        bool full = false;  // as many as `refreshed` holds
    };
    struct ReadSlot {
        bool expected = false;
        int half = 0;
        Request request;
    };
    struct WriteSlot {
        bool expected = false;
        int half = 0;
        Request request;
    };

    static constexpr int kMostPostponed = 8, kMostInAdvance = 8;
    static constexpr int kClosing = 64;  // most clocks to close all banks
    static constexpr int kRankSwitch = 2;  // idle clocks of the data bus between two ranks

    static std::uint64_t mix_seed(std::uint64_t seed) { return seed * 2 + 1; }
    std::uint64_t next_random() {  // xorshift64*
        random_ ^= random_ >> 12;
        random_ ^= random_ << 25;
        random_ ^= random_ >> 27;
        return (random_ * 0x2545F4914F6CDD1Du) >> 40;
    }

    void submit(std::uint64_t beat, std::uint64_t tag, bool write, const std::uint8_t* data,
                std::uint64_t mask) {
        if (beat >= c_.geometry.beats() * c_.ranks) throw std::out_of_range("beat outside memory");
        Request request{beat, tag, cycle_, write, fence_next_, mask, {}};
        fence_next_ = false;
        if (write) std::memcpy(request.data.data(), data, kBeatBytes);
        queue_.push_back(request);
    }

    void fill_window() {
        while (!queue_.empty() && window_.size() < static_cast<std::size_t>(c_.window)) {
            const Request& request = queue_.front();
            if (request.fence && (!window_.empty() || in_flight_)) break;
            const int ranks = c_.mapping.ranks();
            const std::uint64_t per_channel = c_.geometry.beats() * ranks;
            const Place place = place_of(request.beat % per_channel, c_.mapping, c_.geometry);
            const int bank = (place.bg << c_.geometry.bank_bits) | place.ba;
            const int rank =
                static_cast<int>(request.beat / per_channel) * ranks + static_cast<int>(place.rank);
            window_.push_back({request, rank, bank, place, false, false});
            queue_.pop_front();
        }
    }

    void fail(const std::string& text) {
        if (error_.empty()) error_ = text + " in fabric cycle " + std::to_string(cycle_);
    }

    void take_read_data(const std::uint8_t* rddata) {
        ReadSlot& slot = reads_[cycle_ % reads_.size()];
        if (slot.expected && !rddata) fail("no read data");
        if (!slot.expected && rddata) fail("read data of no command");
        if (!slot.expected) return;
        slot.expected = false;
        if (rddata) std::memcpy(arriving_ + slot.half * HostCycle::kDataBytes, rddata,
                                HostCycle::kDataBytes);
        if (slot.half == 0) return;
        --in_flight_;
        HostCompletion done{slot.request.tag, slot.request.submitted, cycle_, {}};
        std::memcpy(done.data, arriving_, kBeatBytes);
        completions_.push_back(done);
        const std::uint64_t latency = cycle_ - slot.request.submitted;
        statistics_.load_latency_sum += latency;
        statistics_.load_latency_max = std::max(statistics_.load_latency_max, latency);
    }

    void drive_write_data(HostCycle& out) {
        WriteSlot& slot = writes_[cycle_ % writes_.size()];
        out.wrdata_en = slot.expected;
        if (!slot.expected) return;
        slot.expected = false;
        std::memcpy(out.wrdata, slot.request.data.data() + slot.half * HostCycle::kDataBytes,
                    HostCycle::kDataBytes);
        out.wrdata_mask =
            static_cast<std::uint32_t>(slot.request.mask >> (slot.half * HostCycle::kDataBytes));
        if (slot.half == 0) return;
        --in_flight_;
        if (slot.request.tag) stored_.push_back(slot.request.tag);
    }

    void choose(int slot, HostSlot& out) {
        const std::int64_t now = static_cast<std::int64_t>(cycle_) * HostCycle::kSlots + slot;
        if (!given_.empty() && maintain(now, out)) return;
        if (refresh(now, out)) return;
        if (stalled_ || window_.empty()) return;
        if (c_.column_slot < 0 || c_.column_slot == slot) {
            const int picked = c_.fr_fcfs ? pick_ready(now) : pick_oldest(now);
            if (picked >= 0) return issue_column(now, picked, out);
        }
        prepare_row(now, out);
    }

    void select(HostSlot& out, int rank, Command command, const Place& at = {}) {
        out.rank = rank;
        out.pins = encode(command, at.bg, at.ba, at.row, at.column);
    }

    // True if the slot is used: to close the rank of the oldest command given, or for that command.
    bool maintain(std::int64_t now, HostSlot& out) {
        const HostSlot each = given_.front();
        Rank& rank = ranks_.at(each.rank);
        rank.refreshing = true;  // nothing else until then
        bool open = false, ready = true;
        for (const Bank& bank : rank.banks) {
            open |= bank.row >= 0;
            ready &= bank.pre <= now;
        }
        if (open) {
            if (!ready) return false;
            close_all(rank, now);
            select(out, each.rank, Command::PREA);
            return true;
        }
        if (rank.ref > now) return false;
        const Command command = decode(each.pins);
        const int wait = command == Command::ZQCS   ? t_.t_zqcs
                         : command == Command::ZQCL ? t_.t_zqoper
                                                    : std::max(t_.t_mod, t_.t_mrd);
        for (Bank& bank : rank.banks) {
            bank.act = std::max(bank.act, now + wait);
            bank.pre = std::max(bank.pre, now + wait);
        }
        rank.ref = now + wait;
        rank.refreshing = false;
        given_.pop_front();
        out = each;
        return true;
    }

    void close_all(Rank& rank, std::int64_t now) {
        for (Bank& bank : rank.banks) {
            bank.row = -1;
            bank.act = std::max(bank.act, now + t_.t_rp);
        }
        rank.ref = std::max(rank.ref, now + t_.t_rp);
    }

    // True if the slot is used. A rank that refreshes takes no other command until nothing is owed.
    bool refresh(std::int64_t now, HostSlot& out) {
        const std::int64_t due = now > 0 ? (now - 1 + c_.refresh_offset) / t_.t_refi : 0;
        for (int r = 0; r < c_.ranks; ++r) {
            Rank& rank = ranks_[r];
            const std::int64_t owed = due - rank.refreshes;
            if (c_.whim) {
                decide(rank, owed, now);
            } else {
                if (owed <= 0) continue;
                const bool idle = window_.empty() && queue_.empty();
                if (r == c_.late_rank ? owed >= kMostPostponed : owed >= c_.postpone || idle)
                    rank.refreshing = true;
            }
            if (!rank.refreshing) continue;
            bool open = false, ready = true;
            for (const Bank& bank : rank.banks) {
                open |= bank.row >= 0;
                ready &= bank.pre <= now;
            }
            if (open) {
                if (!ready) continue;
                close_all(rank, now);
                select(out, r, Command::PREA);
                return true;
            }
            if (rank.ref > now) continue;
            for (Bank& bank : rank.banks) bank.act = std::max(bank.act, now + t_.t_rfc);
            rank.ref = now + t_.t_rfc;
            ++rank.refreshes;
            ++statistics_.refreshes;
            rank.refreshing = owed > 1;
            if (c_.whim) {
                rank.refreshed[rank.next_refresh] = now;
                rank.next_refresh = (rank.next_refresh + 1) % kInWindow;
                rank.full |= rank.next_refresh == 0;
                rank.refreshing = owed - 1 > rank.end;
                if (!rank.refreshing) choose_next(rank, owed - 1, now);
            }
            select(out, r, Command::REF);
            return true;
        }
        return false;
    }

    // Begins or ends a rank's refreshes with `whim`: within nine tREFI of the last REF, at most
    // eight owed or in advance, at most 16 in two tREFI.
    void decide(Rank& rank, std::int64_t owed, std::int64_t now) {
        const std::int64_t last = rank.refreshed[(rank.next_refresh + kInWindow - 1) % kInWindow];
        const std::int64_t left = t_.t_refi - (now + c_.refresh_offset - 1) % t_.t_refi;
        const bool must = (owed >= kMostPostponed && left <= kClosing) ||
                          now - last >= (kMostPostponed + 1) * t_.t_refi - kClosing;
        if (!rank.refreshing && (must || (owed >= rank.begin && now >= rank.not_before))) {
            const std::int64_t least = std::min<std::int64_t>(-c_.pull_in, owed - 1);
            rank.end = owed - 1 - pick(owed - least);
            if (pick(3) == 0) rank.end = least;
            rank.refreshing = must || owed > -c_.pull_in;
        }
        const bool too_many = rank.full && now - rank.refreshed[rank.next_refresh] <
                                               kWindow * t_.t_refi;
        if (rank.refreshing && too_many) {
            rank.refreshing = false;
            choose_next(rank, owed, now);
        }
    }
    void choose_next(Rank& rank, std::int64_t owed, std::int64_t now) {
        const std::int64_t most = std::max<std::int64_t>(c_.postpone, owed + 1);
        rank.begin = pick(3) == 0 ? kMostPostponed + 1 : owed + 1 + pick(most - owed);
        rank.not_before = now + pick(2) * pick(2 * t_.t_refi);
    }
    std::int64_t pick(std::int64_t count) {
        return static_cast<std::int64_t>(next_random() % static_cast<std::uint64_t>(count));
    }

    bool row_open(const Entry& e) const {
        return !ranks_[e.rank].refreshing && ranks_[e.rank].banks[e.bank].row == e.place.row;
    }
    bool column_ready(std::int64_t now, const Entry& e) const {
        const Rank& rank = ranks_[e.rank];
        if (rank.banks[e.bank].column > now) return false;
        const Group& group = rank.groups[e.place.bg];
        return e.request.write ? std::max(group.write, rank.write) <= now
                               : std::max(group.read, rank.read) <= now;
    }
    bool overtakes_same_beat(std::size_t index) const {
        for (std::size_t i = 0; i < index; ++i)
            if (window_[i].request.beat == window_[index].request.beat) return true;
        return false;
    }

    int pick_oldest(std::int64_t now) const {
        return row_open(window_[0]) && column_ready(now, window_[0]) ? 0 : -1;
    }

    int pick_ready(std::int64_t now) {
        if (overtaken_ >= c_.overtake) return pick_oldest(now);
        for (const bool write : {writing_, !writing_}) {
            bool any = false;
            for (std::size_t i = 0; i < window_.size(); ++i) {
                const Entry& e = window_[i];
                if (e.request.write != write || !row_open(e)) continue;
                const bool ready = column_ready(now, e);
                if (!ready && any) continue;
                if (overtakes_same_beat(i)) continue;
                if (ready) return static_cast<int>(i);
                any = true;
            }
            if (any) return -1;  // keep the direction while it has row hits
        }
        return -1;
    }

    void issue_column(std::int64_t now, int index, HostSlot& out) {
        const Entry e = window_[index];
        window_.erase(window_.begin() + index);
        overtaken_ = index ? overtaken_ + 1 : 0;
        const bool write = writing_ = e.request.write;
        Rank& own = ranks_[e.rank];
        Bank& bank = own.banks[e.bank];
        bank.pre = std::max(bank.pre, now + (write ? t_.write_to_precharge() : t_.t_rtp));
        for (int r = 0; r < c_.ranks; ++r) {
            Rank& rank = ranks_[r];
            const bool same = r == e.rank;
            const bool near = r / c_.mapping.ranks() == e.rank / c_.mapping.ranks();
            const std::int64_t again =
                now + (same ? t_.t_ccd_s : kBurstClocks + kRankSwitch);
            const std::int64_t other =
                write ? now + (same ? t_.write_to_read_s()
                                    : std::max(near ? c_.write_to_read : 1,
                                               t_.cwl + kBurstClocks + kRankSwitch - t_.cl))
                      : now + t_.read_to_write();
            (write ? rank.write : rank.read) = std::max(write ? rank.write : rank.read, again);
            (write ? rank.read : rank.write) = std::max(write ? rank.read : rank.write, other);
        }
        Group& group = own.groups[e.place.bg];
        if (write) {
            group.write = std::max(group.write, now + t_.t_ccd_l);
            group.read = std::max(group.read, now + t_.write_to_read_l());
        } else {
            group.read = std::max(group.read, now + t_.t_ccd_l);
        }
        schedule_data(e.request);
        ++(write ? statistics_.stores : statistics_.loads);
        ++(e.conflict ? statistics_.row_conflicts
                      : e.closed ? statistics_.row_misses : statistics_.row_hits);
        if (c_.auto_precharge && (next_random() & 0xFFFF) < static_cast<unsigned>(c_.auto_precharge)) {
            bank.row = -1;
            bank.act = std::max(bank.act, bank.pre + t_.t_rp);
            own.ref = std::max(own.ref, bank.pre + t_.t_rp);
            return select(out, e.rank, write ? Command::WRA : Command::RDA, e.place);
        }
        select(out, e.rank, write ? Command::WR : Command::RD, e.place);
    }

    void schedule_data(const Request& request) {
        ++in_flight_;
        for (int half = 0; half < 2; ++half) {
            if (request.write) {
                WriteSlot& slot = writes_[(cycle_ + c_.write_latency + half) % writes_.size()];
                slot = {true, half, request};
            } else {
                ReadSlot& slot = reads_[(cycle_ + c_.read_latency + half) % reads_.size()];
                slot = {true, half, request};
            }
        }
    }

    void prepare_row(std::int64_t now, HostSlot& out) {
        claimed_.assign(static_cast<std::size_t>(banks_per_rank_) * c_.ranks, 0);
        for (std::size_t i = 0; i < window_.size(); ++i) {
            Entry& e = window_[i];
            Rank& rank = ranks_[e.rank];
            if (rank.refreshing) continue;
            char& claimed = claimed_[static_cast<std::size_t>(e.rank) * banks_per_rank_ + e.bank];
            if (claimed) continue;
            claimed = 1;
            Bank& bank = rank.banks[e.bank];
            if (bank.row == e.place.row) continue;
            if (bank.row >= 0) {
                // In FR-FCFS up to `overtake` later hits of the open row are first.
                if (c_.fr_fcfs && overtaken_ < c_.overtake && another_hit(i)) continue;
                if (bank.pre > now) continue;
                e.conflict = true;
                bank.row = -1;
                bank.act = std::max(bank.act, now + t_.t_rp);
                rank.ref = std::max(rank.ref, now + t_.t_rp);
                return select(out, e.rank, Command::PRE, e.place);
            }
            Group& group = rank.groups[e.place.bg];
            const std::int64_t window = rank.activates[rank.next_activate] + t_.t_faw;
            if (std::max({bank.act, group.act, rank.act, window}) > now) continue;
            e.closed = true;
            bank.row = e.place.row;
            bank.column = now + t_.t_rcd;
            bank.pre = now + t_.t_ras;
            bank.act = now + t_.t_rc;
            group.act = now + t_.t_rrd_l;
            rank.act = now + t_.t_rrd_s;
            rank.activates[rank.next_activate] = now;
            rank.next_activate = (rank.next_activate + 1) & 3;
            return select(out, e.rank, Command::ACT, e.place);
        }
    }

    bool another_hit(std::size_t index) const {
        const Entry& e = window_[index];
        for (std::size_t i = index + 1; i < window_.size(); ++i)
            if (window_[i].rank == e.rank && window_[i].bank == e.bank && row_open(window_[i]) &&
                !overtakes_same_beat(i))
                return true;
        return false;
    }

    HostConfig c_;
    Timing t_;
    int banks_per_rank_;
    std::uint64_t random_;
    std::vector<Rank> ranks_;
    std::deque<Request> queue_;
    std::deque<HostSlot> given_;
    std::vector<Entry> window_;
    std::vector<char> claimed_;
    std::deque<HostCompletion> completions_;
    std::deque<std::uint64_t> stored_;
    std::vector<ReadSlot> reads_;
    std::vector<WriteSlot> writes_;
    std::uint8_t arriving_[kBeatBytes];
    std::uint64_t cycle_ = 0;
    std::int64_t in_flight_ = 0;
    int overtaken_ = 0;
    bool writing_ = false, fence_next_ = false, stalled_ = false;
    HostStatistics statistics_{};
    std::string error_;
};

}  // namespace nearstep
