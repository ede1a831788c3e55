// An AXDIMM in this process: the Verilated kernel shell, its functional units, and a memory.
//
// In each cycle the shell is settled with what memory, registers and units drive; the units are
// clocked if the shell enables them, with what it drives them with; then the shell is clocked, still
// with the outputs that the units had before. Units that are not enabled are not evaluated.
//
// `design.hpp`, generated, gives the constants of the configuration, and the copies between ports.

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>

#include "axi_checker.hpp"
#include "design.hpp"
#include "port_memory.hpp"
#include "units.hpp"

namespace nearstep {
namespace {

constexpr std::uint64_t kRegisterCycles = 1000;  // a register access that takes longer has hung
constexpr unsigned kPollInterval = 32;           // cycles between looks at a register in a wait
constexpr unsigned kResetCycles = 4;
constexpr std::uint64_t kForever = ~std::uint64_t{0};

enum Status : std::int32_t { kDone = 0, kTimeout = -1, kFaulted = -2, kHung = -3 };

struct Options {
    std::uint8_t* data;
    std::uint8_t* state;
    std::uint64_t capacity;
    std::uint64_t latency;
    std::uint64_t seed;
    std::uint32_t half_duplex;
    std::uint32_t native;
    std::uint32_t stall;
    std::uint32_t reserved;
    const char* trace;
};

struct Poll {
    std::uint64_t address;
    std::uint32_t mask, value;
};

template <class Port>
void to_port(Port& port, const Beat& beat) {
    static_assert(sizeof(Port) >= design::kBeatBytes);
    std::memcpy(&port, beat.data(), design::kBeatBytes);
}

template <class Port>
void from_port(Beat& beat, const Port& port) {
    std::memcpy(beat.data(), &port, design::kBeatBytes);
}

class Device {
  public:
    explicit Device(const Options& options)
        : shell_(std::make_unique<design::Shell>(&context_, "kernel")),
          units_(design::make_units(options.native != 0, &context_)),
          memory_(Store(options.data, options.state, options.capacity, design::kBeatBytes),
                  {options.half_duplex != 0, options.latency, options.stall, options.seed}),
          checker_(design::kBeatBytes) {
#if VM_TRACE
        if (options.trace != nullptr) {
            context_.traceEverOn(true);
            trace_ = std::make_unique<VerilatedVcdC>();
            shell_->trace(trace_.get(), 99);
            units_->trace(trace_.get());
            trace_->open(options.trace);
        }
#endif
        reset();
    }

    ~Device() {
        shell_->final();
#if VM_TRACE
        if (trace_) trace_->close();
#endif
    }

    void reset() {
        memory_.reset();
        checker_.reset();
        auto& shell = *shell_;
        shell.s_axil___05Fawvalid = shell.s_axil___05Fwvalid = shell.s_axil___05Farvalid = 0;
        shell.s_axil___05Fbready = shell.s_axil___05Frready = 1;
        shell.s_axil___05Fwstrb = 0xF;
        shell.m_axi___05Farready = shell.m_axi___05Fawready = shell.m_axi___05Fwready = 0;
        shell.m_axi___05Frvalid = shell.m_axi___05Fbvalid = 0;
        shell.fu___05Fo_valid = 0;
        shell.rst = 1;
        for (unsigned i = 0; i < kResetCycles; ++i) {
            shell.clk = 0;
            shell.eval();
            dump();
            shell.clk = 1;
            shell.eval();
            dump();
            ++cycle_;
        }
        shell.rst = 0;
        units_->reset(shell);
    }

    std::int32_t read_register(std::uint64_t address, std::uint32_t* value) {
        auto& shell = *shell_;
        shell.s_axil___05Faraddr = address;
        shell.s_axil___05Farvalid = 1;
        const std::uint64_t limit = cycle_ + kRegisterCycles;
        while (cycle_ < limit && !memory_.fault) {
            settle();
            const bool taken = shell.s_axil___05Farready && shell.s_axil___05Farvalid;
            const bool answered = shell.s_axil___05Frvalid;
            if (answered) *value = shell.s_axil___05Frdata;
            const std::int32_t response = shell.s_axil___05Frresp;
            clock();
            if (taken) shell.s_axil___05Farvalid = 0;
            if (answered) return response;
        }
        return memory_.fault ? kFaulted : kHung;
    }

    std::int32_t write_register(std::uint64_t address, std::uint32_t value) {
        auto& shell = *shell_;
        shell.s_axil___05Fawaddr = address;
        shell.s_axil___05Fwdata = value;
        shell.s_axil___05Fawvalid = shell.s_axil___05Fwvalid = 1;
        const std::uint64_t limit = cycle_ + kRegisterCycles;
        while (cycle_ < limit && !memory_.fault) {
            settle();
            const bool address_taken = shell.s_axil___05Fawready && shell.s_axil___05Fawvalid;
            const bool data_taken = shell.s_axil___05Fwready && shell.s_axil___05Fwvalid;
            const bool answered = shell.s_axil___05Fbvalid;
            const std::int32_t response = shell.s_axil___05Fbresp;
            clock();
            if (address_taken) shell.s_axil___05Fawvalid = 0;
            if (data_taken) shell.s_axil___05Fwvalid = 0;
            if (answered) {
                units_->configure(shell);
                return response;
            }
        }
        return memory_.fault ? kFaulted : kHung;
    }

    // Looks at the registers in turn until one of them is as wanted. A register that answers with an
    // error is not.
    std::int32_t wait(const Poll* polls, std::size_t count, std::uint64_t max_cycles) {
        const std::uint64_t limit = cycle_ + std::min(max_cycles, kForever - cycle_);
        for (;;) {
            for (std::size_t i = 0; i < count; ++i) {
                std::uint32_t word = 0;
                const std::int32_t response = read_register(polls[i].address, &word);
                if (response < 0) return response;
                if (response == kOkay && (word & polls[i].mask) == polls[i].value) return kDone;
            }
            if (cycle_ >= limit) return kTimeout;
            const std::uint64_t until = std::min(limit, cycle_ + kPollInterval);
            while (cycle_ < until) {
                settle();
                clock();
                if (memory_.fault) return kFaulted;
            }
        }
    }

    std::uint64_t cycle() const { return cycle_; }
    Memory& memory() { return memory_; }

  private:
    // Everything that the shell sees in this cycle, and what follows from it without a clock.
    void settle() {
        auto& shell = *shell_;
        const SubordinatePins& s = memory_.pins();
        shell.m_axi___05Farready = s.arready;
        shell.m_axi___05Fawready = s.awready;
        shell.m_axi___05Fwready = s.wready;
        shell.m_axi___05Frvalid = s.rvalid;
        if (s.rvalid) {
            shell.m_axi___05Frid = s.rid;
            shell.m_axi___05Frresp = s.rresp;
            shell.m_axi___05Frlast = s.rlast;
            to_port(shell.m_axi___05Frdata, s.rdata);
        }
        shell.m_axi___05Fbvalid = s.bvalid;
        shell.m_axi___05Fbid = s.bid;
        shell.m_axi___05Fbresp = s.bresp;
        units_->show(shell);
        shell.clk = 0;
        shell.eval();
        dump();
    }

    void clock() {
        auto& shell = *shell_;
        sample();
        checker_.cycle(manager_, memory_.pins(), memory_.fault, cycle_);
        if (shell.fu___05Fi_en) units_->clock(shell);
        shell.clk = 1;
        shell.eval();
        dump();
        memory_.tick(manager_);
        ++cycle_;
    }

    void sample() {
        const auto& shell = *shell_;
        ManagerPins& m = manager_;
        m.ar = address(shell.m_axi___05Farvalid, shell.m_axi___05Farid, shell.m_axi___05Faraddr,
                       shell.m_axi___05Farlen, shell.m_axi___05Farsize, shell.m_axi___05Farburst);
        m.aw = address(shell.m_axi___05Fawvalid, shell.m_axi___05Fawid, shell.m_axi___05Fawaddr,
                       shell.m_axi___05Fawlen, shell.m_axi___05Fawsize, shell.m_axi___05Fawburst);
        m.wvalid = shell.m_axi___05Fwvalid;
        if (m.wvalid) {
            m.wlast = shell.m_axi___05Fwlast;
            m.wstrb = shell.m_axi___05Fwstrb;
            from_port(m.wdata, shell.m_axi___05Fwdata);
        }
        m.rready = shell.m_axi___05Frready;
        m.bready = shell.m_axi___05Fbready;
    }

    static AddressPins address(bool valid, unsigned id, std::uint64_t addr, unsigned len,
                               unsigned size, unsigned burst) {
        if (!valid) return {};
        return {true,
                std::uint8_t(id),
                addr,
                std::uint8_t(len),
                std::uint8_t(size),
                std::uint8_t(burst)};
    }

    void dump() {
#if VM_TRACE
        if (trace_) trace_->dump(context_.time());
        context_.timeInc(1);
#endif
    }

    VerilatedContext context_;
    std::unique_ptr<design::Shell> shell_;
    std::unique_ptr<Units<design::Shell>> units_;
    PortMemory memory_;
    AxiChecker checker_;
    ManagerPins manager_;
    std::uint64_t cycle_ = 0;
#if VM_TRACE
    std::unique_ptr<VerilatedVcdC> trace_;
#endif
};

}  // namespace
}  // namespace nearstep

// Status of every command: 0 to 3 is a register response or done, below 0 see Status.
extern "C" {

void* device_open(const nearstep::Options* options) { return new nearstep::Device(*options); }

void device_close(nearstep::Device* device) { delete device; }

void device_reset(nearstep::Device* device) { device->reset(); }

std::int32_t device_read_register(nearstep::Device* device, std::uint64_t address,
                                  std::uint32_t* value) {
    return device->read_register(address, value);
}

std::int32_t device_write_register(nearstep::Device* device, std::uint64_t address,
                                   std::uint32_t value) {
    return device->write_register(address, value);
}

std::int32_t device_wait(nearstep::Device* device, const nearstep::Poll* polls, std::uint64_t count,
                         std::uint64_t max_cycles) {
    return device->wait(polls, count, max_cycles);
}

std::uint64_t device_cycle(nearstep::Device* device) { return device->cycle(); }

void device_fault(nearstep::Device* device, nearstep::Fault* fault) {
    *fault = device->memory().fault;
}

void device_inject(nearstep::Device* device, const nearstep::Injection* injection) {
    device->memory().injections.add(*injection);
}

void device_heal(nearstep::Device* device) { device->memory().injections.clear(); }

// Text of the last transactions, cut to `size` bytes with its final zero.
void device_history(nearstep::Device* device, char* text, std::uint64_t size) {
    const std::string lines = device->memory().history.text();
    std::snprintf(text, size, "%s", lines.c_str());
}

void device_counters(nearstep::Device* device, nearstep::MemoryCounters* counters) {
    *counters = device->memory().counters;
}
}
