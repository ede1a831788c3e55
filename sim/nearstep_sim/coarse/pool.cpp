// A pool of COARSE memory devices in this process: one Verilated model, an object of it for each
// device, joined by links. No combinational path joins two devices, so each is settled and clocked
// alone in every cycle, in threads if there are several: both ends of a link see its state before
// the cycle, and links are clocked after all devices.
//
// With COARSE_RING all devices are one object of one model, the ring of `ring_top.py`, with links
// and functional units; only settling and clocking differ.
//
// Registers of device d begin at d * register_bytes, its memory at d * memory_bytes. The host
// accesses memory through the device's window, in device cycles, or, as an option, directly.
// Clients also push and pull through the windows, over a link for each device, while cycles pass.
#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "coarse/client_link.hpp"
#include "coarse/device_models.hpp"
#include "models/link/link.hpp"
#include "models/axi/axi_checker.hpp"
#include "models/axi/axi_ports.hpp"
#include "models/bar_host.hpp"
#include "models/axi/port_memory.hpp"
#include "verilate/thread_pool.hpp"
#include "verilated.h"
#if VM_TRACE
#include "verilated_vcd_c.h"
#endif

namespace nearstep {
namespace {

using link::Link;
using link::Phit;

constexpr unsigned kBeatBytes = 64;
constexpr unsigned kPorts = 2;
constexpr std::uint64_t kPollInterval = 4096;   // cycles between looks at a register in a wait
constexpr std::uint64_t kRegisterCycles = 16;   // a register access that takes longer has hung
constexpr std::uint64_t kWindowCycles = 1 << 18;  // a window without progress for longer has hung
constexpr std::uint64_t kSliceCycles = 4096;      // see shell_device.hpp
constexpr std::uint64_t kAloneCycles = 1024;      // a pool starts threads after so many cycles
constexpr BarLimits kWindowLimits{4096, 4096};  // loads and stores of the window are split at pages

enum Status : std::int32_t {  // see shell_device.hpp
    kDone = 0, kTimeout = -1, kFaulted = -2, kHung = -3, kFailed = -4, kMore = -5
};

struct Poll {
    std::uint64_t address;
    std::uint32_t mask, value;
};

struct PoolOptions {
    std::uint8_t* data;
    std::uint8_t* state;
    std::uint64_t capacity;  // of a device
    std::uint64_t register_bytes;
    std::uint64_t devices;
    std::uint64_t latency;
    std::uint64_t seed;
    std::uint32_t half_duplex;
    std::uint32_t native;
    std::uint32_t stall;
    std::uint32_t host_ids;
    std::uint32_t threads;
    std::uint32_t links_inside;  // of a ring that is one object
    const char* trace;
    link::Options link;
    ClientOptions client;
};

// A device with its memory and the host's window.
class Node {
  public:
    Node(const PoolOptions& options, unsigned number, Vdevice& model, VerilatedContext* context)
        : model_(model),
          units_(options.native != 0, context),
          memory_(Store(options.data + number * options.capacity,
                        options.state + number * (options.capacity / Store::kLineBytes),
                        options.capacity, kBeatBytes),
                  {options.half_duplex != 0, options.latency, options.stall,
                   options.seed + number, options.host_ids,
                   2 * options.host_ids}),  // copies of pages include unwritten lines
          client_(options.client),
          window_(kBeatBytes, kWindowLimits, &client_.dma()),
          memory_checker_(kBeatBytes),
          window_checker_(kBeatBytes) {}

    // Before a reset: all inputs idle.
    void rest(std::uint64_t now) {
        memory_.reset();
        window_.reset();
        client_.give_up(now);
        memory_checker_.reset();
        window_checker_.reset();
        Vdevice& d = model_;
        d.csr___05Fread = d.csr___05Fwrite = 0;
        rest_subordinate(d);
        rest_manager(d);
        units_.rest(d);
        d.link_in___05F0___05Fvalid = d.link_in___05F1___05Fvalid = 0;
        d.link_out___05F0___05Fready = d.link_out___05F1___05Fready = 0;
    }

    // After a reset.
    void reset_units() { units_.reset(model_); }

    // Drives and settles the device's inputs of a cycle. `in`: the phit that arrives on each link,
    // or null; `ready`: whether the link takes a phit.
    void settle(const Phit* const (&in)[kPorts], const bool (&ready)[kPorts]) {
        Vdevice& d = model_;
        receive(d.link_in___05F0___05Fvalid, d.link_in___05F0___05Fpayload, in[0]);
        receive(d.link_in___05F1___05Fvalid, d.link_in___05F1___05Fpayload, in[1]);
        d.link_out___05F0___05Fready = ready[0];
        d.link_out___05F1___05Fready = ready[1];
        drive_manager<kBeatBytes>(d, memory_.pins());
        drive_subordinate<kBeatBytes>(d, window_.pins());
        units_.show(d);
        DeviceModels::settle(d);
    }

    // The edge that ends the cycle. `out`: the phit sent on each link, valid if `sent`.
    void clock(Phit (&out)[kPorts], bool (&sent)[kPorts], std::uint64_t now) {
        Vdevice& d = model_;
        sent[0] = send(d.link_out___05F0___05Fvalid, d.link_out___05F0___05Fpayload, out[0]);
        sent[1] = send(d.link_out___05F1___05Fvalid, d.link_out___05F1___05Fpayload, out[1]);
        interrupted |= d.o_interrupt != 0;
        sample_manager<kBeatBytes>(d, manager_);
        sample_subordinate<kBeatBytes>(d, answers_);
        memory_checker_.cycle(manager_, memory_.pins(), memory_.fault, now);
        window_checker_.cycle(window_.pins(), answers_, memory_.fault, now);
        if ((answers_.bvalid && !window_.expects_response(answers_.bid)) ||
            (answers_.rvalid && !window_.expects(answers_.rid)))
            memory_.fault.protocol(answers_.bvalid ? "B" : "R", "an answer belongs to a request",
                                   now, "ID %u", answers_.bvalid ? answers_.bid : answers_.rid);
        units_.clock(d);
        DeviceModels::clock(d);
        memory_.tick(manager_);
        if (!memory_.fault && window_.tick(answers_)) moved = true;
        client_.pass(now);
    }

    // Passes changed scalars of the update kernel to the units.
    void configure_units() { units_.configure(model_); }

    Vdevice& model() { return model_; }
    NodeUnits& units() { return units_; }
    PortMemory& memory() { return memory_; }
    BarHost& window() { return window_; }
    ClientLink& client() { return client_; }

    bool interrupted = false;  // since the last clear
    bool moved = false;        // the window, since the last clear

  private:
    template <class Valid, class Payload>
    static void receive(Valid& valid, Payload& payload, const Phit* phit) {
        valid = phit != nullptr;
        if (phit == nullptr) return;
        std::memcpy(&payload, phit->data, sizeof phit->data);
        payload[4] = (phit->head ? 1u : 0u) | (phit->last ? 2u : 0u);
    }

    template <class Payload>
    static bool send(bool valid, const Payload& payload, Phit& phit) {
        if (!valid) return false;
        std::memcpy(phit.data, &payload, sizeof phit.data);
        phit.head = payload[4] & 1;
        phit.last = payload[4] >> 1 & 1;
        return true;
    }

    Vdevice& model_;
    NodeUnits units_;
    PortMemory memory_;
    ClientLink client_;
    BarHost window_;
    AxiChecker memory_checker_, window_checker_;
    ManagerPins manager_;
    SubordinatePins answers_;
};

}  // namespace

class Pool {
  public:
    explicit Pool(const PoolOptions& options)
        : options_(options),
          contexts_(VM_TRACE ? 1 : options.devices),  // a VCD has one context
          models_(unsigned(options.devices), contexts_),
          sent_(options.devices),
          threads_(VM_TRACE ? 1 : options.threads, unsigned(options.devices)) {
#if VM_TRACE
        contexts_[0].traceEverOn(options.trace != nullptr);
#endif
        for (unsigned i = 0; i < options.devices; ++i)
            nodes_.push_back(std::make_unique<Node>(options, i, models_.at(i),
                                                    &contexts_[VM_TRACE ? 0 : i]));
        models_.links_outside(!options.links_inside);
        // Link i joins port 1 of device i with port 0 of the next; of two devices there is one.
        unsigned links = options.devices == 2 ? 1 : unsigned(options.devices);
        if (options.links_inside) links = 0;
        for (unsigned i = 0; i < links; ++i)
            for (unsigned direction = 0; direction < 2; ++direction)
                links_.push_back(std::make_unique<Link>(link_options(2 * i + direction)));
#if VM_TRACE
        if (options.trace != nullptr) {
            trace_ = std::make_unique<VerilatedVcdC>();
            for (auto& node : nodes_) {
                node->model().trace(trace_.get(), 99);
                node->units().trace(trace_.get());
            }
            trace_->open(options.trace);
        }
#endif
        reset();
    }

    ~Pool() {
        models_.finish();
#if VM_TRACE
        if (trace_) trace_->close();
#endif
    }

    void reset() {
        for (std::size_t i = 0; i < links_.size(); ++i) links_[i]->reset(link_options(i));
        for (auto& node : nodes_) node->rest(cycle_);
        models_.reset();
        for (auto& node : nodes_) node->reset_units();
        cycle_ += kResetCycles;
        begun_ = false;
    }

    void abandon() {
        for (auto& node : nodes_) node->window().abandon();
        begun_ = false;
    }

    std::int32_t read_register(std::uint64_t address, std::uint32_t* value) {
        return access(address, false, value);
    }

    std::int32_t write_register(std::uint64_t address, std::uint32_t value) {
        return access(address, true, &value);
    }

    // Reads the registers in turn until one poll holds; if `advances`, also until the end of a
    // client's transfer.
    std::int32_t wait(const Poll* polls, std::size_t count, std::uint64_t max_cycles,
                      bool advances) {
        const std::uint64_t limit = cycle_ + std::min(max_cycles, ~std::uint64_t{0} - cycle_);
        const std::uint64_t slice = cycle_ + kSliceCycles;
        while (!advances || !woken()) {
            for (std::size_t i = 0; i < count; ++i) {
                std::uint32_t word = 0;
                const std::int32_t response = read_register(polls[i].address, &word);
                if (response < 0) return response;
                if (response == kOkay && (word & polls[i].mask) == polls[i].value) return kDone;
            }
            if (cycle_ >= limit) return kTimeout;
            const std::uint64_t until = std::min(limit, cycle_ + kPollInterval);
            bool interrupted = false;
            while (cycle_ < until && !faulted() && !interrupted && !(advances && woken())) {
                step();
                for (auto& node : nodes_) interrupted |= std::exchange(node->interrupted, false);
            }
            if (faulted()) return kFaulted;
            if (cycle_ >= slice) return kMore;
        }
        return kDone;
    }

    // Begins a transfer of a client, inside one device; `data` must stay valid until it ends.
    void submit(std::uint64_t number, std::uint64_t address, std::uint8_t* data,
                std::uint64_t bytes, bool write) {
        at(address).client().submit(number, address % options_.capacity, data, bytes, write,
                                    cycle_);
    }

    // The oldest end of a client's transfer that was not yet returned.
    std::optional<PeerEnd> ended() {
        for (std::size_t i = 0; i < nodes_.size(); ++i) {
            if (auto end = nodes_[i]->client().ended()) {
                end->address += i * options_.capacity;
                return end;
            }
        }
        return {};
    }

    std::int32_t write(std::uint64_t address, const std::uint8_t* data, std::uint64_t bytes) {
        Node& node = at(address);
        if (!begun_) node.window().write(address % options_.capacity, data, bytes);
        return finish(node);
    }

    std::int32_t read(std::uint64_t address, std::uint8_t* out, std::uint64_t bytes) {
        Node& node = at(address);
        if (!begun_) node.window().read(address % options_.capacity, out, bytes);
        return finish(node);
    }

    void run(std::uint64_t cycles) {
        for (const std::uint64_t until = cycle_ + cycles; cycle_ < until && !faulted();) step();
    }

    // The fault of a memory or a checker, of the first device that has one; or null.
    const Fault* faulted() const {
        for (const auto& node : nodes_)
            if (node->memory().fault) return &node->memory().fault;
        return nullptr;
    }

    BarFailure failure() {
        BarFailure first;
        for (unsigned i = 0; i < nodes_.size(); ++i) {
            BarFailure found = std::exchange(nodes_[i]->window().failure, {});
            if (found.response == kOkay || first.response != kOkay) continue;
            first = found;
            first.address += i * options_.capacity;
        }
        return first;
    }

    void inject(Injection injection) {
        const std::uint64_t size = options_.capacity;
        for (std::uint64_t i = 0; i < nodes_.size(); ++i) {
            Injection part = injection;
            if (injection.limit <= i * size || injection.base >= (i + 1) * size) continue;
            part.base = std::max(injection.base, i * size) - i * size;
            part.limit = std::min(injection.limit - i * size, size);
            nodes_[i]->memory().injections.add(part);
        }
    }

    void heal() {
        for (auto& node : nodes_) node->memory().injections.clear();
        for (std::size_t i = 0; i < links_.size(); ++i) {
            revive(i);
            links_[i]->clear_faults();
        }
    }

    // A dead direction of a link works again.
    void revive(std::size_t number) {
        if (links_[number]->dead()) links_[number]->reset(link_options(number));
    }

    std::vector<std::unique_ptr<Node>>& nodes() { return nodes_; }
    link::Link& link(std::size_t number) { return *links_[number]; }
    ThreadPool& threads() { return threads_; }
    std::size_t link_count() const { return links_.size(); }
    std::uint64_t cycle() const { return cycle_; }

  private:
    // Each direction of a link has its own seed.
    link::Options link_options(std::size_t number) const {
        link::Options options = options_.link;
        options.seed += number;
        return options;
    }

    bool woken() const {
        return std::any_of(nodes_.begin(), nodes_.end(),
                           [](const auto& node) { return node->client().has_ended(); });
    }

    Node& at(std::uint64_t address) { return *nodes_[address / options_.capacity]; }

    // The link that a port sends on, or receives from; null without a peer. Even links send from
    // device i to the next, odd links back.
    Link* link_of(unsigned device, unsigned port, bool sends) {
        const unsigned count = unsigned(nodes_.size());
        const bool up = port == 1;  // towards the next device
        const unsigned index = up ? device : (device + count - 1) % count;
        const unsigned direction = up == sends ? 0 : 1;
        if (links_.empty() || (count == 2 && (device == 0) != up)) return nullptr;
        return links_[2 * (count == 2 ? 0 : index) + direction].get();
    }

    std::int32_t access(std::uint64_t address, bool write, std::uint32_t* word) {
        Node& node = *nodes_[address / options_.register_bytes];
        Vdevice& d = node.model();
        if (faulted()) return kFaulted;
        d.csr___05Faddress = address % options_.register_bytes;
        d.csr___05Fread = !write;
        d.csr___05Fwrite = write;
        if (write) d.csr___05Fwrite_data = *word;
        d.csr___05Fwrite_mask = 0xF;
        for (const std::uint64_t limit = cycle_ + kRegisterCycles; cycle_ < limit;) {
            step();
            d.csr___05Fread = d.csr___05Fwrite = 0;
            if (faulted()) return kFaulted;
            if (d.csr___05Fack) {  // a register's output: that of the next cycle
                const std::int32_t response = d.csr___05Ferror ? kSlverr : kOkay;
                if (!write) *word = d.csr___05Fread_data;
                step();
                if (write) node.configure_units();
                return response;
            }
        }
        return kHung;
    }

    std::int32_t finish(Node& node) {
        BarHost& window = node.window();
        const std::uint64_t slice = cycle_ + kSliceCycles;
        if (!std::exchange(begun_, false)) moved_at_ = cycle_;
        while (window.sending() || window.posted() || window.reading()) {
            if (cycle_ >= slice) {
                begun_ = true;
                return kMore;
            }
            step();
            if (faulted()) return kFaulted;
            if (std::exchange(node.moved, false)) moved_at_ = cycle_;
            if (cycle_ - moved_at_ > kWindowCycles) {
                window.time_out();
                return kFailed;
            }
        }
        return window.failure.response == kOkay ? kDone : kFailed;
    }

    void settle(unsigned i) {
        const Phit* in[kPorts];
        bool ready[kPorts];
        for (unsigned port = 0; port < kPorts; ++port) {
            Link* from = link_of(i, port, false);
            Link* to = link_of(i, port, true);
            in[port] = from == nullptr ? nullptr : from->arriving();
            ready[port] = to == nullptr || to->ready();
        }
        nodes_[i]->settle(in, ready);
    }

    void clock(unsigned i) { nodes_[i]->clock(sent_[i].phit, sent_[i].valid, cycle_); }

    void step() {
        const unsigned count = unsigned(nodes_.size());
#if VM_TRACE
        for (unsigned i = 0; i < count; ++i) settle(i);
        dump();
        for (unsigned i = 0; i < count; ++i) clock(i);
        dump();
#else
        const auto go = [this](unsigned i) {
            settle(i);
            clock(i);
        };
        if constexpr (DeviceModels::kJoined) {
            for (unsigned i = 0; i < count; ++i) settle(i);
            models_.settle();
            for (unsigned i = 0; i < count; ++i) clock(i);
            models_.clock();
        } else if (threads_.begun() || cycle_ >= kAloneCycles) {
            threads_.run(go);
        } else {
            for (unsigned i = 0; i < count; ++i) go(i);
        }
#endif
        for (unsigned i = 0; i < count; ++i)
            for (unsigned port = 0; port < kPorts; ++port)
                if (Link* to = link_of(i, port, true); to != nullptr)
                    to->tick(sent_[i].valid[port], sent_[i].phit[port]);
        ++cycle_;
    }

#if VM_TRACE
    void dump() {
        if (trace_) trace_->dump(contexts_[0].time());
        contexts_[0].timeInc(1);
    }
#endif

    struct alignas(64) Sent {  // each written by another thread
        Phit phit[kPorts];
        bool valid[kPorts];
    };

    PoolOptions options_;
    std::vector<Context> contexts_;
    DeviceModels models_;
    std::vector<std::unique_ptr<Node>> nodes_;
    std::vector<std::unique_ptr<Link>> links_;
    std::vector<Sent> sent_;
    ThreadPool threads_;
    std::uint64_t cycle_ = 0;
    std::uint64_t moved_at_ = 0;
    bool begun_ = false;  // a transfer, which the next call continues
#if VM_TRACE
    std::unique_ptr<VerilatedVcdC> trace_;
#endif
};

}  // namespace nearstep

// The functions that Python calls: those of every device, and the pool's own.
extern "C" {

using nearstep::Pool;

Pool* pool_open(const nearstep::PoolOptions* options) { return new Pool(*options); }

void device_close(Pool* pool) { delete pool; }
void device_reset(Pool* pool) { pool->reset(); }
void device_abandon(Pool* pool) { pool->abandon(); }

std::int32_t device_read_register(Pool* pool, std::uint64_t address, std::uint32_t* value) {
    return pool->read_register(address, value);
}

std::int32_t device_write_register(Pool* pool, std::uint64_t address, std::uint32_t value) {
    return pool->write_register(address, value);
}

std::int32_t device_wait(Pool* pool, const nearstep::Poll* polls, std::uint64_t count,
                         std::uint64_t max_cycles) {
    return pool->wait(polls, count, max_cycles, false);
}

std::int32_t pool_advance(Pool* pool, const nearstep::Poll* polls, std::uint64_t count,
                          std::uint64_t max_cycles) {
    return pool->wait(polls, count, max_cycles, true);
}

void pool_submit(Pool* pool, std::uint64_t number, std::uint64_t address, std::uint8_t* data,
                 std::uint64_t bytes, std::int32_t write) {
    pool->submit(number, address, data, bytes, write != 0);
}

// The next end of a client's transfer that was not yet returned; 0 if there is none.
std::int32_t pool_ended(Pool* pool, nearstep::PeerEnd* end) {
    const auto found = pool->ended();
    if (found) *end = *found;
    return found.has_value();
}

std::uint64_t device_cycle(Pool* pool) { return pool->cycle(); }

void device_fault(Pool* pool, nearstep::Fault* fault) {
    if (const auto* found = pool->faulted()) *fault = *found;
}

void device_inject(Pool* pool, const nearstep::Injection* injection) { pool->inject(*injection); }

void device_heal(Pool* pool) { pool->heal(); }

// Text of the last transactions of each device, cut to `size` bytes with its final zero.
void device_history(Pool* pool, char* text, std::uint64_t size) {
    std::string lines;
    for (std::size_t i = 0; i < pool->nodes().size(); ++i)
        lines += "device " + std::to_string(i) + ":\n" + pool->nodes()[i]->memory().history.text();
    std::snprintf(text, size, "%s", lines.c_str());
}

void device_counters(Pool* pool, nearstep::MemoryCounters* counters) {
    *counters = {};
    for (const auto& node : pool->nodes()) {
        const auto& one = node->memory().counters;
        counters->read_beats += one.read_beats;
        counters->write_beats += one.write_beats;
        counters->turnarounds += one.turnarounds;
    }
}

std::int32_t pool_read(Pool* pool, std::uint64_t address, std::uint8_t* out, std::uint64_t bytes) {
    return pool->read(address, out, bytes);
}

std::int32_t pool_write(Pool* pool, std::uint64_t address, const std::uint8_t* data,
                        std::uint64_t bytes) {
    return pool->write(address, data, bytes);
}

// Most threads from now on; no more than when the pool was opened.
void pool_threads(Pool* pool, std::uint32_t threads) { pool->threads().use(threads); }

void pool_run(Pool* pool, std::uint64_t cycles) { pool->run(cycles); }

// Returns and clears the failure behind status `kFailed`.
void pool_failure(Pool* pool, nearstep::BarFailure* failure) { *failure = pool->failure(); }

void pool_link_fault(Pool* pool, std::uint64_t number, const nearstep::link::FrameFault* fault) {
    pool->link(number).add(*fault);
}

void pool_link_revive(Pool* pool, std::uint64_t number) { pool->revive(number); }

void pool_link_counters(Pool* pool, std::uint64_t number, nearstep::link::Statistics* counters) {
    *counters = pool->link(number).statistics();
}
}
