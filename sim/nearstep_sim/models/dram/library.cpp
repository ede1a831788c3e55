// The DRAM models for ctypes: every function takes numbers, arrays and handles.
#include <cstring>
#include <memory>
#include <vector>

#include "models/dram/channel.hpp"
#include "models/dram/ddr4.hpp"
#include "models/dram/host.hpp"
#include "models/dram/hosted.hpp"

using namespace nearstep;

namespace {

struct IssuedOut {
    std::int64_t ck;  // -1: no command
    std::int32_t command, bg, ba, address;
};

IssuedOut flat(const Issued& issued) {
    if (issued.ck == Issued::kNever) return {-1, 0, 0, 0, 0};
    return {issued.ck, static_cast<std::int32_t>(issued.command), issued.pins.bg, issued.pins.ba,
            static_cast<std::int32_t>(issued.pins.address)};
}

struct ViolationOut {
    IssuedOut previous, next;
    std::int64_t minimum;
    char rule[64];
    char text[256];
};

struct SlotIn {
    std::int32_t cs_n, act_n, address, bg, ba;
};

Pins pins_of(const SlotIn& slot) {
    Pins pins;
    pins.act_n = slot.act_n;
    pins.address = static_cast<std::uint32_t>(slot.address);
    pins.bg = static_cast<std::uint8_t>(slot.bg);
    pins.ba = static_cast<std::uint8_t>(slot.ba);
    return pins;
}

struct HostCycleOut {
    std::int32_t rank[HostCycle::kSlots];
    SlotIn slots[HostCycle::kSlots];
    std::int32_t wrdata_en;
    std::uint32_t wrdata_mask;
    std::uint8_t wrdata[HostCycle::kDataBytes];
};

// A host controller and its ranks, with nothing in between.
class BareDram final : public HostedDram {
  public:
    BareDram(const HostConfig& config, const PortConfig& port)
        : HostedDram(config), dram_(config.timing, config.geometry, config.ranks, port) {}
    Ddr4Device& device(int rank) override { return dram_.device(static_cast<unsigned>(rank)); }
    const std::string& error() override { return host_.error(); }  // devices report their own

  private:
    bool failed() const override { return !ok_; }
    void step() override {
        HostCycle out;
        host_.tick(dram_.read_data(), out);
        ok_ = host_.error().empty();
        for (int slot = 0; slot < HostCycle::kSlots; ++slot)
            if (const HostSlot& each = out.slots[slot]; each.rank >= 0)
                ok_ &= dram_.command(slot, 1u << each.rank, each.pins);
        ok_ &= dram_.end_cycle(out.wrdata_en, out.wrdata, out.wrdata_mask);
    }

    Ddr4Channel dram_;
    bool ok_ = true;
};

// Fills `out` from what was violated.
void flatten(const Violation& v, ViolationOut* out) {
    *out = {flat(v.previous), flat(v.next), v.minimum, {}, {}};
    std::strncpy(out->rule, v.rule, sizeof out->rule - 1);
    std::strncpy(out->text, v.text().c_str(), sizeof out->text - 1);
}

Place place_at(const Ddr4Device& device, const Mapping& mapping, std::uint64_t beat) {
    return place_of(beat, mapping, device.geometry());
}

}  // namespace

extern "C" {

const char* ddr4_last_error() { return last_error.c_str(); }

Ddr4Device* ddr4_device_new(const Timing* timing, const Geometry* geometry, unsigned rank) {
    return guarded([&] { return new Ddr4Device(*timing, *geometry, rank); });
}
void ddr4_device_free(Ddr4Device* device) { delete device; }

int ddr4_device_command(Ddr4Device* device, std::uint64_t ck, const SlotIn* slot) {
    return slot->cs_n ? device->advance(ck) : device->command(ck, pins_of(*slot));
}
int ddr4_device_advance(Ddr4Device* device, std::uint64_t ck) { return device->advance(ck); }

// Plays commands by name; a non-negative row of a column command is compared with the open row.
// Returns the number of commands accepted.
std::uint64_t ddr4_device_play(Ddr4Device* device, std::uint64_t count, const std::uint64_t* ck,
                               const std::int32_t* command, const std::int32_t* bg,
                               const std::int32_t* ba, const std::int32_t* row,
                               const std::int32_t* column) {
    for (std::uint64_t i = 0; i < count; ++i) {
        const auto each = static_cast<Command>(command[i]);
        const bool is_column = each >= Command::RD && each <= Command::WRA;
        // Commands that the pins cannot encode
        const char* wrong = nullptr;
        if (!(each == Command::MRS ? bg[i] >> 2 == 0 && ba[i] >> 2 == 0
                                   : device->has_bank(bg[i], ba[i])))
            wrong = "bank out of range";
        if (each == Command::MRS && row[i] & ~int(kModeMask)) wrong = "mode out of range";
        if (each == Command::ACT && row[i] >> device->geometry().row_bits)
            wrong = "row out of range";
        if (is_column && column[i] >> device->geometry().column_bits)
            wrong = "column out of range";
        const std::int64_t open = device->open_row(bg[i], ba[i]);
        if (is_column && row[i] >= 0 && open >= 0 && open != row[i]) wrong = "another row is open";
        if (wrong) {
            device->fail_data(wrong, ck[i]);
            return i;
        }
        if (!device->command(ck[i], encode(each, bg[i], ba[i], row[i], column[i]))) return i;
    }
    return count;
}

int ddr4_device_violation(const Ddr4Device* device, ViolationOut* out) {
    if (!device->failed()) return 0;
    flatten(device->violation(), out);
    return 1;
}

SharedBus* ddr4_bus_new(const Timing* timing, int rank_switch) {
    return guarded([&] { return new SharedBus(*timing, rank_switch); });
}
void ddr4_bus_free(SharedBus* bus) { delete bus; }

// Plays commands by name. Returns the number of commands before the first violation, which is then
// written.
std::uint64_t ddr4_bus_play(SharedBus* bus, std::uint64_t count, const std::uint64_t* ck,
                            const std::int32_t* command, const std::int32_t* rank,
                            const std::int32_t* bg, const std::int32_t* ba, const std::int32_t* row,
                            const std::int32_t* column, ViolationOut* out) {
    for (std::uint64_t i = 0; i < count; ++i)
        if (!bus->check(static_cast<unsigned>(rank[i]), ck[i],
                        encode(static_cast<Command>(command[i]), bg[i], ba[i], row[i], column[i]))) {
            flatten(bus->violation(), out);
            return i;
        }
    return count;
}

std::int64_t ddr4_device_open_row(const Ddr4Device* device, unsigned bg, unsigned ba) {
    return device->open_row(bg, ba);
}
std::int64_t ddr4_device_refresh_debt(const Ddr4Device* device, std::uint64_t ck) {
    return device->refresh_debt(ck);
}
void ddr4_device_refresh_offset(Ddr4Device* device, std::int64_t clocks) {
    device->refresh_offset(clocks);
}
void ddr4_device_refresh_extremes(const Ddr4Device* device, RefreshExtremes* out) {
    *out = device->refresh_extremes();
}
void ddr4_device_counts(const Ddr4Device* device, std::uint64_t* out) {
    for (int i = 0; i < kCommands; ++i) out[i] = device->count(static_cast<Command>(i));
}
void ddr4_device_account(const Ddr4Device* device, BusClocks* out) { *out = device->account(); }
void ddr4_device_restart_account(Ddr4Device* device, std::uint64_t ck) {
    device->restart_account(ck);
}
int ddr4_device_trace(Ddr4Device* device, const char* path, const char* header) {
    auto writer = std::make_unique<TraceWriter>(path, header);
    if (!writer->good()) return 0;
    device->trace_to(std::move(writer));
    return 1;
}
void ddr4_device_trace_close(Ddr4Device* device) { device->trace_to(nullptr); }

// Contents by beat number, past the pins.
void ddr4_device_read(Ddr4Device* device, const Mapping* mapping, std::uint64_t beat,
                      std::uint64_t count, std::uint8_t* out) {
    for (std::uint64_t i = 0; i < count; ++i)
        device->storage().read(place_at(*device, *mapping, beat + i), out + i * kBeatBytes);
}
void ddr4_device_write(Ddr4Device* device, const Mapping* mapping, std::uint64_t beat,
                       std::uint64_t count, const std::uint8_t* data) {
    for (std::uint64_t i = 0; i < count; ++i)
        device->storage().write(place_at(*device, *mapping, beat + i), data + i * kBeatBytes, 0);
}
std::uint64_t ddr4_device_allocated_rows(Ddr4Device* device) {
    return device->storage().allocated_rows();
}

Ddr4Port* ddr4_port_new(Ddr4Device* device, const PortConfig* config) {
    return guarded([&] { return new Ddr4Port(*device, *config); });
}
void ddr4_port_free(Ddr4Port* port) { delete port; }
std::uint64_t ddr4_port_cycle_number(const Ddr4Port* port) { return port->cycle(); }
std::uint64_t ddr4_port_uninitialised(const Ddr4Port* port) { return port->uninitialised_reads(); }

// Bit 0: no rule violated; bit 1: rddata (of data_bytes) holds data of the next cycle.
int ddr4_port_cycle(Ddr4Port* port, const SlotIn* slots, int phases, int data_bytes, int wrdata_en,
                    const std::uint8_t* wrdata, std::uint64_t mask, std::uint8_t* rddata) {
    bool ok = true;
    for (int phase = 0; phase < phases; ++phase)
        if (!slots[phase].cs_n) ok &= port->command(phase, pins_of(slots[phase]));
    ok &= port->end_cycle(wrdata_en, wrdata, mask);
    const std::uint8_t* data = port->read_data();
    if (data) std::memcpy(rddata, data, data_bytes);
    return int(ok) | (data ? 2 : 0);
}

HostController* ddr4_host_new(const HostConfig* config) {
    return guarded([&] { return new HostController(*config); });
}
void ddr4_host_free(HostController* host) { delete host; }
int ddr4_host_submit(HostController* host, std::uint64_t count, const std::uint8_t* is_store,
                     const std::uint64_t* beats, const std::uint64_t* tags,
                     const std::uint8_t* data, const std::uint64_t* masks) {
    return guarded([&] {
        for (std::uint64_t i = 0; i < count; ++i) {
            if (is_store[i])
                host->store(beats[i], data + i * kBeatBytes, masks ? masks[i] : 0);
            else
                host->load(beats[i], tags[i]);
        }
        return 1;
    });
}
int ddr4_host_give(HostController* host, int rank, const SlotIn* slot) {
    if (rank < 0 || rank >= host->ranks()) return 0;
    host->give(rank, pins_of(*slot));
    return 1;
}
void ddr4_host_fence(HostController* host) { host->fence(); }
int ddr4_host_idle(const HostController* host) { return host->idle(); }
std::uint64_t ddr4_host_cycle_number(const HostController* host) { return host->cycle(); }
std::uint64_t ddr4_host_waiting(const HostController* host) { return host->waiting(); }
const char* ddr4_host_error(const HostController* host) { return host->error().c_str(); }
void ddr4_host_statistics(const HostController* host, HostStatistics* out) {
    *out = host->statistics();
}
void ddr4_host_tick(HostController* host, const std::uint8_t* rddata, HostCycleOut* out) {
    HostCycle cycle;
    host->tick(rddata, cycle);
    for (int slot = 0; slot < HostCycle::kSlots; ++slot) {
        const HostSlot& each = cycle.slots[slot];
        out->rank[slot] = each.rank;
        out->slots[slot] = {each.rank < 0, each.pins.act_n,
                            static_cast<std::int32_t>(each.pins.address), each.pins.bg,
                            each.pins.ba};
    }
    out->wrdata_en = cycle.wrdata_en;
    out->wrdata_mask = cycle.wrdata_mask;
    std::memcpy(out->wrdata, cycle.wrdata, sizeof out->wrdata);
}
// Takes up to `most` completed loads; returns their number.
std::uint64_t ddr4_host_completions(HostController* host, std::uint64_t most, std::uint64_t* tags,
                                    std::uint64_t* submitted, std::uint64_t* completed,
                                    std::uint8_t* data) {
    auto& queue = host->completions();
    std::uint64_t taken = 0;
    for (; taken < most && !queue.empty(); ++taken) {
        const HostCompletion& done = queue.front();
        tags[taken] = done.tag;
        submitted[taken] = done.submitted;
        completed[taken] = done.completed;
        std::memcpy(data + taken * kBeatBytes, done.data, kBeatBytes);
        queue.pop_front();
    }
    return taken;
}

HostedDram* ddr4_bare_new(const HostConfig* config, const PortConfig* port) {
    return guarded([&] { return new BareDram(*config, *port); });
}
void ddr4_hosted_free(HostedDram* hosted) { delete hosted; }
HostController* ddr4_hosted_host(HostedDram* hosted) { return &hosted->host(); }
Ddr4Device* ddr4_hosted_device(HostedDram* hosted, int number) { return &hosted->device(number); }
const char* ddr4_hosted_error(HostedDram* hosted) { return hosted->error().c_str(); }
std::uint64_t ddr4_hosted_run(HostedDram* hosted, std::uint64_t cycles, int until_idle) {
    return hosted->run(cycles, until_idle);
}

}  // extern "C"
