// AXI4 ports of a Verilated model: `m_axi`, of a manager, and `s_axi`, with `kBytes` of data a
// beat. The payload of a channel is copied only if valid.
#pragma once

#include <cstring>

#include "models/axi/axi.hpp"

namespace nearstep {

template <unsigned kBytes, class Port>
void to_port(Port& port, const Beat& beat) {
    static_assert(sizeof(Port) >= kBytes);
    std::memcpy(&port, beat.data(), kBytes);
}

template <unsigned kBytes, class Port>
void from_port(Beat& beat, const Port& port) {
    static_assert(sizeof(Port) >= kBytes);
    std::memcpy(beat.data(), &port, kBytes);
}

inline AddressPins address_pins(bool valid, unsigned id, std::uint64_t addr, unsigned len,
                                unsigned size, unsigned burst) {
    if (!valid) return {};
    return {true,
            std::uint8_t(id),
            addr,
            std::uint8_t(len),
            std::uint8_t(size),
            std::uint8_t(burst)};
}

// Reads the requests of the model's `m_axi`.
template <unsigned kBytes, class Model>
void sample_manager(const Model& d, ManagerPins& m) {
    m.ar = address_pins(d.m_axi___05Farvalid, d.m_axi___05Farid, d.m_axi___05Faraddr,
                        d.m_axi___05Farlen, d.m_axi___05Farsize, d.m_axi___05Farburst);
    m.aw = address_pins(d.m_axi___05Fawvalid, d.m_axi___05Fawid, d.m_axi___05Fawaddr,
                        d.m_axi___05Fawlen, d.m_axi___05Fawsize, d.m_axi___05Fawburst);
    m.wvalid = d.m_axi___05Fwvalid;
    if (m.wvalid) {
        m.wlast = d.m_axi___05Fwlast;
        m.wstrb = d.m_axi___05Fwstrb;
        from_port<kBytes>(m.wdata, d.m_axi___05Fwdata);
    }
    m.rready = d.m_axi___05Frready;
    m.bready = d.m_axi___05Fbready;
}

// Drives the answers to the model's `m_axi`.
template <unsigned kBytes, class Model>
void drive_manager(Model& d, const SubordinatePins& s) {
    d.m_axi___05Farready = s.arready;
    d.m_axi___05Fawready = s.awready;
    d.m_axi___05Fwready = s.wready;
    d.m_axi___05Frvalid = s.rvalid;
    if (s.rvalid) {
        d.m_axi___05Frid = s.rid;
        d.m_axi___05Frresp = s.rresp;
        d.m_axi___05Frlast = s.rlast;
        to_port<kBytes>(d.m_axi___05Frdata, s.rdata);
    }
    d.m_axi___05Fbvalid = s.bvalid;
    d.m_axi___05Fbid = s.bid;
    d.m_axi___05Fbresp = s.bresp;
}

// Drives requests to the model's `s_axi`, but not `rready` and `bready`.
template <unsigned kBytes, class Model>
void drive_subordinate(Model& d, const ManagerPins& m) {
    d.s_axi___05Farvalid = m.ar.valid;
    if (m.ar.valid) {
        d.s_axi___05Farid = m.ar.id;
        d.s_axi___05Faraddr = m.ar.addr;
        d.s_axi___05Farlen = m.ar.len;
        d.s_axi___05Farsize = m.ar.size;
        d.s_axi___05Farburst = m.ar.burst;
    }
    d.s_axi___05Fawvalid = m.aw.valid;
    if (m.aw.valid) {
        d.s_axi___05Fawid = m.aw.id;
        d.s_axi___05Fawaddr = m.aw.addr;
        d.s_axi___05Fawlen = m.aw.len;
        d.s_axi___05Fawsize = m.aw.size;
        d.s_axi___05Fawburst = m.aw.burst;
    }
    d.s_axi___05Fwvalid = m.wvalid;
    if (m.wvalid) {
        d.s_axi___05Fwlast = m.wlast;
        d.s_axi___05Fwstrb = m.wstrb;
        to_port<kBytes>(d.s_axi___05Fwdata, m.wdata);
    }
}

// Reads the answers of the model's `s_axi`.
template <unsigned kBytes, class Model>
void sample_subordinate(const Model& d, SubordinatePins& s) {
    s.arready = d.s_axi___05Farready;
    s.awready = d.s_axi___05Fawready;
    s.wready = d.s_axi___05Fwready;
    s.bvalid = d.s_axi___05Fbvalid;
    s.bid = d.s_axi___05Fbid;
    s.bresp = d.s_axi___05Fbresp;
    s.rvalid = d.s_axi___05Frvalid;
    if (s.rvalid) {
        s.rid = d.s_axi___05Frid;
        s.rresp = d.s_axi___05Frresp;
        s.rlast = d.s_axi___05Frlast;
        from_port<kBytes>(s.rdata, d.s_axi___05Frdata);
    }
}

// Before and in a reset: all inputs idle.
template <class Model>
void rest_manager(Model& d) {
    d.m_axi___05Farready = d.m_axi___05Fawready = d.m_axi___05Fwready = 0;
    d.m_axi___05Frvalid = d.m_axi___05Fbvalid = 0;
}

template <class Model>
void rest_subordinate(Model& d) {
    d.s_axi___05Farvalid = d.s_axi___05Fawvalid = d.s_axi___05Fwvalid = 0;
    d.s_axi___05Frready = d.s_axi___05Fbready = 1;
}

}  // namespace nearstep
