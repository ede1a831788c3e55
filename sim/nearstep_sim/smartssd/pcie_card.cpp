// A SmartSSD card in this process, as it is shipped: the Verilated top with its PCIe endpoint and its
// functional units. Host and drive access registers and memory only by packets of the link.

#include "models/pcie/host.hpp"
#include "smartssd/card_device.hpp"

namespace nearstep {
namespace {

constexpr std::uint64_t kMsixTable = 0x1000;   // in BAR 0
constexpr std::uint64_t kSetupCycles = 4096;   // setting up interrupts after a reset
constexpr std::uint32_t kCounterStops = 0xFFFE;  // of the endpoint's counters

class PcieCard final : public HostedCard<PcieHost> {
  public:
    PcieCard(const Options& options, const BarLimits& limits, const PeerPacing& pacing,
             const PcieShape& shape)
        : HostedCard(options, limits, pacing, limits, shape), host_ids_(options.host_ids) {
        while ((128ull << max_payload_) < limits.payload) ++max_payload_;
        reset_card();
    }

    std::int32_t read_register(std::uint64_t address, std::uint32_t* value) override {
        if (!begun_ || asked_ != address) {
            asked_ = address;
            host_.read_register(address);
        }
        const auto status = access();
        if (status != kDone) return status;
        *value = host_.answer.value;
        return host_.answer.status == 0 ? kOkay : kSlverr;
    }

    std::int32_t write_register(std::uint64_t address, std::uint32_t value) override {
        if (!begun_) {
            flushing_ = host_.posted();  // a run must not start before its data are in memory
            flushing_ ? host_.flush() : begin(address, value);
        }
        if (const auto status = access(); status != kDone) return status;
        if (std::exchange(flushing_, false)) {
            begin(address, value);
            if (const auto status = access(); status != kDone) return status;
        }
        if (shell().o_failed_writes >= kCounterStops)
            memory().fault.protocol("BAR 0", "failed writes are counted", cycle(),
                                    "the counter stopped at %#x", shell().o_failed_writes);
        if (memory().fault) return kFaulted;
        return refused() == refused_before_ ? kOkay : kSlverr;
    }

    std::int32_t read(std::uint64_t address, std::uint8_t* out, std::uint64_t bytes) override {
        if (!begun_) host_.read(address, out, bytes);
        const auto status = run([this] { return host_.reading(); });
        begun_ = status == kMore;
        return unless_failed(status);
    }

    std::int32_t flush() override {
        if (!begun_) {
            if (!host_.posted()) return unless_failed(run([] { return false; }));
            host_.flush();
        }
        return access();
    }

    // Packets of other devices, and their completions: see `PcieHost`.
    void other(const std::uint32_t* words, std::size_t count) { host_.other(words, count); }
    std::int32_t settle_others() { return run([this] { return host_.serves_others(); }); }
    std::uint64_t completion(std::uint32_t* words, std::uint64_t most) {
        if (host_.completions.empty()) return 0;
        const auto& next = host_.completions.front();
        const std::uint64_t count = std::min<std::uint64_t>(next.size(), most);
        std::copy_n(next.begin(), count, words);
        host_.completions.pop_front();
        return count;
    }
    PcieCounters pcie_counters() const { return host_.shown(); }

    // What configuration space says of MSI-X; kept by a reset of the card.
    void allow_messages(bool enabled, bool masked) {
        shell().cfg_interrupt_msix___05Fenable = enabled_ = enabled;
        shell().cfg_interrupt_msix___05Fmask = masked_ = masked;
    }

    // Counters of the endpoint: dropped posted requests, failed writes, and completions with an
    // error status.
    void endpoint_counters(std::uint32_t* dropped, std::uint32_t* writes, std::uint32_t* reads) {
        *dropped = shell().o_dropped;
        *writes = shell().o_failed_writes;
        *reads = shell().o_failed_reads;
    }

  private:
    void begin(std::uint64_t address, std::uint32_t value) {
        refused_before_ = refused();
        host_.write_register(address, value);
    }

    // Number of failed register writes: all failed writes less those of memory.
    std::uint64_t refused() { return shell().o_failed_writes - host_.failed_writes(); }

    // Waits for the accesses of BAR 0 that the host makes.
    std::int32_t access() {
        const auto status = run([this] { return host_.accessing(); });
        begun_ = status == kMore;
        return unless_failed(status);
    }

    void reset_card() override {
        forget();
        auto& port = shell();
        port.m_axis_cq___05Ftvalid = 0;
        port.s_axis_cc___05Ftready = 1;
        port.cfg_max_payload = max_payload_;
        allow_messages(enabled_, masked_);
        port.cfg_interrupt_msix___05Fsent = port.cfg_interrupt_msix___05Ffail = 0;
        reset_shell();
        const BarCounters before = host_.counters;
        const std::uint32_t entry[] = {PcieHost::kMessageAddress, 0, PcieHost::kMessageData, 0};
        for (unsigned word = 0; word < std::size(entry); ++word)
            host_.write_register(kMsixTable + 4 * word, entry[word]);
        for (const std::uint64_t limit = cycle() + kSetupCycles;
             host_.accessing() && cycle() < limit && !memory().fault;)
            step();
        host_.counters = before;
        interrupted_ = false;
    }

    void step() override {
        auto& port = shell();
        PcieBlock& block = host_.block();
        const CqPins& cq = block.cq();
        port.m_axis_cq___05Ftvalid = cq.valid;
        if (cq.valid) {
            std::memcpy(&port.m_axis_cq___05Ftdata, cq.data.data(), sizeof cq.data);
            std::memcpy(&port.m_axis_cq___05Ftuser, cq.user.data(), sizeof cq.user);
            port.m_axis_cq___05Ftkeep = cq.keep;
            port.m_axis_cq___05Ftlast = cq.last;
        }
        port.s_axis_cc___05Ftready = block.cc_ready();
        port.cfg_interrupt_msix___05Fsent = block.msix_sent;
        port.cfg_interrupt_msix___05Ffail = block.msix_failed;
        settle();
        sample();
        const bool cq_ready = port.m_axis_cq___05Ftready;
        const unsigned np_req = port.pcie_cq_np_req;
        message();
        memory().peer_writes = host_.next_write_is_peers();
        memory().peer_reads = host_.next_read_is_peers();
        clock();
        peer_.pass(cycle());
        if (!memory().fault && host_.tick(cq_ready, np_req, cc_, bursts_, memory().fault, cycle()))
            moved_at_ = cycle();
    }

    void sample() {
        const auto& port = shell();
        cc_.valid = port.s_axis_cc___05Ftvalid;
        if (cc_.valid) {
            std::memcpy(cc_.data.data(), &port.s_axis_cc___05Ftdata, sizeof cc_.data);
            cc_.keep = port.s_axis_cc___05Ftkeep;
            cc_.last = port.s_axis_cc___05Ftlast;
            cc_.user = port.s_axis_cc___05Ftuser;
        }
        const SubordinatePins& memory_pins = memory().pins();
        bursts_.aw = port.m_axi___05Fawvalid && memory_pins.awready &&
                     port.m_axi___05Fawid < host_ids_;
        bursts_.ar = port.m_axi___05Farvalid && memory_pins.arready &&
                     port.m_axi___05Farid < host_ids_;
        bursts_.b = memory_pins.bvalid && port.m_axi___05Fbready && memory_pins.bid < host_ids_;
        bursts_.aw_address = port.m_axi___05Fawaddr;
        bursts_.ar_address = port.m_axi___05Faraddr;
        bursts_.aw_beats = port.m_axi___05Fawlen + 1u;
        bursts_.ar_beats = port.m_axi___05Farlen + 1u;
        bursts_.response = memory_pins.bresp;
    }

    void message() {
        const auto& port = shell();
        const bool asked = port.cfg_interrupt_msix___05Fint;
        if (asked && (port.cfg_interrupt_msix___05Faddress != PcieHost::kMessageAddress ||
                      port.cfg_interrupt_msix___05Fdata != PcieHost::kMessageData))
            memory().fault.protocol("MSI-X", "a message is that of its vector", cycle(),
                                    "data %#x at %#llx", port.cfg_interrupt_msix___05Fdata,
                                    (unsigned long long)port.cfg_interrupt_msix___05Faddress);
        interrupted_ |= host_.block().message(asked);
    }

    std::uint32_t host_ids_;
    unsigned max_payload_ = 0;  // in the block's code
    CcPins cc_;
    HostBursts bursts_;
    std::uint64_t refused_before_ = 0;
    std::uint64_t asked_ = 0;  // address of the register being read
    bool flushing_ = false;    // before the write of a register
    bool enabled_ = true, masked_ = false;  // MSI-X
};

PcieCard& card(ShellDevice* device) { return *static_cast<PcieCard*>(device); }

}  // namespace
}  // namespace nearstep

extern "C" {

void* card_open(const nearstep::Options* options, const nearstep::BarLimits* limits,
                const nearstep::PeerPacing* pacing, const nearstep::PcieShape* shape) {
    return static_cast<nearstep::ShellDevice*>(
        new nearstep::PcieCard(*options, *limits, *pacing, *shape));
}

void card_other(nearstep::ShellDevice* device, const std::uint32_t* words, std::uint64_t count) {
    nearstep::card(device).other(words, count);
}

std::int32_t card_settle_others(nearstep::ShellDevice* device) {
    return nearstep::card(device).settle_others();
}

// Dwords of the next completion to another device, cut to `most`; 0 if there is none.
std::uint64_t card_completion(nearstep::ShellDevice* device, std::uint32_t* words,
                              std::uint64_t most) {
    return nearstep::card(device).completion(words, most);
}

void card_pcie_counters(nearstep::ShellDevice* device, nearstep::PcieCounters* counters) {
    *counters = nearstep::card(device).pcie_counters();
}

void card_allow_messages(nearstep::ShellDevice* device, std::int32_t enabled, std::int32_t masked) {
    nearstep::card(device).allow_messages(enabled, masked);
}

void card_endpoint_counters(nearstep::ShellDevice* device, std::uint32_t* dropped,
                            std::uint32_t* writes, std::uint32_t* reads) {
    nearstep::card(device).endpoint_counters(dropped, writes, reads);
}
}
