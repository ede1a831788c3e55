// A ring of Verilated sync cores, each with its own memory; a queue of entries between two cores
// replaces the link and the buffers at both ends.
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <memory>
#include <vector>

#include "models/axi/axi_checker.hpp"
#include "models/axi/port_memory.hpp"
#include "VSyncCore.h"
#include "verilated.h"

using namespace nearstep;

namespace {

constexpr unsigned kBeatBytes = 64;
constexpr std::uint64_t kAfterError = 2000;  // cycles that other cores run after an error

struct Job {
    std::uint64_t source, destination;
    std::uint32_t elements, scale, tag, operation, wire, divisor;
};

struct Settings {
    std::uint64_t window_base, window_limit;
    std::uint64_t capacity;  // of each memory
    std::uint64_t memory_latency, link_latency, slots, seed;
    std::uint64_t max_cycles, quiet;
    std::uint32_t source_stall, sink_stall, memory_stall;  // of 65536
    std::uint32_t half_duplex;
};

struct Report {
    std::uint64_t cycles;  // to the end of the last job
    std::uint64_t done, beats, stall_local, stall_receive, stall_send, stall_write, busy;
    std::uint64_t phits, entries;  // sent
    std::uint64_t reads, writes;  // beats of memory
    std::uint32_t error, errors, cause, stream, response, violations;
    std::uint64_t address;
    Fault fault;
};

struct Phit {
    std::uint32_t words[4];
    bool last;
    std::uint64_t ready;
};

class Link {
  public:
    bool has_slot(std::uint64_t slots) const { return open_ || entries_ < slots; }
    void push(const Phit& phit) {
        if (!open_) ++entries_;
        open_ = !phit.last;
        phits_.push_back(phit);
    }
    bool offers(std::uint64_t now) const { return !phits_.empty() && phits_.front().ready <= now; }
    const Phit& front() const { return phits_.front(); }
    void pop() {
        if (phits_.front().last) --entries_;
        phits_.pop_front();
    }
    void clear() { *this = {}; }

  private:
    std::deque<Phit> phits_;
    std::uint64_t entries_ = 0;
    bool open_ = false;
};

// Fields of a job's payload, from the lowest bit.
class Packer {
  public:
    void put(std::uint64_t value, unsigned width) {
        for (unsigned i = 0; i < width; ++i, ++at_)
            if (value >> i & 1) words[at_ / 32] |= 1u << at_ % 32;
    }
    std::uint32_t words[8] = {};

  private:
    unsigned at_ = 0;
};

struct Core {
    VerilatedContext context;
    std::unique_ptr<VSyncCore> top = std::make_unique<VSyncCore>(&context, "top");
    std::unique_ptr<PortMemory> memory;
    AxiChecker checker{kBeatBytes};
    Link link;  // to the next
    ManagerPins pins;
    bool receiving = false, was_sending = false;
    std::uint32_t held[5] = {};

    void edge() {
        top->clk = 1;
        top->eval();
        top->clk = 0;
    }
};

class Ring {
  public:
    std::vector<std::unique_ptr<Core>> cores;

    explicit Ring(int members) {
        for (int i = 0; i < members; ++i) {
            cores.push_back(std::make_unique<Core>());
            auto& top = *cores.back()->top;
            top.rst = 1;
            for (int k = 0; k < 2; ++k) {
                top.eval();
                cores.back()->edge();
            }
            top.rst = 0;
        }
    }
};

void sample(Core& core) {
    const auto& top = *core.top;
    ManagerPins& p = core.pins;
    p.ar = {bool(top.read___05Farvalid), top.read___05Farid, top.read___05Faraddr,
            top.read___05Farlen, top.read___05Farsize, top.read___05Farburst};
    p.aw = {bool(top.write___05Fawvalid), top.write___05Fawid, top.write___05Fawaddr,
            top.write___05Fawlen, top.write___05Fawsize, top.write___05Fawburst};
    p.rready = top.read___05Frready;
    p.wvalid = top.write___05Fwvalid;
    p.wlast = top.write___05Fwlast;
    p.wstrb = top.write___05Fwstrb;
    if (p.wvalid) std::memcpy(p.wdata.data(), &top.write___05Fwdata[0], kBeatBytes);
    p.bready = top.write___05Fbready;
}

void drive(Core& core, const SubordinatePins& s) {
    auto& top = *core.top;
    top.read___05Farready = s.arready;
    top.read___05Frvalid = s.rvalid;
    top.read___05Frid = s.rid;
    top.read___05Frresp = s.rresp;
    top.read___05Frlast = s.rlast;
    if (s.rvalid) std::memcpy(&top.read___05Frdata[0], s.rdata.data(), kBeatBytes);
    top.write___05Fawready = s.awready;
    top.write___05Fwready = s.wready;
    top.write___05Fbvalid = s.bvalid;
    top.write___05Fbid = s.bid;
    top.write___05Fbresp = s.bresp;
}

}  // namespace

extern "C" void* ring_open(int members) { return new Ring(members); }
extern "C" void ring_close(void* ring) { delete static_cast<Ring*>(ring); }

// Gives job `jobs[i]` to core i where `has[i]`; injections are of core `injected`.
extern "C" void ring_run(void* handle, const Settings* settings, const Job* jobs,
                         const std::uint8_t* has, const std::uint8_t* positions,
                         std::uint8_t members, std::uint8_t** data, std::uint8_t** state,
                         const Injection* injection, int injected, int halted, Report* reports) {
    Ring& ring = *static_cast<Ring*>(handle);
    const Settings& set = *settings;
    const int count = int(ring.cores.size());
    Random random{set.seed};
    std::vector<int> place(count);  // core at each position
    for (int i = 0; i < count; ++i) place[positions[i] % count] = i;
    for (int i = 0; i < count; ++i) {
        Core& core = *ring.cores[i];
        core.memory = std::make_unique<PortMemory>(
            Store(data[i], state[i], set.capacity, kBeatBytes),
            PortTiming{bool(set.half_duplex), set.memory_latency, set.memory_stall,
                       set.seed + 17 * i});
        if (i == injected) core.memory->injections.add(*injection);
        core.checker.reset();
        auto& top = *core.top;
        top.i_members = members;
        top.i_position = positions[i];
        top.i_window_base = set.window_base;
        top.i_window_limit = set.window_limit;
        top.i_halt = halted;
        top.i_clear = 0;
        Packer job;
        job.put(jobs[i].source, ADDRESS_WIDTH);
        job.put(jobs[i].destination, ADDRESS_WIDTH);
        job.put(jobs[i].elements, 32);
        job.put(jobs[i].scale, 32);
        job.put(jobs[i].tag, 16);
        job.put(jobs[i].operation, 2);
        job.put(jobs[i].wire, 2);
        job.put(0, 2);
        job.put(jobs[i].divisor != 0, 16);  // arrays: only cores with exact sums have the fields
        job.put(jobs[i].divisor, 16);
        std::memcpy(&top.job___05Fpayload[0], job.words, sizeof top.job___05Fpayload);
        top.job___05Fvalid = has[i];
        reports[i] = {};
    }
    std::uint64_t now = 0, moved = 0, error_at = ~0ull;
    for (; now < set.max_cycles && now - moved < set.quiet; ++now) {
        if (error_at != ~0ull && now - error_at > kAfterError) break;
        for (int i = 0; i < count; ++i) {
            Core& core = *ring.cores[i];
            auto& top = *core.top;
            const int before = place[(positions[i] + count - 1) % count];
            Link& in = ring.cores[before]->link;
            drive(core, core.memory->pins());
            if (!core.receiving)
                core.receiving = in.offers(now) && !random.chance(set.source_stall);
            top.receive___05Fvalid = core.receiving;
            if (core.receiving) {
                std::memcpy(&top.receive___05Fpayload[0], in.front().words, 16);
                top.receive___05Fpayload[4] = in.front().last;
            }
            top.send___05Fready = core.link.has_slot(set.slots) && !random.chance(set.sink_stall);
            top.eval();
        }
        bool all = true;
        for (int i = 0; i < count; ++i) {
            Core& core = *ring.cores[i];
            auto& top = *core.top;
            Report& report = reports[i];
            const int before = place[(positions[i] + count - 1) % count];
            sample(core);
            core.checker.cycle(core.pins, core.memory->pins(), report.fault, now);
            const bool changed =
                !top.send___05Fvalid || std::memcmp(core.held, &top.send___05Fpayload[0], 17);
            if (core.was_sending && changed) ++report.violations;
            std::memcpy(core.held, &top.send___05Fpayload[0], 20);
            core.was_sending = top.send___05Fvalid && !top.send___05Fready;
            if (top.send___05Fvalid && top.send___05Fready) {
                Phit phit{};
                std::memcpy(phit.words, &top.send___05Fpayload[0], 16);
                phit.last = top.send___05Fpayload[4] & 1;
                phit.ready = now + 1 + set.link_latency;
                core.link.push(phit);
                ++report.phits;
                report.entries += phit.last;
                moved = now;
            }
            if (core.receiving && top.receive___05Fready) {
                ring.cores[before]->link.pop();
                core.receiving = false;
                moved = now;
            }
            if (top.job___05Fvalid && top.job___05Fready) moved = now;
            const bool job_taken = top.job___05Fvalid && top.job___05Fready;
            report.busy += top.o_busy;
            report.beats += top.o_beat;
            report.stall_local += top.o_stall_local;
            report.stall_receive += top.o_stall_receive;
            report.stall_send += top.o_stall_send;
            report.stall_write += top.o_stall_write;
            if (top.o_beat) moved = now;
            if (top.o_done) {
                ++report.done;
                report.cycles = now + 1;
                if (!top.o_idle || !top.o_busy) ++report.violations;
            }
            if (top.o_error_valid) {
                ++report.errors;
                report.error = 1;
                report.cause = top.o_error_cause;
                report.stream = top.o_error_stream;
                report.response = top.o_error_response;
                report.address = top.o_error_address;
                if (error_at == ~0ull) error_at = now;
            }
            all = all && (report.done >= has[i]);
            core.memory->tick(core.pins);
            if (core.memory->fault && !report.fault) report.fault = core.memory->fault;
            report.reads = core.memory->counters.read_beats;
            report.writes = core.memory->counters.write_beats;
            core.edge();
            if (job_taken) top.job___05Fvalid = 0;
        }
        if (all && now - moved > 50) break;
    }
    for (auto& core : ring.cores) core->top->job___05Fvalid = 0;
}

// Halts all cores, waits until their memories are idle, and clears the cores. Returns the cycles
// that this took; 0 if a memory did not become idle.
extern "C" std::uint64_t ring_clear(void* handle, std::uint64_t max_cycles) {
    Ring& ring = *static_cast<Ring*>(handle);
    for (std::uint64_t now = 0; now < max_cycles; ++now) {
        bool idle = true;
        for (auto& core : ring.cores) {
            auto& top = *core->top;
            drive(*core, core->memory->pins());
            top.i_halt = 1;
            top.receive___05Fvalid = 0;
            top.send___05Fready = 0;
            top.eval();
            sample(*core);
            idle = idle && top.o_idle;
            core->memory->tick(core->pins);
        }
        const bool clear = idle && now > 4;
        for (auto& core : ring.cores) {
            core->top->i_clear = clear;
            core->top->eval();
            core->edge();
            core->top->i_clear = 0;
        }
        if (clear) {
            for (auto& core : ring.cores) {
                core->link.clear();
                core->receiving = core->was_sending = false;
                core->top->i_halt = 0;
            }
            return now + 1;
        }
    }
    return 0;
}
