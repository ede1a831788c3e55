// A DIMM in this process: a host memory controller, the RTL, and for each channel DDR4 ranks that
// judge every command.
//
// The RTL is the module as it is shipped (NEARSTEP_WHOLE, `dimm_whole.hpp`), or its channels and
// their functional units as Verilated objects of their own (`dimm_parts.hpp`).
//
// The ranks of the host's bus are those of channel 0, then those of channel 1 and so on; a channel
// sees the commands of its chip selects and all write data, and the read data of the channel that
// drives them reach the host. In each cycle the channels are settled with what host, ranks and units
// drive; then all are clocked.
//
// The host's commands depend on its requests, never on read data, and no channel depends on
// another. So the host is simulated for up to kAhead cycles, then the RTL for the same cycles, each
// separately Verilated part in its own thread if there are enough; then the host's read data are
// copied out. Every access to channels, data or faults first simulates the pending cycles of the
// channels. Bits and cycles equal those of a simulation cycle by cycle, except that after a fault
// the whole DIMM has been simulated to the end of the pending cycles, for any number of threads.

#include <algorithm>
#include <array>
#include <cstring>
#include <deque>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "models/dram/hosted.hpp"
#include "verilate/context.hpp"
#include "axdimm/dimm_memory.hpp"
#if NEARSTEP_WHOLE
#include "axdimm/dimm_whole.hpp"
#else
#include "axdimm/dimm_parts.hpp"
#endif
#include "verilate/history.hpp"
#include "verilate/thread_pool.hpp"

namespace nearstep {
namespace {

#if NEARSTEP_WHOLE
using Rtl = Whole;
#else
using Rtl = Parts;
#endif

constexpr unsigned kQueued = 32;              // most accesses queued in the host's controller
constexpr unsigned kSettleCycles = 8;         // from the host's last data to the register they set
constexpr unsigned kPollInterval = 64;        // cycles between looks at a register in a wait
constexpr unsigned kAhead = kPollInterval;    // most cycles of the host before the channels'
constexpr std::uint64_t kAccessCycles = 100'000;  // an access that takes longer has hung
constexpr std::uint64_t kSliceCycles = 4096;      // see shell_device.hpp
constexpr unsigned kWorthThread = 8;              // least cycles of a job for running threads
constexpr unsigned kResetCycles = 4;
constexpr std::uint64_t kForever = ~std::uint64_t{0};

// Tags of accesses: number of a submitted transfer, from 1, and of its line. Number 0 is the
// transfer of the current call: loads are numbered over all calls, every store has tag kOwn.
constexpr unsigned kLineBits = 40;
constexpr std::uint64_t kOwn = (std::uint64_t{1} << kLineBits) - 1;

enum Status : std::int32_t {  // see shell_device.hpp
    kDone = 0, kTimeout = -1, kFaulted = -2, kHung = -3, kMore = -5
};

struct Poll {
    std::uint64_t address;
    std::uint32_t mask, value;
};

struct ChannelCounters {
    std::uint64_t activates, reads, writes, precharges, refreshes;
};

// A cycle that is simulated for the host and not yet for the channels.
struct Ahead {
    HostCycle host;
    enum Due { nothing, first, second } due;  // which half of a beat a channel drives
    std::uint8_t* to;  // destination of the beat, used with its second half; null: dropped
};

class Dimm {
  public:
    explicit Dimm(const DimmOptions& options)
        : channel_lines_(options.channel_beats()),
          window_lines_(options.window_bytes / kBeatBytes),
          read_latency_(options.host.read_latency),
          host_(options.host),
          contexts_(VM_TRACE ? 1 : Rtl::count(options)),  // a VCD has one context
          memories_(memories_of(options)),
          rtl_(options, memories_, contexts_),
          parts_(Rtl::count(options)),
          read_data_(parts_),
          threads_(VM_TRACE ? 1 : options.threads, parts_) {
#if VM_TRACE
        if (options.trace != nullptr) {
            contexts_[0].traceEverOn(true);
            trace_ = std::make_unique<VerilatedVcdC>();
            rtl_.trace(trace_.get());
            trace_->open(options.trace);
        }
#endif
        for (unsigned i = 0; i < kResetCycles; ++i) rtl_.reset_cycle(i + 1 == kResetCycles);
    }

    ~Dimm() {
#if VM_TRACE
        if (trace_) trace_->close();
#endif
    }

    // Lines from `first` on, through the host's bus.
    std::int32_t read(std::uint64_t first, std::uint8_t* out, std::uint64_t lines) {
        return read(first, out, lines, kSliceCycles);
    }

    std::int32_t write(std::uint64_t first, const std::uint8_t* data, std::uint64_t lines) {
        const std::uint64_t slice = host_.cycle() + kSliceCycles;
        Transfer& t = begin("W", first, lines, nullptr);
        while (t.taken < lines || (submitted_.empty() && !host_.idle())) {
            if (host_.cycle() >= slice) return more();
            for (; t.given < lines && host_.waiting() < kQueued; ++t.given) {
                host_.store(first + t.given, data + t.given * kBeatBytes, 0, kOwn);
                t.limit = host_.cycle() + kAccessCycles;
            }
            step();
            if (fault_) return end(kFaulted);
            if (host_.cycle() > t.limit) return end(kHung);
        }
        if (end(kDone) != kDone) return kFaulted;
        const std::uint64_t channel = first / channel_lines_;
        const std::uint64_t inside = first % channel_lines_;
        if (inside + lines > channel_lines_ - window_lines_) {
            const std::int32_t status = run(kSettleCycles);
            rtl_.configure(channel);
            return status;
        }
        memories_[channel]->states().mark(inside, inside + lines, LineState::written);
        return kDone;
    }

    // Queues a transfer, which is carried out while other calls are. Returns its number; `data`
    // must stay valid until the transfer has ended. Accesses of calls are issued before its lines.
    std::uint64_t submit(std::uint64_t first, std::uint8_t* data, std::uint64_t lines, bool writes) {
        submitted_.push_back({++last_submitted_, first, lines, 0, 0, data, writes});
        moved_at_ = host_.cycle();
        log(writes ? "W" : "R", first, lines);
        return last_submitted_;
    }

    // Number of submitted transfers that have ended; transfers end in order.
    std::uint64_t ended() const { return last_submitted_ - submitted_.size(); }

    // Cycle in which the next transfer ended that this was not called for; 0 if none has.
    std::uint64_t next_end() {
        if (ends_.empty()) return 0;
        const std::uint64_t cycle = ends_.front();
        ends_.pop_front();
        return cycle;
    }

    // Drops all submitted transfers; see `abandon`.
    void withdraw() {
        settle();
        for (const Submitted& t : submitted_)
            if (t.writes && t.given) mark(t.first, t.given, LineState::written);
        submitted_.clear();
    }

    // Runs until a poll holds, a submitted transfer ends, or cycle `limit`.
    std::int32_t advance(const Poll* polls, std::size_t count, std::uint64_t limit) {
        const std::uint64_t slice = host_.cycle() + kSliceCycles, ended_before = ended();
        for (;;) {
            bool holds = false;
            const std::int32_t status = look(polls, count, holds);
            if (status != kDone || holds || ended() != ended_before) return end(status);
            const std::uint64_t interval = count ? kPollInterval : kSliceCycles;
            for (std::uint64_t i = 0; i < interval; ++i) {
                if (host_.cycle() >= limit) return end(kDone);
                step();
                if (fault_) return end(kFaulted);
                if (ended() != ended_before) return end(kDone);
                if (!submitted_.empty() && host_.cycle() > moved_at_ + kAccessCycles)
                    return end(kHung);
            }
            if (host_.cycle() >= slice) return end(kMore);
        }
    }

    // Drops the rest of a transfer that returned `kMore`: accesses in the host's controller are
    // carried out, and their read data dropped.
    void abandon() {
        if (!transfer_.begun) return;
        transfer_.begun = false;
        transfer_.out = nullptr;
        settle();
        if (!transfer_.writes || !transfer_.given) return;
        const std::uint64_t inside = transfer_.first % channel_lines_;
        if (inside + transfer_.given <= channel_lines_ - window_lines_)
            mark(transfer_.first, transfer_.given, LineState::written);
    }

    std::int32_t run(std::uint64_t cycles) {
        for (std::uint64_t i = 0; i < cycles; ++i) {
            step();
            if (fault_) break;
        }
        return end(fault_ ? kFaulted : kDone);
    }

    // Reads the registers in turn through the host's bus until one poll holds.
    std::int32_t wait(const Poll* polls, std::size_t count, std::uint64_t max_cycles) {
        const std::uint64_t limit = host_.cycle() + std::min(max_cycles, kForever - host_.cycle());
        const std::uint64_t slice = host_.cycle() + kSliceCycles;
        for (;;) {
            bool holds = false;
            const std::int32_t status = look(polls, count, holds);
            if (status != kDone || holds) return status;
            if (host_.cycle() >= limit) return kTimeout;
            if (run(std::min<std::uint64_t>(kPollInterval, limit - host_.cycle())) != kDone)
                return kFaulted;
            if (host_.cycle() >= slice) return kMore;
        }
    }

    void mark(std::uint64_t first, std::uint64_t lines, LineState state) {
        while (lines) {
            const std::uint64_t inside = first % channel_lines_;
            const std::uint64_t n = std::min(lines, channel_lines_ - inside);
            memories_[first / channel_lines_]->states().mark(inside, inside + n, state);
            first += n;
            lines -= n;
        }
    }
    LineState state(std::uint64_t line) const {
        return memories_[line / channel_lines_]->states().of(line % channel_lines_);
    }

    // Whether kernel accesses are checked. A broken DDR4 rule is kept: its rank is lost.
    void watch(bool on) {
        for (auto& memory : memories_) memory->judge(on);
        if (on || fault_.kind == FaultKind::protocol) return;
        fault_ = {};
        for (auto& memory : memories_) memory->fault = {};
        settle();
    }

    std::uint64_t cycle() const { return host_.cycle(); }
    const Fault& fault() const { return fault_; }
    const History& history() const { return history_; }
    HostController& host() { return host_; }
    ChannelMemory& memory(unsigned channel) { return *memories_[channel]; }
    ThreadPool& threads() { return threads_; }
    std::size_t channels() const { return memories_.size(); }

  private:
    static Memories memories_of(const DimmOptions& options) {
        Memories memories;
        for (unsigned c = 0; c < options.channels(); ++c)
            memories.push_back(std::make_unique<ChannelMemory>(options, c));
        return memories;
    }

    std::int32_t look(const Poll* polls, std::size_t count, bool& holds) {
        for (std::size_t i = 0; i < count; ++i) {
            std::uint8_t line[kBeatBytes];
            const std::int32_t status = read(polls[i].address / kBeatBytes, line, 1, kForever);
            if (status != kDone) return status;
            std::uint32_t word;
            std::memcpy(&word, line + polls[i].address % kBeatBytes, sizeof word);
            if ((holds = (word & polls[i].mask) == polls[i].value)) break;
        }
        return kDone;
    }

    struct Submitted {
        std::uint64_t number, first, lines, given, taken;
        std::uint8_t* data;
        bool writes;
    };

    // Issues lines of the submitted transfers to the host's controller, in order.
    void give_submitted() {
        for (Submitted& t : submitted_) {
            for (; t.given < t.lines; ++t.given) {
                if (host_.waiting() >= kQueued) return;
                const std::uint64_t line = t.first + t.given, tag = t.number << kLineBits | t.given;
                if (t.writes)
                    host_.store(line, t.data + t.given * kBeatBytes, 0, tag);
                else
                    host_.load(line, tag);
            }
        }
    }

    // Counts the accesses done in a cycle. `catch_up` copies the data of its load, at most one.
    void take_moved(Ahead& cycle) {
        for (auto& stored = host_.stored(); !stored.empty(); stored.pop_front()) took(stored.front());
        for (auto& done = host_.completions(); !done.empty(); done.pop_front())
            cycle.to = took(done.front().tag);
        while (!submitted_.empty() && submitted_.front().taken == submitted_.front().lines) {
            const Submitted& t = submitted_.front();
            if (t.writes) {
                run_channels();  // checks the accesses so far against the old state
                mark(t.first, t.lines, LineState::written);
            }
            ends_.push_back(host_.cycle());
            submitted_.pop_front();
        }
    }

    // Counts a line done. Returns its place in the caller's data, null if its transfer was dropped.
    std::uint8_t* took(std::uint64_t tag) {
        const std::uint64_t number = tag >> kLineBits;
        if (tag == kOwn) ++transfer_.taken;
        if (number == 0) {
            const std::uint64_t line = tag - transfer_.tag;
            if (line >= transfer_.lines || !transfer_.out) return nullptr;  // of an earlier call
            ++transfer_.taken;
            transfer_.limit = host_.cycle() + kAccessCycles;
            return transfer_.out + line * kBeatBytes;
        }
        if (number <= ended()) return nullptr;  // withdrawn
        Submitted& t = submitted_[number - submitted_.front().number];
        ++t.taken;
        moved_at_ = host_.cycle();
        return t.data + (tag & kOwn) * kBeatBytes;
    }

    // The transfer of a call, `begun` if the call returned `kMore`: lines issued and done so far,
    // and the cycle by which another line must be done.
    struct Transfer {
        bool begun = false, writes = false;
        std::uint64_t first = 0, lines = 0, given = 0, taken = 0, limit = 0;
        std::uint8_t* out = nullptr;  // of loads
        std::uint64_t tag = 0;        // of the first load
    };

    std::int32_t read(std::uint64_t first, std::uint8_t* out, std::uint64_t lines,
                      std::uint64_t cycles) {
        const std::uint64_t slice = host_.cycle() + std::min(cycles, kForever - host_.cycle());
        Transfer& t = begin("R", first, lines, out);
        while (t.taken < lines) {
            if (host_.cycle() >= slice) return more();
            for (; t.given < lines && host_.waiting() < kQueued; ++t.given)
                host_.load(first + t.given, t.tag + t.given);
            step();
            if (fault_) return end(kFaulted);
            if (host_.cycle() > t.limit) return end(kHung);
        }
        return end(kDone);
    }

    // A new transfer, or the one that returned `kMore`.
    Transfer& begin(const char* what, std::uint64_t first, std::uint64_t lines, std::uint8_t* out) {
        if (!std::exchange(transfer_.begun, false)) {
            transfer_ = {false, *what == 'W', first, lines, 0, 0, host_.cycle() + kAccessCycles,
                         out,   loads_};
            if (out) loads_ += lines;
            log(what, first, lines);
        }
        return transfer_;
    }

    std::int32_t more() {
        const std::int32_t status = end(kMore);
        transfer_.begun = status == kMore;
        return status;
    }

    // Runs until all issued accesses are done, and issues none.
    void settle() {
        giving_ = false;
        for (std::uint64_t i = 0; i < kAccessCycles && !host_.idle() && !fault_; ++i) step();
        catch_up();
        giving_ = true;
    }

    // Simulates a cycle of the host; of the channels too once kAhead cycles are pending.
    void step() {
        static constexpr std::uint8_t kComesLater[HostCycle::kDataBytes] = {};
        const std::uint64_t now = host_.cycle();
        if (pending_ == 0) begun_ = now;
        Ahead& cycle = ahead_[pending_];
        cycle.due = due(now);
        cycle.to = nullptr;
        if (giving_ && !submitted_.empty()) give_submitted();
        host_.tick(cycle.due == Ahead::nothing ? nullptr : kComesLater, cycle.host);
        for (const HostSlot& slot : cycle.host.slots) {
            if (slot.rank < 0) continue;
            const Command command = decode(slot.pins);
            if (command == Command::RD || command == Command::RDA)
                due_.push_back(now + read_latency_);
        }
        take_moved(cycle);
        if (++pending_ == kAhead) catch_up();
    }

    // Which half of a beat the read commands so far make due in this cycle.
    Ahead::Due due(std::uint64_t now) {
        if (due_.empty() || now < due_.front()) return Ahead::nothing;
        if (now == due_.front()) return Ahead::first;
        due_.pop_front();
        return Ahead::second;
    }

    // Simulates pending cycles at the end of a call; its status.
    std::int32_t end(std::int32_t status) {
        if (pending_ == 0) return status;
        catch_up();
        return fault_ ? kFaulted : status;
    }

    // Simulates the pending cycles of the channels, and copies out the host's read data.
    void catch_up() {
        run_channels();
        Fault found;
        for (const auto& memory : memories_)
            if (memory->fault && (!found || memory->fault.cycle < found.cycle))
                found = memory->fault;
        for (unsigned i = 0; i < pending_; ++i) take_read_data(i, found);
        if (!fault_) fault_ = found;
        pending_ = done_ = 0;
    }

    void run_channels() {
        const unsigned first = std::exchange(done_, pending_);
#if VM_TRACE
        for (unsigned i = first; i < pending_; ++i) {
            for (unsigned part = 0; part < parts_; ++part) settle(part, i);
            dump();
            for (unsigned part = 0; part < parts_; ++part) rtl_.clock(part, begun_ + i);
            dump();
        }
#else
        const auto go = [this, first](unsigned part) {
            for (unsigned i = first; i < pending_; ++i) {
                settle(part, i);
                rtl_.clock(part, begun_ + i);
            }
        };
        if (pending_ - first >= (threads_.begun() ? kWorthThread : kAhead))
            threads_.run(go);
        else
            for (unsigned part = 0; part < parts_; ++part) go(part);
#endif
    }

    void settle(unsigned part, unsigned i) {
        rtl_.sample(part, read_data_[part][i]);
        rtl_.settle(part, ahead_[i].host);
    }

    // Copies the read data of a cycle; a fault if they are not due, or missing.
    void take_read_data(unsigned i, Fault& found) {
        const Ahead& cycle = ahead_[i];
        const std::uint8_t* data = nullptr;
        for (const auto& each : read_data_)
            if (each[i].valid) data = each[i].data;
        if ((data != nullptr) != (cycle.due != Ahead::nothing)) [[unlikely]] {
            const std::uint64_t now = begun_ + i;
            if (found && now < found.cycle) found = {};
            found.protocol("host", "read latency", now, "%s in fabric cycle %llu",
                           data ? "read data of no command" : "no read data",
                           static_cast<unsigned long long>(now));
        }
        if (cycle.due == Ahead::nothing) return;
        const bool second = cycle.due == Ahead::second;
        if (data) std::memcpy(arriving_ + second * HostCycle::kDataBytes, data, sizeof(ReadData::data));
        if (second && cycle.to) std::memcpy(cycle.to, arriving_, kBeatBytes);
    }

    void log(const char* what, std::uint64_t first, std::uint64_t lines) {
        history_.add(host_.cycle(), *what == 'R' ? "A host reads," : "A host writes,",
                     static_cast<unsigned>(first / channel_lines_), first * kBeatBytes,
                     static_cast<unsigned>(lines), 0);
    }

#if VM_TRACE
    void dump() {
        if (trace_) trace_->dump(contexts_[0].time());
        contexts_[0].timeInc(1);
    }
#endif

    Transfer transfer_;
    std::deque<Submitted> submitted_;
    std::deque<std::uint64_t> ends_;
    std::uint64_t last_submitted_ = 0, moved_at_ = 0, loads_ = 0;
    bool giving_ = true;
    std::uint64_t channel_lines_, window_lines_, read_latency_;
    HostController host_;
    std::deque<std::uint64_t> due_;  // cycles of the first data of reads
    std::vector<Context> contexts_;
    Memories memories_;
    Rtl rtl_;
    unsigned parts_;
    // From `begun_` on, `pending_` cycles are simulated for the host, `done_` for the channels too.
    std::array<Ahead, kAhead> ahead_{};
    std::uint64_t begun_ = 0;
    unsigned pending_ = 0, done_ = 0;
    std::vector<std::array<ReadData, kAhead>> read_data_;  // of each part
    std::uint8_t arriving_[kBeatBytes] = {};
    ThreadPool threads_;
    Fault fault_;
    History history_;
#if VM_TRACE
    std::unique_ptr<VerilatedVcdC> trace_;
#endif
};

}  // namespace
}  // namespace nearstep

using namespace nearstep;

extern "C" {

// Null, with ddr4_last_error, if the configuration is invalid.
Dimm* dimm_open(const DimmOptions* options) {
    return guarded([&] { return new Dimm(*options); });
}

void dimm_close(Dimm* dimm) { delete dimm; }

void dimm_abandon(Dimm* dimm) { dimm->abandon(); }

std::int32_t dimm_read(Dimm* dimm, std::uint64_t line, std::uint8_t* out, std::uint64_t lines) {
    return dimm->read(line, out, lines);
}

std::int32_t dimm_write(Dimm* dimm, std::uint64_t line, const std::uint8_t* data,
                        std::uint64_t lines) {
    return dimm->write(line, data, lines);
}

std::int32_t dimm_wait(Dimm* dimm, const Poll* polls, std::uint64_t count,
                       std::uint64_t max_cycles) {
    return dimm->wait(polls, count, max_cycles);
}

std::uint64_t dimm_submit(Dimm* dimm, std::uint64_t line, std::uint8_t* data, std::uint64_t lines,
                          std::int32_t writes) {
    return dimm->submit(line, data, lines, writes != 0);
}

std::uint64_t dimm_next_end(Dimm* dimm) { return dimm->next_end(); }

void dimm_withdraw(Dimm* dimm) { dimm->withdraw(); }

std::int32_t dimm_advance(Dimm* dimm, const Poll* polls, std::uint64_t count,
                          std::uint64_t limit) {
    return dimm->advance(polls, count, limit);
}

// Most threads from now on; no more than at `dimm_open`.
void dimm_threads(Dimm* dimm, std::uint32_t threads) { dimm->threads().use(threads); }

std::uint64_t dimm_cycle(Dimm* dimm) { return dimm->cycle(); }

void dimm_fault(Dimm* dimm, Fault* fault) { *fault = dimm->fault(); }

void dimm_watch(Dimm* dimm, std::int32_t on) { dimm->watch(on != 0); }

void dimm_mark(Dimm* dimm, std::uint64_t line, std::uint64_t lines, std::uint8_t state) {
    dimm->mark(line, lines, static_cast<LineState>(state));
}

std::uint8_t dimm_state(Dimm* dimm, std::uint64_t line) {
    return static_cast<std::uint8_t>(dimm->state(line));
}

void dimm_inject(Dimm* dimm, const Injection* injection) {
    for (std::size_t c = 0; c < dimm->channels(); ++c) dimm->memory(c).injections().add(*injection);
}

void dimm_heal(Dimm* dimm) {
    for (std::size_t c = 0; c < dimm->channels(); ++c) dimm->memory(c).injections().clear();
}

void dimm_history(Dimm* dimm, char* text, std::uint64_t size) {
    std::snprintf(text, size, "%s", dimm->history().text().c_str());
}

void dimm_counters(Dimm* dimm, unsigned channel, ChannelCounters* out) {
    const Ddr4Channel& dram = dimm->memory(channel).dram();
    *out = {dram.count(Command::ACT),
            dram.count(Command::RD) + dram.count(Command::RDA),
            dram.count(Command::WR) + dram.count(Command::WRA),
            dram.count(Command::PRE) + dram.count(Command::PREA),
            dram.count(Command::REF)};
}

// Issues a command with ACT_n high from the host's controller, which closes the rank's banks first.
void dimm_give(Dimm* dimm, std::int32_t rank, std::uint32_t address, std::uint32_t bg,
               std::uint32_t ba) {
    Pins pins;
    pins.address = address;
    pins.bg = static_cast<std::uint8_t>(bg);
    pins.ba = static_cast<std::uint8_t>(ba);
    dimm->host().give(rank, pins);
}

void dimm_statistics(Dimm* dimm, HostStatistics* out) { *out = dimm->host().statistics(); }
}
