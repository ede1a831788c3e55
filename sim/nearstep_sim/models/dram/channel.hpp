// The ranks of a channel behind one PHY: a Ddr4Port each, and the buses that they share.
//
// Call once for each fabric cycle, as Ddr4Port.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "models/dram/port.hpp"
#include "models/dram/shared_bus.hpp"

namespace nearstep {

class Ddr4Channel {
  public:
    static constexpr int kRankSwitch = 2;  // RANK_SWITCH of nearstep_spec.dram.timing

    // `number`: of the first rank, in traces.
    Ddr4Channel(const Timing& timing, const Geometry& geometry, int ranks, const PortConfig& config,
                unsigned number = 0)
        : phases_(config.phases), bus_(timing, kRankSwitch) {
        for (int rank = 0; rank < ranks; ++rank) {
            devices_.push_back(std::make_unique<Ddr4Device>(timing, geometry, number + rank));
            ports_.push_back(std::make_unique<Ddr4Port>(*devices_.back(), config));
        }
    }

    int ranks() const { return static_cast<int>(devices_.size()); }
    Ddr4Device& device(unsigned rank) { return *devices_[rank]; }
    const Ddr4Device& device(unsigned rank) const { return *devices_[rank]; }
    std::uint64_t cycle() const { return ports_[0]->cycle(); }
    std::uint64_t clock() const { return cycle() * phases_; }

    // rddata of this cycle; null while rddata_valid is low.
    const std::uint8_t* read_data() const {
        const std::uint8_t* found = nullptr;
        for (const auto& port : ports_)
            if (const std::uint8_t* data = port->read_data()) found = data;
        return found;
    }

    // Bit r of `selected` is high if the command is for rank r. False once a rule was violated.
    bool command(unsigned phase, unsigned selected, const Pins& pins) {
        bool ok = true;
        for (unsigned rank = 0; rank < ports_.size(); ++rank) {
            if (!(selected >> rank & 1)) continue;
            if (ports_.size() > 1 && !bus_.check(rank, clock() + phase, pins)) [[unlikely]]
                ok &= devices_[rank]->fail_shared(bus_.violation());
            ok &= ports_[rank]->command(phase, pins);
        }
        return ok;
    }

    // As Ddr4Port; the write data belong to the rank that expects data.
    bool end_cycle(bool wrdata_en, const std::uint8_t* wrdata, std::uint64_t mask) {
        if (ports_.size() == 1) return ports_[0]->end_cycle(wrdata_en, wrdata, mask);
        bool ok = true, taken = false;
        for (const auto& port : ports_) {
            const bool mine = wrdata_en && port->expects_write();
            if (mine && taken) port->device().fail_data("data bus: two ranks", clock());
            taken |= mine;
            ok &= port->end_cycle(mine, wrdata, mask);
        }
        if (wrdata_en && !taken)
            ok = devices_[0]->fail_data("CWL: write data of no command", clock());
        return ok;
    }

    // The earliest violation, if there is one.
    const Violation* violation() const {
        const Violation* first = nullptr;
        for (const auto& device : devices_)
            if (device->failed() && (!first || device->violation().next.ck < first->next.ck))
                first = &device->violation();
        return first;
    }
    bool failed() const { return violation() != nullptr; }

    // Address of the column command just accepted by a rank.
    Place place(unsigned rank, const Pins& pins) const {
        Place at = devices_[rank]->place(pins);
        at.rank = rank;
        return at;
    }

    // Contents past the pins; see SparseStorage.
    bool load(const Place& at, std::uint8_t* out) const {
        return devices_[at.rank]->storage().read(at, out);
    }
    void store(const Place& at, const std::uint8_t* data, std::uint64_t keep) {
        devices_[at.rank]->storage().write(at, data, keep);
    }

    void trace_to(std::shared_ptr<TraceWriter> writer) {
        for (const auto& device : devices_) device->trace_to(writer);
    }

    // Of all ranks.
    std::uint64_t count(Command command) const {
        std::uint64_t sum = 0;
        for (const auto& device : devices_) sum += device->count(command);
        return sum;
    }

  private:
    std::uint64_t phases_;
    std::vector<std::unique_ptr<Ddr4Device>> devices_;
    std::vector<std::unique_ptr<Ddr4Port>> ports_;
    SharedBus bus_;
};

}  // namespace nearstep
