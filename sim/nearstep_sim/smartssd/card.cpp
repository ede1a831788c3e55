// A SmartSSD card in this process: the Verilated card shell behind its two BARs. The host reaches
// registers and memory through requests of the link only, in device cycles; so does its drive memory.

#include <utility>

#include "models/bar_host.hpp"
#include "updater/shell_device.hpp"

namespace nearstep {
namespace {

constexpr std::uint64_t kPollInterval = 4096;     // cycles between looks at a register in a wait
constexpr std::uint64_t kRegisterCycles = 16;     // a register access that takes longer has hung
constexpr std::uint64_t kBarCycles = 1 << 18;     // so has a memory BAR that moves nothing for so long
constexpr std::uint64_t kDrainCycles = 1 << 12;   // what a reset gives requests to be answered

class Card final : public ShellDevice {
  public:
    Card(const Options& options, const BarLimits& limits, const PeerPacing& pacing)
        : ShellDevice(options),
          peer_(limits.payload, limits.request, pacing),
          host_(design::kBeatBytes, limits, &peer_),
          checker_(design::kBeatBytes) {
        memory().peer_writes = 1u << BarHost::kPeer;
        reset_card();
    }

    void reset() override {
        const std::uint64_t limit = cycle() + kDrainCycles;
        peer_.give_up();
        while ((host_.posted() || host_.serves_dma()) && cycle() < limit && !memory().fault &&
               !hung_)
            step();
        reset_card();
    }

    void abandon() override {
        host_.abandon();
        begun_ = waiting_ = false;
    }

    std::int32_t read_register(std::uint64_t address, std::uint32_t* value) override {
        if (const auto status = flush(); status != kDone) return status;
        shell().csr___05Faddress = address;
        shell().csr___05Fread = 1;
        host_.count_register(false);
        return acknowledged(value);
    }

    std::int32_t write_register(std::uint64_t address, std::uint32_t value) override {
        if (const auto status = flush(); status != kDone) return status;
        shell().csr___05Faddress = address;
        shell().csr___05Fwrite = 1;
        shell().csr___05Fwrite_data = value;
        shell().csr___05Fwrite_mask = 0xF;
        host_.count_register(true);
        std::uint32_t nothing;
        const auto status = acknowledged(&nothing);
        configure_units();
        return status;
    }

    // Ends when the card has taken the data; `flush` tells whether it got them to memory.
    std::int32_t write(std::uint64_t address, const std::uint8_t* data, std::uint64_t bytes) {
        if (!std::exchange(begun_, true)) host_.write(address, data, bytes);
        const auto status = run([this] { return host_.sending(); });
        begun_ = status == kMore;
        return status;
    }

    std::int32_t read(std::uint64_t address, std::uint8_t* out, std::uint64_t bytes) {
        if (!begun_) {
            if (const auto status = flush(); status != kDone) return status;
            host_.read(address, out, bytes);
        }
        const auto status = run([this] { return host_.reading(); });
        begun_ = status == kMore;
        return status == kDone && host_.failure.response != kOkay ? kFailed : status;
    }

    // Every posted write is answered.
    std::int32_t flush() {
        const auto status = run([this] { return host_.posted(); });
        return status == kDone && host_.failure.response != kOkay ? kFailed : status;
    }

    // As `wait`, but the end of a transfer of the drive ends it, too.
    std::int32_t advance(const Poll* polls, std::size_t count, std::uint64_t max_cycles) {
        ended_ = peer_.count();
        advancing_ = true;
        const auto status = wait(polls, count, max_cycles);
        advancing_ = false;
        return status;
    }

    // The first failure since the last call.
    BarFailure failure() { return std::exchange(host_.failure, {}); }
    const BarCounters& counters() const { return host_.counters; }
    const BarCounters& peer_counters() const { return host_.peer_counters; }
    PeerDma& peer() { return peer_; }

  private:
    void reset_card() {
        host_.reset();
        checker_.reset();
        hung_ = begun_ = waiting_ = false;
        auto& port = shell();
        port.csr___05Fread = port.csr___05Fwrite = 0;
        rest_subordinate(port);
        reset_shell();
    }

    bool woken() const override { return advancing_ && peer_.count() != ended_; }

    void sleep(std::uint64_t limit) override {
        const std::uint64_t until = std::min(limit, cycle() + kPollInterval);
        while (cycle() < until && !memory().fault && !interrupted_ && !woken()) step();
        interrupted_ = false;
    }

    // Runs while there is something to do, or until the end of a slice.
    template <class Busy>
    std::int32_t run(Busy busy) {
        if (memory().fault) return kFaulted;
        if (hung_) return kHung;
        const std::uint64_t slice = cycle() + kSliceCycles;
        if (!std::exchange(waiting_, false)) moved_at_ = cycle();
        while (busy()) {
            if (cycle() >= slice) {
                waiting_ = true;
                return kMore;
            }
            step();
            if (memory().fault) return kFaulted;
            if (cycle() - moved_at_ > kBarCycles) {
                hung_ = true;
                host_.time_out();
                return kFailed;
            }
        }
        return kDone;
    }

    // The answer to the register access that the port shows.
    std::int32_t acknowledged(std::uint32_t* word) {
        auto& port = shell();
        for (const std::uint64_t limit = cycle() + kRegisterCycles; cycle() < limit;) {
            step();
            port.csr___05Fread = port.csr___05Fwrite = 0;
            if (memory().fault) return kFaulted;
            if (port.csr___05Fack) {  // a register: what it is in the cycle that begins
                const std::int32_t response = port.csr___05Ferror ? kSlverr : kOkay;
                *word = port.csr___05Fread_data;
                step();
                return response;
            }
        }
        return kHung;
    }

    void step() {
        drive_subordinate<design::kBeatBytes>(shell(), host_.pins());
        settle();
        const auto& port = shell();
        interrupted_ |= port.o_interrupt;
        SubordinatePins& s = answers_;
        sample_subordinate<design::kBeatBytes>(port, s);
        checker_.cycle(host_.pins(), s, memory().fault, cycle());
        if ((s.bvalid && !host_.expects_response(s.bid)) || (s.rvalid && !host_.expects(s.rid)))
            memory().fault.protocol(s.bvalid ? "B" : "R", "an answer belongs to a request", cycle(),
                                    "ID %u", s.bvalid ? s.bid : s.rid);
        memory().peer_reads = host_.peer_tags();
        clock();
        peer_.pass(cycle());
        if (!memory().fault && host_.tick(s)) moved_at_ = cycle();
    }

    PeerDma peer_;
    BarHost host_;
    AxiChecker checker_;
    SubordinatePins answers_;
    std::uint64_t moved_at_ = 0;
    bool hung_ = false;
    bool begun_ = false;    // a transfer, which the next call goes on with
    bool waiting_ = false;  // for something to move, since `moved_at_` and over calls
    bool interrupted_ = false;  // since the last sleep
    bool advancing_ = false;
    std::uint64_t ended_ = 0;  // transfers of the drive, before `advance`
};

}  // namespace
}  // namespace nearstep

extern "C" {

void* card_open(const nearstep::Options* options, const nearstep::BarLimits* limits,
                const nearstep::PeerPacing* pacing) {
    return static_cast<nearstep::ShellDevice*>(new nearstep::Card(*options, *limits, *pacing));
}

std::int32_t card_write(nearstep::ShellDevice* device, std::uint64_t address,
                        const std::uint8_t* data, std::uint64_t bytes) {
    return static_cast<nearstep::Card*>(device)->write(address, data, bytes);
}

std::int32_t card_read(nearstep::ShellDevice* device, std::uint64_t address, std::uint8_t* out,
                       std::uint64_t bytes) {
    return static_cast<nearstep::Card*>(device)->read(address, out, bytes);
}

std::int32_t card_flush(nearstep::ShellDevice* device) {
    return static_cast<nearstep::Card*>(device)->flush();
}

// What the status `kFailed` is about; forgets it.
void card_failure(nearstep::ShellDevice* device, nearstep::BarFailure* failure) {
    *failure = static_cast<nearstep::Card*>(device)->failure();
}

void card_counters(nearstep::ShellDevice* device, nearstep::BarCounters* counters) {
    *counters = static_cast<nearstep::Card*>(device)->counters();
}

std::int32_t card_advance(nearstep::ShellDevice* device, const nearstep::Poll* polls,
                          std::uint64_t count, std::uint64_t max_cycles) {
    return static_cast<nearstep::Card*>(device)->advance(polls, count, max_cycles);
}

void card_submit_write(nearstep::ShellDevice* device, std::uint64_t number, std::uint64_t address,
                       std::uint8_t* data, std::uint64_t bytes, std::int32_t host) {
    auto& peer = static_cast<nearstep::Card*>(device)->peer();
    (host ? peer.host_writes : peer.writes).submit(number, address, data, bytes, device->cycle());
}

void card_submit_read(nearstep::ShellDevice* device, std::uint64_t number, std::uint64_t address,
                      std::uint8_t* out, std::uint64_t bytes, std::int32_t host) {
    auto& peer = static_cast<nearstep::Card*>(device)->peer();
    (host ? peer.host_reads : peer.reads).submit(number, address, out, bytes, device->cycle());
}

// The next of these transfers that has ended; 0 if nobody has to be told of one.
std::int32_t card_peer_ended(nearstep::ShellDevice* device, nearstep::PeerEnd* end) {
    const auto found = static_cast<nearstep::Card*>(device)->peer().ended();
    if (found) *end = *found;
    return found.has_value();
}

void card_peer_counters(nearstep::ShellDevice* device, nearstep::BarCounters* counters) {
    *counters = static_cast<nearstep::Card*>(device)->peer_counters();
}
}
