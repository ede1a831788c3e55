// The DDR4 controller between traffic like the Adam kernel's and the DDR4 rank model.
//
// The bus traffic of KernelCore: blocks of four arrays read round robin into buffers of two blocks
// each, three results stored from buffers of two blocks each, a burst issued only with its space or
// its data in the buffer. The traffic is made in C++, so that block sizes and rates can be swept
// without a build for each. Every beat read is compared, and every beat written at the end.
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

constexpr int kReads = 4, kWrites = 3, kLanes = kBeatBytes / 4;
constexpr int kWords = kBeatBytes / 8;
using Beat = std::array<std::uint64_t, kWords>;

// Order is the ABI.
struct TrafficConfig {
    ChannelConfig channel;
    std::int32_t block_beats, burst_beats;
    std::int32_t cycles_per_beat;  // of the functional units
    std::int32_t compute_latency;
    std::int32_t bursts_ahead;
    std::int32_t padding;
};

Beat filled(std::uint64_t beat, std::uint64_t seed) {
    Beat out;
    for (int i = 0; i < kWords; ++i) out[i] = mix(seed ^ (beat * kWords + i));
    return out;
}

Beat updated(const Beat& own, const Beat& gradient, std::uint64_t stream) {
    Beat out;
    for (int i = 0; i < kWords; ++i) out[i] = mix(own[i] ^ (gradient[i] * (2 * stream + 3)));
    return out;
}

struct Burst {
    int stream;
    std::uint64_t first;  // beat of the array
    int beats;
};

// Bursts of several arrays, block by block, round robin.
class Schedule {
  public:
    Schedule(std::vector<std::uint64_t> bases, std::uint64_t beats, const TrafficConfig& t)
        : streams_(static_cast<int>(bases.size())), beats_(beats), t_(t), bases_(std::move(bases)) {}
    bool done() const { return block_ >= beats_; }
    Burst peek() const {
        const std::uint64_t block_end = std::min(beats_, block_ + t_.block_beats);
        const std::uint64_t burst = static_cast<std::uint64_t>(t_.burst_beats);
        const std::uint64_t shift = bases_[stream_] % burst;  // bursts end at page boundaries
        const std::uint64_t page = (at_ + shift) / burst * burst + burst - shift;
        return {stream_, at_, static_cast<int>(std::min(block_end, page) - at_)};
    }
    void next() {
        at_ += peek().beats;
        if (at_ < std::min(beats_, block_ + t_.block_beats)) return;
        if (++stream_ == streams_) {
            stream_ = 0;
            block_ += t_.block_beats;
        }
        at_ = block_;
    }

  private:
    int streams_;
    std::uint64_t beats_;
    const TrafficConfig& t_;
    std::vector<std::uint64_t> bases_;  // in beats
    int stream_ = 0;
    std::uint64_t block_ = 0, at_ = 0;
};

class Bench {
  public:
    explicit Bench(const TrafficConfig& config)
        : t_(config),
          c_(config.channel),
          port_(c_.timing, c_.geometry, c_.mapping.ranks(), c_.port),
          beats_((c_.count + kLanes - 1) / kLanes),
          dut_(&context_),
          read_schedule_({beat_of(0, 0), beat_of(1, 0), beat_of(2, 0), beat_of(3, 0)}, beats_, t_),
          write_schedule_({beat_of(0, 0), beat_of(2, 0), beat_of(3, 0)}, beats_, t_) {}

    std::string run(ChannelResult& result) {
        if (!c_.trace(port_)) return "the commands cannot be written";
        fill();
        dut_.s_axi___05Frready = dut_.s_axi___05Fbready = 1;
        dut_.s_axi___05Farsize = dut_.s_axi___05Fawsize = 6;
        dut_.s_axi___05Farburst = dut_.s_axi___05Fawburst = 1;
        dut_.s_axi___05Fwstrb = ~std::uint64_t{0};
        dut_.rst = 1;
        for (int i = 0; i < 2; ++i) tick(dut_);
        dut_.rst = 0;
        dut_.i_enable = 1;
        dut_.i_debt = c_.debt;
        for (int i = 0; i < 4; ++i) step(false);
        dut_.i_clear_slots = 1;
        step(false);
        dut_.i_clear_slots = 0;
        const std::uint64_t limit = 10000 + beats_ * 40;
        std::uint64_t cycles = 0;
        while (acknowledged_ < kWrites * beats_) {
            step(true);
            ++cycles;
            if (!error_.empty()) return error_;
            if (port_.failed()) return port_.violation()->text();
            if (cycles > limit) return "hang: " + std::to_string(acknowledged_) + " beats done";
        }
        result.cycles = cycles;
        take_counters(dut_, port_, result);
        slots_.take(dut_, result);
        for (int i = 0; i < 16; ++i) step(false);  // the last data
        return verify(result);
    }

  private:
    std::uint64_t beat_of(int stream, std::uint64_t i) const {
        return c_.base[stream] / kBeatBytes + i;
    }
    static int array_of(int write_stream) { return write_stream == 0 ? 0 : write_stream + 1; }

    void fill() {
        for (int s = 0; s < kReads; ++s)
            for (std::uint64_t i = 0; i < beats_; ++i) {
                const std::uint64_t beat = beat_of(s, i);
                const Beat data = filled(beat, c_.seed);
                port_.store(place_of(beat, c_.mapping, c_.geometry),
                                        reinterpret_cast<const std::uint8_t*>(data.data()), 0);
            }
    }
    std::string verify(ChannelResult& result) {
        for (int w = 0; w < kWrites; ++w)
            for (std::uint64_t i = 0; i < beats_; ++i) {
                const std::uint64_t beat = beat_of(array_of(w), i);
                const Beat want = updated(filled(beat, c_.seed), filled(beat_of(1, i), c_.seed), w);
                Beat found;
                port_.load(place_of(beat, c_.mapping, c_.geometry),
                                       reinterpret_cast<std::uint8_t*>(found.data()));
                if (found != want) return "memory differs at beat " + std::to_string(beat);
                ++checked_;
            }
        result.checks = checked_;
        return port_.failed() ? port_.violation()->text() : error_;
    }

    void step(bool traffic) {
        if (traffic) drive();
        NEARSTEP_DFI_READ(dut_, dfi, port_);
        dut_.eval();
        if (traffic) sample();
        NEARSTEP_DFI_CYCLE(dut_, dfi, port_);
        slots_.observe(dut_);
        tick(dut_);
        ++cycle_;
    }

    // The functional units: a beat of every input, every so many cycles, if the results have room.
    void compute() {
        if (cycle_ < next_compute_) return;
        for (auto& queue : landed_)
            if (queue.empty()) return;
        for (int w = 0; w < kWrites; ++w)
            if (held_[w] >= 2 * t_.block_beats) return;
        next_compute_ = cycle_ + t_.cycles_per_beat;
        std::array<Beat, kWrites> out;
        for (int w = 0; w < kWrites; ++w) {
            out[w] = updated(landed_[array_of(w)].front(), landed_[1].front(), w);
            ++held_[w];
        }
        for (auto& queue : landed_) queue.pop_front();
        for (int& credit : credit_) ++credit;
        computing_.push_back({cycle_ + t_.compute_latency, out});
    }

    void drive() {
        compute();
        while (!computing_.empty() && computing_.front().first <= cycle_) {
            for (int w = 0; w < kWrites; ++w) {
                produced_[w].push_back(computing_.front().second[w]);
                ++ready_[w];
            }
            computing_.pop_front();
        }
        if (!ar_valid_ && !read_schedule_.done() && outstanding_reads_ < t_.bursts_ahead) {
            const Burst burst = read_schedule_.peek();
            if (credit_[burst.stream] + 2 * t_.block_beats >= burst.beats) {
                credit_[burst.stream] -= burst.beats;
                ++outstanding_reads_;
                ar_ = burst;
                ar_valid_ = true;
                read_schedule_.next();
            }
        }
        if (!aw_valid_ && !write_schedule_.done()) {
            const Burst burst = write_schedule_.peek();
            if (ready_[burst.stream] >= burst.beats && outstanding_writes_[burst.stream] < t_.bursts_ahead) {
                ready_[burst.stream] -= burst.beats;
                ++outstanding_writes_[burst.stream];
                aw_ = burst;
                aw_valid_ = true;
                write_schedule_.next();
            }
        }
        dut_.s_axi___05Farvalid = ar_valid_;
        dut_.s_axi___05Farid = ar_.stream;
        dut_.s_axi___05Faraddr = beat_of(ar_.stream, ar_.first) * kBeatBytes;
        dut_.s_axi___05Farlen = ar_.beats - 1;
        dut_.s_axi___05Fawvalid = aw_valid_;
        dut_.s_axi___05Fawid = aw_.stream;
        dut_.s_axi___05Fawaddr = beat_of(array_of(aw_.stream), aw_.first) * kBeatBytes;
        dut_.s_axi___05Fawlen = aw_.beats - 1;
        dut_.s_axi___05Fwvalid = !sending_.empty();
        if (!sending_.empty()) {
            const Burst& burst = sending_.front();
            std::memcpy(&dut_.s_axi___05Fwdata, produced_[burst.stream].front().data(), kBeatBytes);
            dut_.s_axi___05Fwlast = burst.beats == 1;
        }
    }

    void sample() {
        if (dut_.s_axi___05Fwvalid && dut_.s_axi___05Fwready) {
            Burst& burst = sending_.front();
            produced_[burst.stream].pop_front();
            --held_[burst.stream];
            if (--burst.beats == 0) sending_.pop_front();
        }
        if (ar_valid_ && dut_.s_axi___05Farready) {
            ar_valid_ = false;
            reading_[ar_.stream].push_back(ar_);
        }
        if (aw_valid_ && dut_.s_axi___05Fawready) {
            aw_valid_ = false;
            sending_.push_back(aw_);
            answering_[aw_.stream].push_back(aw_.beats);
        }
        if (dut_.s_axi___05Frvalid) read_beat();
        if (dut_.s_axi___05Fbvalid) {
            const int stream = dut_.s_axi___05Fbid;
            if (dut_.s_axi___05Fbresp || answering_[stream].empty()) {
                error_ = "unexpected B";
                return;
            }
            acknowledged_ += answering_[stream].front();
            answering_[stream].pop_front();
            --outstanding_writes_[stream];
        }
    }

    void read_beat() {
        const int stream = dut_.s_axi___05Frid;
        if (dut_.s_axi___05Frresp || reading_[stream].empty()) {
            error_ = "unexpected R";
            return;
        }
        Burst& burst = reading_[stream].front();
        Beat found;
        std::memcpy(found.data(), &dut_.s_axi___05Frdata, kBeatBytes);
        if (found != filled(beat_of(stream, burst.first), c_.seed)) {
            error_ = "data of array " + std::to_string(stream) + " differ at beat " +
                     std::to_string(burst.first);
            return;
        }
        ++checked_;
        landed_[stream].push_back(found);
        ++burst.first;
        --burst.beats;
        if (bool(dut_.s_axi___05Frlast) != (burst.beats == 0)) error_ = "RLAST in the wrong place";
        if (burst.beats == 0) {
            reading_[stream].pop_front();
            --outstanding_reads_;
        }
    }

    TrafficConfig t_;
    ChannelConfig c_;
    Ddr4Channel port_;
    std::uint64_t beats_;
    SlotSpan slots_;
    VerilatedContext context_;
    VDramController dut_;
    Schedule read_schedule_, write_schedule_;
    std::deque<Beat> landed_[kReads], produced_[kWrites];
    std::deque<Burst> reading_[kReads], sending_;
    std::deque<int> answering_[kWrites];
    std::deque<std::pair<std::uint64_t, std::array<Beat, kWrites>>> computing_;
    int credit_[kReads] = {};  // beats given back less beats asked for
    int held_[kWrites] = {}, ready_[kWrites] = {}, outstanding_writes_[kWrites] = {};
    int outstanding_reads_ = 0;
    Burst ar_{}, aw_{};
    bool ar_valid_ = false, aw_valid_ = false;
    std::uint64_t cycle_ = 0, next_compute_ = 0, acknowledged_ = 0, checked_ = 0;
    std::string error_;
};

}  // namespace

// Returns 0, or 1 and why in `message`.
extern "C" int traffic_bench(const TrafficConfig* config, ChannelResult* result, char* message,
                             std::size_t message_size) {
    Bench bench(*config);
    return report(bench.run(*result), message, message_size);
}
