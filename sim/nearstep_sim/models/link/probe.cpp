// One direction of a link by itself: phits from an array, with what arrives and when.
#include <cstdint>

#include "models/link/link.hpp"

using nearstep::link::FrameFault;
using nearstep::link::Link;
using nearstep::link::Options;
using nearstep::link::Phit;
using nearstep::link::Statistics;

extern "C" {

struct Sample {
    std::uint64_t data[2];
    std::uint64_t head, last;
    std::uint64_t cycle;  // from which it is offered, or in which it arrived
};

// Returns how many arrived; `taken` gets the cycle in which each was taken.
std::uint64_t probe_run(const Options* options, const FrameFault* faults, std::uint64_t fault_count,
                        const Sample* in, std::uint64_t count, std::uint64_t* taken, Sample* out,
                        std::uint64_t capacity, std::uint64_t cycles, Statistics* statistics) {
    Link link(*options);
    for (std::uint64_t i = 0; i < fault_count; ++i) link.add(faults[i]);
    std::uint64_t next = 0, arrived = 0;
    for (std::uint64_t cycle = 0; cycle < cycles; ++cycle) {
        const bool valid = next < count && cycle >= in[next].cycle;
        Phit phit;
        if (valid) {
            phit.data[0] = in[next].data[0];
            phit.data[1] = in[next].data[1];
            phit.head = in[next].head;
            phit.last = in[next].last;
        }
        if (const Phit* got = link.arriving(); got && arrived < capacity)
            out[arrived++] = {{got->data[0], got->data[1]}, got->head, got->last, cycle};
        const bool takes = valid && link.ready();
        link.tick(valid, phit);
        if (takes) taken[next++] = cycle;
    }
    *statistics = link.statistics();
    return arrived;
}

}  // extern "C"
