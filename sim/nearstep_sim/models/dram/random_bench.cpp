// The DDR4 controller under random bursts on AXI4 and a channel that is handed over and back.
//
// Reads and writes of a few pages, any length, any ID, partial strobes, stalls on every channel,
// bursts that cannot be served. A byte read must be the result of the writes answered before the
// read was issued, or of a write issued before the data arrived. R and B must hold while stalled.
// When the controller has handed the channel over, all rows must be closed and no refresh due;
// after some time without refreshes, the controller takes the channel back.
#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <deque>
#include <string>
#include <vector>

#include "VDramController.h"
#include "models/dram/channel_bench.hpp"
#include "models/dram/dfi_pins.hpp"
#include "verilated.h"

using namespace nearstep;

namespace {

constexpr int kIds = 4;
constexpr unsigned kPageBeats = 64;
constexpr int kOkay = 0, kSlaveError = 2, kDecodeError = 3;

// Order is the ABI. Chances are of 65536.
struct RandomConfig {
    ChannelConfig channel;  // base and count are not used
    std::uint64_t bursts;   // in all
    std::uint64_t address_bits;
    std::int32_t pages;
    std::int32_t stall;        // of each channel, each cycle
    std::int32_t refused;      // of a burst that cannot be served
    std::int32_t hand_over;    // of a cycle
    std::int32_t longest_gap;  // cycles without an owner
    std::int32_t padding;
};

struct RandomResult {
    std::uint64_t cycles, read_beats, write_beats, refused, hand_overs;
    std::uint64_t longest_hand_over;  // cycles from i_enable low to o_idle
    std::uint64_t highest_debt;
    std::uint64_t calibrations;
};

struct Burst {
    std::uint64_t address;  // bytes
    unsigned beats;
    int id, response, kind, size;
};

struct Write {
    std::uint32_t version;
    std::uint64_t strobe;
};

struct BeatLog {
    std::vector<Write> writes;
    std::size_t answered = 0;
};

struct Read {
    Burst burst;
    unsigned done = 0;
    std::vector<std::size_t> answered;  // of each beat: writes answered when the read was issued
};

struct Sent {
    Burst burst;
    std::vector<std::size_t> index;  // of this write in the log of each beat
};

class Bench {
  public:
    explicit Bench(const RandomConfig& config)
        : t_(config),
          c_(config.channel),
          port_(c_.timing, c_.geometry, c_.mapping.ranks(), c_.port),
          logs_(std::size_t(t_.pages) * kPageBeats),
          dut_(&context_),
          state_(c_.seed) {}

    std::string run(RandomResult& result) {
        if (!c_.trace(port_)) return "the commands cannot be written";
        for (std::size_t i = 0; i < logs_.size(); ++i) store(i);
        dut_.s_axi___05Farburst = dut_.s_axi___05Fawburst = 1;
        dut_.rst = 1;
        for (int i = 0; i < 2; ++i) tick(dut_);
        dut_.rst = 0;
        dut_.i_enable = 1;
        while (finished_ < t_.bursts) {
            step();
            if (port_.failed()) return port_.violation()->text();
            if (!error_.empty()) return error_ + " in cycle " + std::to_string(port_.cycle());
            if (port_.cycle() - progress_ > 40000) return "no progress";
        }
        for (int i = 0; i < 16; ++i) step();
        result_.cycles = port_.cycle();
        result = result_;
        for (std::size_t i = 0; i < logs_.size(); ++i) {
            std::uint8_t found[kBeatBytes];
            port_.load(place(i), found);
            for (int b = 0; b < kBeatBytes; ++b)
                if (found[b] != after(i, b, logs_[i].writes.size()))
                    return "memory differs in page " + std::to_string(i / kPageBeats);
        }
        return port_.failed() ? port_.violation()->text() : error_;
    }

  private:
    std::uint64_t random() { return state_ = mix(state_); }
    bool chance(std::int32_t of_65536) {
        return static_cast<std::int32_t>(random() & 0xFFFF) < of_65536;
    }

    // Pages are in groups of four neighbours of a rank; the groups share their banks.
    std::uint64_t page_address(unsigned page) const {
        const unsigned ranks = static_cast<unsigned>(port_.ranks()), group = page >> 2;
        const std::uint64_t inside = (page & 3) + (std::uint64_t(group / ranks) << 10);
        return c_.mapping.outside(inside * kPageBeats, group % ranks) * kBeatBytes;
    }
    std::size_t log_of(std::uint64_t address) const {
        const std::uint64_t beat = address / kBeatBytes, inside = c_.mapping.inside(beat);
        const std::uint64_t page = inside / kPageBeats;
        const std::uint64_t group = (page >> 10) * port_.ranks() + c_.mapping.rank_of(beat);
        return ((page & 3) | group << 2) * kPageBeats + beat % kPageBeats;
    }
    Place place(std::size_t log) const {
        return place_of(page_address(static_cast<unsigned>(log / kPageBeats)) / kBeatBytes +
                            log % kPageBeats,
                        c_.mapping, c_.geometry);
    }
    static std::uint8_t byte(std::size_t log, int b, std::uint32_t version) {
        return static_cast<std::uint8_t>(
            mix((std::uint64_t(version) << 32 | log) * kBeatBytes + unsigned(b)) >> 13);
    }
    // Byte b after the first n writes.
    std::uint8_t after(std::size_t log, int b, std::size_t n) const {
        while (n--)
            if (logs_[log].writes[n].strobe >> b & 1)
                return byte(log, b, logs_[log].writes[n].version);
        return byte(log, b, 0);
    }
    void store(std::size_t log) {
        std::uint8_t data[kBeatBytes];
        for (int b = 0; b < kBeatBytes; ++b) data[b] = byte(log, b, 0);
        port_.store(place(log), data, 0);
    }

    Burst draw() {
        Burst burst{};
        const unsigned first = random() % kPageBeats;
        const unsigned longest = kPageBeats - first;
        burst.beats = 1 + random() % (chance(32768) ? longest : std::min(longest, 4u));
        burst.address = page_address(random() % t_.pages) + first * kBeatBytes;
        burst.id = random() % kIds;
        burst.kind = 1;
        burst.size = 6;
        if (chance(t_.refused)) refuse(burst, longest);
        return burst;
    }
    void refuse(Burst& burst, unsigned longest) {
        burst.response = kSlaveError;
        switch (random() % 4) {
            case 0: burst.kind = 0; break;
            case 1: burst.size = random() % 6; break;
            case 2: burst.beats = longest + 1; break;
            default:
                burst.address |= std::uint64_t{1} << (t_.address_bits - 1);
                burst.response = kDecodeError;
        }
        ++result_.refused;
    }

    // Requests calibration of each rank at random, until the command is on the pins.
    void calibrate() {
        unsigned wanted = dut_.i_calibrate;
        for (int rank = 0; rank < port_.ranks(); ++rank) {
            const std::uint64_t given = port_.device(rank).count(Command::ZQCS);
            if (wanted >> rank & 1) {
                if (given != calibrated_[rank]) wanted &= ~(1u << rank);
            } else if (chance(16)) {
                wanted |= 1u << rank;
                calibrated_[rank] = given;
            }
        }
        dut_.i_calibrate = wanted;
        result_.calibrations = port_.count(Command::ZQCS);
    }

    void step() {
        hand_over();
        calibrate();
        drive();
        NEARSTEP_DFI_READ(dut_, dfi, port_);
        dut_.eval();
        sample();
        const bool quiet = dut_.o_idle && was_idle_;
        const unsigned all = (1u << port_.ranks()) - 1;
        if (quiet && (dut_.dfi___05Fp0___05Fcs_n & dut_.dfi___05Fp1___05Fcs_n &
                      dut_.dfi___05Fp2___05Fcs_n & dut_.dfi___05Fp3___05Fcs_n) != all)
            error_ = "a command without the channel";
        was_idle_ = dut_.o_idle;
        std::uint64_t refreshes[ChannelResult::kRanks];
        for (int rank = 0; rank < port_.ranks(); ++rank) {
            result_.highest_debt =
                std::max<std::uint64_t>(result_.highest_debt, debt_of(dut_.o_debt, rank));
            refreshes[rank] = port_.device(rank).count(Command::REF);
        }
        NEARSTEP_DFI_CYCLE(dut_, dfi, port_);
        for (int rank = 0; rank < port_.ranks(); ++rank)
            if (port_.device(rank).count(Command::REF) != refreshes[rank])
                last_refresh_[rank] = port_.clock();
        tick(dut_);
    }

    void hand_over() {
        if (dut_.i_enable) {
            if (chance(t_.hand_over)) {
                dut_.i_enable = 0;
                asked_ = port_.cycle();
                gap_ = 0;
            }
        } else if (dut_.o_idle && was_idle_) {
            if (gap_ == 0) taken_back();
            if (--gap_ == 0) {
                // Refreshes due, but no fewer than intervals since the last one; and the interval
                // that has begun.
                unsigned due = 0;
                for (int rank = 0; rank < port_.ranks(); ++rank) {
                    const std::int64_t since =
                        (port_.clock() - last_refresh_[rank]) / c_.timing.t_refi;
                    const std::int64_t owed = port_.device(rank).refresh_debt(port_.clock());
                    due |= static_cast<unsigned>(std::max(since, owed) + 1) << (4 * rank);
                }
                dut_.i_debt = due;
                dut_.i_enable = 1;
                progress_ = port_.cycle();
            }
        }
    }
    void taken_back() {
        ++result_.hand_overs;
        result_.longest_hand_over = std::max(result_.longest_hand_over, port_.cycle() - asked_);
        gap_ = 1 + random() % t_.longest_gap;
        for (int rank = 0; rank < port_.ranks(); ++rank) {
            const Ddr4Device& device = port_.device(rank);
            for (int g = 0; g < c_.geometry.groups(); ++g)
                for (int b = 0; b < 1 << c_.geometry.bank_bits; ++b)
                    if (device.open_row(g, b) >= 0) error_ = "a row is open after the hand-over";
            if (device.refresh_debt(port_.clock()) > 0)
                error_ = "a refresh is due after the hand-over";
        }
    }

    void drive() {
        const bool more = started_ < t_.bursts;
        if (!ar_valid_ && more && !chance(t_.stall) && chance(16384)) {
            ar_ = draw();
            ar_valid_ = true;
            ++started_;
        }
        if (!aw_valid_ && more && !chance(t_.stall) && chance(16384)) {
            aw_ = draw();
            aw_valid_ = true;
            ++started_;
        }
        if (!w_valid_ && !sending_.empty() && !chance(t_.stall)) prepare_data();
        dut_.s_axi___05Farvalid = ar_valid_;
        dut_.s_axi___05Farid = ar_.id;
        dut_.s_axi___05Faraddr = ar_.address;
        dut_.s_axi___05Farlen = ar_.beats - 1;
        dut_.s_axi___05Farburst = ar_.kind;
        dut_.s_axi___05Farsize = ar_.size;
        dut_.s_axi___05Fawvalid = aw_valid_;
        dut_.s_axi___05Fawid = aw_.id;
        dut_.s_axi___05Fawaddr = aw_.address;
        dut_.s_axi___05Fawlen = aw_.beats - 1;
        dut_.s_axi___05Fawburst = aw_.kind;
        dut_.s_axi___05Fawsize = aw_.size;
        dut_.s_axi___05Fwvalid = w_valid_;
        dut_.s_axi___05Frready = !chance(t_.stall);
        dut_.s_axi___05Fbready = !chance(t_.stall);
    }

    void prepare_data() {
        const Sent& sent = sending_.front();
        dut_.s_axi___05Fwlast = sent_beats_ + 1 == sent.burst.beats;
        dut_.s_axi___05Fwstrb = random();
        if (sent.burst.response == kOkay) {
            const std::size_t log = log_of(sent.burst.address) + sent_beats_;
            const Write& write = logs_[log].writes[sent.index[sent_beats_]];
            std::uint8_t data[kBeatBytes];
            for (int b = 0; b < kBeatBytes; ++b) data[b] = byte(log, b, write.version);
            std::memcpy(&dut_.s_axi___05Fwdata, data, kBeatBytes);
            dut_.s_axi___05Fwstrb = write.strobe;
        }
        w_valid_ = true;
    }

    void sample() {
        if (w_valid_ && dut_.s_axi___05Fwready) {
            w_valid_ = false;
            ++result_.write_beats;
            if (++sent_beats_ == sending_.front().burst.beats) {
                sent_beats_ = 0;
                sending_.pop_front();
            }
        }
        if (ar_valid_ && dut_.s_axi___05Farready) {
            ar_valid_ = false;
            Read read{ar_, 0, {}};
            for (unsigned i = 0; i < ar_.beats && ar_.response == kOkay; ++i)
                read.answered.push_back(logs_[log_of(ar_.address) + i].answered);
            reading_[ar_.id].push_back(std::move(read));
        }
        if (aw_valid_ && dut_.s_axi___05Fawready) {
            aw_valid_ = false;
            Sent sent{aw_, {}};
            for (unsigned i = 0; i < aw_.beats && aw_.response == kOkay; ++i) {
                BeatLog& log = logs_[log_of(aw_.address) + i];
                sent.index.push_back(log.writes.size());
                log.writes.push_back({++version_, chance(16384) ? random() : ~std::uint64_t{0}});
            }
            sending_.push_back(sent);
            answering_[aw_.id].push_back(std::move(sent));
        }
        take_read();
        take_answer();
    }

    void take_read() {
        const bool valid = dut_.s_axi___05Frvalid, last = dut_.s_axi___05Frlast;
        const int id = dut_.s_axi___05Frid, response = dut_.s_axi___05Frresp;
        std::array<std::uint8_t, kBeatBytes> data;
        std::memcpy(data.data(), &dut_.s_axi___05Frdata, kBeatBytes);
        if (r_held_ && (!valid || last != r_last_ || id != r_id_ || response != r_response_ ||
                        (response == kOkay && data != r_data_)))
            error_ = "R changed while it was stalled";
        r_held_ = valid && !dut_.s_axi___05Frready;
        r_last_ = last;
        r_id_ = id;
        r_response_ = response;
        r_data_ = data;
        if (!valid || r_held_) return;
        if (reading_[id].empty()) {
            error_ = "R of no read";
            return;
        }
        Read& read = reading_[id].front();
        if (response != read.burst.response) error_ = "RRESP";
        if (last != (read.done + 1 == read.burst.beats)) error_ = "RLAST";
        if (response == kOkay && error_.empty()) {
            const std::size_t log = log_of(read.burst.address) + read.done;
            for (int b = 0; b < kBeatBytes; ++b) {
                bool found = false;
                for (std::size_t n = read.answered[read.done];
                     !found && n <= logs_[log].writes.size(); ++n)
                    found = after(log, b, n) == data[b];
                if (!found) error_ = "read data";
            }
        }
        ++result_.read_beats;
        progress_ = port_.cycle();
        if (++read.done == read.burst.beats) {
            reading_[id].pop_front();
            ++finished_;
        }
    }

    void take_answer() {
        const bool valid = dut_.s_axi___05Fbvalid;
        const int id = dut_.s_axi___05Fbid, response = dut_.s_axi___05Fbresp;
        if (b_held_ && (!valid || id != b_id_ || response != b_response_))
            error_ = "B changed while it was stalled";
        b_held_ = valid && !dut_.s_axi___05Fbready;
        b_id_ = id;
        b_response_ = response;
        if (!valid || b_held_) return;
        if (answering_[id].empty()) {
            error_ = "B of no write";
            return;
        }
        const Sent& sent = answering_[id].front();
        if (response != sent.burst.response) error_ = "BRESP";
        for (std::size_t i = 0; i < sent.index.size(); ++i) {
            BeatLog& log = logs_[log_of(sent.burst.address) + i];
            log.answered = std::max(log.answered, sent.index[i] + 1);
        }
        answering_[id].pop_front();
        progress_ = port_.cycle();
        ++finished_;
    }

    RandomConfig t_;
    ChannelConfig c_;
    Ddr4Channel port_;
    std::vector<BeatLog> logs_;
    VerilatedContext context_;
    VDramController dut_;
    std::uint64_t state_;
    std::deque<Read> reading_[kIds];
    std::deque<Sent> answering_[kIds], sending_;
    Burst ar_{}, aw_{};
    bool ar_valid_ = false, aw_valid_ = false, w_valid_ = false, was_idle_ = false;
    bool r_held_ = false, r_last_ = false, b_held_ = false;
    int r_id_ = 0, r_response_ = 0, b_id_ = 0, b_response_ = 0;
    std::array<std::uint8_t, kBeatBytes> r_data_{};
    unsigned sent_beats_ = 0;
    std::uint32_t version_ = 0;
    std::uint64_t started_ = 0, finished_ = 0, progress_ = 0, asked_ = 0, gap_ = 0;
    std::uint64_t last_refresh_[ChannelResult::kRanks] = {},
                  calibrated_[ChannelResult::kRanks] = {};
    RandomResult result_{};
    std::string error_;
};

}  // namespace

// Returns 0, or 1 and why in `message`.
extern "C" int random_bench(const RandomConfig* config, RandomResult* result, char* message,
                            std::size_t message_size) {
    Bench bench(*config);
    return report(bench.run(*result), message, message_size);
}
