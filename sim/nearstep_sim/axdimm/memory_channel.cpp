// A memory channel, Verilated, between a host memory controller, a kernel and its DDR4 ranks.
//
// The ranks check every command. Every read of the host and every beat that the kernel reads is
// compared with a second memory, which is written from the host's pins and the kernel's bus.
#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "VMemoryChannel.h"
#include "VMemoryChannel___024root.h"
#include "axdimm/dfi_pins.hpp"
#include "models/dram/hosted.hpp"
#include "verilated.h"

using namespace nearstep;

namespace {

constexpr int kLines = 64;       // of the kernel's register block
constexpr int kChunkBeats = 64;  // a page; a burst is inside one, and no two bursts in the same
constexpr int kIds = 4;
constexpr int kStates = 16, kBanks = 3, kCommands = 16;  // of `channel_commands`
constexpr int kCut = 12;  // cycles before o_kernel_reset in which the kernel's commands may be lost

// Order is the ABI.
struct ChannelConfig {
    HostConfig host;
    Timing timing;
    Geometry geometry;
    Mapping mapping;
    PortConfig port;
    std::uint64_t window_beat;   // first beat of the CSR window
    std::uint64_t kernel_beat;   // first beat of the kernel's region
    std::uint64_t kernel_chunks;
    std::uint64_t seed;
};

// Order is the ABI.
struct ChannelStatistics {
    std::uint64_t cycles, normal_cycles, acceleration_cycles;
    std::uint64_t dram_reads, window_reads, refused_reads;       // of the host
    std::uint64_t dram_writes, window_writes, refused_writes;
    std::uint64_t torn_reads;     // of beats that a kernel write in flight may have reached
    std::uint64_t kernel_beats_read, kernel_beats_written, kernel_resets;
    std::uint64_t mode_changes;
    std::uint64_t split_columns;  // of the host to a rank granted before the other rank
};

enum class Kernel : int { kQuiet, kBusy, kDeaf };  // deaf: it takes no answers

using Beat = std::array<std::uint8_t, kBeatBytes>;
using Line = Beat;

class ChannelBench final : public HostedDram {
  public:
    explicit ChannelBench(const ChannelConfig& config)
        : HostedDram(config.host),
          c_(config),
          dram_(config.timing, config.geometry, config.mapping.ranks(), config.port),
          dut_(&context_),
          banks_(config.geometry.banks()),
          open_(banks_ * config.mapping.ranks(), false),
          row_(banks_ * config.mapping.ranks(), 0),
          random_(config.seed * 2 + 1) {
        for (int rank = 0; rank < config.mapping.ranks(); ++rank)
            model_.push_back(std::make_unique<SparseStorage>(config.geometry));
        for (auto& line : lines_) line.fill(0);
        idle_pins();
        dut_.rst = 1;
        for (int i = 0; i < 2; ++i) tick();
        dut_.rst = 0;
    }

    Ddr4Device& device(int rank) override { return dram_.device(rank); }
    void kernel(Kernel what) { kernel_ = what; }
    void kernel_line(int number, const std::uint8_t* data) {
        std::memcpy(lines_[number].data(), data, kBeatBytes);
    }
    const std::uint8_t* kernel_line(int number) const { return lines_[number].data(); }
    const ChannelStatistics& statistics() const { return statistics_; }
    void commands(std::uint64_t* out) const { std::memcpy(out, commands_, sizeof commands_); }
    bool kernel_idle() const { return bursts_.empty(); }
    int mode() const { return dut_.o_normal | dut_.o_acceleration << 1; }
    const std::string& error() override {
        if (const Violation* found = dram_.violation(); error_.empty() && found)
            error_ = found->text();
        if (error_.empty()) error_ = host_.error();
        return error_;
    }

  private:
    struct Burst {
        bool write;
        int id;
        std::uint64_t beat;  // first
        int beats, moved = 0;
        std::vector<Beat> data;
        std::vector<std::uint64_t> strobes;
    };
    struct Column {
        bool write, window;
        std::uint64_t beat, cycle;
        int rank;
    };
    struct Expected {
        std::uint64_t cycle;
        bool checked;
        Beat data, other;  // either
    };

    std::uint64_t random() {
        random_ ^= random_ >> 12;
        random_ ^= random_ << 25;
        random_ ^= random_ >> 27;
        return random_ * 0x2545F4914F6CDD1Du >> 16;
    }
    void fail(const std::string& text) {
        if (error_.empty()) error_ = text + " in cycle " + std::to_string(statistics_.cycles);
    }
    unsigned nobody() const { return (1u << c_.mapping.ranks()) - 1; }  // chip selects
    Place place(std::uint64_t beat) const { return place_of(beat, c_.mapping, c_.geometry); }
    void read_model(std::uint64_t beat, std::uint8_t* out) const {
        const Place at = place(beat);
        model_[at.rank]->read(at, out);
    }
    void write_model(std::uint64_t beat, const std::uint8_t* data, std::uint64_t keep) {
        const Place at = place(beat);
        model_[at.rank]->write(at, data, keep);
    }
    // Whether the host owns the rank; a change of mode can grant one rank before the other.
    bool passes(int rank) const {
        return dut_.rootp->MemoryChannel__DOT__dram__DOT__switch__DOT__i_pass >> rank & 1;
    }

    void tick() {
        dut_.clk = 1;
        dut_.eval();
        dut_.clk = 0;
        dut_.eval();
    }
    void idle_pins() {
        dut_.host___05Fp0___05Fcs_n = dut_.host___05Fp1___05Fcs_n = nobody();
        dut_.s_axi___05Farsize = dut_.s_axi___05Fawsize = 6;
        dut_.s_axi___05Farburst = dut_.s_axi___05Fawburst = 1;
    }

    bool failed() const override {
        return !error_.empty() || dram_.failed() || !host_.error().empty();
    }
    void step() override {
        check_read_data();
        HostCycle out;
        std::uint8_t rddata[HostCycle::kDataBytes];
        std::memcpy(rddata, &dut_.host___05Frddata, sizeof rddata);
        host_.tick(dut_.host___05Frddata_valid ? rddata : nullptr, out);
        NEARSTEP_HOST_DRIVE(dut_, out, nobody());
        drive_kernel();
        NEARSTEP_DFI_READ(dut_, dfi, dram_);
        dut_.eval();
        NEARSTEP_DFI_CYCLE(dut_, dfi, dram_);
        sample_kernel();
        settle_writes();
        classify();
        count_commands();
        slots_ = out;
        statistics_.normal_cycles += dut_.o_normal;
        statistics_.acceleration_cycles += dut_.o_acceleration;
        const int now = mode();
        statistics_.mode_changes += now != 0 && now != last_mode_;
        if (now) last_mode_ = now;
        follow_host(out);
        tick();
        ++statistics_.cycles;
    }

    // Counts the host's commands of the last cycle, which the arbiters see in this one, by the state
    // of the rank's arbiter and of the bank: closed, open in the host's row, open in another one. Of
    // a command for all banks: whether one is open.
    void count_commands() {
        const auto* root = dut_.rootp;
        for (const HostSlot& each : slots_.slots) {
            if (each.rank < 0) continue;
            unsigned state = root->MemoryChannel__DOT__dram__DOT__arbiter__DOT__fsm_state;
#if NEARSTEP_RANKS > 1
            if (each.rank) state = root->MemoryChannel__DOT__dram__DOT__arbiter1__DOT__fsm_state;
#endif
            const Command command = decode(each.pins);
            const Ddr4Device& device = dram_.device(each.rank);
            int bank = 0;
            if (command >= Command::ACT && command <= Command::PRE) {
                const int number = (each.pins.bg << c_.geometry.bank_bits) | each.pins.ba;
                const std::int64_t row = device.open_row(each.pins.bg, each.pins.ba);
                bank = row < 0 ? 0 : row == row_[each.rank * banks_ + number] ? 1 : 2;
            } else {
                for (int number = 0; number < banks_; ++number)
                    if (device.open_row(number >> c_.geometry.bank_bits,
                                        number & ((1 << c_.geometry.bank_bits) - 1)) >= 0)
                        bank = 1;
            }
            ++commands_[state][bank][int(command)];
        }
    }

    // The host's rows and columns, from its pins; its write data.
    void follow_host(const HostCycle& out) {
        for (int slot = 0; slot < HostCycle::kSlots; ++slot) {
            const HostSlot& each = out.slots[slot];
            if (each.rank < 0) continue;
            const Pins& pins = each.pins;
            const int first = each.rank * banks_;
            const int bank = first + ((pins.bg << c_.geometry.bank_bits) | pins.ba);
            switch (const Command command = decode(pins)) {
                case Command::ACT:
                    open_[bank] = true;
                    row_[bank] = pins.address;
                    break;
                case Command::PRE: open_[bank] = false; break;
                case Command::PREA:
                    std::fill_n(open_.begin() + first, banks_, false);
                    break;
                case Command::RD:
                case Command::RDA:
                case Command::WR:
                case Command::WRA: {
                    const bool write = command == Command::WR || command == Command::WRA;
                    const std::uint64_t beat =
                        beat_of({pins.bg, pins.ba, row_[bank], pins.address & kColumnMask,
                                 static_cast<std::uint32_t>(each.rank)},
                                c_.mapping);
                    columns_.push_back(
                        {write, beat >= c_.window_beat, beat, statistics_.cycles, each.rank});
                    if (!open_[bank]) fail("host column of a closed bank");
                    if (command == Command::RDA || command == Command::WRA) open_[bank] = false;
                    break;
                }
                default: break;
            }
        }
        if (out.wrdata_en) {
            if (writes_.empty()) return fail("host write data of no command");
            Write& write = writes_.front();
            std::memcpy(write.data.data() + write.half * HostCycle::kDataBytes, out.wrdata,
                        HostCycle::kDataBytes);
            write.keep |= std::uint64_t(out.wrdata_mask) << (write.half * HostCycle::kDataBytes);
            if (++write.half == 2) {
                if (write.passed) {
                    write_model(write.beat, write.data.data(), write.keep);
                    torn_.erase(write.beat);
                }
                writes_.pop_front();
            }
        }
    }

    // Whether the column command of the last cycle passes, and what it must return.
    void classify() {
        while (!columns_.empty() && columns_.front().cycle + 1 == statistics_.cycles) {
            const Column column = columns_.front();
            columns_.pop_front();
            const bool passed = passes(column.rank);
            if (dut_.o_normal && !passed) return fail("normal mode without a rank");
            statistics_.split_columns += passed && !dut_.o_normal;
            if (column.write) {
                ++(column.window ? statistics_.window_writes
                                 : passed ? statistics_.dram_writes : statistics_.refused_writes);
                writes_.push_back({column.beat, passed && !column.window, 0, 0, {}});
                continue;
            }
            ++(column.window ? statistics_.window_reads
                             : passed ? statistics_.dram_reads : statistics_.refused_reads);
            Expected expected{column.cycle + c_.host.read_latency, !column.window, {}, {}};
            expected.data.fill(0);
            if (passed && !column.window) read_model(column.beat, expected.data.data());
            expected.other = expected.data;
            if (const auto torn = torn_.find(column.beat); passed && torn != torn_.end()) {
                expected.other = torn->second;
                ++statistics_.torn_reads;
            }
            expected_.push_back(expected);
        }
    }

    void check_read_data() {
        const bool valid = dut_.host___05Frddata_valid;
        const bool due = !expected_.empty() && expected_.front().cycle <= statistics_.cycles;
        if (valid != due) return fail(valid ? "read data too early" : "read data missing");
        if (!valid) return;
        Expected& expected = expected_.front();
        const int half = static_cast<int>(statistics_.cycles - expected.cycle);
        const std::size_t offset = half * HostCycle::kDataBytes;
        if (expected.checked &&
            std::memcmp(&dut_.host___05Frddata, expected.data.data() + offset, HostCycle::kDataBytes) &&
            std::memcmp(&dut_.host___05Frddata, expected.other.data() + offset, HostCycle::kDataBytes))
            fail("host read data differ");
        if (half == 1) expected_.pop_front();
    }

    // Random bursts in the kernel's region, and its register lines.
    void drive_kernel() {
        if (kernel_ == Kernel::kBusy && bursts_.size() < 12 && random() % 4 == 0) start_burst();
        Burst* address[2] = {nullptr, nullptr};
        for (auto& burst : bursts_)
            if (!burst->sent && !address[burst->burst.write]) address[burst->burst.write] = &burst->burst;
        dut_.s_axi___05Farvalid = address[0] != nullptr;
        if (address[0]) {
            dut_.s_axi___05Farid = address[0]->id;
            dut_.s_axi___05Faraddr = address[0]->beat * kBeatBytes;
            dut_.s_axi___05Farlen = address[0]->beats - 1;
        }
        dut_.s_axi___05Fawvalid = address[1] != nullptr;
        if (address[1]) {
            dut_.s_axi___05Fawid = address[1]->id;
            dut_.s_axi___05Fawaddr = address[1]->beat * kBeatBytes;
            dut_.s_axi___05Fawlen = address[1]->beats - 1;
        }
        const Burst* sending = first_sending();
        dut_.s_axi___05Fwvalid = sending != nullptr;
        if (sending) {
            std::memcpy(&dut_.s_axi___05Fwdata, sending->data[sending->moved].data(), kBeatBytes);
            dut_.s_axi___05Fwstrb = sending->strobes[sending->moved];
            dut_.s_axi___05Fwlast = sending->moved == sending->beats - 1;
        }
        dut_.s_axi___05Frready = dut_.s_axi___05Fbready = kernel_ != Kernel::kDeaf;
        std::memcpy(&dut_.kernel___05Fread_data, line_out_.data(), kBeatBytes);
    }

    static constexpr std::uint64_t kNever = UINT64_MAX / 2;
    struct Open {
        Burst burst;
        bool sent = false;
        std::uint64_t answered = kNever;
    };

    Burst* first_sending() {
        for (auto& each : bursts_)
            if (each->burst.write && each->sent && each->burst.moved < each->burst.beats)
                return &each->burst;
        return nullptr;
    }

    void start_burst() {
        const std::uint64_t chunk = random() % c_.kernel_chunks;
        const std::uint64_t first = c_.kernel_beat + chunk * kChunkBeats;
        for (const auto& each : bursts_)
            if (each->burst.beat / kChunkBeats == first / kChunkBeats) return;
        if (tainted_.count(first / kChunkBeats)) return;
        auto open = std::make_unique<Open>();
        Burst& burst = open->burst;
        burst.write = random() % 2;
        burst.id = static_cast<int>(random() % kIds);
        const int skip = random() % 2 ? 0 : static_cast<int>(random() % kChunkBeats);
        burst.beat = first + skip;
        burst.beats = 1 + static_cast<int>(random() % (kChunkBeats - skip));
        for (int i = 0; burst.write && i < burst.beats; ++i) {
            Beat data;
            for (auto& byte : data) byte = static_cast<std::uint8_t>(random());
            burst.data.push_back(data);
            burst.strobes.push_back(random() % 8 ? ~std::uint64_t{0} : random() << 20 ^ random());
            torn_[burst.beat + i] = merged(burst, i);
        }
        bursts_.push_back(std::move(open));
    }
    Beat merged(const Burst& burst, int i) const {
        Beat beat;
        read_model(burst.beat + i, beat.data());
        for (int byte = 0; byte < kBeatBytes; ++byte)
            if (burst.strobes[i] >> byte & 1) beat[byte] = burst.data[i][byte];
        return beat;
    }

    template <typename Match>
    std::deque<std::unique_ptr<Open>>::iterator oldest(Match match) {
        for (auto it = bursts_.begin(); it != bursts_.end(); ++it)
            if (match(**it)) return it;
        return bursts_.end();
    }

    void sample_kernel() {
        if (dut_.s_axi___05Fwvalid && dut_.s_axi___05Fwready) ++first_sending()->moved;
        for (const bool write : {false, true})
            if (write ? dut_.s_axi___05Fawvalid && dut_.s_axi___05Fawready
                      : dut_.s_axi___05Farvalid && dut_.s_axi___05Farready)
                (*oldest([&](const Open& o) { return !o.sent && o.burst.write == write; }))->sent = true;
        if (dut_.s_axi___05Frvalid && dut_.s_axi___05Frready) take_beat();
        if (dut_.s_axi___05Fbvalid && dut_.s_axi___05Fbready) take_response();
        line_out_ = lines_[dut_.kernel___05Fread_address];
        if (dut_.kernel___05Fwrite) {
            Line& line = lines_[dut_.kernel___05Fwrite_address];
            const auto* data = reinterpret_cast<const std::uint8_t*>(&dut_.kernel___05Fwrite_data);
            for (int i = 0; i < kBeatBytes; ++i)
                if (dut_.kernel___05Fwrite_mask >> i & 1) line[i] = data[i];
        }
        if (dut_.o_kernel_reset) {
            ++statistics_.kernel_resets;
            // Writes in flight are done or lost: torn_ has their data, their page is not used again
            for (const auto& each : bursts_) tainted_.insert(each->burst.beat / kChunkBeats);
            bursts_.clear();
        }
    }
    void take_beat() {
        const int id = dut_.s_axi___05Frid;
        const auto found = oldest([&](const Open& o) {
            return o.sent && !o.burst.write && o.burst.id == id && o.burst.moved < o.burst.beats;
        });
        if (found == bursts_.end() || dut_.s_axi___05Frresp) return fail("unexpected R");
        Burst& burst = (*found)->burst;
        const std::uint64_t beat = burst.beat + burst.moved;
        Beat expected;
        read_model(beat, expected.data());
        const auto torn = torn_.find(beat);
        const auto* data = reinterpret_cast<const std::uint8_t*>(&dut_.s_axi___05Frdata);
        if (std::memcmp(data, expected.data(), kBeatBytes)) {
            if (torn == torn_.end() || std::memcmp(data, torn->second.data(), kBeatBytes))
                return fail("kernel read data differ at beat " + std::to_string(beat));
        }
        ++statistics_.kernel_beats_read;
        const bool last = ++burst.moved == burst.beats;
        if (bool(dut_.s_axi___05Frlast) != last) fail("RLAST in the wrong place");
        if (last) bursts_.erase(found);
    }
    void take_response() {
        const int id = dut_.s_axi___05Fbid;
        const auto found = oldest([&](const Open& o) {
            return o.sent && o.burst.write && o.burst.id == id && o.burst.moved == o.burst.beats &&
                   o.answered == kNever;
        });
        if (found == bursts_.end() || dut_.s_axi___05Fbresp) return fail("unexpected B");
        (*found)->answered = statistics_.cycles;
    }
    // A write counts as done once no reset has followed its answer for kCut cycles.
    void settle_writes() {
        for (auto it = bursts_.begin(); it != bursts_.end();) {
            if ((*it)->answered + kCut > statistics_.cycles) {
                ++it;
                continue;
            }
            const Burst& burst = (*it)->burst;
            for (int i = 0; i < burst.beats; ++i) {
                write_model(burst.beat + i, burst.data[i].data(), ~burst.strobes[i]);
                torn_.erase(burst.beat + i);
                ++statistics_.kernel_beats_written;
            }
            it = bursts_.erase(it);
        }
    }

    struct Write {
        std::uint64_t beat;
        bool passed;
        int half;
        std::uint64_t keep;
        Beat data;
    };

    ChannelConfig c_;
    Ddr4Channel dram_;
    VerilatedContext context_;
    VMemoryChannel dut_;
    std::vector<std::unique_ptr<SparseStorage>> model_;  // what each rank holds
    int banks_;                                          // of a rank
    std::vector<bool> open_;
    std::vector<std::uint32_t> row_;
    std::uint64_t random_;
    std::deque<Column> columns_;
    std::deque<Write> writes_;
    std::deque<Expected> expected_;
    std::deque<std::unique_ptr<Open>> bursts_;
    std::map<std::uint64_t, Beat> torn_;  // beats of unanswered kernel writes: the new contents
    std::set<std::uint64_t> tainted_;
    std::array<Line, kLines> lines_;
    Line line_out_{};
    Kernel kernel_ = Kernel::kQuiet;
    int last_mode_ = 1;
    HostCycle slots_{};  // of the last cycle
    std::uint64_t commands_[kStates][kBanks][kCommands] = {};
    ChannelStatistics statistics_{};
};

}  // namespace

extern "C" {

HostedDram* channel_new(const ChannelConfig* config) {
    return guarded([&] { return new ChannelBench(*config); });
}
void channel_kernel(ChannelBench* bench, int what) { bench->kernel(static_cast<Kernel>(what)); }
int channel_kernel_idle(const ChannelBench* bench) { return bench->kernel_idle(); }
int channel_mode(const ChannelBench* bench) { return bench->mode(); }
void channel_statistics(const ChannelBench* bench, ChannelStatistics* out) {
    *out = bench->statistics();
}
void channel_commands(const ChannelBench* bench, std::uint64_t* out) { bench->commands(out); }
void channel_kernel_line(const ChannelBench* bench, int number, std::uint8_t* out) {
    std::memcpy(out, bench->kernel_line(number), kBeatBytes);
}
void channel_set_kernel_line(ChannelBench* bench, int number, const std::uint8_t* data) {
    bench->kernel_line(number, data);
}

}  // extern "C"
