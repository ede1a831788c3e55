// A SmartSSD card in this process: the Verilated card shell behind its two BARs. Host and
// drive access registers and memory only by requests of the link, in device cycles.

#include "smartssd/card_device.hpp"

namespace nearstep {
namespace {

constexpr std::uint64_t kRegisterCycles = 16;  // a register access that takes longer has hung

class Card final : public HostedCard<BarHost> {
  public:
    Card(const Options& options, const BarLimits& limits, const PeerPacing& pacing)
        : HostedCard(options, limits, pacing, design::kBeatBytes, limits),
          checker_(design::kBeatBytes) {
        memory().peer_writes = 1u << BarHost::kPeer;
        reset_card();
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

    std::int32_t read(std::uint64_t address, std::uint8_t* out, std::uint64_t bytes) override {
        if (!begun_) {
            if (const auto status = flush(); status != kDone) return status;
            host_.read(address, out, bytes);
        }
        const auto status = run([this] { return host_.reading(); });
        begun_ = status == kMore;
        return unless_failed(status);
    }

    std::int32_t flush() override {
        return unless_failed(run([this] { return host_.posted(); }));
    }

  private:
    void reset_card() override {
        forget();
        checker_.reset();
        auto& port = shell();
        port.csr___05Fread = port.csr___05Fwrite = 0;
        rest_subordinate(port);
        reset_shell();
    }

    // Waits for the answer to the register access on the port.
    std::int32_t acknowledged(std::uint32_t* word) {
        auto& port = shell();
        for (const std::uint64_t limit = cycle() + kRegisterCycles; cycle() < limit;) {
            step();
            port.csr___05Fread = port.csr___05Fwrite = 0;
            if (memory().fault) return kFaulted;
            if (port.csr___05Fack) {  // a register's output: that of the next cycle
                const std::int32_t response = port.csr___05Ferror ? kSlverr : kOkay;
                *word = port.csr___05Fread_data;
                step();
                return response;
            }
        }
        return kHung;
    }

    void step() override {
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

    AxiChecker checker_;
    SubordinatePins answers_;
};

}  // namespace
}  // namespace nearstep

extern "C" void* card_open(const nearstep::Options* options, const nearstep::BarLimits* limits,
                           const nearstep::PeerPacing* pacing) {
    return static_cast<nearstep::ShellDevice*>(new nearstep::Card(*options, *limits, *pacing));
}
