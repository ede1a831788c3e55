// Common to all devices of one Verilated shell: functional units, a memory behind `m_axi`, and
// waits. Register accesses depend on the device.
//
// In each cycle the shell is settled with the pins of memory, host and units; the units are clocked
// if the shell enables them, with the shell's outputs; then the shell is clocked, with the units'
// outputs before their clock. Units that are not enabled are not evaluated.
//
// `design.hpp`, generated, gives the constants of the configuration, and the copies between ports.
#pragma once

#include <algorithm>
#include <memory>
#include <string>

#include "models/axi/axi_checker.hpp"
#include "models/axi/axi_ports.hpp"
#include "verilate/context.hpp"
#include "design.hpp"
#include "models/axi/port_memory.hpp"
#include "updater/units.hpp"

namespace nearstep {

constexpr unsigned kResetCycles = 6;
// A call returns after so many cycles, so that the caller can handle signals.
constexpr std::uint64_t kSliceCycles = 4096;
constexpr std::uint64_t kForever = ~std::uint64_t{0};

// Of every command: 0 to 3 is a register response or done; below 0, one of these. After `kMore` the
// same call continues, a wait with the cycles left; or `abandon` is called.
enum Status : std::int32_t {
    kDone = 0, kTimeout = -1, kFaulted = -2, kHung = -3, kFailed = -4, kMore = -5
};

struct Options {
    std::uint8_t* data;
    std::uint8_t* state;
    std::uint64_t capacity;
    std::uint64_t latency;
    std::uint64_t seed;
    std::uint32_t half_duplex;
    std::uint32_t native;
    std::uint32_t stall;
    std::uint32_t host_ids;
    const char* trace;
};

struct Poll {
    std::uint64_t address;
    std::uint32_t mask, value;
};

class ShellDevice {
  public:
    explicit ShellDevice(const Options& options)
        : shell_(std::make_unique<design::Shell>(&context_, "kernel")),
          units_(design::make_units(options.native != 0, &context_)),
          memory_(Store(options.data, options.state, options.capacity, design::kBeatBytes),
                  {options.half_duplex != 0, options.latency, options.stall, options.seed,
                   options.host_ids}),
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
    }

    virtual ~ShellDevice() {
        in_thread(&context_);
        shell_->final();
#if VM_TRACE
        if (trace_) trace_->close();
#endif
    }

    virtual void reset() = 0;
    // Drops a call that returned `kMore`, whose data are not accessed any more.
    virtual void abandon() {}
    virtual std::int32_t read_register(std::uint64_t address, std::uint32_t* value) = 0;
    virtual std::int32_t write_register(std::uint64_t address, std::uint32_t value) = 0;

    // Reads the registers in turn until one poll holds. The poll of a register that answers with an
    // error does not hold.
    std::int32_t wait(const Poll* polls, std::size_t count, std::uint64_t max_cycles) {
        const std::uint64_t limit = cycle_ + std::min(max_cycles, kForever - cycle_);
        const std::uint64_t slice = cycle_ + kSliceCycles;
        while (!woken()) {
            for (std::size_t i = 0; i < count; ++i) {
                std::uint32_t word = 0;
                const std::int32_t response = read_register(polls[i].address, &word);
                if (response < 0) return response;
                if (response == kOkay && (word & polls[i].mask) == polls[i].value) return kDone;
            }
            if (cycle_ >= limit) return kTimeout;
            sleep(limit);
            if (memory_.fault) return kFaulted;
            if (cycle_ >= slice && !woken()) return kMore;
        }
        return kDone;
    }

    std::uint64_t cycle() const { return cycle_; }
    PortMemory& memory() { return memory_; }

  protected:
    // Runs between two polls: up to cycle `limit`, a fault, or an event that ends the wait.
    virtual void sleep(std::uint64_t limit) = 0;
    // Whether an event other than a register ends a wait.
    virtual bool woken() const { return false; }

    // Resets shell, memory and units. The ports of the host must be idle.
    void reset_shell() {
        memory_.reset();
        checker_.reset();
        auto& shell = *shell_;
        rest_manager(shell);
        shell.fu___05Fo_valid = 0;
        for (unsigned i = 0; i < kResetCycles; ++i) {
            shell.rst = i < kResetCycles - 2;  // the shell can delay its reset by two cycles
            shell.clk = 0;
            design::rest_pairs(shell);
            shell.eval();
            dump();
            shell.clk = 1;
            design::clock_pairs(shell);
            shell.eval();
            dump();
            ++cycle_;
        }
        units_->reset(shell);
    }

    // Drives the shell's inputs of this cycle, and settles the shell.
    void settle() {
        auto& shell = *shell_;
        drive_manager<design::kBeatBytes>(shell, memory_.pins());
        units_->show(shell);
        shell.clk = 0;
        design::rest_pairs(shell);
        shell.eval();
        dump();
    }

    void clock() {
        auto& shell = *shell_;
        sample_manager<design::kBeatBytes>(shell, manager_);
        checker_.cycle(manager_, memory_.pins(), memory_.fault, cycle_);
        if (shell.fu___05Fi_en) units_->clock(shell);
        shell.clk = 1;
        design::clock_pairs(shell);
        shell.eval();
        dump();
        memory_.tick(manager_);
        ++cycle_;
    }

    // Passes changed scalars to the units.
    void configure_units() { units_->configure(*shell_); }

    design::Shell& shell() { return *shell_; }

  private:
    void dump() {
#if VM_TRACE
        if (trace_) trace_->dump(context_.time());
        context_.timeInc(1);
#endif
    }

    Context context_;
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

}  // namespace nearstep

// The functions that Python calls. Each family defines `device_open`.
extern "C" {

void device_close(nearstep::ShellDevice* device) { delete device; }

void device_reset(nearstep::ShellDevice* device) { device->reset(); }

void device_abandon(nearstep::ShellDevice* device) { device->abandon(); }

std::int32_t device_read_register(nearstep::ShellDevice* device, std::uint64_t address,
                                  std::uint32_t* value) {
    return device->read_register(address, value);
}

std::int32_t device_write_register(nearstep::ShellDevice* device, std::uint64_t address,
                                   std::uint32_t value) {
    return device->write_register(address, value);
}

std::int32_t device_wait(nearstep::ShellDevice* device, const nearstep::Poll* polls,
                         std::uint64_t count, std::uint64_t max_cycles) {
    return device->wait(polls, count, max_cycles);
}

std::uint64_t device_cycle(nearstep::ShellDevice* device) { return device->cycle(); }

void device_fault(nearstep::ShellDevice* device, nearstep::Fault* fault) {
    *fault = device->memory().fault;
}

void device_inject(nearstep::ShellDevice* device, const nearstep::Injection* injection) {
    device->memory().injections.add(*injection);
}

void device_heal(nearstep::ShellDevice* device) { device->memory().injections.clear(); }

// Text of the last transactions, cut to `size` bytes with its final zero.
void device_history(nearstep::ShellDevice* device, char* text, std::uint64_t size) {
    const std::string lines = device->memory().history.text();
    std::snprintf(text, size, "%s", lines.c_str());
}

void device_counters(nearstep::ShellDevice* device, nearstep::MemoryCounters* counters) {
    *counters = device->memory().counters;
}
}
