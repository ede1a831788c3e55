// The memory models and the AXI checker alone, for their tests.

#include <algorithm>

#include "models/axi/axi_checker.hpp"
#include "models/axi/port_memory.hpp"

namespace nearstep {
namespace {

struct CheckerBench {
    AxiChecker checker;
    Fault fault;
    std::uint64_t cycle = 0;
};

struct Traffic {
    std::uint8_t* data;
    std::uint8_t* state;
    std::uint64_t capacity;
    std::uint64_t latency, seed;
    std::uint64_t reads, writes;        // bursts, back to back; writes start at half the capacity
    std::uint64_t max_cycles;
    std::uint32_t half_duplex, stall, beat_bytes, burst_beats;
};

struct Report {
    std::uint64_t cycles, read_beats, write_beats, turnarounds, answered_reads, answered_writes;
    std::uint64_t sum;  // of all bytes read
};

// A manager whose next address and next beat are always valid, and which takes every answer.
Report run(const Traffic& t, Fault& fault) {
    PortMemory memory(Store(t.data, t.state, t.capacity, t.beat_bytes),
                      {t.half_duplex != 0, t.latency, t.stall, t.seed});
    AxiChecker checker(t.beat_bytes);
    ManagerPins m;
    Report report{};
    std::uint8_t size = 0;
    while ((1u << size) < t.beat_bytes) ++size;
    const std::uint64_t bytes = std::uint64_t(t.burst_beats) * t.beat_bytes;
    std::uint64_t asked_reads = 0, asked_writes = 0, beats = 0, now = 0;
    const auto burst = [&](std::uint64_t index, std::uint64_t base) -> AddressPins {
        return {true, 0, base + index * bytes, std::uint8_t(t.burst_beats - 1), size, 1};
    };
    for (; now < t.max_cycles && !memory.fault; ++now) {
        if (report.answered_reads == t.reads && report.answered_writes == t.writes) break;
        const bool started = now > 0;
        m.ar = started && asked_reads < t.reads ? burst(asked_reads, 0) : AddressPins{};
        m.aw = started && asked_writes < t.writes ? burst(asked_writes, t.capacity / 2)
                                                  : AddressPins{};
        m.wvalid = beats < asked_writes * t.burst_beats;
        m.wlast = beats % t.burst_beats + 1 == t.burst_beats;
        m.wstrb = ~0ull;
        m.wdata.fill(std::uint8_t(beats));
        m.rready = m.bready = true;
        const SubordinatePins s = memory.pins();
        checker.cycle(m, s, memory.fault, now);
        asked_reads += m.ar.valid && s.arready;
        asked_writes += m.aw.valid && s.awready;
        beats += m.wvalid && s.wready;
        report.answered_reads += s.rvalid && s.rlast;
        report.answered_writes += s.bvalid;
        if (s.rvalid)
            for (unsigned i = 0; i < t.beat_bytes; ++i) report.sum += s.rdata[i];
        memory.tick(m);
    }
    report.cycles = now;
    report.read_beats = memory.counters.read_beats;
    report.write_beats = memory.counters.write_beats;
    report.turnarounds = memory.counters.turnarounds;
    fault = memory.fault;
    return report;
}

}  // namespace
}  // namespace nearstep

extern "C" {

void* checker_open(std::uint32_t beat_bytes) {
    return new nearstep::CheckerBench{nearstep::AxiChecker(beat_bytes), {}, 0};
}

void checker_close(nearstep::CheckerBench* bench) { delete bench; }

void checker_cycle(nearstep::CheckerBench* bench, const nearstep::ManagerPins* manager,
                   const nearstep::SubordinatePins* subordinate) {
    bench->checker.cycle(*manager, *subordinate, bench->fault, bench->cycle++);
}

void checker_fault(nearstep::CheckerBench* bench, nearstep::Fault* fault) {
    *fault = bench->fault;
}

void traffic_run(const nearstep::Traffic* traffic, nearstep::Report* report,
                 nearstep::Fault* fault) {
    *report = nearstep::run(*traffic, *fault);
}
}
