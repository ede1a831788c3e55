// Two Verilated link layers, joined by modelled links, between sources and sinks of entries.
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <memory>
#include <vector>

#include "models/link/link.hpp"
#include "VLinkLayer.h"
#include "verilated.h"

namespace {

using nearstep::link::FrameFault;
using nearstep::link::Link;
using nearstep::link::Options;
using nearstep::link::Phit;
using nearstep::link::Statistics;

constexpr int kDevices = 2, kPorts = 2, kEvents = 8;

#if GROUPS == 1
#define EACH_GROUP(X) X(0)
#elif GROUPS == 2
#define EACH_GROUP(X) X(0) X(1)
#else
#define EACH_GROUP(X) X(0) X(1) X(2) X(3)
#endif

std::uint64_t mix(std::uint64_t z) {
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
}

struct Random {
    std::uint64_t state;
    std::uint64_t next() { return mix(state += 0x9E3779B97F4A7C15ull); }
    bool chance(std::uint32_t of_65536) { return (next() & 0xFFFF) < of_65536; }
};

// Entry `number` of a group of a device: its length and phits, from the seed alone.
struct Entries {
    std::uint64_t seed;
    std::uint32_t most;
    bool full;

    std::uint64_t word(std::uint64_t number, std::uint64_t phit, int half) const {
        return mix(mix(mix(seed + number * 0x9E3779B97F4A7C15ull) + phit) + half);
    }
    std::uint32_t phits(std::uint64_t number) const {
        return full ? most : 1 + word(number, 1000, 0) % most;
    }
};

struct Source {
    Entries entries;
    std::uint64_t number = 0, count = 0;
    std::uint32_t phit = 0;
    bool offered = false;
};

struct Sink {
    Entries entries;
    std::uint64_t number = 0, phits = 0, checks = 0, mismatches = 0;
    std::uint32_t phit = 0;
};

std::uint32_t crc32(std::uint32_t crc, const Phit& phit, int bits = 128) {
    for (int bit = 0; bit < bits; ++bit) {
        const bool in = (phit.data[bit / 64] >> (bit % 64)) & 1;
        crc = (crc >> 1) ^ (((crc & 1) != in) ? 0xEDB88320u : 0u);
    }
    return crc;
}

// Changes one entry or its header as `forge` in link_layer.py says, and recomputes the CRC.
struct Forger {
    std::uint64_t wait = 0;  // entries until then, counted from 1; 0: never
    int what = 0;            // 0: the payload, 1: the group, 2: the report
    bool active = false;
    bool first = false;
    std::uint32_t crc = 0;

    Phit operator()(Phit phit) {
        if (phit.head) {
            active = (phit.data[0] & 7) == 2 && wait && --wait == 0;
            first = true;
            crc = ~0u;
            if (active && what) {
                if (what == 1) phit.data[0] ^= 1 << 7;
                else phit.data[0] = (phit.data[0] | 1u << 30) & ~(0x7FFull << 37);  // accepts none
                close(phit, crc32(crc, phit, 96));
                active = false;
            }
        } else if (active && !phit.last) {
            if (first) phit.data[0] ^= 1;
            first = false;
            crc = crc32(crc, phit);
        } else if (active) {
            close(phit, crc);
        }
        return phit;
    }

    static void close(Phit& phit, std::uint32_t crc) {
        phit.data[1] = (phit.data[1] & 0xFFFFFFFFull) | (std::uint64_t(~crc) << 32);
    }
};

Phit phit_of(const VlWide<5>& words) {
    Phit phit;
    phit.data[0] = words[0] | (std::uint64_t(words[1]) << 32);
    phit.data[1] = words[2] | (std::uint64_t(words[3]) << 32);
    phit.head = words[4] & 1;
    phit.last = words[4] & 2;
    return phit;
}

void put(VlWide<5>& words, const Phit& phit) {
    for (int i = 0; i < 4; ++i) words[i] = std::uint32_t(phit.data[i / 2] >> (32 * (i % 2)));
    words[4] = std::uint32_t(phit.head) | (std::uint32_t(phit.last) << 1);
}

// Of both devices; `ports` 1 joins port 1 of device 0 and port 0 of device 1, 2 the others as well.
struct Config {
    std::uint64_t seed;
    std::uint32_t ports, entry_phits, full;
};

struct Inputs {
    std::uint32_t epoch, used, watch, silence_limit, keepalive, retry;
    std::uint32_t abort, abort_cause, abort_device, abort_port, clear;
    std::uint32_t source_stall, sink_stall;  // chances of 65536
    std::uint32_t blocked;                   // groups whose sink takes nothing
};

struct DeviceReport {
    std::uint64_t events[kPorts][kEvents];
    std::uint64_t delivered[4], phits[4], checks[4], mismatches[4], sent[4];
    std::uint64_t aborts, abort_cause, abort_device, abort_port;
    std::uint64_t silent_cycles[kPorts], silent_since[kPorts];
    std::uint64_t unused_port;  // phits on ports that are not used
    std::uint64_t unstable;     // phits that changed while they waited
    std::uint64_t digest;       // of every bit of the phits that links took, and their cycles
};

struct Report {
    std::uint64_t cycles;
    DeviceReport devices[kDevices];
};

struct Bench {
    Config config;
    VerilatedContext context;
    std::unique_ptr<VLinkLayer> top[kDevices];
    Inputs inputs[kDevices] = {};
    Source sources[kDevices][GROUPS];
    Sink sinks[kDevices][GROUPS];
    Random random{1};
    Link links[kDevices][kPorts];  // by sender
    Forger forger;                 // on arrivals at device 1
    Report report = {};
    Phit held[kDevices][kPorts];
    bool waits[kDevices][kPorts] = {};

    explicit Bench(const Config& given) : config(given) {
        random.state = config.seed;
        for (int d = 0; d < kDevices; ++d) {
            top[d] = std::make_unique<VLinkLayer>(&context);
            top[d]->clk = 0;
            top[d]->rst = 0;
            for (int g = 0; g < GROUPS; ++g) {
                const std::uint64_t seed = mix(config.seed * 64 + d * 8 + g + 1);
                sources[d][g].entries = {seed, config.entry_phits, bool(config.full)};
                sinks[1 - d][g].entries = sources[d][g].entries;
            }
            // Port 1 of device 0 is joined to port 0 of device 1. With two links, odd groups use
            // the other link.
            const int joined = 1 - d;
#define PORTS_OF(g)                                                         \
    {                                                                       \
        const bool two = config.ports == 2;                                 \
        const int send = two ? ((g) % 2 ? 0 : 1) : joined;                  \
        top[d]->i_send_port___05F##g = send;                                \
        top[d]->i_receive_port___05F##g = two ? 1 - send : joined;          \
    }
            EACH_GROUP(PORTS_OF)
#undef PORTS_OF
        }
    }

    void drive(int d) {
        VLinkLayer& t = *top[d];
        const Inputs& in = inputs[d];
        t.i_epoch = in.epoch;
        t.i_used = in.used;
        t.i_watch = in.watch;
        t.i_silence_limit = in.silence_limit;
        t.i_keepalive = in.keepalive;
        t.i_retry = in.retry;
        t.i_abort = in.abort;
        t.i_abort_cause = in.abort_cause;
        t.i_abort_device = in.abort_device;
        t.i_abort_port = in.abort_port;
        t.i_clear = in.clear;
#define DRIVE(g)                                                                       \
    {                                                                                  \
        Source& s = sources[d][g];                                                     \
        if (!s.offered && s.number < s.count && !random.chance(in.source_stall))       \
            s.offered = true;                                                          \
        t.send___05F##g##___05Fvalid = s.offered;                                      \
        if (s.offered) {                                                               \
            Phit p;                                                                    \
            p.data[0] = s.entries.word(s.number, s.phit, 0);                           \
            p.data[1] = s.entries.word(s.number, s.phit, 1);                           \
            p.head = s.phit + 1 == s.entries.phits(s.number); /* bit 128: last */      \
            put(t.send___05F##g##___05Fpayload, p);                                    \
        }                                                                              \
        t.receive___05F##g##___05Fready =                                              \
            !random.chance(in.sink_stall) && !(in.blocked >> (g) & 1);                 \
    }
        EACH_GROUP(DRIVE)
#undef DRIVE
        drive_link(d, 0, t.link_in___05F0___05Fvalid, t.link_in___05F0___05Fpayload,
                   t.link_out___05F0___05Fready);
        drive_link(d, 1, t.link_in___05F1___05Fvalid, t.link_in___05F1___05Fpayload,
                   t.link_out___05F1___05Fready);
    }

    // Port p of one device is joined to port 1 - p of the other.
    void drive_link(int d, int p, CData& valid, VlWide<5>& payload, CData& ready) {
        const Phit* phit = links[1 - d][1 - p].arriving();
        valid = phit != nullptr;
        if (phit) put(payload, d == 1 ? forger(*phit) : *phit);
        ready = links[d][p].ready();
    }

    void sample_link(int d, int p, bool valid, const VlWide<5>& payload) {
        const Phit phit = phit_of(payload);
        Link& link = links[d][p];
        DeviceReport& r = report.devices[d];
        if (valid && !(inputs[d].used >> p & 1)) ++r.unused_port;
        if (waits[d][p] && !inputs[d].clear &&
            (!valid || std::memcmp(held[d][p].data, phit.data, sizeof phit.data)))
            ++r.unstable;
        waits[d][p] = valid && !link.ready() && !inputs[d].clear;
        held[d][p] = phit;
        if (valid && link.ready())
            for (const std::uint64_t word :
                 {phit.data[0], phit.data[1],
                  report.cycles << 3 | p << 2 | phit.head << 1 | phit.last})
                r.digest = mix(r.digest + word);
        link.tick(valid, phit);
    }

    template <class Events> void count(int d, int p, const Events& events) {
        for (int e = 0; e < kEvents; ++e) report.devices[d].events[p][e] += (events >> e) & 1;
    }

    void sample(int d) {
        VLinkLayer& t = *top[d];
        DeviceReport& r = report.devices[d];
        const bool clear = inputs[d].clear;  // discards the transfers of this cycle
#define SAMPLE(g)                                                                      \
    {                                                                                  \
        Source& s = sources[d][g];                                                     \
        if (!clear && s.offered && t.send___05F##g##___05Fready) {                               \
            s.offered = false;                                                         \
            if (++s.phit == s.entries.phits(s.number)) s.phit = 0, ++s.number;         \
        }                                                                              \
        if (!clear && t.receive___05F##g##___05Fvalid && t.receive___05F##g##___05Fready)        \
            check(sinks[d][g], t.receive___05F##g##___05Fpayload);                     \
    }
        EACH_GROUP(SAMPLE)
#undef SAMPLE
        sample_link(d, 0, t.link_out___05F0___05Fvalid, t.link_out___05F0___05Fpayload);
        sample_link(d, 1, t.link_out___05F1___05Fvalid, t.link_out___05F1___05Fpayload);
        count(d, 0, t.o_events___05F0);
        count(d, 1, t.o_events___05F1);
        if (t.o_peer_abort) {
            ++r.aborts;
            r.abort_cause = t.o_peer_cause;
            r.abort_device = t.o_peer_device;
            r.abort_port = t.o_peer_port;
        }
        for (int p = 0; p < kPorts; ++p) {
            if (!(t.o_silent >> p & 1)) continue;
            if (r.silent_cycles[p]++ == 0) r.silent_since[p] = report.cycles;
        }
    }

    static void check(Sink& k, const VlWide<5>& payload) {
        const Phit got = phit_of(payload);
        ++k.checks;
        ++k.phits;
        const bool last = k.phit + 1 == k.entries.phits(k.number);
        if (got.data[0] != k.entries.word(k.number, k.phit, 0) ||
            got.data[1] != k.entries.word(k.number, k.phit, 1) || got.head != last)
            ++k.mismatches;
        if (got.head)
            k.phit = 0, ++k.number;
        else
            ++k.phit;
    }

    bool delivered() const {
        for (int d = 0; d < kDevices; ++d)
            for (int g = 0; g < GROUPS; ++g)
                if (sinks[1 - d][g].number < sources[d][g].count) return false;
        return true;
    }

    std::uint64_t run(std::uint64_t cycles, bool until_delivered) {
        std::uint64_t ran = 0;
        for (; ran < cycles && !(until_delivered && delivered()); ++ran) {
            for (int d = 0; d < kDevices; ++d) {
                drive(d);
                top[d]->clk = 0;
                top[d]->eval();
            }
            for (int d = 0; d < kDevices; ++d) sample(d);
            for (int d = 0; d < kDevices; ++d) {
                top[d]->clk = 1;
                top[d]->eval();
            }
            ++report.cycles;
        }
        return ran;
    }
};

}  // namespace

extern "C" {

Bench* link_bench_open(const Config* config) { return new Bench(*config); }
void link_bench_close(Bench* bench) { delete bench; }
void link_bench_inputs(Bench* bench, int device, const Inputs* inputs) {
    bench->inputs[device] = *inputs;
}
void link_bench_link(Bench* bench, int device, int port, const Options* options) {
    bench->links[device][port].reset(*options);
}
void link_bench_fault(Bench* bench, int device, int port, const FrameFault* fault) {
    bench->links[device][port].add(*fault);
}
void link_bench_statistics(Bench* bench, int device, int port, Statistics* statistics) {
    *statistics = bench->links[device][port].statistics();
}
void link_bench_forge(Bench* bench, std::uint64_t nth, int what) {
    bench->forger.wait = nth;
    bench->forger.what = what;
}
void link_bench_send(Bench* bench, int device, int group, std::uint64_t entries) {
    bench->sources[device][group].count += entries;
}
// Sources and sinks continue with the next entry that was not begun.
void link_bench_forget(Bench* bench) {
    for (int d = 0; d < kDevices; ++d)
        for (int g = 0; g < GROUPS; ++g) {
            Source& source = bench->sources[d][g];
            Sink& sink = bench->sinks[1 - d][g];
            source.number = source.count = source.count + 1;
            source.phit = 0;
            source.offered = false;
            sink.number = source.number;
            sink.phit = 0;
        }
}
std::uint64_t link_bench_run(Bench* bench, std::uint64_t cycles, int until_delivered) {
    return bench->run(cycles, until_delivered);
}
void link_bench_report(Bench* bench, Report* report) {
    for (int d = 0; d < kDevices; ++d)
        for (int g = 0; g < GROUPS; ++g) {
            DeviceReport& r = bench->report.devices[d];
            r.delivered[g] = bench->sinks[d][g].number;
            r.phits[g] = bench->sinks[d][g].phits;
            r.checks[g] = bench->sinks[d][g].checks;
            r.mismatches[g] = bench->sinks[d][g].mismatches;
            r.sent[g] = bench->sources[d][g].number;
        }
    *report = bench->report;
}

}  // extern "C"
